"""`neusight-jax serve`: how many of which GPU answer so many users in time, and what a million tokens cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from neusight_jax.cli.console import answer, busy, remark
from neusight_jax.cli.options import (
    AsJson,
    Checkpoint,
    LimitOptions,
    PriceFile,
    ReportFile,
    RunOptions,
    argument,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError

_USERS = "Requests at once: each user sends the next when one is answered."
_WRITE = "Also write the best layout to deploy it: vllm=, dynamo= or llm-d= and a YAML file; several at will."
_ENGINE = "Whose own time is counted: vllm, trtllm, sglang, or a file of `calibrate --engine`."
_DRAFT = "Tokens guessed ahead of each step (speculative decoding, MTP), or best: as many as serve the load best."
_SKEW = "Exponent of Zipf's law of how popular experts are with tokens of answers; 0 = all alike."
_DATA = "Ranks to try that hold requests of their own and share the experts (data-parallel attention)."
_DTYPE = "Of the arithmetic of matrix products."


@dataclass(frozen=True)
class LoadOptions:
    """Load: requests, and the targets they have to meet."""

    input_tokens: Annotated[int | None, option("Of a prompt.")] = None
    output_tokens: Annotated[int | None, option("Of an answer.")] = None
    users: Annotated[float | None, option(_USERS)] = None
    request_rate: Annotated[float | None, option("Requests a second, arriving at random; instead of --users.")] = None
    trace: Annotated[Path | None, option("Requests in Mooncake's JSONL, instead of tokens and users.")] = None
    ttft: Annotated[str | None, option("Most time to the first token: 1s, 800ms.")] = None
    tpot: Annotated[str | None, option("Most time of a further token: 50ms.")] = None
    percentile: Annotated[int, option("Of requests that have to meet the targets: 50 or 95.")] = 95


@dataclass(frozen=True)
class EngineOptions:
    """Engine: how a model is laid out and served."""

    tensor_parallel: Annotated[
        list[int] | None, option("Ranks of a replica to try.", default="1 2 4 8, within a server")
    ] = None
    expert_parallel: Annotated[
        list[int] | None, option("1 = experts split as layers are, or as many as ranks.", default="both")
    ] = None
    data_parallel: Annotated[list[int] | None, option(_DATA, default="1")] = None
    disaggregated: Annotated[bool, option("Also try GPUs that only take prompts beside others that only answer.")] = (
        False
    )
    dtype: Annotated[str | None, option(_DTYPE, default="the model's own")] = None
    weight_dtype: Annotated[str | None, option("What weights are stored in.", default="as the config says")] = None
    kv_dtype: Annotated[str | None, option("Of the KV cache.", default="fp8 for fp8 and fp4, else as --dtype")] = None
    chunk_tokens: Annotated[int | None, option("Most tokens of a step.", default="vLLM's, 8192 or 2048")] = None
    max_batch: Annotated[int | None, option("Most running requests.", default="vLLM's, 1024 or 256")] = None
    memory_share: Annotated[float, option("Of the device memory that the engine takes.")] = 0.9
    prefix_share: Annotated[float, option("Of input tokens that the prefix cache holds.")] = 0.0
    draft_tokens: Annotated[str, option(_DRAFT)] = "0"
    draft_acceptance: Annotated[float, option("Chance that a guess is right.")] = 0.7
    draft_share: Annotated[float, option("Time of a guess over that of a decode step.")] = 0.05
    expert_skew: Annotated[float, option(_SKEW)] = 0.0
    poll_steps: Annotated[int, option("Decode steps from one look for new requests to the next.")] = 1
    engine: Annotated[str, option(_ENGINE, metavar="ENGINE")] = "vllm"
    method: Annotated[str, option("estimate; engine, which needs '.[serving]'; auto.")] = "auto"


@takes_workload
def serve(
    model: Annotated[str, argument("A name of `neusight-jax models`, or a config.json, of a decoder.", "MODEL")],
    gpu: Annotated[list[str], option("GPUs to choose from: names, or JSON or YAML files.", metavar="GPU")],
    prices: PriceFile = None,
    max_gpus: Annotated[int | None, option("Most GPUs of one type.")] = None,
    kw: Annotated[float | None, option("Most kilowatts that all boards draw on average.")] = None,
    *,
    load: LoadOptions,
    setup: EngineOptions,
    limits: LimitOptions,
    whole: RunOptions,
    checkpoint: Checkpoint = "tensorcore",
    write: Annotated[list[str] | None, option(_WRITE, metavar="KIND=FILE.yaml", default="none")] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """How many of which GPU serve a model to so many users in time, and what a million tokens cost.

    By an engine's scheduler where the extra `serving` is installed, else an estimate in closed form: continuous
    batching with chunked prefill in steady state. Every GPU is forecast from its figures alone, all alike.
    """
    from neusight_jax.cli.workloads import limit_figures, require_config
    from neusight_jax.hardware.prices import read_prices
    from neusight_jax.model.checkpoint import card_notes, load_card, load_predictor
    from neusight_jax.serving.answers import serve as serve_load
    from neusight_jax.serving.deployment import write_deployment
    from neusight_jax.serving.times import Options

    require_config(model, "engines serve decoders")
    run, files, drafts = whole.run(), _files(write or (), setup.engine), {"draft_tokens": _drafts(setup.draft_tokens)}
    with busy("forecasting"):
        serving = serve_load(
            load_predictor(checkpoint),
            gpu,
            model,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            users=load.users,
            request_rate=load.request_rate,
            trace=load.trace,
            method=setup.method,
            ttft_s=_seconds("--ttft", load.ttft),
            tpot_s=_seconds("--tpot", load.tpot),
            percentile=load.percentile,
            prices=read_prices(prices) if prices is not None else None,
            run=run,
            max_gpus=max_gpus,
            max_kw=kw,
            dtypes={"dtype": setup.dtype, "weight_dtype": setup.weight_dtype, "kv_dtype": setup.kv_dtype},
            options={field.name: getattr(setup, field.name) for field in fields(Options)} | drafts,
            tensor_parallel=setup.tensor_parallel,
            expert_parallel=setup.expert_parallel,
            data_parallel=setup.data_parallel,
            disaggregated=setup.disaggregated,
            engine=setup.engine,
            limits=limit_figures(limits),
            expert_skew=setup.expert_skew,
            notes=card_notes(load_card(checkpoint), checkpoint),
        )
    write_deployment(serving, files)
    for path in files.values():
        remark(f"wrote {path}")
    answer(serving, as_json, report, checkpoint=checkpoint)


def _files(words: Sequence[str], engine: str) -> dict[str, Path]:
    """Deployment files to write by their kinds, checked before the work begins."""
    from neusight_jax.serving.deployment import FORMATS, require_format
    from neusight_jax.serving.times import engine_name

    files = {}
    for word in words:
        kind, _, file = word.partition("=")
        if not file.endswith((".yaml", ".yml")):  # vLLM reads no other
            raise InputError(f"--write is {word!r}, expected KIND=FILE.yaml with a kind of {', '.join(FORMATS)}")
        require_format(kind, engine_name(engine))
        files[kind] = Path(file)
    return files


def _drafts(text: str) -> int | str:
    """Tokens guessed ahead, or the word for the best number of them."""
    if text != "best" and not text.isdecimal():
        raise InputError(f"--draft-tokens is {text!r}, expected a whole number from 0 to 64, or best")
    return text if text == "best" else int(text)


def _seconds(name: str, text: str | None) -> float | None:
    from neusight_jax.cli.workloads import seconds_of

    return None if text is None else seconds_of(name, text)
