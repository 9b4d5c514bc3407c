"""Dynamo: loads run through the scheduler of a real engine on a virtual clock, with step times of ours.

The one file that knows `ai-dynamo-runtime` (extra `serving`, Apache-2.0): its mock engine does continuous batching,
chunked prefill, preemption and prefix caching as vLLM does, and takes the times of steps from a table. The calls are
private to that package, so its version is checked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.model.programs import one_shot
from neusight_jax.serving.steady import Lengths
from neusight_jax.serving.times import MOST_DRAFTED, Options, Times
from neusight_jax.tables import parse_content, read_text
from neusight_jax.units import MS

PLAIN = Options()
PACKAGE, VERSION = "ai-dynamo-runtime", "1.6.1"
BLOCK_TOKENS = 64
"""Tokens of a block of the KV cache."""
REQUESTS = 1000
"""Requests of a synthetic load, or ten for every user."""
TRACE_FIELDS: tuple[str, ...] = ("timestamp", "input_length", "output_length", "hash_ids")
"""Fields of a line of a Mooncake trace: milliseconds, tokens, and ids of blocks of the prompt (Qin et al., Mooncake,
2024, github.com/kvcache-ai/Mooncake)."""
TRACE_BLOCK_TOKENS = 512
"""Tokens of a prompt that one id of a Mooncake trace stands for."""
MOST_TOKENS = 2**31
"""Tokens of a prompt or answer, and milliseconds in units of a second: beyond, something else was meant."""


def installed() -> bool:
    """Whether the package is there, in whatever version."""
    return importlib.util.find_spec("dynamo") is not None and _version() is not None


def _version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_engine(options: Iterable[Options]) -> None:
    """`InputError` where the package is missing or another version, or its engine has no such options."""
    version = _version()
    if version != VERSION:
        told = "is not installed" if version is None else f"is {version}"
        raise InputError(f"{PACKAGE} {told}, expected {VERSION}: pip install '.[serving]', or --method estimate")
    for setup in options:
        if setup.draft_tokens > MOST_DRAFTED:
            raise InputError(
                f"the engine guesses at most {MOST_DRAFTED} tokens, not {setup.draft_tokens}; give --method estimate"
            )
        if setup.poll_steps > 1:
            raise InputError(
                "the engine looks for new requests at every step: leave --poll-steps out, or --method estimate"
            )


def _core() -> Any:
    """The package's module."""
    os.environ.setdefault("DYN_LOG", "error")
    import dynamo._core

    return dynamo._core


def write_profile(
    times: Times, path: str | os.PathLike[str], options: Options = PLAIN, prompt_tokens: float = math.inf
) -> None:
    """Write step times as Dynamo's `dynamo_profile` timing model reads them.

    Milliseconds of a prompt by its length, and of a decode step by the tokens in the KV cache of all requests and the
    mean length of one. The engine asks for all prompts of a step as if they were one.

    Args:
      times: of the steps of a replica.
      path: file to write, `.npz`.
      options: of the engine; its guesses, if any, take their time too.
      prompt_tokens: length of a prompt: what a step has beyond it are several of that length.
    """
    axes = times.axes
    contexts, batches = np.array(axes.contexts, np.float32), np.array(axes.batches, np.float32)
    tokens = np.unique(np.outer(batches, contexts))
    batch = np.maximum(tokens[:, None] / contexts[None, :], 1.0)
    lengths = {*axes.chunks, *(start for start in axes.starts if start > axes.chunks[-1])}
    prompts = np.array(sorted({*lengths, *(size for size in axes.tokens if size > max(lengths))}), np.float32)
    each = np.minimum(prompts, np.float32(min(prompt_tokens, max(lengths))))
    prefill, decode = _steps_s(times, each, prompts / each, batch, contexts, np.float32(options.draft_tokens))
    np.savez(
        path,
        prefill_isl=prompts.astype(float),
        prefill_ttft_ms=1e3 * np.asarray(prefill, float),
        decode_active_kv_tokens=tokens.astype(float),
        decode_context_length=contexts.astype(float),
        decode_itl=1e3 * options.drafting * np.asarray(decode, float),
    )


@one_shot
def _steps_s(times: Times, prompts: Any, counts: Any, batch: Any, contexts: Any, guesses: Any) -> Any:
    """Seconds of the step of so many of each prompt alone, and of each batch [tokens held, context]."""
    decode = times.step_s(batch, contexts[None, :] + 0.0 * batch, guesses=guesses)
    return jax.vmap(lambda prompt, count: times.step_s(0.0, 1.0, prompt, prompts=count))(prompts, counts), decode


@dataclass(frozen=True)
class Run:
    """Times that requests met, seconds, by percentile; and requests a second."""

    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    rate: float
    prefix_share: float


