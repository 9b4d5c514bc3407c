"""Checkpoints: a folder with `weights.safetensors` and `card.json`. No pickle anywhere.

The card says what the predictor is (kind, sizes), what it was trained on, which GPUs were held out, its errors per
family and GPU, the command that remakes it, and digests of itself and the weights (`digests`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import atomic_folder
from neusight_jax.hardware.catalog import canonical_name, generation_of
from neusight_jax.kernels.families import FAMILIES, GROUP
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.calibrated import CalibratedPredictor, init_shape_effect, shape_coordinates
from neusight_jax.model.heads import TileChoice, init_tile_choice
from neusight_jax.model.intervals import Intervals, empty_intervals
from neusight_jax.model.mixture import FamilyMixture, MixturePredictor, init_family
from neusight_jax.model.network import init_network, load_network
from neusight_jax.model.neusight import OUTPUTS, NeuSightPredictor
from neusight_jax.model.physics import FITTED
from neusight_jax.model.power import PowerLaw, fitted_law
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import use_compile_cache
from neusight_jax.tables import parse_content, read_bytes, read_text

# The card of a checkpoint as a typed record: what is read from it, checked once.

Effects = dict[str, dict[str, list[float]]]
"""Effects by device or generation, then by family; missing where there are none."""


class Digests(BaseModel):
    """SHA-256 of the weights file and of the card's content, hex (`digests`)."""

    weights: str
    card: str


class Architecture(BaseModel):
    """Sizes of a predictor; see `checkpoint.untrained`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    families: list[str]
    hidden: list[int]
    members: int = Field(ge=1)
    intervals: bool = False
    vendor_intervals: list[str] = []
    labelled: list[str] | None = None
    points: dict[str, int] = {}


class Trained(BaseModel):
    """What a predictor was trained on; more keys are for people."""

    model_config = ConfigDict(frozen=True, extra="allow")

    devices: list[str] = []


class Card(BaseModel):
    """What a card says that a predictor is read by; more keys (errors, recipe, notes ...) are for people and reports.

    Attributes:
      format: version of the layout; kind: of predictor; architecture: its sizes.
      trained_on, trained_dtypes, held_out: what it was trained on, and which GPUs it was not.
      device_effects, generation_effects: what was measured of devices and of generations of kernels.
      device_intervals: half-widths by device and family; libraries: number of the known one by family.
      sha256: digests, None in a card that was changed by hand.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: int
    kind: str
    architecture: Architecture
    trained_on: Trained = Trained()
    trained_dtypes: list[str] = []
    held_out: list[str] = []
    device_effects: Effects = {}
    generation_effects: Effects = {}
    device_intervals: dict[str, dict[str, float]] = {}
    libraries: dict[str, float | list[float]] = {}
    sha256: Digests | None = None


def typed_card(content: dict[str, Any], path: Path) -> Card:
    """The record of a card. `InputError` naming the first key that is not as expected."""
    try:
        return Card.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "kind or architecture" if first["loc"][0] in ("kind", "architecture") else str(first["loc"][0])
        raise InputError(f"{path}: {what} unreadable ({key}: {first['msg']}); copy it again") from None


# Digests of a checkpoint, kept in its card: a damaged or mixed copy is refused, not forecast with.

KEY = "sha256"
"""Key of a card that holds `digests`."""


def digests(card: Mapping[str, Any], weights: bytes) -> dict[str, str]:
    """SHA-256 of the weights file, byte for byte, and of the card's content without these digests, in hex.

    The content is what JSON says, keys sorted: its layout may change.
    """
    content = json.dumps({key: value for key, value in card.items() if key != KEY}, sort_keys=True)
    return {"weights": _sha256(weights), "card": _sha256(content.encode())}


def check_card(card: Mapping[str, Any], path: Path) -> None:
    """`InputError` unless the card's content has its digest; a card without digests passes (`card_notes` says so)."""
    if KEY in card and _kept(card, "card", path) != digests(card, b"")["card"]:
        raise InputError(f"{path}: its content does not match its own digest; copy the checkpoint again")


