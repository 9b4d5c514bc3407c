"""Whole models measured end to end: rows as `models/end_to_end.csv` has them, with a data card."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from rich.console import Console

from neusight_jax.datasets.model_tables import END_TO_END
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing
from neusight_jax.graph.traced.source_file import is_source
from neusight_jax.profiling.clock import FEWEST_REPEATS, spread
from neusight_jax.profiling.machine import Machine, Sensors, find_machine, host_facts, make_backend
from neusight_jax.profiling.model_target import Target, target_from_config, target_from_source
from neusight_jax.profiling.run import begun_card, failure, now, write_folder

MODES: dict[str, str] = {"inference": "inf", "training": "train"}
"""Modes, and their spelling in measurement files."""
EXECUTIONS: dict[str, str] = {"eager": "", "compiled": "fusion"}
"""Ways to run a model, and the `option` of its rows."""
WARM_UPS, MOST_REPEATS = 2, 50


class Model(Protocol):
    """A model that can be run once."""

    def step(self) -> tuple[float, float | None]:
        """Seconds forward, and backward (None for inference)."""


def profile_models(
    models: Sequence[str],
    output: Path | str,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    modes: Sequence[str] = tuple(MODES),
    executions: Sequence[str] = tuple(EXECUTIONS),
    dtype: str = "fp32",
    seconds: float = 5.0,
    gpu: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure whole models and write them to a folder of the measurement schema.

    Args:
      models: `path/to/file.py:function` as `predict` takes it (a JAX function or NNX module, or a torch module), or
        names and config.json files, which run as torch models of `transformers`.
      output: folder to write, new or empty; batch_size, sequence_length: of models from configs.
      modes, executions: keys of `MODES` and `EXECUTIONS`; dtype: of models from configs.
      seconds: for each model, mode and execution, warm-up aside; gpu: as for `run.profile`.
      console: for progress.
    Returns: the data card.
    Raises: `InputError` for unknown names, a model that cannot be made, or when none could be measured.
    """
    for kind, names, choices in (("mode", modes, MODES), ("execution", executions, EXECUTIONS)):
        for name in names:
            if name not in choices:
                raise unknown_name(kind, name, choices)
    refuse_existing(output)
    console = console or Console(quiet=True)
    measured: list[dict[str, Any]] = []
    machines: dict[str, Machine] = {}
    versions: dict[str, str] = {}
    began, host, on_cpu = now(), host_facts(), True
    for model in models:
        for mode in modes:
            # Made for each mode, as some models have other heads when they train.
            target = _target(model, batch_size, sequence_length, mode, dtype)
            if target.framework not in machines:
                backend = make_backend(target.framework)
                machines[target.framework] = find_machine(backend, gpu)
                versions, on_cpu = {**versions, **backend.versions()}, backend.is_cpu
            for execution in executions:
                console.print(f"{model}: {mode}, {execution}", highlight=False)
                row = _measured(target, machines[target.framework], mode, execution, seconds)
                if "reason" in row:
                    console.print(f"skipped {model}: {row['reason']}", highlight=False)
                measured.append(row)
    rows = [row for row in measured if "reason" not in row]
    skipped = [row for row in measured if "reason" in row]
    if not rows:
        raise InputError(f"no model could be measured; the first was skipped because it {skipped[0]['reason']}")
    machine = next(iter(machines.values()))
    facts = {"timing": "whole steps, each waited for; median over repeats, warm-up aside", "models": ", ".join(models)}
    facts["made_by"] = f"neusight-jax profile-model {' '.join(models)} --output DIR"
    card = begun_card(machine, Sensors(wanted=not on_cpu), versions, **facts)
    card |= {"began": began, "host": host, "rows": {"end_to_end": len(rows)}}
    return write_folder(Path(output), card, {f"models/{END_TO_END.file}": pd.DataFrame(rows)}, skipped, machine.file)


def _measured(target: Target, machine: Machine, mode: str, execution: str, seconds: float) -> dict[str, Any]:
    """A row of a model, or what it is and the reason why there is none."""
    workload: dict[str, Any] = {
        "device": machine.name,
        "model": target.model,
        "mode": MODES[mode],
        "sequence_length": target.sequence_length,
        "batch_size": target.batch_size,
        "option": EXECUTIONS[execution],
        "num_layers": target.layers,
    }
    try:
        timing = _timed(_model(target, mode == "training", execution == "compiled"), seconds)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises when it is run
        return {**workload, "reason": failure(error)}
    finally:
        gc.collect()
    source = {"dtype": target.dtype, "backend": target.framework, "provenance": machine.provenance}
    return {**workload, **timing, **source}


def _target(model: str, batch_size: int | None, sequence_length: int | None, mode: str, dtype: str) -> Target:
    if not is_source(model):
        if sequence_length is None:
            raise InputError(f"{model}: say how many tokens with --sequence-length")
        return target_from_config(model, batch_size or 1, sequence_length, mode, dtype)
    if batch_size is not None or sequence_length is not None or dtype != "fp32":
        raise InputError(
            f"{model}: its example arguments say batch, lengths and dtypes; "
            "leave --batch-size, --sequence-length and --dtype out"
        )
    return target_from_source(model)


def _model(target: Target, training: bool, compiled: bool) -> Model:
    if target.framework == "torch":
        from neusight_jax.profiling.torch_model import TorchModel

        return TorchModel(target, training, compiled)
    from neusight_jax.profiling.jax_model import JaxModel

    return JaxModel(target, training, compiled)


def _timed(model: Model, seconds: float) -> dict[str, Any]:
    """Median seconds of a model, and how far its repeats lie apart."""
    for _ in range(WARM_UPS):
        model.step()
    steps: list[tuple[float, float | None]] = []
    while len(steps) < FEWEST_REPEATS or (
        len(steps) < MOST_REPEATS and sum(forward + (backward or 0.0) for forward, backward in steps) < seconds
    ):
        steps.append(model.step())
    totals = [forward + (backward or 0.0) for forward, backward in steps]
    # A step of JAX is one program: what its gradients take is what it takes beyond the forward pass.
    backward_s = None if steps[0][1] is None else statistics.median(backward or 0.0 for _, backward in steps)
    return {
        "e2e_s": statistics.median(totals),
        "forward_s": statistics.median(forward for forward, _ in steps),
        "backward_s": backward_s if backward_s is not None and backward_s > 0.0 else None,
        "spread": spread(totals),
        "repeats": len(steps),
    }
