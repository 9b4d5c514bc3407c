"""`neusight-jax serve`: how many of which GPU answer so many users in time, and what a million tokens cost."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Any

from neusight_jax.cli.console import answer, busy
from neusight_jax.cli.options import AsJson, ReportFile, WorkloadCheckpoint, argument, option
from neusight_jax.errors import InputError

_USERS = "Requests at once: each user sends the next when one is answered."
_DTYPE = "Of the arithmetic of matrix products."
_of_load, _of_engine = (functools.partial(option, group=group) for group in ("Load", "Engine"))
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}


def serve(
    model: Annotated[str, argument("A name of `neusight-jax models`, or a config.json, of a decoder.", "MODEL")],
    gpu: Annotated[list[str], option("GPUs to choose from: names, or JSON or YAML files.", metavar="GPU")],
    input_tokens: Annotated[int | None, _of_load("Of a prompt.")] = None,
    output_tokens: Annotated[int | None, _of_load("Of an answer.")] = None,
    users: Annotated[float | None, _of_load(_USERS)] = None,
    request_rate: Annotated[
        float | None, _of_load("Requests a second, arriving at random; instead of --users.")
    ] = None,
    trace: Annotated[Path | None, _of_load("Requests in Mooncake's JSONL, instead of tokens and users.")] = None,
    ttft: Annotated[str | None, _of_load("Most time to the first token: 1s, 800ms.")] = None,
    tpot: Annotated[str | None, _of_load("Most time of a further token: 50ms.")] = None,
    percentile: Annotated[int, _of_load("Of requests that have to meet the targets: 50 or 95.")] = 95,
    prices: Annotated[Path | None, option("JSON, YAML or CSV, GPU: price of an hour of one.", metavar="FILE")] = None,
    max_gpus: Annotated[int | None, option("Most GPUs of one type.")] = None,
    tensor_parallel: Annotated[
        list[int] | None, _of_engine("Ranks of a replica to try.", default="1 2 4 8, within a server")
    ] = None,
    expert_parallel: Annotated[
        list[int] | None, _of_engine("1 = experts split as layers are, or as many as ranks.", default="both")
    ] = None,
    disaggregated: Annotated[
        bool, _of_engine("Also try GPUs that only take prompts beside others that only answer.")
    ] = False,
    dtype: Annotated[str | None, _of_engine(_DTYPE, default="the model's own")] = None,
    weight_dtype: Annotated[str | None, _of_engine("What weights are stored in.", default="as the config says")] = None,
    kv_dtype: Annotated[
        str | None, _of_engine("Of the KV cache.", default="fp8 for fp8 and fp4, else as --dtype")
    ] = None,
    chunk_tokens: Annotated[int | None, _of_engine("Most tokens of a step.", default="vLLM's, 8192 or 2048")] = None,
    max_batch: Annotated[int | None, _of_engine("Most running requests.", default="vLLM's, 1024 or 256")] = None,
    memory_share: Annotated[float, _of_engine("Of the device memory that the engine takes.")] = 0.9,
    prefix_share: Annotated[float, _of_engine("Of input tokens that the prefix cache holds.")] = 0.0,
    draft_tokens: Annotated[int, _of_engine("Tokens guessed ahead of each step (speculative decoding).")] = 0,
    draft_acceptance: Annotated[float, _of_engine("Chance that a guess is right.")] = 0.7,
    draft_share: Annotated[float, _of_engine("Time of a guess over that of a decode step.")] = 0.05,
    method: Annotated[str, _of_engine("estimate; engine, which needs '.[serving]'; auto.")] = "auto",
    checkpoint: WorkloadCheckpoint = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """How many of which GPU serve a model to so many users in time, and what a million tokens cost.

    By an engine's scheduler where the extra `serving` is installed, else an estimate in closed form: continuous
    batching with chunked prefill in steady state. Every GPU is forecast from its figures alone, all alike.
    """
    from neusight_jax.checkpoint import load_predictor
    from neusight_jax.prices import read_prices
    from neusight_jax.serving.answers import serve as serve_load

    options: dict[str, Any] = {
        "chunk_tokens": chunk_tokens,
        "max_batch": max_batch,
        "memory_share": memory_share,
        "prefix_share": prefix_share,
        "draft_tokens": draft_tokens,
        "draft_acceptance": draft_acceptance,
        "draft_share": draft_share,
    }
    checkpoint = checkpoint or "tensorcore"
    with busy("forecasting"):
        found = serve_load(
            load_predictor(checkpoint),
            gpu,
            model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            users=users,
            request_rate=request_rate,
            trace=trace,
            method=method,
            ttft_s=_seconds("--ttft", ttft),
            tpot_s=_seconds("--tpot", tpot),
            percentile=percentile,
            prices=read_prices(prices) if prices is not None else None,
            max_gpus=max_gpus,
            dtypes={"dtype": dtype, "weight_dtype": weight_dtype, "kv_dtype": kv_dtype},
            options=options,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            disaggregated=disaggregated,
        )
    answer(found, as_json, report, checkpoint=checkpoint)


def _seconds(name: str, text: str | None) -> float | None:
    """A time with or without a unit, in seconds."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+(?:e-?\d+)?)\s*(s|ms|us|)\s*", text)
    try:
        return float(found[1]) * _UNITS[found[2]] if found else _bad(name, text)
    except ValueError:
        return _bad(name, text)


def _bad(name: str, text: str) -> float:
    raise InputError(f"{name} is {text!r}, expected a time such as 1s, 800ms or 0.05")