def check_weights(card: Mapping[str, Any], weights: bytes, path: Path) -> None:
    """`InputError` unless the weights have the card's digest; a card without digests passes."""
    if KEY in card and _kept(card, "weights", path) != _sha256(weights):
        raise InputError(f"{path}: weights do not match the card's digest; copy the checkpoint again")


def _kept(card: Mapping[str, Any], part: str, path: Path) -> str:
    checksums = card[KEY]
    if not isinstance(checksums, dict) or not isinstance(checksums.get(part), str):
        raise InputError(f"{path}: the card's digest is unreadable; copy the checkpoint again")
    return str(checksums[part])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


FORMAT = 5
"""Version of the layout; raised whenever older files could be misread."""
LIBRARIES = "libraries"
"""Key of a card that says, by family, which library is known to run it on the device of a calibrated predictor."""
ADDED: tuple[str, ...] = ("vendor_intervals", "labelled", "power")
"""Keys of a card's architecture that `save_checkpoint` adds; see `untrained`."""
WEIGHTS, CARD = "weights.safetensors", "card.json"
MOST_WEIGHT_BYTES = 1 << 30
"""Those that ship have under ten million."""
_EXPECTED = f"a checkpoint, a folder with {CARD} and {WEIGHTS}; copy the checkpoint again"
TRUST = "NEUSIGHT_JAX_TRUST_MODULES"
"""Variable of the environment: 1 lets cards name modules to import, as `trust_modules` of `load_predictor`."""
NEUSIGHT_INPUTS = 4

SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints"
_CHECKOUT = Path(__file__).resolve().parents[2] / "checkpoints"


def _shelf() -> Path:
    """The folder of shipped checkpoints: inside the package, or beside it in a source checkout."""
    return SHIPPED if SHIPPED.is_dir() else _CHECKOUT


def list_checkpoints() -> list[str]:
    """Names of the checkpoints that ship with the package."""
    return sorted(path.parent.name for path in _shelf().glob(f"*/{CARD}"))


def default_checkpoint(kernels: KernelTable) -> str:
    """The shipped checkpoint for a workload: `fp32` for kernels of its families alone, messages between GPUs aside."""
    families = [FAMILIES[name] for name in kernels.families]
    only_sent = bool(families) and all(family.linked for family in families)
    narrow = any(family.tensor_core for family in families if not family.linked)
    return "tensorcore" if narrow or only_sent else "fp32"


def checkpoint_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """Folder of a shipped checkpoint, or of one on disk (the folder, or a file in it)."""
    text = os.fspath(name_or_path)
    if text in list_checkpoints():
        return _shelf() / text
    path = Path(text)
    if path.name in (WEIGHTS, CARD):
        path = path.parent
    if path.is_dir():
        return path
    if os.sep in text or path.suffix:
        raise InputError(f"checkpoint {text}: no such folder; expected one with {CARD} and {WEIGHTS}")
    raise unknown_name("checkpoint", text, list_checkpoints(), "or give the path of a folder written by `train`")


