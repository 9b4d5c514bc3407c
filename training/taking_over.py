"""One checkpoint from two: families that were trained here, and the rest from a checkpoint that has them.

    python -m neusight_jax.training.taking_over CHECKPOINT --base BASE --output DIR

writes a checkpoint again with the families it took over as they are in BASE now; its own stay as they are. With `--join
OTHER` in place of the base it gets the families of OTHER that it has not, such as what recipe `collectives` trains.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from neusight_jax.datasets.measurements import Measurements, find_measured, read_measurements
from neusight_jax.errors import InputError, run_script
from neusight_jax.files import refuse_existing
from neusight_jax.model.checkpoint import LIBRARIES, load_card, load_predictor, save_checkpoint
from neusight_jax.model.intervals import MODELS, Intervals
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor


class Refit(NamedTuple):
    """Parts that a recipe starts from which fits one thing of a checkpoint and keeps the rest.

    Attributes:
      predictor, card: of the base; data: measurements of all GPUs; held_out: those that are scored and not fitted.
    """

    predictor: MixturePredictor
    card: dict[str, Any]
    data: Measurements
    held_out: list[str]


def refit(
    measurements: Sequence[Path | str], output: Path | str, base: str, hold_out: Sequence[str], drop: bool, what: str
) -> Refit:
    """What such a recipe starts from.

    Args:
      measurements: files or folders of the schema.
      output: folder that will be written, new or empty.
      base: checkpoint of kind mixture.
      hold_out: GPUs that are scored and not fitted.
      drop: leave bad rows out instead of refusing them.
      what: is fitted, for the error.
    Raises: `InputError` for bad measurements, a base of another kind, or an output that holds something.
    """
    refuse_existing(Path(output))
    predictor, card = load_predictor(base), load_card(base)
    if not isinstance(predictor, MixturePredictor):
        raise InputError(f"checkpoint {base} is of kind {card['kind']}; {what} fitted to one of kind mixture")
    held_out = find_measured(hold_out, measurements)
    return Refit(predictor, card, read_measurements(measurements, on_invalid="drop" if drop else "refuse"), held_out)


BY_DEVICE: tuple[str, ...] = ("device_effects", "generation_effects", "device_intervals")
"""Entries of a card by device or generation, then family."""
BY_FAMILY: tuple[str, ...] = ("kernels", "other_vendor", "measured_kernels", "gpu_range", "shape_range")
"""Fields of intervals by family."""


def taken_over(predictor: Predictor, card: Mapping[str, Any], base: str) -> tuple[MixturePredictor, dict[str, Any]]:
    """A predictor with the families of a base checkpoint beside its own, and the card of both.

    Ensembles must be of one size in a checkpoint: members of the base beyond the predictor's are left out.

    Args:
      predictor, card: trained here; base: name or folder of a `mixture` checkpoint.
    Raises: `InputError` when the base is of another kind or size.
    """
    other, other_card = load_predictor(base), load_card(base)
    if not isinstance(other, MixturePredictor) or not isinstance(predictor, MixturePredictor):
        raise InputError(f"base checkpoint {base} is of another kind than mixture; expected a mixture")
    members, hidden = card["architecture"]["members"], card["architecture"]["hidden"]
    if card["architecture"].get("network") != other_card["architecture"].get("network"):
        raise InputError(f"base checkpoint {base} has another network; expected the one trained here")
    if other_card["architecture"]["hidden"] != hidden or other_card["architecture"]["members"] < members:
        raise InputError(f"base checkpoint {base} has other sizes; expected hidden {hidden}, {members} members or more")
    extra = [name for name in other.families if name not in predictor.families]
    families = {name: _members(other.families[name], members) for name in extra}
    own_intervals, other_intervals = predictor.intervals, other.intervals
    intervals = None if own_intervals is None or other_intervals is None else _joined(other_intervals, own_intervals)
    both = MixturePredictor(
        {**families, **predictor.families},
        {**{name: other.tiles[name] for name in extra}, **predictor.tiles},
        intervals,
        other.power if predictor.power is None else predictor.power,
    )
    merged = {
        **card,
        "architecture": {**card["architecture"], "families": list(both.families), "intervals": intervals is not None},
        "trained_on": {
            **card["trained_on"],
            "devices": sorted({*card["trained_on"]["devices"], *other_card["trained_on"]["devices"]}),
        },
        "trained_dtypes": sorted({*card["trained_dtypes"], *other_card["trained_dtypes"]}),
        "taken_over": {"checkpoint": base, "families": extra},
        "errors_percent": {
            **{name: other_card["errors_percent"][name] for name in extra},
            **card["errors_percent"],
        },
        **{key: _beside(other_card[key], card.get(key, {}), extra) for key in BY_DEVICE if key in other_card},
    }
    return both, merged


def taken_again(checkpoint: str, base: str) -> tuple[MixturePredictor, dict[str, Any]]:
    """A checkpoint whose families from elsewhere are those of `base` now, and its card.

    Args:
      checkpoint, base: names or folders; the first took families over, from the second or an earlier state of it.
    Raises: `InputError` when it took none over, or the base is of another kind or size.
    """
    predictor, card = load_predictor(checkpoint), load_card(checkpoint)
    foreign = card.get("taken_over")
    if not foreign or not isinstance(predictor, MixturePredictor):
        raise InputError(f"{checkpoint} took no families over; expected a checkpoint of a recipe with a base")

    def trained_here(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: part for name, part in parts.items() if name not in foreign["families"]}

    intervals = predictor.intervals
    if intervals is not None:
        kept_pairs: dict[str, Any] = {name: trained_here(getattr(intervals, name)) for name in BY_FAMILY}
        intervals = replace(intervals, **kept_pairs)
    alone = MixturePredictor(trained_here(predictor.families), trained_here(predictor.tiles), intervals)
    kept = {key: part for key, part in card.items() if key not in ("taken_over", "format", LIBRARIES)}
    kept["architecture"] = {**card["architecture"], "families": list(alone.families)}
    kept["errors_percent"] = trained_here(card["errors_percent"])
    # GPUs that only the base was trained on come back with it, as it is now.
    devices = {device for errors in kept["errors_percent"].values() for device in errors["training"]}
    kept["trained_on"] = {**card["trained_on"], "devices": sorted(devices)}
    for key in BY_DEVICE:
        kept[key] = {name: trained_here(parts) for name, parts in card.get(key, {}).items()}
    both, merged = taken_over(alone, kept, base)
    merged["taken_over"]["checkpoint"] = foreign["checkpoint"]
    return both, merged


def joined(checkpoint: str, other: str) -> tuple[MixturePredictor, dict[str, Any]]:
    """A checkpoint with the families of another that it has not, or that it was given before, and its card.

    Raises: `InputError` when one is of another kind or size.
    """
    predictor, card = load_predictor(checkpoint), load_card(checkpoint)
    if not isinstance(predictor, MixturePredictor):
        raise InputError(f"checkpoint {checkpoint} is of another kind than mixture; expected a mixture")
    again = set(card.get("joined", {}).get(other, ()))
    alone = MixturePredictor(
        {name: family for name, family in predictor.families.items() if name not in again},
        predictor.tiles,
        predictor.intervals,
    )
    kept = {key: part for key, part in card.items() if key not in ("format", LIBRARIES)}
    both, merged = taken_over(alone, kept, other)
    extra = merged["taken_over"]["families"]
    merged["joined"] = {**card.get("joined", {}), other: extra}
    if "taken_over" in card:
        merged["taken_over"] = card["taken_over"]
    else:
        del merged["taken_over"]
    return both, merged


def _members(parameters: Any, members: int) -> Any:
    """The first members of an ensemble; device effect, physics and library have no such axis."""
    first = jax.tree.map(lambda leaf: leaf[:members], replace(parameters, effect=None, physics=None, library=None))
    return replace(first, effect=parameters.effect, physics=parameters.physics, library=parameters.library)


def _joined(base: Intervals, trained: Intervals) -> Intervals:
    others = {name: pair for name, pair in base.other_vendor.items() if name not in (*trained.kernels, MODELS)}
    both: dict[str, Any] = {name: {**getattr(base, name), **getattr(trained, name)} for name in BY_FAMILY}
    return replace(trained, **{**both, "other_vendor": {**others, **trained.other_vendor}})


def _beside(
    base: Mapping[str, Mapping[str, Any]], trained: Mapping[str, Mapping[str, Any]], families: list[str]
) -> dict[str, dict[str, Any]]:
    """Entries of both cards by device or generation, then family; of the base only the families taken over."""
    out: dict[str, dict[str, Any]] = {}
    for name in (*base, *(name for name in trained if name not in base)):
        kept = {family: effect for family, effect in base.get(name, {}).items() if family in families}
        out[name] = {**kept, **trained.get(name, {})}
    return out


def main() -> None:
    """Write a checkpoint again beside the present state of its base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base")
    source.add_argument("--join")
    parser.add_argument("--output", required=True)
    chosen = parser.parse_args()
    refuse_existing(Path(chosen.output))
    write = (joined, chosen.join) if chosen.join else (taken_again, chosen.base)
    save_checkpoint(chosen.output, *write[0](chosen.checkpoint, write[1]))


if __name__ == "__main__":
    run_script(main)
