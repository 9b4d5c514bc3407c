"""Calibration: numbers of an engine from a few measured loads of a server, and the files that hold both."""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from neusight_jax.errors import InputError
from neusight_jax.files import write_text_atomically
from neusight_jax.hardware.cluster import Machine, as_cluster
from neusight_jax.job.step import most_probable
from neusight_jax.model.predictor import Predictor
from neusight_jax.records import json_text
from neusight_jax.serving.layouts import Ranks, Replica, replicas
from neusight_jax.serving.steady import Demand, Lengths, demand, steady
from neusight_jax.serving.steps import load_model
from neusight_jax.serving.times import WIDTHS, Engine, Times, engine_of, usual_options
from neusight_jax.tables import read_text

NOISE = 0.1
"""Spread of measured loads around forecasts with the right numbers, in logarithms."""
FITTED = tuple(name for name in WIDTHS if name != "wave")
"""Numbers that loads are fitted with: how a load generator starts its requests is no number of the engine."""

Seconds = Annotated[float, Field(gt=0, lt=1e5)]


class MeasuredLoad(BaseModel, extra="forbid", frozen=True, title="Measured load"):
    """A load of one replica as a load generator measured it.

    Attributes:
      input_tokens, output_tokens: of a request; users: requests at once, each following an answer.
      ttft_s: mean time to the first token, seconds; tpot_s: of each further one.
      tensor_parallel, expert_parallel, data_parallel: ranks of the replica, as of `layouts.Ranks`.
    """

    input_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    output_tokens: Annotated[int, Field(ge=2, le=10_000_000)]
    users: Annotated[float, Field(gt=0, le=1e5)]
    ttft_s: Seconds
    tpot_s: Seconds
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    expert_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    data_parallel: Annotated[int, Field(ge=1, le=1024)] = 1


def read_loads(path: str | os.PathLike[str]) -> list[MeasuredLoad]:
    """Measured loads of a CSV file, a row each under the names of `MeasuredLoad`'s fields.

    Raises: `InputError` for a file that is not there, without rows, or a value that is no such figure.
    """
    file = Path(path)
    rows = list(csv.DictReader(read_text(file, "a CSV file of measured loads").splitlines()))
    if not rows:
        raise InputError(f"{file}: no measured load; expected a row under {', '.join(MeasuredLoad.model_fields)}")
    return [_load(row, f"{file}: row {number}") for number, row in enumerate(rows, 1)]


def _load(row: Mapping[Any, Any], where: str) -> MeasuredLoad:
    try:
        return MeasuredLoad.model_validate({key: value for key, value in row.items() if value not in ("", None)})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = first["loc"][0]
        if first["type"] == "missing":
            raise InputError(f"{where} has no {name}; add the column, such as {name},...") from None
        if first["type"] == "extra_forbidden":
            known = ", ".join(MeasuredLoad.model_fields)
            raise InputError(f"{where}: unknown column {name!r}, expected {known}") from None
        raise InputError(f"{where}: {name} is {first['input']!r}, expected {first['msg'].lower()}") from None


def calibrate_engine(
    predictor: Predictor,
    machine: Machine,
    config: str | Path | Mapping[str, Any],
    loads: Sequence[MeasuredLoad],
    *,
    engine: Engine | str = "vllm",
    dtypes: Mapping[str, str | None] | None = None,
    options: Mapping[str, Any] | None = None,
    gpu_name: str = "",
    noise: float = NOISE,
) -> Engine:
    """The numbers of an engine from measured loads of a server, for `engine=` of `nj.serve`.

    Every number starts from that of `engine` and moves as far as its prior lets it and the loads ask for: the most
    probable values, with logarithms of numbers and of measured over forecast seconds normal.

    Args:
      predictor: of a checkpoint.
      machine: a GPU, or a cluster, that the server runs on.
      config: of the model, as of `nj.serve`.
      loads: measured, all of this model on this machine; `wave` stays as it is.
      engine: numbers to start from.
      dtypes: `dtype`, `weight_dtype`, `kv_dtype`, as of `nj.serve`.
      options: fields of `times.Options` that are not vLLM's defaults.
      gpu_name: whose defaults those are.
      noise: spread of loads around a forecast with the right numbers, in logarithms.
    Raises: `InputError` for no load, or one that a replica cannot run.
    """
    if not loads:
        raise InputError("no measured load; expected at least one")
    start, cluster = engine_of(engine), as_cluster(machine)
    setup = usual_options(float(np.asarray(cluster.gpu.mem_bytes)), gpu_name, **(options or {}))
    model, longest = load_model(config, **(dtypes or {})), max(row.input_tokens + row.output_tokens for row in loads)

    @functools.cache
    def replica_of(lengths: Lengths, *split: int) -> Replica:
        machines, setups = {gpu_name: cluster}, {gpu_name: setup}
        ranks = Ranks(*((count,) for count in split))
        (replica,) = replicas(predictor, machines, model, lengths, longest, setups, start, ranks)
        return replica

    cases: list[tuple[Times, Demand, float, float]] = []
    for row in loads:
        lengths = Lengths(row.input_tokens, row.output_tokens)
        replica = replica_of(lengths, row.tensor_parallel, row.expert_parallel, row.data_parallel)
        if replica.times is None:
            raise InputError(f"{row.tensor_parallel * row.data_parallel} ranks with {longest} tokens: {replica.reason}")
        if row.users > replica.most:
            raise InputError(f"{row.users:g} users at once: at most {replica.most:g} requests run on a replica")
        cases.append((replica.times[0], demand(lengths, setup), row.users, replica.most))
    first = np.array([float(np.asarray(getattr(start, name))) for name in FITTED])

    @jax.jit
    def seconds(logs: Any) -> Any:
        numbers = start.replace(**dict(zip(FITTED, jnp.asarray(first) * jnp.exp(logs), strict=True)))
        states = [
            steady(dataclasses.replace(times, engine=numbers), request, users, most)
            for times, request, users, most in cases
        ]
        return jnp.log(jnp.stack([part for state in states for part in (state.ttft_s, state.tpot_s)]))

    slopes = jax.jit(jax.jacfwd(seconds))
    measured = np.log([part for row in loads for part in (row.ttft_s, row.tpot_s)])
    widths = np.array([WIDTHS[name] for name in FITTED])
    moved = most_probable(lambda logs: (seconds(logs), slopes(logs)), measured, widths, noise)
    return start.replace(**dict(zip(FITTED, (first * np.exp(moved)).tolist(), strict=True)))


def write_engine(path: Path | str, engine: Engine, base: str) -> None:
    """Write the numbers of an engine to a JSON file, for `--engine FILE`; `base`: the engine they started from."""
    numbers = {name: float(np.asarray(getattr(engine, name))) for name in FITTED}
    write_text_atomically(path, json_text({"engine": base, **numbers}) + "\n")