def load_card(name_or_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The card of a checkpoint; `InputError` if it is missing, damaged, not JSON, or of another format version."""
    return _read_card(name_or_path)[0]


def _read_card(name_or_path: str | os.PathLike[str]) -> tuple[dict[str, Any], Card]:
    """The card of a checkpoint as it is written, and as a checked record."""
    path = checkpoint_folder(name_or_path) / CARD
    text = read_text(path, _EXPECTED)
    card = parse_content(text, str(path), _EXPECTED)
    if not isinstance(card, dict) or "format" not in card:
        raise InputError(f"{path}: not a checkpoint card, it has no `format`; expected one written by `train`")
    if card["format"] != FORMAT:
        raise InputError(
            f"{path}: format {card['format']!r}, this version reads format {FORMAT}; "
            "train it again or install the version that wrote it"
        )
    check_card(json.loads(text), path)  # as written: names of `card` are made printable
    return card, typed_card(card, path)


def card_notes(card: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Notes to read before trusting any forecast of a checkpoint, whatever the GPU and model: sentences."""
    notes = []
    if card.get("interrupted"):
        where = ", ".join(f"{name} at step {step}" for name, step in card["interrupted"].items())
        notes.append(f"the training of {checkpoint} was interrupted ({where}): its weights are unfinished")
    if card.get("trial"):
        notes.append(
            f"{checkpoint} is a trial: its recipe, {card.get('recipe')}, takes few steps, to try the path; forecasts "
            "made with it say little, train by the recipe fp32"
        )
    if KEY not in card:
        notes.append(f"{checkpoint}: its weights carry no digest, so that damage to them would not be noticed")
    return notes


def load_predictor(
    name_or_path: str | os.PathLike[str], device: str | None = None, *, trust_modules: bool = False
) -> Predictor:
    """The predictor of a checkpoint: a shipped name or a path.

    Args:
      device: the GPU to forecast, by name. One the checkpoint was trained on (`load_card(...)["device_effects"]`) gets
        its small measured effect: more accurate for it and what-if variants of it. Any other gets what the GPUs share
        that run the same generation of library kernels, if any was trained on. None (the default) has no effect at
        all; compare different GPUs with that one.
      trust_modules: import the module that the card names, if it has a network of a user's own. An import runs code, so
        a card that came from elsewhere is refused without it.
    Raises: `InputError` naming the file, and the leaf, when weights are truncated, foreign or of another shape.
    """
    use_compile_cache()
    folder = checkpoint_folder(name_or_path)
    card, typed = _read_card(folder)
    path = folder / WEIGHTS
    content = read_bytes(path, _EXPECTED, MOST_WEIGHT_BYTES)
    try:
        flat = load(content)
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); copy the checkpoint again") from None
    check_weights(card, content, path)
    _check_families(typed, folder)
    _check_module(card, folder, trust_modules)
    try:
        template = _template(card["kind"], json.dumps(card["architecture"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / CARD}: kind or architecture unreadable ({error}); copy it again") from None
    predictor: Predictor = tree_from_arrays(template, _with_later_constants(flat), path)
    predictor = _with_library(predictor, {name: np.asarray(number) for name, number in typed.libraries.items()})
    effects = typed.device_effects
    name = device if device is None or device in effects else canonical_name(device)
    if name is None and device is not None:
        raise unknown_name("GPU", device, effects)
    if name is None or not isinstance(predictor, MixturePredictor):
        return predictor
    base = with_libraries(predictor, name)
    measured = effects.get(name, {})
    shared = typed.generation_effects
    fitting: dict[str, Sequence[float]] = {}
    # What was measured of the GPU itself goes before what its generation shares.
    for family in base.families:
        effect = measured.get(family) or shared.get(generation_of(name, FAMILIES[family].generations), {}).get(family)
        if effect is not None:
            fitting[family] = effect
    fitted = with_effect(base, fitting)
    if not measured or fitted.intervals is None:
        return fitted
    return replace(fitted, intervals=fitted.intervals.measured(measured, typed.device_intervals.get(name, {})))


def _with_later_constants(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint; constants of the physics that came after it are at their defaults."""
    missing = {name: len(FITTED) - len(array) for name, array in flat.items() if name.endswith("physics")}
    return {**flat, **{name: np.pad(flat[name], (0, count)) for name, count in missing.items() if count > 0}}


def _check_families(card: Card, folder: Path) -> None:
    """`InputError` where a card's predictor is of families that no installed package registers."""
    unknown = [name for name in card.architecture.families if name not in FAMILIES]
    if unknown:
        raise InputError(
            f"{folder / CARD}: has the family {unknown[0]!r}, which is not of this package; install the one that "
            f"registers it (entry points of {GROUP!r})"
        )


def _check_module(card: Mapping[str, Any], folder: Path, trust_modules: bool) -> None:
    """`InputError` where a card names a module that is not of this package and that nobody said to trust."""
    network = card["architecture"].get("network")
    if network is None or trust_modules or os.environ.get(TRUST) == "1":
        return
    module = str(network.get("module")) if isinstance(network, dict) else str(network)
    if not module.startswith(f"{__package__}."):
        raise InputError(
            f"{folder / CARD}: its network is {module!r}, whose import would run code from outside this package; if "
            f"you trust it, call load_predictor(..., trust_modules=True), or set {TRUST}=1 for the command line"
        )


@functools.cache
def _template(kind: str, architecture: str) -> Any:
    """Shapes of `untrained`, kept: to trace them takes most of the time that one more GPU's predictor takes to load."""
    return jax.eval_shape(lambda: untrained(kind, json.loads(architecture)))


def _with_library(predictor: Predictor, libraries: Mapping[str, ArrayLike]) -> Any:
    """The predictor with the number of the library that runs each family; None where nothing is known."""
    if isinstance(predictor, CalibratedPredictor):
        return replace(predictor, base=_with_library(predictor.base, libraries))
    if not isinstance(predictor, MixturePredictor):
        return predictor
    families = {
        name: replace(parameters, library=jnp.asarray(libraries[name], jnp.float32) if name in libraries else None)
        for name, parameters in predictor.families.items()
    }
    return replace(predictor, families=families)


def _families(predictor: Predictor) -> dict[str, FamilyMixture]:
    """Parameters of a mixture by family, or of what was calibrated; none of another kind."""
    base = predictor.base if isinstance(predictor, CalibratedPredictor) else predictor
    return base.families if isinstance(base, MixturePredictor) else {}


def with_libraries(predictor: MixturePredictor, device: str) -> MixturePredictor:
    """The predictor with the libraries that are known to run its families on a device."""
    families = (FAMILIES[name] for name in predictor.families)
    numbers = {family.name: family.library_of(generation_of(device, family.generations)) for family in families}
    libraries = {name: number for name, number in numbers.items() if number}  # 0 = as the rest
    adapted: MixturePredictor = _with_library(predictor, libraries)
    return adapted


def with_effect(predictor: MixturePredictor, effects: Mapping[str, Sequence[float]]) -> MixturePredictor:
    """The predictor with the effects of some families."""
    families = dict(predictor.families)
    for name, effect in effects.items():
        parameters = families[name]
        if len(effect) != parameters.effect.shape[-1]:
            raise InputError(
                f"the card's effect of {name} has {len(effect)} numbers, the weights need "
                f"{parameters.effect.shape[-1]}; the card and the weights do not belong together"
            )
        families[name] = replace(parameters, effect=jnp.asarray(effect, jnp.float32))
    return replace(predictor, families=families)


def save_checkpoint(folder: str | os.PathLike[str], predictor: Predictor, card: Mapping[str, Any]) -> None:
    """Write a checkpoint, all or nothing.

    `card` needs `kind` and `architecture`; `format`, `LIBRARIES`, digests and, in the architecture, `ADDED` are added.
    """
    libraries = {
        name: np.asarray(parameters.library).tolist()
        for name, parameters in _families(predictor).items()
        if parameters.library is not None
    }
    flat = tree_to_arrays(_with_library(predictor, {}))
    intervals: Intervals | None = getattr(predictor, "intervals", None)
    parts = (list(intervals.other_vendor), list(intervals.labelled or ())) if intervals else ([], [])
    extras = (*parts, fitted_law(predictor) is not None)
    architecture = {key: value for key, value in card["architecture"].items() if key not in ADDED}
    architecture |= {key: names for key, names in zip(ADDED, extras, strict=True) if names}
    entries = {LIBRARIES: libraries} if libraries else {}
    # As it will be read: digests are of what JSON says, which has no tuples.
    card = json.loads(json.dumps({"format": FORMAT, **card, "architecture": architecture, **entries}))
    card = {key: value for key, value in card.items() if key != KEY}  # not that of a card it was copied from
    weights = save(flat)
    with atomic_folder(Path(folder)) as beside:
        (beside / WEIGHTS).write_bytes(weights)
        (beside / CARD).write_text(json.dumps({**card, KEY: digests(card, weights)}, indent=1) + "\n")


def untrained(kind: str, architecture: Mapping[str, Any]) -> Predictor:
    """A predictor of these sizes with initial weights: the template a checkpoint is read into.

    Args:
      kind: "mixture", "neusight", "calibrated" (a mixture calibrated on one GPU) or a baseline.
      architecture: `families` (names that have a network), `hidden` (layer sizes), `members` (ensemble size),
        `network`: a user's own module in place of the layers (`network.network_card`), `intervals`: whether it
        carries intervals, `vendor_intervals`: of what another vendor's GPUs have some of their own, `labelled`:
        families in the measured whole models (all if missing), `power`: whether it has a law of power of its own; of
        a calibrated one also `points` (measured shapes by network).
    """
    key, hidden, members = jax.random.key(0), tuple(architecture["hidden"]), int(architecture["members"])
    module = load_network(architecture["network"]) if "network" in architecture else None
    chosen = {name: FAMILIES[name] for name in architecture["families"]}
    features = {name: jnp.zeros((2, _feature_count(family))) for name, family in chosen.items()}
    tiles: dict[str, TileChoice] = {
        name: init_tile_choice(key, family, features[name]) for name, family in chosen.items()
    }
    if kind == "mixture":
        families = {
            name: init_family(key, family, features[name], hidden, members, module) for name, family in chosen.items()
        }
        counts = {name: table.shape[-1] for name, table in features.items()}
        intervals = empty_intervals(counts, architecture.get("vendor_intervals", ()), architecture.get("labelled"))
        power = PowerLaw() if architecture.get("power") else None
        return MixturePredictor(families, tiles, intervals if architecture.get("intervals") else None, power)
    if kind == "neusight":
        inputs = jnp.zeros((2, NEUSIGHT_INPUTS))
        networks = {name: init_network(key, inputs, hidden, OUTPUTS, members, module) for name in chosen}
        return NeuSightPredictor(networks, tiles)
    if kind == "calibrated":
        base = untrained("mixture", architecture)
        assert isinstance(base, MixturePredictor)
        shapes = {
            name: init_shape_effect(int(points), shape_coordinates(FAMILIES[name]))
            for name, points in architecture["points"].items()
        }
        return CalibratedPredictor(base, shapes)
    from neusight_jax.model.rivals import RIVALS, FittedBaseline

    if kind in RIVALS:
        return FittedBaseline(kind, {name: RIVALS[kind].untrained(family, hidden) for name, family in chosen.items()})
    raise unknown_name("predictor kind", kind, ("mixture", "neusight", "calibrated", *RIVALS))


def _feature_count(family: Family) -> int:
    one = jax.ShapeDtypeStruct((1,), jnp.float32)  # type: ignore[no-untyped-call]
    return int(jax.eval_shape(family.features, dict.fromkeys(family.dims, one), one).shape[-1])


def _names(tree: Any) -> tuple[list[str], list[Any], Any]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return names, [leaf for _, leaf in leaves], treedef


def tree_to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """Leaves of a pytree as float32 by their path."""
    names, leaves, _ = _names(tree)
    return {name: np.asarray(leaf, np.float32) for name, leaf in zip(names, leaves, strict=True)}


def tree_from_arrays(template: Any, flat: Mapping[str, np.ndarray], path: Path) -> Any:
    """A pytree of the template's structure from `tree_to_arrays`; `InputError` names file and leaf that do not fit."""
    names, leaves, treedef = _names(template)
    extra = sorted(set(flat) - set(names))
    if extra:
        raise InputError(f"{path}: unexpected leaf {extra[0]}; the card and the weights do not belong together")
    arrays = []
    for name, leaf in zip(names, leaves, strict=True):
        # A leaf of another shape would broadcast, and one that is not finite would spread, both without a word.
        if name not in flat:
            raise InputError(f"{path}: leaf {name} is missing; the card and the weights do not belong together")
        if flat[name].shape != leaf.shape:
            raise InputError(
                f"{path}: {name} has shape {flat[name].shape}, expected {leaf.shape}; if another version trained it, "
                "train it again"
            )
        if not np.isfinite(flat[name]).all():
            raise InputError(f"{path}: leaf {name} holds values that are not finite; copy the checkpoint again")
        arrays.append(np.asarray(flat[name], np.float32))
    # One transfer of all: `jnp.asarray` compiles a program for every shape.
    return jax.tree_util.tree_unflatten(treedef, jax.device_put(arrays))
