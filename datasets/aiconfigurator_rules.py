"""Rules of what is taken of `aiconfigurator-core`: rows by rule, each with the reasons others are left out."""

from __future__ import annotations

from dataclasses import dataclass


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
