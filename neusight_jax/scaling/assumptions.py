"""What a scaled run takes for granted, as notes: where it was measured, what names did not say, the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, fold_name, gpu_info
from neusight_jax.hardware.gpu import GPU
from neusight_jax.model.checkpoint import load_card
from neusight_jax.scaling.rules import lacks_path, multiplies, product_peaks
from neusight_jax.scaling.trace import Measured, Trace


def origin_of(trace: Trace) -> str:
    """The GPU that a trace says it was measured on. `InputError` when it names none, several, or one unknown."""
    known = sorted({name for gpu in trace.gpus if (name := canonical_name(gpu)) is not None})
    if len(known) == 1:
        return known[0]
    said = f"it names {', '.join(trace.gpus)}" if trace.gpus else "it does not say"
    raise InputError(f"{trace.source}: on which GPU was it measured? {said}; say so with --from GPU")


def origin_notes(trace: Trace, asked: str | GPU | None, origin: str) -> list[str]:
    """A note when a trace says another GPU than the one it is scaled from, or when its word was taken.

    Args:
      asked: what the user gave; origin: its name in the catalog, or in its file.
    """
    if asked is None and trace.gpus:
        return [f"measured on {origin}, as the trace says"]
    same = (origin, fold_name(origin))
    others = [gpu for gpu in trace.gpus if (canonical_name(gpu) or gpu) not in same and fold_name(gpu) not in same]
    if not others:
        return []
    return [
        f"the trace says it was measured on {', '.join(others)}, and is scaled as if on {origin}: unless that is where "
        "it ran, give --from the GPU it names"
    ]


def assumed(
    items: Sequence[Measured],
    rules: Sequence[str],
    origin: tuple[str, GPU],
    target: tuple[str, GPU],
    checkpoint: str,
    *,
    chosen: bool,
) -> list[str]:
    """Notes on what was assumed of a run's kernels, with shares of the measured time.

    Args:
      rules: of every item; origin, target: names and figures.
      checkpoint: "" for a predictor given as such; chosen: whether it was chosen here.
    """
    here, there = product_peaks(origin[1]), product_peaks(target[1])
    ruled = list(zip(items, rules, strict=True))
    products = [item for item in items if multiplies(item)]
    unknown = [pair for pair in ruled if pair[0].kind == "unknown" and pair[1] not in ("forecast", "none")]
    tf32 = [item for item in products if item.dtype == "tf32"]
    found = {
        f"names of unknown kind, scaled by {' and '.join(sorted({rule for _, rule in unknown}))}": [
            item for item, _ in unknown
        ],
        "products whose names say no dtype, taken to be fp32": [item for item in products if not item.dtype_said],
        f"products in a dtype that {origin[0]} has no path for here, scaled by grid and bandwidth alone": [
            item for item in products if lacks_path(item, here)
        ],
        "products in tf32, taken to run in fp32 where a GPU has no tf32": []
        if {"tf32"} <= here.keys() & there.keys()
        else tf32,
    }
    forecast = [item for item, rule in ruled if rule in ("forecast", "inferred") and multiplies(item)]
    notes = _checkpoint_notes([item for item in forecast if item.dtype != "fp32"], items, checkpoint, chosen=chosen)
    notes += [f"{text}: {_share(which, items)}" for text, which in found.items() if which]
    for name in dict.fromkeys((origin[0], target[0])):
        if canonical_name(name) == name and (estimates := gpu_info(name).estimates):
            notes.append(f"figures of {name} that are estimates, not public: {', '.join(estimates)}")
    return notes


def _checkpoint_notes(
    products: Sequence[Measured], items: Sequence[Measured], checkpoint: str, *, chosen: bool
) -> list[str]:
    """Why a checkpoint was chosen, and which of the products that are not in fp32 it never saw the dtype of."""
    if not checkpoint:
        return []
    trained: list[str] = load_card(checkpoint).get("trained_dtypes") or []
    unseen = [item for item in products if trained and item.dtype not in trained]
    dtypes, new = (", ".join(sorted({item.dtype for item in each})) for each in (products, unseen))
    notes = []
    if chosen and products:
        notes.append(f"checkpoint {checkpoint}, as products run in {dtypes}: {_share(products, items)}")
    if unseen:
        known = f"{checkpoint} was trained on {', '.join(trained)} only, its {new} is an extrapolation"
        notes.append(f"{known}: {_share(unseen, items)}")
    return notes


def _share(found: Sequence[Measured], items: Sequence[Measured]) -> str:
    """Share of the measured time, and the names with the most of it."""
    total = sum(item.seconds for item in items)
    share = sum(item.seconds for item in found) / total if total > 0.0 else 0.0
    names = list(dict.fromkeys(item.name for item in sorted(found, key=lambda item: -item.seconds)))
    shown = ", ".join(name[:48] for name in names[:2])
    return f"{share:.1%} of the time ({shown}{f' and {len(names) - 2} more' if len(names) > 2 else ''})"
