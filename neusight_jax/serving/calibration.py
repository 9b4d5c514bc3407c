"""Calibration: numbers of an engine from a few measured loads of a server, and the files that hold both."""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field

from neusight_jax.errors import InputError
from neusight_jax.files import write_text_atomically
from neusight_jax.hardware.cluster import Machine, as_cluster
from neusight_jax.hardware.files import checked
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

_Tokens: TypeAlias = Annotated[int, Field(le=10_000_000)]
_Seconds: TypeAlias = Annotated[float, Field(gt=0, lt=1e5)]
_Ranks: TypeAlias = Annotated[int, Field(ge=1, le=1024)]


class MeasuredLoad(BaseModel, extra="forbid", frozen=True, title="Measured load"):
    """A load of one replica as a load generator measured it."""

    input_tokens: _Tokens = Field(ge=1, description="tokens of a prompt, a whole number from 1")
    output_tokens: _Tokens = Field(ge=2, description="tokens of an answer, a whole number from 2")
    users: float = Field(gt=0, le=1e5, description="requests at once, each following an answer, above 0")
    ttft_s: _Seconds = Field(description="mean time to the first token, seconds above 0")
    tpot_s: _Seconds = Field(description="mean time of each further token, seconds above 0")
    tensor_parallel: _Ranks = Field(1, description="ranks of the replica that layers are split over, from 1")
    expert_parallel: _Ranks = Field(1, description="ranks that experts are split over, from 1")
    data_parallel: _Ranks = Field(1, description="ranks that hold requests of their own, from 1")


def read_loads(path: str | os.PathLike[str]) -> list[MeasuredLoad]:
    """Measured loads of a CSV file, a row each under the names of `MeasuredLoad`'s fields.

    Raises: `InputError` for a file that is not there, without rows, or a value that is no such figure.
    """
    file = Path(path)
    rows = list(csv.DictReader(read_text(file, "a CSV file of measured loads").splitlines()))
    if not rows:
        raise InputError(f"{file}: no measured load; expected a row under {', '.join(MeasuredLoad.model_fields)}")
    given = [{key: value for key, value in row.items() if value not in ("", None)} for row in rows]
    return [checked(MeasuredLoad, row, f"{file}: row {number}") for number, row in enumerate(given, 1)]


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
