"""Recipes: how each kind of checkpoint is trained, and the way from measurements to one, with progress and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import neusight_jax
from neusight_jax.datasets.measurements import Measurements, find_measured, read_measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing
from neusight_jax.hardware.catalog import generation_of
from neusight_jax.kernels.families import TENSOR_FAMILIES
from neusight_jax.model.checkpoint import save_checkpoint, untrained, with_effect, with_libraries
from neusight_jax.model.heads import TileChoice
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.network import load_network, network_card
from neusight_jax.model.neusight import NeuSightPredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.training.data import (
    NETWORKS,
    Rows,
    devices_with,
    join_rows,
    measured_devices,
    model_rows,
    sweep_rows,
    thin,
)
from neusight_jax.training.fit import (
    MORE_STEPS,
    TENSOR_SETTINGS,
    FitState,
    Job,
    Kind,
    Saved,
    Settings,
    fit,
    init_state,
    sample_of,
    with_more_steps,
)
from neusight_jax.training.intervals import Evidence, Residuals, make_intervals, mean_error_percent
from neusight_jax.training.left_out import LeftOut, left_out_jobs, merged, shared_effect
from neusight_jax.training.objectives import (
    LatencyKind,
    MixtureObjective,
    TileObjective,
    effect_penalties,
    members_of,
    neusight_objective,
    residuals_of,
    stack_members,
    tile_choice,
)
from neusight_jax.training.taking_over import taken_over


@dataclass(frozen=True)
class Recipe:
    """Recipe of a kind of checkpoint.

    Attributes:
      kind: "mixture" or "neusight".
      members: ensemble size, one seed each.
      hidden: hidden layers.
      settings: of the optimizer, for the families and for the tile choice.
      rows_per_device: at most this many sweep rows of each GPU and family.
      in_model: whether nodes of measured models are trained on too.
      left_out_seeds, left_out_settings: fits that leave each device out, the evidence for intervals; 0 seeds = none.
      families: those to train, of those that were measured; empty = all.
      base: a checkpoint whose families are taken over where none is trained here; "" = none.
      more_steps: family -> times the steps of both settings.
      left_out_by: what is left out together, a "device" or all devices of an "architecture".
      trial: whether it only tries the path, so that every forecast made with it says so.
      network: a user's own module in place of the hidden layers, as `network.network_card` says it.
    """

    kind: str
    members: int
    hidden: tuple[int, ...]
    settings: Settings
    tile_settings: Settings = field(default_factory=lambda: Settings(steps=600))
    rows_per_device: int = 6000
    in_model: bool = True
    left_out_seeds: int = 1
    left_out_settings: Settings = field(default_factory=lambda: Settings(steps=1000))
    families: tuple[str, ...] = ()
    base: str = ""
    left_out_by: str = "device"
    more_steps: dict[str, float] = field(default_factory=dict)
    trial: bool = False
    network: dict[str, Any] | None = None


RECIPES: dict[str, Recipe] = {
    "fp32": Recipe("mixture", members=4, hidden=(32, 32), settings=Settings(steps=1500)),
    "fp32-neusight": Recipe(
        "neusight",
        members=1,
        hidden=(64, 64, 64),
        settings=Settings(steps=4000),
        in_model=False,
        left_out_seeds=0,
    ),
    "tensorcore": Recipe(
        "mixture",
        members=3,
        hidden=(32, 32),
        settings=TENSOR_SETTINGS,
        rows_per_device=8000,
        in_model=False,
        left_out_settings=TENSOR_SETTINGS,
        families=tuple(sorted(TENSOR_FAMILIES)),
        base="fp32",
        left_out_by="architecture",
        more_steps=MORE_STEPS,
    ),
    "collectives": Recipe(
        "mixture",
        members=3,
        hidden=(32, 32),
        settings=Settings(steps=400),
        in_model=False,
        left_out_settings=Settings(steps=300),
        families=("collective",),
        left_out_by="architecture",
    ),
    "tiny": Recipe(
        "mixture",
        members=1,
        hidden=(8,),
        settings=Settings(steps=60, batch_size=64),
        tile_settings=Settings(steps=20),
        left_out_settings=Settings(steps=20, batch_size=64),
        trial=True,
    ),
}
"""Recipes by name: `fp32` the default, `fp32-neusight` the paper's form, `tensorcore` for every other dtype with
attention and experts, `collectives` for messages between GPUs (to be joined to it), `tiny` a quick
trial of the whole path."""


def train(
    measurements: Sequence[Path | str],
    recipe: str,
    output: Path | str,
    hold_out: Sequence[str] = (),
    seed: int = 0,
    resume: bool = False,
    drop_invalid: bool = False,
    console: Console | None = None,
    network: Any = None,
) -> dict[str, Any]:
    """Train a checkpoint and write it to a folder.

    Progress shows, after every epoch (100 steps), the training loss and the error on each held-out GPU. The state after
    every epoch is kept beside the output (`fit.Saved`) until the checkpoint is there: a run that was stopped
    leaves no checkpoint, and `resume` goes on from the last epoch to the weights of a run that was not.

    Args:
      measurements: files or folders of the schema; recipe: key of `RECIPES`; output: folder to write, new or empty.
      hold_out: GPUs whose rows are not trained on; seed: of the first member, the others follow.
      drop_invalid: leave bad rows out instead of refusing; console: for progress (none = quiet).
      network: a flax module of one's own in place of the recipe's (`neusight_jax.model.network`).
    Returns: the card.
    Raises: `InputError` for bad measurements, unknown names, GPUs to hold out that were not measured, a network that
      does not fit or cannot be imported again, an output that cannot be written.
    """
    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    module_card = None if network is None else network_card(network)
    chosen, target = replace(RECIPES[recipe], network=module_card), Path(output)
    refuse_existing(target)
    held_out = tuple(find_measured(hold_out, measurements))
    saved = Saved(target, {"recipe": recipe, "hold_out": sorted(held_out), "seed": seed, **asdict(chosen)})
    if resume:
        saved.check()
    else:
        saved.discard()
    data = read_measurements(measurements, on_invalid="drop" if drop_invalid else "refuse")
    devices = tuple(name for name in measured_devices(data) if name not in held_out)
    if not devices:
        raise InputError("no GPU is left to train on; hold out fewer, or give measurements of more")
    run = _Run(chosen, data, devices, held_out, seed, saved, console)
    sizes = run.sizes()
    begin = time.monotonic()
    predictor, effects = run.all_families()
    card = {
        "kind": chosen.kind,
        "architecture": {**sizes, "intervals": bool(run.intervals_card)},
        "recipe": recipe,
        "trial": chosen.trial,
        "settings": asdict(chosen.settings),
        "seconds": round(time.monotonic() - begin, 1),
        "version": neusight_jax.__version__,
        "made_by": train_command(recipe, held_out, seed, module_card),
        **run.card(),
        "device_effects": effects,
    }
    if chosen.base:
        predictor, card = taken_over(predictor, card, chosen.base)
    save_checkpoint(target, predictor, card)
    saved.discard()
    return card


def train_command(recipe: str, hold_out: Sequence[str], seed: int, network: Mapping[str, Any] | None = None) -> str:
    """The command that makes a checkpoint again, for its card.

    Args:
      recipe: name of the recipe, or of a baseline; hold_out: GPUs that were left out.
      seed: of the first member; network: a module of one's own, as the card has it.
    """
    held = "".join(f' --hold-out "{name}"' for name in hold_out)
    held += f" --network {network['module']}" if network else ""
    return f"neusight-jax train --measurements DIR --recipe {recipe}{held} --seed {seed} --output DIR"


class _Run:
    """One training run: fits every family in turn and gathers what the card says of it."""

    def __init__(
        self,
        recipe: Recipe,
        data: Measurements,
        devices: tuple[str, ...],
        held_out: tuple[str, ...],
        seed: int,
        saved: Saved,
        console: Console | None,
    ) -> None:
        self.recipe, self.data, self.devices = recipe, data, devices
        self.held_out, self.seed = held_out, seed
        measured = measured_devices(data)
        self.scored_apart = [device for device in held_out if device in measured]
        # Runs with different seeds share no member.
        self.jobs = [Job(seed * 1000 + member) for member in range(recipe.members)]
        self.saved, self.console = saved, console or Console(quiet=True)
        present = set(data.frame.loc[data.frame["device"].isin(devices), "family"])
        wanted = recipe.families or NETWORKS
        self.families = [name for name in NETWORKS if name in present and name in wanted]
        if not self.families:
            raise InputError(f"no measurement of what the recipe trains: {', '.join(wanted)}")
        self.row_counts: dict[str, int] = {}
        self.errors: dict[str, dict[str, dict[str, float]]] = {}
        self.tile_accuracy: dict[str, float] = {}
        self.generation_effects: dict[str, dict[str, list[float]]] = {}
        self.intervals_card: dict[str, Any] = {}

    def sizes(self) -> dict[str, Any]:
        """The architecture as cards have it. `InputError` for a network of one's own that does not fit."""
        sizes = {"families": self.families, "hidden": list(self.recipe.hidden), "members": self.recipe.members}
        if self.recipe.network:
            sizes["network"] = self.recipe.network
            # Fails here, before anything is trained, and computes nothing.
            jax.eval_shape(lambda: untrained(self.recipe.kind, sizes))
        return sizes

    def card(self) -> dict[str, Any]:
        """Entries of the card: rows trained on, and how well they are fitted."""
        return {
            "trained_on": {"devices": list(self.devices), "rows": self.row_counts},
            "trained_dtypes": sorted(self.data.frame["dtype"].unique()),
            "held_out": list(self.held_out),
            "seed": self.seed,
            "errors_percent": self.errors,
            "tile_accuracy": self.tile_accuracy,
            **self.intervals_card,
            "notes": list(self.data.notes),
            "generation_effects": self.generation_effects,
        }

    def all_families(self) -> tuple[Predictor, dict[str, dict[str, list[float]]]]:
        """The predictor, and the effect of each training device by family."""
        tiles: dict[str, TileChoice] = {}
        parts: dict[str, Any] = {}
        effects: dict[str, dict[str, list[float]]] = {name: {} for name in self.devices}
        evidence = Evidence()
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[s]}"),
        )
        with Progress(*columns, console=self.console) as bar:
            for name in self.families:
                rows = self._rows(name, devices_with(self.data, name, self.devices))
                self.row_counts[name] = len(rows.seconds)
                # Tiles first: the loss of a family runs through the waves that they make.
                tiles[name] = self._fit_tiles(bar, name, rows)
                kind = self._kind(tiles[name], rows)
                best = self._fit(bar, name, kind, rows, self.jobs, self.recipe.settings)
                seen = self._score(name, kind, rows, best)
                parts[name] = self._merged(best, rows, effects, name)
                if isinstance(kind, MixtureObjective):
                    evidence.seen[name], evidence.rows[name] = seen, rows
                    left_out = self._fit_left_out(bar, name, kind, rows)
                    evidence.left_out |= {name: left_out} if left_out else {}
        if self.recipe.kind == "neusight":
            return NeuSightPredictor(parts, tiles), {}
        predictor = MixturePredictor(parts, tiles)
        if evidence.left_out:
            intervals, self.intervals_card = make_intervals(
                evidence,
                self.data,
                self.devices,
                tiles,
                lambda name: with_effect(with_libraries(predictor, name), effects[name]),
            )
            predictor = replace(predictor, intervals=intervals)
        return predictor, effects

    def _kind(self, tile: TileChoice, rows: Rows) -> LatencyKind:
        network = load_network(self.recipe.network) if self.recipe.network else None
        if self.recipe.kind == "neusight":
            return neusight_objective(tile, self.recipe.hidden, network)
        return MixtureObjective(tile, self.recipe.hidden, effect_penalties(rows), network)

    def _rows(self, name: str, devices: Sequence[str]) -> Rows:
        rows = thin(sweep_rows(self.data, name, devices), self.recipe.rows_per_device)
        if self.recipe.in_model:
            rows = join_rows([rows, model_rows(self.data, name, devices)])
        # Only a mixture is told the libraries of a GPU when it forecasts.
        return rows.without_libraries() if self.recipe.kind == "neusight" else rows

    def _fit_tiles(self, bar: Progress, name: str, rows: Rows) -> TileChoice:
        first, settings = self.jobs[:1], self.recipe.tile_settings
        choice = tile_choice(
            rows, first[0].seed, lambda kind: self._fit(bar, f"{name} tiles", kind, rows, first, settings)
        )
        labelled = rows.take(rows.tile >= 0)
        if len(labelled.tile):
            index = np.asarray(TileObjective().choose(choice, rows.family, sample_of(labelled)))
            self.tile_accuracy[name] = round(float(np.mean(index == labelled.tile)), 3)
        return choice

    def _fit(self, bar: Progress, name: str, kind: Kind, rows: Rows, jobs: Sequence[Job], settings: Settings) -> Any:
        """Best parameters of one fit, resumed and saved as it goes."""
        settings = with_more_steps(settings, rows.family.name, self.recipe.more_steps)
        task = bar.add_task(name, total=settings.steps, s="")
        begin = self.saved.load(name, init_state(kind, rows, jobs, settings))
        validate = self._validator(rows.family.name, kind)

        def progress(state: FitState, loss: np.ndarray) -> bool:
            self.saved.save(name, state)
            bar.update(task, completed=state.done, s=f"loss {loss.mean():.3f}{validate(state)}")
            return True

        return fit(kind, rows, jobs, settings, progress, state=begin).best

    def _validator(self, name: str, kind: Kind) -> Callable[[FitState], str]:
        """Error of latencies on every held-out GPU with measurements: shown, never used to choose anything."""
        if not self.scored_apart or not isinstance(kind, LatencyKind):
            return lambda _: ""
        rows = thin(sweep_rows(self.data, name, self.scored_apart), 500)

        def text(state: FitState) -> str:
            first = members_of(state.parameters)[:1]
            residuals = residuals_of(kind, first, rows, seen=False, trained=self.devices)
            errors = [f"{device} {mean_error_percent(log):.1f}%" for device, log in residuals.items()]
            return "  held out: " + ", ".join(errors)

        return text

    def _score(self, name: str, kind: LatencyKind, rows: Rows, best: Any) -> Residuals:
        """Errors for the card: training GPUs with and without their effect, held-out GPUs without.

        Returns: log(measured / forecast) of the training GPUs with their effect.
        """
        members, alone = members_of(best), rows.take(rows.isolated > 0.5)
        seen = residuals_of(kind, members, alone, seen=True)
        splits = {"training": seen, "training, as if unseen": residuals_of(kind, members, alone, seen=False)}
        if self.scored_apart:
            apart = sweep_rows(self.data, name, self.scored_apart)
            splits["held out"] = residuals_of(kind, members, apart, seen=False, trained=self.devices)
        self.errors[name] = {
            split: {device: mean_error_percent(log) for device, log in residuals.items()}
            for split, residuals in splits.items()
        }
        return seen

    def _merged(self, best: Any, rows: Rows, effects: dict[str, dict[str, list[float]]], name: str) -> Any:
        """Jobs as one ensemble; device effects, their generation's included, averaged over members and taken out."""
        if self.recipe.kind == "neusight":
            return stack_members(best)
        mean = np.asarray(jnp.mean(best.effect, axis=0))
        for position, device in enumerate(rows.devices):
            effect = mean[position] + shared_effect(mean, rows, device)
            effects[device][name] = [round(float(value), 5) for value in effect]
        for device in rows.devices:
            shared = [round(float(value), 5) for value in shared_effect(mean, rows, device)]
            generation = generation_of(device, rows.family.generations)
            self.generation_effects.setdefault(generation, {})[name] = shared
        return merged(best, rows)

    def _fit_left_out(self, bar: Progress, name: str, kind: MixtureObjective, rows: Rows) -> LeftOut | None:
        jobs = left_out_jobs(self.recipe.left_out_seeds, rows.devices, self.recipe.left_out_by)
        if not jobs:
            return None
        best = self._fit(bar, f"{name} left out", kind, rows, jobs, self.recipe.left_out_settings)
        return LeftOut(kind, rows, jobs, best)
