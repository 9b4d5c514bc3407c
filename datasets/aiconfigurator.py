"""Import of `aiconfigurator-core` (PyPI, Apache-2.0): its measured kernels, cleaned, as the measurement schema.

The package carries millions of kernel latencies of serving frameworks on NVIDIA GPUs. Not all are kernel time. What is
taken, and why the rest is not, stands in `RULES`; every import counts both.
"""

from __future__ import annotations

import importlib.util
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from rich.console import Console

from neusight_jax.datasets.imported import ImportReport, write_imported
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing, scratch_folder
from neusight_jax.progress import follow

PACKAGE = "aiconfigurator_core"
DATA = Path("systems") / "data"

DEVICES: dict[str, str] = {
    "a100_sxm": "NVIDIA A100-SXM4-80GB",
    "l40s": "NVIDIA L40S",
    "h100_sxm": "NVIDIA H100 80GB HBM3",
    "h200_sxm": "NVIDIA H200",
    "b200_sxm": "NVIDIA B200",
    "b300_sxm": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "rtx_pro_6000_server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
"""Folders taken, and their GPUs in the catalog. Others hold collectives only, or another vendor's GPU."""

ATTRIBUTION = """\
Rows of this folder are derived from the measurements in the Python package aiconfigurator-core {version},
https://pypi.org/project/aiconfigurator-core/, Copyright (c) NVIDIA CORPORATION & AFFILIATES.
Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
Changed: rows were selected, converted to seconds, renamed to another schema, and medians taken over frameworks.
"""


_WARM = "faster than light (warm in a cache)"


@dataclass(frozen=True)
class Rule:
    """Rule for one kind of table.

    Attributes:
      name: of the output file.
      table: file in the package, below the folder of a GPU and of a framework and version.
      keep: reason rows are left out -> which rows of a table pass, as a query.
      columns: the schema's columns from the package's, as expressions.
      latency: its column of times, milliseconds, as an expression.
      others: (1 or -1, table of the same GPU), quantizations, whose times are added or taken off, shape by shape.
      median: whether equal shapes of several frameworks become their median.
    """

    name: str
    table: str
    keep: dict[str, str]
    columns: dict[str, str]
    median: bool = False
    others: tuple[tuple[float, str], ...] = ()
    latency: str = "latency"


def _gemm_columns(dtype: str) -> dict[str, str]:
    # In the package k is the contraction; in the schema it is n.
    return {"op": "'linear'", "dtype": f"'{dtype}'", "m": "m", "n": "k", "k": "n"}


def _attention_columns(op: str, kv_length: str) -> dict[str, str]:
    return {
        "op": f"'{op}'",
        "dtype": "'bf16'",
        "batch_size": "batch_size",
        "query_length": "isl",
        "kv_length": kv_length,
        "heads": "num_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "causal": "1",
        "window": "window_size.fillna(0).clip(lower=0)",
    }


def _expert_columns(dtype: str, share: float) -> dict[str, str]:
    return {
        "op": "'experts'",
        "dtype": f"'{dtype}'",
        "tokens": "num_tokens",
        "experts": "num_experts",
        "local_experts": "(num_experts // moe_ep_size).clip(lower=1)",
        "top_k": "topk",
        "hidden": "hidden_size",
        "inner": "(inter_size // moe_tp_size).clip(lower=1)",
        "weight_share": f"{share}",
    }


_SUPERSEDED = {"an older version measured again later": "version not in ['0.5.6.post2', '0.22.0']"}
_WIDE = {"n or k below 64": "n >= 64 and k >= 64"}
_BF16 = {"another dtype": "gemm_dtype == 'bfloat16'", **_SUPERSEDED, **_WIDE}
_QUANTIZE = {"another framework": "framework == 'VLLM'", "another dtype": "quant_dtype == 'fp8'"}


def _quantized(dtype: str, framework: str, kernel: str) -> dict[str, str]:
    return {
        "another dtype": f"gemm_dtype == '{dtype}'",
        "another framework: quantized products are software, and one source is taken": f"framework == '{framework}'",
        "another kernel; fp8_block is bound by its host": f"kernel_source.str.match('{kernel}')",
        **_WIDE,
    }


def _experts(dtype: str) -> dict[str, str]:
    return {
        "another dtype": f"moe_dtype == '{dtype}'",
        "another framework": "framework == 'VLLM'",
        "another version": "version == '0.24.0'",
        "a fallback or trial kernel": "~kernel_source.str.match('.*(?:_as_silu|w4a4mxfp4moe_marlin.*)$')",
        "uneven spread of tokens": "distribution == 'balanced'",
        "experts of two matrices": "topk != 22 and hidden_size != 2688",  # Nemotron's
    }


def _attention(shortest: int) -> dict[str, str]:
    return {
        "another framework: attention is software, and one source is taken": "framework == 'VLLM'",
        **_SUPERSEDED,
        "another dtype of tensors or cache": "attn_dtype == 'bfloat16' and kv_cache_dtype == 'bfloat16'",
        "a fallback or trial kernel": "~kernel_source.str.match('vllm_triton_attn|.*_fa4$')",
        "head size above 256": "head_dim <= 256",
        "fewer than 16 new tokens": f"isl >= {shortest}",
    }


def _quantize_columns(op: str) -> dict[str, str]:
    return {"op": f"'{op}'", "dtype": "'bf16'", "b": "m", "h": "k"}


# Times of NCCL and of exchanges of experts are kernels alone; the links of the L40S server reach 1 to 2 GB/s.
_BROKEN_HOST = {"a server whose links are broken": "folder != 'l40s'"}
_NCCL = {**_BROKEN_HOST, "another dtype": "nccl_dtype == 'half'"}
_ENGINE = {**_BROKEN_HOST, "another version": "version == '0.24.0'", "launched by the host": "backend == 'vllm_graph'"}
_COPY = {"H100's values under another name": "not (folder == 'h200_sxm' and version == '0.5.0')"}
_WIDTH = {**_COPY, "another width of the model": "hidden_size == 7168"}  # the bytes say it all: others are repeats
_SMS = {**_WIDTH, "another share of the GPU's SMs": "dispatch_sms == 20"}


def _collective_columns(op: str, sent: str, ranks: str = "num_gpus", software: int = 0, **more: str) -> dict[str, str]:
    columns = {"op": op, "dtype": "'bf16'", "bytes": sent, "ranks": ranks, "nodes": "1", "software": f"{software}"}
    return {**columns, "crossing_share": "1.0", **more}


def _exchange_columns(element_bytes: float, *, dense: bool) -> dict[str, str]:
    """Dims of an exchange of experts: a token goes to each of its experts, or once to every rank that has some."""
    # DeepEP's test sends a token to at most four nodes (tests/test_internode.py, `num_topk_groups`).
    nodes = "node_num.clip(upper=4)"
    reached, across = (f"({c} * (1 - (1 - 1 / {c}) ** num_topk))" for c in (f"({nodes} * gpus_per_node)", nodes))
    sent = f"(num_token * hidden_size * {element_bytes} * {'num_topk' if dense else reached}).round()"
    share = "1.0" if dense else f"{across} / {reached}"
    more = {"nodes": "node_num", "crossing_share": share, "dtype": "'bf16'" if element_bytes >= 2.0 else "'fp8'"}
    return _collective_columns("'all_to_all'", sent, _RANKS, 2 if dense else 1, **more)


_EXPERT_DTYPES: dict[str, tuple[str, float]] = {
    "bfloat16": ("bf16", 1.0),
    "fp8_block": ("fp8", 1.0),
    "nvfp4": ("fp4", 1.0),
    "w4a16_mxfp4": ("bf16", 4.25 / 16),
    "w4a8_mxfp4_mxfp8": ("fp8", 4.25 / 8),
}
"""Arithmetic of experts, and their weights as stored over the same; weights in mxfp4 have a scale of 8 bits for 32."""
_RANKS = "(node_num * gpus_per_node)"
_FP8, _BF16_BYTES = 1.03125, 2.0  # fp8 with a scale of four bytes for every 128 values
_LOW = "comm/sglang/*/wideep_deepep_ll_perf.parquet"
_HIGH = "comm/sglang/*/wideep_deepep_normal_perf.parquet"
_NCCL_OP = "op_name.str.replace('alltoall', 'all_to_all')"
_GEMM, _SCALE = "gemm/*/*/gemm_perf.parquet", "quantize/*/*/scale_matrix_perf.parquet"
_SCALES = "quantize/{framework}/{version}/"
_FOUND, _SCALED = (_SCALES + f"{name}_perf.parquet" for name in ("computescale", "scale_matrix"))
RULES: tuple[Rule, ...] = (
    Rule("gemm_bf16", _GEMM, _BF16, _gemm_columns("bf16"), median=True),
    Rule(
        "gemm_fp8",
        _GEMM,
        _quantized("fp8", "TRTLLM", "torch_flow"),
        _gemm_columns("fp8"),
        others=((-1.0, _FOUND), (-1.0, _SCALED)),
    ),
    Rule("gemm_fp4", _GEMM, _quantized("nvfp4", "VLLM", "FlashInfer.*NvFp4"), _gemm_columns("fp4")),
    Rule(
        "prefill",
        "attention/*/*/context_attention_perf.parquet",
        _attention(16),
        _attention_columns("prefill", kv_length="isl"),
    ),
    Rule(
        "decode",
        "attention/*/*/generation_attention_perf.parquet",
        _attention(1),
        _attention_columns("decode", kv_length="step + 1"),
    ),
    *(
        Rule(f"experts_{measured}", "moe/*/*/moe_perf.parquet", _experts(measured), _expert_columns(dtype, share))
        for measured, (dtype, share) in _EXPERT_DTYPES.items()
    ),
    Rule(
        "collectives",
        "comm/nccl/*/nccl_perf.parquet",
        _NCCL,
        _collective_columns(_NCCL_OP, "message_size * 2"),
        median=True,
    ),
    Rule(
        "all_reduce_engine",
        "comm/vllm/*/custom_allreduce_perf.parquet",
        _ENGINE,
        _collective_columns("'all_reduce'", "message_size * 2", software=1),
    ),
    *(
        Rule(f"{phase}_{name}", table, keep, _exchange_columns(size, dense=dense), latency=f"{phase}_{column} / 1000")
        for name, table, keep, dense, column in (
            ("low_latency", _LOW, _WIDTH, True, "avg_t_us"),
            ("full_rate", _HIGH, _SMS, False, "transmit_us"),
        )
        for phase, size in (("dispatch", _FP8), ("combine", _BF16_BYTES))
    ),
    Rule("quantize", _SCALE, _QUANTIZE, _quantize_columns("quantize")),
    Rule("quantize_rows", _SCALE, _QUANTIZE, _quantize_columns("quantize_rows"), others=((1.0, _FOUND),)),
)
"""The rules. Products in bf16 are the vendor's BLAS in every framework, so their median is; for the rest one
framework (vLLM) is the stack a forecast speaks of. Products in fp8 are TensorRT-LLM's, which measured by itself what
quantizes their activations: engines do that in the kernel before, or in one of its own."""


def import_aiconfigurator(
    source: Path | str | None, output: Path | str, console: Console | None = None
) -> ImportReport:
    """Import the clean part of `aiconfigurator-core` into a folder of the measurement schema.

    Rows faster than light are left out and counted: a working set beyond L2 that beats the memory bandwidth was warm
    in a cache. Smaller working sets may, and the model says so itself.

    Args:
      source: an unpacked wheel, a wheel, or None for the installed package (extra `aiconfigurator`).
      output: folder to write, new or empty; gets `kernels/*.parquet` and `ATTRIBUTION`; console: for progress.
    Raises: `InputError` when the source holds no such data.
    """
    target = Path(output)
    refuse_existing(target)
    with _package(source) as root:
        version = _version(root)
        tables = {rule.name: _read(root, rule) for rule in follow(RULES, "reading", console)}
    if not any(len(frame) for frame, _ in tables.values()):
        raise InputError(f"{source or PACKAGE}: holds no row that the rules take; expected aiconfigurator-core 0.12")
    frames = {f"kernels/{name}": frame for name, (frame, _) in tables.items()}
    write_imported(target, frames, {"ATTRIBUTION": ATTRIBUTION.format(version=version)})
    rows = {name: len(frame) for name, (frame, _) in tables.items() if len(frame)}
    left_out = {(name, why): count for name, (_, counts) in tables.items() for why, count in counts.items()}
    return ImportReport(target, f"of aiconfigurator-core {version}", rows, left_out)


@contextmanager
def _package(source: Path | str | None) -> Iterator[Path]:
    """The folder that holds `systems/data`."""
    if source is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                "aiconfigurator-core is not installed; from the clone: `pip install '.[aiconfigurator]'`, or give the "
                "path of its wheel or of the unpacked wheel"
            )
        yield Path(next(iter(spec.submodule_search_locations)))
        return
    path = Path(source)
    if path.suffix == ".whl" and path.is_file():
        with scratch_folder() as folder:
            try:
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(folder)
            except (zipfile.BadZipFile, OSError) as error:
                raise InputError(f"{path}: not a whole wheel ({error}); download it again") from None
            yield _root(folder, path)
        return
    yield _root(path, path)