@dataclass(frozen=True)
class Prefill:
    """A pool of replicas that only prefill.

    Attributes:
      times, cache_tokens, workers: of one, and how many; token_bytes: KV cache of a token on all ranks.
      bytes_per_s: at which that of a prompt goes to a replica that decodes.
    """

    times: Times
    cache_tokens: float
    workers: int
    token_bytes: float
    bytes_per_s: float


def run(
    times: Times,
    options: Options,
    cache_tokens: float,
    *,
    workers: int = 1,
    lengths: Lengths | None = None,
    users: float | None = None,
    rate: float | None = None,
    trace: Path | None = None,
    prefill: Prefill | None = None,
) -> Run:
    """A load on so many replicas, each taking requests in turn; with `prefill` they only decode.

    Args:
      cache_tokens: tokens that the KV cache of one replica holds.
      lengths, and users at once or a Poisson rate of requests a second; or a trace.
    Raises: `InputError` where the package is missing or another version, or fails.
    """
    require_engine([options])
    core = _core()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.npz"
        prompt_tokens = math.inf if lengths is None else lengths.input_tokens * (1.0 - options.prefix_share)
        write_profile(times, path, options, prompt_tokens)
        engine = _engine(options, cache_tokens, path)
        if prefill is None:
            shared: dict[str, Any] = {"extra_engine_args": {"engine": engine}, "num_workers": workers}
        else:
            shared = _pools(engine, workers, prefill, options, Path(folder) / "prefill.npz")
        try:
            if trace is not None:
                replay = core.run_mocker_trace_replay([str(trace)], **shared)
            else:
                replay = _synthetic(core, options, lengths, users, rate, shared)
        except Exception as error:  # the package raises it plainly, without a class of its own
            raise InputError(f"{PACKAGE} refused the load: {' '.join(str(error).split())[:200]}") from None
    return _read(replay.summary, float(np.asarray(times.engine.request_s)))


def _engine(options: Options, cache_tokens: float, path: Path) -> dict[str, Any]:
    """An engine as the package has it, with a profile."""
    guesses: dict[str, Any] = {}
    if options.draft_tokens:  # each rate is given that the guesses before it were right
        rates = ",".join([f"{options.draft_acceptance:g}"] * options.draft_tokens)
        guesses = {"aic_nextn": options.draft_tokens, "aic_nextn_accept_rates": rates}
    return {
        "backend": "vllm",
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks": max(int(cache_tokens) // BLOCK_TOKENS, 1),
        "max_num_seqs": options.max_batch,
        "max_num_batched_tokens": options.chunk_tokens,
        "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(path)}},
        **guesses,
    }


def _pools(engine: dict[str, Any], workers: int, prefill: Prefill, options: Options, path: Path) -> dict[str, Any]:
    """A pool of engines that decode, and one that prefills for them."""
    write_profile(prefill.times, path, options)
    sent = {"kv_bytes_per_token": round(prefill.token_bytes), "kv_transfer_bandwidth": prefill.bytes_per_s / 1e9}
    first = {**_engine(options, prefill.cache_tokens, path), **sent, "worker_type": "prefill"}
    return {
        "prefill_engine_args": {"engine": first},
        "decode_engine_args": {"engine": {**engine, **sent, "worker_type": "decode"}},
        "num_prefill_workers": prefill.workers,
        "num_decode_workers": workers,
    }


def _synthetic(
    core: Any,
    options: Options,
    lengths: Lengths | None,
    users: float | None,
    rate: float | None,
    shared: dict[str, Any],
) -> Any:
    assert lengths is not None
    if options.prefix_share:
        shared |= {"shared_prefix_ratio": options.prefix_share, "num_prefix_groups": 1}
    if users is not None:
        shared["replay_concurrency"] = math.ceil(users)
    else:
        shared["request_rate"] = rate
    count = max(REQUESTS, 10 * math.ceil(users or 0))
    return core.run_mocker_synthetic_trace_replay(lengths.input_tokens, lengths.output_tokens, count, **shared)


def _read(summary: Mapping[str, Any], request_s: float) -> Run:
    """Run that a summary tells of; `request_s` passes before an engine has a request."""

    def of(name: str, before: float = 0.0) -> dict[str, float]:
        return {"p50": before + summary[f"median_{name}_ms"] / 1e3, "p95": before + summary[f"p95_{name}_ms"] / 1e3}

    ratio = float(summary["prefix_cache_reused_ratio"])
    return Run(of("ttft", request_s), of("tpot"), float(summary["request_throughput_rps"]), ratio)


MOST_TRACE_BYTES = 256 << 20
_EXPECTED = f"JSON lines, an object with {', '.join(TRACE_FIELDS)} in each"


