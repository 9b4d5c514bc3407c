"""Pin what the checkpoint `tensorcore` forecasts today: writes `tensorcore.npz` beside this file.

    PYTHONPATH=. python tests/golden/make.py     # says what moved against the file there is, then replaces it

Every case is kept by its content (family, operator, dtype, dims, name of the GPU), so that GPUs or families added later
change nothing. Kernels are forecast with the predictor loaded for the GPU by name, alone and inside a model; infinite
seconds mean that the GPU lacks the path. Whole models are forecast with the predictor that knows no GPU.
"""

from __future__ import annotations

import datetime
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import neusight_jax as nj
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.families import FAMILIES, TENSOR_FAMILIES
from neusight_jax.kernels.family import WEIGHT_SHARE
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.tables import table

FILE = Path(__file__).with_name("tensorcore.npz")
CHECKPOINT = "tensorcore"
TOLERANCE = 1e-5
"""Largest relative change that is no change. A forecast is the exponential of a sum of logarithms of about 10, so that
single precision (6e-8) leaves it 1e-6: compiled with all optimizations instead of plainly none moves by more than 3e-6.
A constant that moves by 1 % moves forecasts that it matters to by 1e-3 and more."""

ROWS, OUTSIDE = 64, 8
"""Shapes of a family; the last so many are drawn from ranges four times as long."""
DTYPES: dict[str, tuple[str, ...]] = {
    "gemm": ("bf16", "fp16", "tf32"),
    "gemm_fp8": ("fp8", "int8"),
    "gemm_fp4": ("fp4",),
    "grouped_gemm": ("bf16", "fp16", "tf32", "fp8", "fp4", "int8"),
    "prefill": ("bf16", "fp16", "fp8"),
    "decode": ("bf16", "fp16", "fp8"),
    "stream": ("bf16", "fp16", "fp8", "fp32"),
    "reduction": ("bf16", "fp16", "fp8", "fp32"),
}
CONDITIONS: dict[str, bool] = {"alone": True, "in a model": False}
INTERVAL_GPUS = ("NVIDIA B200", "NVIDIA GB300", "AMD Instinct MI300X", "Tesla V100-SXM2-32GB")
INTERVAL_FAMILIES = ("gemm_fp8", "decode", "stream")
INTERVAL_ROWS = 16
"""First shapes of each of those families."""
MODEL_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA L40S", "AMD Instinct MI300X")
MODELS: tuple[dict[str, Any], ...] = (
    {"config": "llama-3.1-8b", "mode": "decode", "batch_size": 32, "sequence_length": 2048},
    {"config": "llama-3.1-8b", "mode": "prefill", "batch_size": 1, "sequence_length": 4096, "dtype": "fp8"},
    {"config": "llama-3.1-8b", "mode": "training", "batch_size": 1, "sequence_length": 1024},
    {"config": "mixtral-8x7b", "mode": "decode", "batch_size": 16, "sequence_length": 3000},
    {
        **{"config": "deepseek-v3", "mode": "decode", "batch_size": 64, "sequence_length": 4096},
        **{"dtype": "fp8", "expert_parallel": 8},
    },
    {"config": "gpt-oss-20b", "mode": "decode", "batch_size": 8, "sequence_length": 1000},
    {"config": "qwen3-8b", "mode": "decode", "batch_size": 4, "sequence_length": 1024, "weight_dtype": "int4"},
    {"config": "vit-large", "mode": "inference", "batch_size": 32, "dtype": "bf16"},
)


def _drawn(name: str) -> dict[str, np.ndarray]:
    """Dims of one family [ROWS], log-uniform whole numbers in the range that the checkpoint was measured in.

    Half of them are whole multiples of 16, as the sizes of models are.
    """
    random = np.random.default_rng([38, *name.encode()])
    aligned = random.random(ROWS) < 0.5
    stretch = np.where(np.arange(ROWS) < ROWS - OUTSIDE, 1.0, 4.0)

    def whole(low: float, high: float) -> np.ndarray:
        sizes = np.exp(random.uniform(np.log(low), np.log(high * stretch)))
        return np.maximum(np.where(aligned & (sizes > 16), np.round(sizes / 16) * 16, np.floor(sizes)), 1.0)

    def one_of(*values: float) -> np.ndarray:
        return random.choice(np.array(values), ROWS)

    share = {WEIGHT_SHARE: one_of(1.0, 1.0, 1.0, 0.28125)}  # int4 in groups of 128 with a scale of 16 bits
    if name.startswith("gemm"):
        batch = np.where(np.arange(ROWS) % 2, whole(1, 16), 1.0)  # every second is a `bmm`
        return {"batch": batch, "m": whole(1, 32768), "n": whole(64, 65536), "k": whole(64, 65536), **share}
    if name == "grouped_gemm":
        experts = one_of(8, 32, 128, 256)
        sizes = {"experts": experts, "local_experts": experts / one_of(1, 1, 8), "top_k": one_of(1, 2, 4, 8)}
        sizes |= {"hidden": whole(2048, 6144), "inner": whole(16, 16384)}
        tokens = whole(1, 16384)
        even, uneven = (expert_dims(tokens, distribution=how, **sizes) for how in ("balanced", "random"))  # type: ignore[arg-type]
        return {dim: np.where(aligned, even[dim], uneven[dim]) for dim in even} | share
    if name in ("prefill", "decode"):
        kv_heads = one_of(1, 2, 8, 16)
        sizes = {
            **{"heads": kv_heads * one_of(1, 4, 8), "kv_heads": kv_heads, "head_size": one_of(64, 128, 256)},
            **{"window": one_of(0, 0, 128, 1024), "kv_share": one_of(1, 1, 0.5)},
        }
        queries = whole(16, 16384) if name == "prefill" else np.ones(ROWS)
        context = queries + (one_of(0, 0, 1000) if name == "prefill" else whole(1, 131072))
        return attention_dims(queries, context, repeat=whole(1, 256), **sizes)  # type: ignore[arg-type]
    return {"rows": whole(1, 32768), "cols": whole(32, 65536), "reads": one_of(1, 2), "writes": one_of(0.5, 1)}


