"""Pin whole answers: writes `answers.json.gz` beside this file.

    PYTHONPATH=. python tests/golden/answers.py         # says what moved against the file there is, then replaces it
    PYTHONPATH=. python tests/golden/answers.py jobs    # of one group, and replaces that

An answer is the `to_dict` of a result, without its texts (`TEXTS`), which have tests of their own.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import neusight_jax as nj
from neusight_jax.designs.search import Settings
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.memory import footprint
from neusight_jax.job.parallelism import Space
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.sweeps.space import Range

FILE = Path(__file__).with_name("answers.json.gz")
TEXTS = ("notes", "schema")
TOLERANCE = {"designs": 1e-3}
"""Largest relative change that is no change, by group: a search of a machine amplifies rounding."""
EXACTLY = 1e-5

Question = Mapping[str, Any]
GPUS = ("Tesla P4", "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB")
GPUS += ("NVIDIA H100 80GB HBM3",)
FP32_MODELS = ("bert-base", "bert-large", "roberta-large", "gpt2", "gpt2-large", "gpt3-xl", "gpt3-2.7b", "opt-350m")
FP32_MODELS += ("opt-1.3b", "opt-13b", "switch-base-8", "vit-large")

DENSE = {"config": "llama-3.1-8b", "gpus": "8x H100", "global_batch_size": 16, "sequence_length": 2048}
ROUTED = {"config": "mixtral-8x7b", "gpus": "16x H100", "global_batch_size": 32, "sequence_length": 4096}
LARGE = {"config": "gpt3-175b", "gpus": "64x A100", "global_batch_size": 64, "sequence_length": 2048}
SINGLE = {"config": "llama-3.2-1b", "gpus": "1x H100", "global_batch_size": 4, "sequence_length": 2048}
LATENT = {"config": "deepseek-v2-lite", "gpus": "8x B200", "global_batch_size": 16, "sequence_length": 4096}
OLD = {"config": "gpt2", "gpus": "4x V100", "global_batch_size": 32, "sequence_length": 1024, "dtype": "fp32"}


def _jobs() -> Iterator[Question]:
    """Every axis, schedule, ZeRO level, recompute, adapters, experts; of dense, routed, latent and fp32 models."""
    yield {**DENSE, "data": 8}
    for zero in (1, 2, 3):
        yield {**DENSE, "data": 8, "zero": zero, "micro_batch_size": 2}
    yield {**DENSE, "data": 8, "zero": 3, "shards": 4}
    yield {**DENSE, "tensor": 8}
    yield {**DENSE, "tensor": 8, "sequence_parallel": True}
    yield {**DENSE, "tensor": 4, "data": 2, "zero": 1, "sequence_parallel": True}
    yield {**DENSE, "pipeline": 8}
    for schedule in ("gpipe", "zero-bubble"):
        yield {**DENSE, "pipeline": 4, "data": 2, "schedule": schedule}
    yield {**DENSE, "pipeline": 4, "tensor": 2, "chunks": 2, "schedule": "interleaved"}
    yield {**DENSE, "pipeline": 4, "tensor": 2, "chunks": 4, "micro_batch_size": 2}
    yield {**DENSE, "context": 4, "tensor": 2, "sequence_length": 32768}
    yield {**DENSE, "context": 2, "data": 4, "zero": 3, "sequence_length": 16384}
    for recompute in ("selective", "full"):
        yield {**DENSE, "tensor": 2, "data": 4, "recompute": recompute}
    yield {**DENSE, "tensor": 2, "data": 4, "recompute": "selective", "attention": "unfused"}
    yield {**DENSE, "tensor": 2, "data": 4, "order": ("data", "context", "tensor", "pipeline")}
    yield {**DENSE, "data": 8, "lora": Lora(16)}
    yield {**DENSE, "tensor": 2, "data": 4, "lora": Lora(8, ("attention",)), "recompute": "full"}
    yield {**DENSE, "data": 8, "optimizer": "sgd"}
    yield {**DENSE, "data": 8, "optimizer": None, "gradient_dtype": "bf16"}
    yield {**DENSE, "data": 8, "zero": 1, "overlaps": ()}
    yield {**DENSE, "data": 8, "dtype": "fp8"}
    yield {**DENSE, "gpus": "8x MI300X", "tensor": 8}
    yield {**SINGLE}
    yield {**SINGLE, "micro_batch_size": 4}
    yield {**SINGLE, "recompute": "full", "lora": Lora(16)}
    yield {**SINGLE, "optimizer": None}
    yield {**SINGLE, "gpus": "1x RTX4090", "dtype": "fp16"}
    yield {**ROUTED, "expert": 8, "data": 16, "zero": 1}
    yield {**ROUTED, "expert": 4, "data": 8, "tensor": 2, "sequence_parallel": True}
    yield {**ROUTED, "expert": 8, "data": 8, "pipeline": 2, "recompute": "full"}
    yield {**LARGE, "tensor": 8, "pipeline": 8}
    yield {**LARGE, "tensor": 8, "pipeline": 8, "chunks": 3, "recompute": "selective", "attention": "unfused"}
    yield {**LARGE, "tensor": 8, "pipeline": 4, "data": 2, "zero": 1, "recompute": "full", "sequence_parallel": True}
    yield {**LATENT, "expert": 8, "data": 8, "zero": 1}
    yield {**OLD, "data": 4}
    yield {**OLD, "tensor": 2, "data": 2, "micro_batch_size": 4}
    yield {**OLD, "pipeline": 2, "data": 2, "recompute": "full"}


def _models() -> Iterator[Question]:
    for config, mode in itertools.product(FP32_MODELS, ("inference", "training")):
        length = 197 if config.startswith("vit") else 512
        yield {"config": config, "batch_size": 4, "sequence_length": length, "mode": mode, "dtype": "fp32"}


def _layouts() -> Iterator[Question]:
    few = Space(micro_batch_sizes=(1, 4), chunks=(1, 2), zero=(0, 1))
    common = {"global_batch_size": 32, "sequence_length": 2048, "space": few, "top": 8}
    for config, gpus in (("llama-3.1-8b", "8x H100"), ("llama-3.1-8b", "16x A100"), ("llama-3.1-70b", "64x H100")):
        yield {**common, "config": config, "gpus": gpus}
    yield {**common, "config": "llama-3.1-8b", "gpus": "8x H100", "lora": Lora(16)}
    yield {**common, "config": "llama-3.1-8b", "gpus": "8x MI300X", "optimizer": "sgd"}
    yield {**common, "config": "mixtral-8x7b", "gpus": "32x H100"}
    yield {**common, "config": "deepseek-v2-lite", "gpus": "8x H200"}
    yield {**common, "config": "gpt3-13b", "gpus": "16x A100", "attention": "unfused"}
    yield {**common, "config": "llama-3.2-1b", "gpus": "1x RTX4090"}
    yield {**common, "config": "gpt2-xl", "gpus": "4x V100", "dtype": "fp32", "sequence_length": 1024}


def _services() -> Iterator[Question]:
    common = {"input_tokens": 1000, "output_tokens": 200, "tpot_s": 0.05, "method": "estimate"}
    small = {**common, "config": "llama-3.1-8b", "gpus": ["H100"], "tensor_parallel": [1]}
    yield {**small, "users": 16}
    yield {**small, "users": 16, "gpus": ["A100", "L40S"]}
    yield {**small, "request_rate": 2.0, "ttft_s": 1.0}
    yield {**small, "users": 16, "prices": {"NVIDIA H100 80GB HBM3": 3.0}}
    yield {**small, "users": 16, "options": {"prefix_share": 0.5}}
    yield {**small, "users": 16, "options": {"draft_tokens": 3, "draft_acceptance": 0.7}}
    yield {**small, "users": 16, "engine": "sglang"}
    yield {**small, "users": 16, "dtypes": {"dtype": "bf16", "weight_dtype": "fp8"}}
    yield {**small, "request_rate": 8.0, "ttft_s": 1.0, "disaggregated": True}
    yield {**common, "config": "llama-3.1-70b", "gpus": ["H100"], "tensor_parallel": [4, 8], "users": 32}
    yield {**common, "config": "gpt-oss-20b", "gpus": ["H100"], "tensor_parallel": [1], "users": 16}
    yield {**common, "config": "qwen3-30b-a3b", "gpus": ["MI300X"], "tensor_parallel": [1], "users": 16}


def _traces() -> Iterator[Question]:
    for (origin, target), plain in itertools.product(
        (("A100", "H100"), ("V100-PCIE-32GB", "T4"), ("H100", "MI300X"), ("L4", "L40S")), (False, True)
    ):
        yield {"origin": origin, "target": target, "plain": plain}


def _designs() -> Iterator[Question]:
    memory, sms = Range("mem_bytes_per_s", 1e12, 8e12), Range("num_sms", 60.0, 300.0)
    clock = Range("clock_hz", 1e9, 2.5e9)
    decode = {"config": "gpt2", "batch_size": 8, "sequence_length": 512, "mode": "inference", "dtype": "fp32"}
    yield {**decode, "free": (memory, sms), "budgets": {"area_mm2": 600.0}}
    yield {**decode, "free": (memory,), "objective": "cost"}
    yield {**decode, "mode": "training", "free": (clock, sms), "budgets": {"power_w": 400.0}}
    yield {**decode, "config": "bert-base", "free": (memory, clock), "budgets": {"area_mm2": 500.0}}


QUESTIONS: dict[str, Callable[[], Iterator[Question]]] = {
    "models": _models,
    "jobs": _jobs,
    "layouts": _layouts,
    "services": _services,
    "sizes": lambda: ({"config": name} for name in nj.list_models()),
    "traces": _traces,
    "designs": _designs,
}
"""What is asked, by group."""


@functools.cache
def weights(name: str) -> Any:
    return nj.load_predictor(name)


def _of(dtype: str) -> Any:
    return weights("fp32" if dtype == "fp32" else "tensorcore")


def _model(question: Question) -> dict[str, Any]:
    graph = nj.graph_from_config(**question)
    return {name: nj.predict(weights("fp32"), nj.load_gpu(name), graph).to_dict() for name in GPUS}


def _job(question: Question) -> dict[str, Any]:
    asked = dict(question)
    cluster = nj.load_cluster(asked.pop("gpus"))
    axes = {name: asked.pop(name) for name in tuple(asked) if name in nj.Parallelism.__dataclass_fields__}
    job = nj.job_from_config(asked.pop("config"), nj.Parallelism(**axes), **asked)
    return nj.predict(_of(asked.get("dtype", "bf16")), cluster, job).to_dict()


def _layout(question: Question) -> dict[str, Any]:
    asked = dict(question)
    cluster, config = nj.load_cluster(asked.pop("gpus")), asked.pop("config")
    return nj.parallelize(_of(asked.get("dtype", "bf16")), cluster, config, **asked).to_dict()


def _service(question: Question) -> dict[str, Any]:
    asked = dict(question)
    return nj.serve(weights("tensorcore"), asked.pop("gpus"), asked.pop("config"), **asked).to_dict()


def _size(question: Question) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for mode in ("prefill", "decode", "training"):
        try:
            graph = nj.graph_from_config(question["config"], batch_size=2, sequence_length=128, mode=mode)
        except nj.InputError:
            continue  # an encoder has no such step
        batches = graph.kernels.families
        answer[mode] = {
            **{"parameters": graph.parameters, "launches": graph.launches(), "memory": footprint(graph).total},
            "rows": {name: float(batch.count.sum()) for name, batch in batches.items()},
        }
        if mode != "training":
            forecast = nj.predict(RooflinePredictor(), nj.load_gpu("H200"), graph).to_dict()
            answer[mode] |= {name: forecast[name] for name in ("flop", "bytes", "dtype")}
    return answer


def _trace(question: Question) -> dict[str, Any]:
    from trace_files import GRID, kernel, operator, write

    events = [
        operator("aten::mm", 1, [[512, 4096], [4096, 512]], ["float"] * 2, 0),
        kernel("volta_sgemm_128x64_nn", 20.0, 900.0, 1, **GRID),
        operator("aten::gelu", 2, [[512, 4096]], ["float"], 30),
        kernel("void at::native::vectorized_elementwise_kernel<4, GeluFunctor>", 1000.0, 60.0, 2, **GRID),
        operator("aten::_softmax", 3, [[8, 128, 128], [], []], ["float", "Scalar", "Scalar"], 40),
        kernel("softmax_warp_forward", 1100.0, 9.0, 3, **GRID),
        kernel("Memcpy DtoD (Device -> Device)", 1200.0, 30.0, None, cat="gpu_memcpy", bytes=1 << 24),
        kernel("something_nobody_knows", 1300.0, 40.0, None, **GRID),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "trace.json", {"traceEvents": events})
        answer = nj.scale_trace(file, predictor=weights("fp32"), **question).to_dict()
    return json.loads(json.dumps(answer, default=float).replace(str(file), "trace.json"))  # type: ignore[no-any-return]


def _design(question: Question) -> dict[str, Any]:
    asked = dict(question)
    search = {name: asked.pop(name) for name in ("free", "objective", "budgets") if name in asked}
    few = Settings(starts=2, steps=20, rounds=4, candidates=16)
    base, graph = nj.load_gpu("A100"), nj.graph_from_config(**asked)
    return nj.design(weights("fp32"), base, search.pop("free"), [graph], settings=few, seed=1, **search).to_dict()


ANSWERS: dict[str, Callable[[Question], dict[str, Any]]] = {
    "models": _model,
    "jobs": _job,
    "layouts": _layout,
    "services": _service,
    "sizes": _size,
    "traces": _trace,
    "designs": _design,
}


def name_of(question: Question) -> str:
    """A question in one line, which its answer is kept under."""
    return " ".join(f"{key}={value}" for key, value in question.items())


def ask(group: str) -> dict[str, Any]:
    """Answers of a group by question, as plain values without their texts."""
    return {name_of(question): _plain(ANSWERS[group](question)) for question in QUESTIONS[group]()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in TEXTS}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool):
        return value
    return float(f"{float(value):.8g}")


def read() -> dict[str, dict[str, Any]]:
    """What is pinned, by group and question."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        return json.load(file)  # type: ignore[no-any-return]


def differences(old: Any, new: Any, tolerance: float, place: str = "") -> Iterator[str]:
    """Where two answers differ, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            if key not in old or key not in new:
                yield f"{place}.{key}: {'came' if key in new else 'went'}"
            else:
                yield from differences(old[key], new[key], tolerance, f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, tolerance, f"{place}[{index}]")
    elif isinstance(old, float) and isinstance(new, float):
        if not (old == new or abs(new - old) <= tolerance * abs(old)):
            yield f"{place}: {old:.9g} -> {new:.9g}" + (f" ({new / old - 1:+.3%})" if old else "")
    elif old != new:
        yield f"{place}: {old!r} -> {new!r}"


def moved(group: str, pinned: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    """What moved in a group."""
    return differences(dict(pinned), dict(asked), TOLERANCE.get(group, EXACTLY), group)


def main(groups: list[str]) -> None:
    """Ask, say what moved, and keep the answers."""
    pinned = read() if FILE.exists() else {}
    for group in groups or QUESTIONS:
        answers = ask(group)
        for line in moved(group, pinned.get(group, {}), answers):
            print(line)  # noqa: T201 - what a maintainer asked for
        pinned[group] = answers
    text = json.dumps(pinned, sort_keys=False, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(sys.argv[1:])