@dataclass(frozen=True)
class Trace:
    """A Mooncake trace: its file, mean lengths, and requests a second."""

    path: Path
    lengths: Lengths
    longest: int
    requests: int
    rate: float


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A trace in Mooncake's JSONL, one request a line (`TRACE_FIELDS`).

    Raises: `InputError` naming the line, for what is no request, unknown fields, or lengths and times that cannot be.
    """
    file = Path(path)
    lines = read_text(file, _EXPECTED, MOST_TRACE_BYTES).splitlines()
    rows = [_line(f"{file}, line {at}", text) for at, text in enumerate(lines, start=1) if text.strip()]
    if not rows:
        raise InputError(f"{file} is empty; expected one request a line with {', '.join(TRACE_FIELDS)}")
    inputs, outputs, at = (
        np.array([row[name] for row in rows], float) for name in TRACE_FIELDS[1:3] + TRACE_FIELDS[:1]
    )
    span = max(float(at.max() - at.min()) / 1e3, 1e-3)
    lengths = Lengths(max(round(inputs.mean()), 1), max(round(outputs.mean()), 1))
    return Trace(file, lengths, int((inputs + outputs).max()), len(rows), len(rows) / span)


def _line(where: str, text: str) -> dict[str, Any]:
    row = parse_content(text, where, _EXPECTED)
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object with {', '.join(TRACE_FIELDS)}")
    for name in row:
        if name not in TRACE_FIELDS:
            raise InputError(f"{where}: unknown field {_cut(name)}; expected {', '.join(TRACE_FIELDS)}")
    for name, kinds, least, most in (
        ("timestamp", (int, float), 0, 1e3 * MOST_TOKENS),
        ("input_length", (int,), 1, MOST_TOKENS),
        ("output_length", (int,), 1, MOST_TOKENS),
    ):
        if type(row.get(name)) not in kinds or not least <= row[name] <= most:
            number = "a number" if float in kinds else "a whole number"
            raise InputError(f"{where}: {name} is {_cut(row.get(name))}, expected {number} from {least} to {most:.0f}")
    blocks, wanted = row.get("hash_ids"), math.ceil(row["input_length"] / TRACE_BLOCK_TOKENS)
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < 2**64 for block in blocks):
        raise InputError(f"{where}: hash_ids is {_cut(blocks)}, expected a list of whole numbers from 0")
    if len(blocks) < wanted:
        raise InputError(
            f"{where}: hash_ids has {len(blocks)} ids, expected {wanted} or more: one for every {TRACE_BLOCK_TOKENS} "
            f"tokens of input_length {row['input_length']}"
        )
    return row


def _cut(value: Any) -> str:
    """A value as an error says it, at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# Vidur: step times as the execution-time predictor of Microsoft's simulator of serving (PyPI `vidur`, MIT).
#
# Agrawal et al., Vidur: A Large-Scale Simulation Framework for LLM Inference, MLSys 2024. Written against vidur 0.0.26.


class ExecutionTimePredictor:
    """Answers as Vidur's `BaseExecutionTimePredictor` does, from the step times of a replica.

    Put in place of the one that a simulation trains: `replica_scheduler._execution_time_predictor`, or what the
    registry returns. One pipeline stage; what a step consists of is not told apart.
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self._run = jax.jit(Times.batch_s)

    def step_s(self, queries: Sequence[int], context: Sequence[int]) -> float:
        """Seconds of a step.

        Args:
          queries: new tokens of every request; context: its tokens after the step, as Vidur's batches have them.
        Raises: `InputError` for lists of different length, or fewer tokens after the step than are new.
        """
        new, after = np.asarray(queries, np.float32), np.asarray(context, np.float32)
        if new.shape != after.shape or new.ndim != 1 or np.any(new < 1) or np.any(after < new):
            raise InputError("queries and context are one list each, of 1 new token or more and no fewer in all")
        padding = (0, max(1 << (max(len(new), 16) - 1).bit_length(), 16) - len(new))  # few programs
        return float(self._run(self.times, np.pad(new, padding), np.pad(after - new, padding)))

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        """Vidur's `ExecutionTime` of one of its batches. `InputError` for a second pipeline stage, or without Vidur."""
        if pipeline_stage != 0:
            raise InputError(f"pipeline stage {pipeline_stage}: these step times are of one stage; expected 0")
        try:
            from vidur._native.entities import ExecutionTime
        except ImportError:
            raise InputError("vidur is not installed; pip install vidur") from None
        milliseconds = self.step_s(batch.num_q_tokens, batch.num_kv_tokens) / MS
        return ExecutionTime(1, *(0.0,) * 11, milliseconds, 0.0, 0.0)  # all of it as `add_time` of one layer