def _cases() -> dict[str, Any]:
    """Header of the file: every case by its content."""
    families = {}
    for name, dtypes in DTYPES.items():
        ops = FAMILIES[name].ops
        families[name] = {
            "dims": list(_drawn(name)),
            "dtype": [dtypes[row // 2 % len(dtypes)] for row in range(ROWS)],
            "op": [ops[row % len(ops)] for row in range(ROWS)],
        }
    gpus = list(table("datasets", "gpus"))
    return {"families": families, "gpus": gpus, "interval_gpus": INTERVAL_GPUS, "models": MODELS}


def _table(kernels: list[Kernel]) -> KernelTable:
    """Kernels as a table without empty families."""
    rows = table_from_kernels(kernels)
    return KernelTable({name: batch for name, batch in rows.families.items() if batch.num_rows})


def kernels_of(header: Mapping[str, Any], dims: Mapping[str, np.ndarray], name: str) -> list[Kernel]:
    """The kernels of one family, in the order of the file."""
    said = header["families"][name]
    return [
        Kernel(name, op, dict(zip(said["dims"], map(float, sizes), strict=True)), dtype=dtype)
        for op, dtype, sizes in zip(said["op"], said["dtype"], dims[name], strict=True)
    ]


@functools.cache
def _predictor(gpu: str | None, intervals: bool = False) -> Any:
    """What forecasts for a GPU by name, with the families of tensor cores alone and intervals only where they are asked
    for, so that most GPUs share a program."""
    predictor: Any = nj.load_predictor(CHECKPOINT, gpu)
    own = {
        part: {name: value for name, value in getattr(predictor, part).items() if name in TENSOR_FAMILIES}
        for part in ("families", "tiles")
    }
    return jax.tree.map(np.asarray, replace(predictor, **own, intervals=predictor.intervals if intervals else None))


def kernel_seconds(header: Mapping[str, Any], dims: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Seconds of every kernel by family [gpu, condition, row]."""
    names = list(header["families"])
    table = _table([kernel for name in names for kernel in kernels_of(header, dims, name)])
    seconds = [
        [
            nj.predict_kernels(_predictor(gpu), nj.load_gpu(gpu), table, isolated=isolated)
            for isolated in CONDITIONS.values()
        ]
        for gpu in header["gpus"]
    ]
    ends = np.cumsum([len(dims[name]) for name in names])[:-1]
    return dict(zip(names, np.split(np.array(seconds, np.float32), ends, axis=-1), strict=True))


def interval_kernels(header: Mapping[str, Any], dims: Mapping[str, np.ndarray]) -> list[Kernel]:
    """The kernels whose intervals are pinned."""
    return [kernel for name in INTERVAL_FAMILIES for kernel in kernels_of(header, dims, name)[:INTERVAL_ROWS]]


def kernel_intervals(header: Mapping[str, Any], dims: Mapping[str, np.ndarray]) -> np.ndarray:
    """Bounds of `interval_kernels`, alone, seconds [gpu, bound, row]."""
    table = _table(interval_kernels(header, dims))
    return np.array(
        [
            nj.predict_kernel_intervals(_predictor(gpu, True), nj.load_gpu(gpu), table)
            for gpu in header["interval_gpus"]
        ],
        np.float32,
    )


def model_name(workload: Mapping[str, Any]) -> str:
    """A workload in one line."""
    return " ".join(f"{value}" if key == "config" else f"{key}={value}" for key, value in workload.items())


def model_figures(workload: Mapping[str, Any], gpu: str) -> dict[str, float]:
    """Seconds in all and by family of a whole model, and its memory in bytes."""
    forecast = nj.predict(_predictor(None), nj.load_gpu(gpu), nj.graph_from_config(**workload))
    assert forecast.memory is not None
    seconds = {f"seconds of {name}": seconds for name, seconds in sorted(forecast.seconds_by("family").items())}
    return {"total_s": forecast.total_s, **seconds, "memory_bytes": forecast.memory.total}


def all_models(models: Any) -> dict[str, dict[str, dict[str, float]]]:
    """`model_figures` by workload and GPU."""
    return {model_name(each): {gpu: model_figures(each, gpu) for gpu in MODEL_GPUS} for each in models}


def relative_change(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """|new / old − 1|; 0 where both are infinite, infinite where one of them is or where the new one is no number."""
    with np.errstate(invalid="ignore", divide="ignore"):
        change = np.abs(np.asarray(new, np.float64) / np.asarray(old, np.float64) - 1.0)
    apart = np.where(np.isinf(old) != np.isinf(new), np.inf, np.nan_to_num(change, nan=np.inf, posinf=np.inf))
    return np.where(np.isinf(old) & np.isinf(new), 0.0, apart)


def moved(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[tuple[int, ...], str]]:
    """Place, old and new value of every number that moved by more than `TOLERANCE`, the largest change first."""
    change = relative_change(old, new)
    order = np.argsort(-change, axis=None, kind="stable")
    for flat in order[: int(np.sum(change > TOLERANCE))]:
        place = tuple(int(index) for index in np.unravel_index(flat, change.shape))
        yield place, f"{old[place]:.9g} -> {new[place]:.9g} s ({new[place] / old[place] - 1.0:+.3g})"


def read(path: Path = FILE) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Header, dims and forecasts of a file."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header: dict[str, Any] = json.loads(str(arrays.pop("header")))
    dims = {name: arrays.pop(f"dims/{name}") for name in header["families"]}
    return header, dims, arrays


def differences(
    header: Mapping[str, Any], dims: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Every pinned number that is another one now: the case, its old and its new value."""
    yield from kernel_differences(header, dims, old)
    yield from interval_differences(header, dims, old)
    yield from model_differences(header)


def kernel_differences(
    header: Mapping[str, Any], dims: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Those of single kernels."""
    for name, new in kernel_seconds(header, dims).items():
        kernels = kernels_of(header, dims, name)
        for (gpu, condition, row), values in moved(old[f"seconds/{name}"], new):
            yield f"{_said(kernels[row])} on {header['gpus'][gpu]} {list(CONDITIONS)[condition]}: {values}"


def interval_differences(
    header: Mapping[str, Any], dims: Mapping[str, np.ndarray], old: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Those of intervals."""
    kernels = interval_kernels(header, dims)
    for (gpu, bound, row), values in moved(old["intervals"], kernel_intervals(header, dims)):
        yield f"{('lower', 'upper')[bound]} bound of {_said(kernels[row])} on {header['interval_gpus'][gpu]}: {values}"


def model_differences(header: Mapping[str, Any]) -> Iterator[str]:
    """Those of whole models."""
    for workload in header["models"]:
        for gpu, old in header["model_figures"][model_name(workload)].items():
            new = model_figures(workload, gpu)
            for figure in sorted({*old, *new}):
                before, after = old.get(figure, 0.0), new.get(figure, 0.0)
                if relative_change(np.array(before), np.array(after)) > TOLERANCE:
                    yield f"{model_name(workload)} on {gpu}, {figure}: {before:.9g} -> {after:.9g}"


def _said(kernel: Kernel) -> str:
    dims = ", ".join(f"{name} {size:g}" for name, size in kernel.dims.items())
    return f"{kernel.family} ({kernel.op}, {kernel.dtype}: {dims})"


def main() -> None:
    """Say what moved, then write the file."""
    if FILE.exists():
        lines = list(differences(*read()))
        sys.stdout.write("\n".join([*lines, f"{len(lines)} pinned numbers moved\n"]))
    header = _cases()
    drawn = {name: np.stack(list(_drawn(name).values()), axis=1).astype(np.float32) for name in DTYPES}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=FILE.parent, capture_output=True, text=True, check=True
    ).stdout
    header["source"] = {
        "what": f"forecasts of this repository's checkpoint {CHECKPOINT}, made by tests/golden/make.py",
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "tolerance": f"{TOLERANCE:g} relative: rounding of single precision through logarithms and exponentials",
    }
    header["model_figures"] = all_models(header["models"])
    arrays: dict[str, Any] = {f"seconds/{name}": values for name, values in kernel_seconds(header, drawn).items()}
    arrays |= {f"dims/{name}": values for name, values in drawn.items()}
    arrays["intervals"] = kernel_intervals(header, drawn)
    np.savez_compressed(FILE, header=np.array(json.dumps(header)), **arrays)
    sys.stdout.write(f"{FILE.name}: {FILE.stat().st_size / 1e3:.0f} kB\n")


if __name__ == "__main__":
    main()