def _root(folder: Path, source: Path) -> Path:
    for root in (folder, folder / PACKAGE, folder.parent.parent if folder.name == "data" else folder):
        if (root / DATA).is_dir():
            return root
    raise InputError(
        f"{source}: holds no {PACKAGE}/{DATA}; expected the wheel of aiconfigurator-core, or the folder it unpacks to"
    )


def _version(root: Path) -> str:
    infos = sorted(root.parent.glob("aiconfigurator_core-*.dist-info"))
    return infos[-1].name.removeprefix("aiconfigurator_core-").removesuffix(".dist-info") if infos else "unknown"


def _read(root: Path, rule: Rule) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows of one rule from all GPUs, and how many were left out by reason."""
    parts: list[pd.DataFrame] = []
    counts = dict.fromkeys((*rule.keep, "not a time", _WARM), 0)
    # Medians are over frameworks, each a table of its own, so they wait until all are read.
    for folder, device in DEVICES.items():
        for file in sorted((root / DATA / folder).glob(rule.table)):
            # What says where rows come from is missing in the oldest tables.
            origin: dict[str, Any] = {"framework": file.parts[-3], "version": file.parent.name, "kernel_source": ""}
            origin |= {"folder": folder, "gpus_per_node": 4 if folder in ("gb200", "gb300") else 8}
            raw = _table(file)
            raw = raw.assign(**{name: value for name, value in origin.items() if name not in raw})
            try:
                raw = _kept(raw, rule.keep, counts)
                for sign, table in rule.others if len(raw) else ():
                    raw = _added(raw, sign, _table(root / DATA / folder / table.format(**origin)))
                raw = _kept(raw, {"not a time": f"{rule.latency} > 0"}, counts)
                parts.append(_written(raw, rule).assign(device=device))
            except (KeyError, NameError) as error:
                name = re.search("'.*?'", str(error))
                raise InputError(
                    f"{file}: column {name and name[0]} is missing; expected aiconfigurator-core 0.12"
                ) from None
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(), counts
    frame = pd.concat(filled, ignore_index=True)
    if rule.median:
        shape = ["device", *rule.columns]
        frame = frame.groupby(shape, as_index=False, sort=False).agg(
            latency_s=("latency_s", "median"),
            framework=("framework", "+".join),
            version=("version", "+".join),
            **{name: (name, "median") for name in POWER if name in frame},
        )
    warm = check_rows(frame, rule.name)[1].bad
    counts[_WARM] = int(warm.sum())
    return frame[~warm].reset_index(drop=True), counts


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: not a readable Parquet file ({reason}); install the package again") from None


def _added(raw: pd.DataFrame, sign: float, other: pd.DataFrame) -> pd.DataFrame:
    """Times of two tables added, shape by shape, or taken off; the second may be 0, where it was a difference."""
    both = raw.merge(other[["m", "k", "latency"]], on=["m", "k"], suffixes=("", "_more"))
    both["latency"] += sign * both.pop("latency_more").clip(lower=0)
    return both


def _kept(raw: pd.DataFrame, keep: dict[str, str], counts: dict[str, int]) -> pd.DataFrame:
    """Rows of one table that pass; the others are counted by reason."""
    for reason, passes in keep.items():
        kept = raw.query(passes, engine="python")
        counts[reason] += len(raw) - len(kept)
        raw = kept
    return raw


POWER: dict[str, tuple[str, ...]] = {"power_w": ("power_w", "power"), "power_limit_w": ("power_limit_w", "power_limit")}
"""Columns of watts of the schema, and what versions of the package that have them call them; 0 = not measured."""


def _watts(raw: pd.DataFrame) -> dict[str, pd.Series]:
    """Columns of watts that a table has."""
    present = {column: name for column, names in POWER.items() for name in names if name in raw}
    return {column: raw[name].where(raw[name] > 0.0) for column, name in present.items()}


def _written(raw: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Rows of one table in the schema's columns and with where they come from."""
    if "window_size" not in raw:
        raw = raw.assign(window_size=0)  # older tables of attention have none
    columns = {name: raw.eval(expression, engine="python") for name, expression in rule.columns.items()}
    return pd.DataFrame(columns, index=raw.index).assign(
        latency_s=np.asarray(raw.eval(rule.latency, engine="python"), np.float64) * 1e-3,
        framework=raw["framework"].str.lower(),
        version=raw["version"].astype(str),
        kernel_source=raw["kernel_source"],
        **_watts(raw),
    )
