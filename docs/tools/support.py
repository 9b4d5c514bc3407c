"""The support matrix: model × GPU × dtype, from the measured GPUs of the cards and the kernels models launch."""

from __future__ import annotations

from functools import cache

import neusight_jax as nj
from neusight_jax.hardware.catalog import catalog_gpu, gpu_info

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
EAGER, DENSE, EXPERTS = "Eager transformers", "Dense decoders and ViT", "Mixtures of experts"
SAMPLES = {EAGER: "gpt2", DENSE: "llama-3.2-1b", EXPERTS: "mixtral-8x7b"}
"""Kind of model -> one whose kernels stand for it."""
BORROWED = ("memory", "strided", "window")
"""Families without measurements of their own, forecast by the network of another."""
MEASURED_DTYPE = {"gemm": ("bf16",), "gemm_fp8": ("fp8",), "gemm_fp4": ("fp4",), "grouped_gemm": ("bf16",)}
SISTER = {"fp16": "bf16"}
"""A dtype that runs as fast as another on every GPU measured."""
LETTERS = {"measured": "M", "sibling": "S", "extrapolated": "x", "refused": "-"}
RANK = list(LETTERS)


@cache
def _families(model: str, dtype: str) -> frozenset[str]:
    """Families of the kernels that a model launches."""
    modes = ("inference", "training") if model == SAMPLES[EAGER] else ("prefill", "decode")
    graphs = [
        nj.graph_from_config(model, batch_size=1, sequence_length=128, mode=mode, dtype=dtype, fused=False)
        for mode in modes
    ]
    names = {name for graph in graphs for name, batch in graph.kernels.families.items() if batch.num_rows}
    return frozenset(names - set(BORROWED))


@cache
def _measured() -> dict[str, dict[str, str]]:
    """Family -> GPU it was measured on -> architecture of the GPU."""
    errors = nj.load_card("tensorcore")["errors_percent"]
    errors = errors | nj.load_card("fp32")["errors_percent"]
    return {family: {name: gpu_info(name).architecture for name in item["training"]} for family, item in errors.items()}


def status(kind: str, gpu: str, dtype: str) -> str:
    """`measured`, `sibling`, `extrapolated` or `refused`, the worst over the kernels of the kind."""
    if not getattr(catalog_gpu(gpu), f"{dtype}_flop_per_s"):
        return "refused"
    return max((_of_family(family, gpu, dtype) for family in _families(SAMPLES[kind], dtype)), key=RANK.index)


def _of_family(family: str, gpu: str, dtype: str) -> str:
    devices = _measured()[family]
    at_best = "measured"
    if family in MEASURED_DTYPE and family != "gemm" and dtype not in MEASURED_DTYPE[family]:
        return "extrapolated"
    if family == "gemm" and dtype in ("tf32", "fp16"):
        at_best = "sibling" if dtype in SISTER else "extrapolated"
    here = "measured" if gpu in devices else "extrapolated"
    if here == "extrapolated" and gpu_info(gpu).architecture in devices.values():
        here = "sibling"
    return max(at_best, here, key=RANK.index)


def support() -> str:
    """One table for each kind of model; GPUs of equal rows stand together."""
    out = ""
    for kind in SAMPLES:
        rows: dict[tuple[str, ...], list[str]] = {}
        for gpu in nj.list_gpus():
            cells = tuple(LETTERS[status(kind, gpu, dtype)] for dtype in DTYPES)
            rows.setdefault(cells, []).append(_short(gpu))
        out += f"\n### {kind}\n\n| GPU | {' | '.join(DTYPES)} |\n| --- |{' :-: |' * len(DTYPES)}\n"
        ordered = sorted(rows.items(), key=lambda item: -sum(cell == "M" for cell in item[0]))
        out += "".join(f"| {', '.join(names)} | {' | '.join(cells)} |\n" for cells, names in ordered)
    return out + "\n"


def _short(name: str) -> str:
    for part in ("NVIDIA ", "Tesla ", "AMD Instinct ", "GeForce ", "Intel "):
        name = name.removeprefix(part)
    return name.replace(" Generation", "").replace("Blackwell ", "").replace(" Edition", "")


def kind_of(model: str) -> str:
    """The row of `SAMPLES` a catalog model belongs to."""
    graph = nj.graph_from_config(model, batch_size=1, sequence_length=64, mode="inference", dtype="bf16")
    used = {name for name, batch in graph.kernels.families.items() if batch.num_rows}
    return EXPERTS if "grouped_gemm" in used else DENSE if "prefill" in used else EAGER


def support_models() -> str:
    """Models of the catalog by kind."""
    kinds: dict[str, list[str]] = {kind: [] for kind in SAMPLES}
    for model in nj.list_models():
        kinds[kind_of(model)].append(f"`{model}`")
    return "".join(f"- **{kind}**: {', '.join(names)}.\n" for kind, names in kinds.items())
