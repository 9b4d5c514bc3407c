"""What engines do in one kernel and what in two: quantization, shared experts, and the norm after a sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
from quantized import DENSE, EXPERTS, HIDDEN, INNER, LAYERS, SECTIONS, SPARSE

import neusight_jax as nj
from neusight_jax.graph.configs.parallel import CUSTOM_BYTES
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.kernels.grouped_gemm import flop as expert_flop
from neusight_jax.serving.steps import axes, load_model, points

SHARED = {**SPARSE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1}


def launches(config: dict[str, Any], mode: str = "decode", gpu: str = "H100", **changes: Any) -> Counter[str]:
    """Forward launches by node and operator on a GPU."""
    work = nj.graph_from_config(config, 4, 64, mode, **{"dtype": "bf16", **changes}).on(nj.load_gpu(gpu).paths)
    found = Counter[str]()
    for node in work.nodes:
        for kernel in node.forward:
            found[f"{node.name.split('.', 1)[-1]} {kernel.op}"] += round(kernel.count * node.repeat)
    return found


def quantized(found: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in found.items() if "quantize" in name and count}


def test_eight_bit_activations_are_quantized_on_the_way() -> None:
    """But for those out of attention."""
    assert quantized(launches(DENSE, dtype="fp8")) == {"attention.output quantize": LAYERS}
    assert quantized(launches(DENSE)) == {}


def test_scales_for_blocks_take_a_kernel_each() -> None:
    blocks = {**DENSE, "quantization_config": SECTIONS["fp8 blocks"]}
    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    assert quantized(launches(blocks)) == {f"{name} quantize_rows": LAYERS for name in names}
    assert quantized(launches(blocks, gpu="A100 80GB")) == {}, "widened weights meet wide activations"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_shared_expert_is_one_more_of_them(mode: str) -> None:
    tokens = 4 if mode == "decode" else 4 * 64
    work, apart = (nj.graph_from_config(SHARED, 4, 64, each, "bf16") for each in (mode, "inference"))
    assert not any("shared" in node.name and "gate_up" in node.name for node in work.nodes)
    [experts] = [kernel for node in work.nodes if node.name.endswith("mlp.experts") for kernel in node.forward]
    wide = SHARED["shared_expert_intermediate_size"] / SHARED["moe_intermediate_size"]
    assert experts.dims["rows"] == pytest.approx(tokens * (2 + wide))
    assert wide < experts.dims["active"] <= EXPERTS + wide
    assert work.parameters == apart.parameters
    flop = 6.0 * HIDDEN * tokens * (2 * SHARED["moe_intermediate_size"] + SHARED["shared_expert_intermediate_size"])
    assert float(expert_flop({name: jnp.array([size]) for name, size in experts.dims.items()})[0]) == pytest.approx(
        flop
    )


def residual_norms(ranks: int, tokens: int) -> float:
    """Norms with the residual sum in a step of one prompt."""
    grid = axes(8192, 8192, 1)
    written = points(load_model(DENSE, "bf16"), Parallelism(tensor=ranks), grid)
    step = written[len(grid.batches) + grid.tokens.index(tokens)]
    return sum(count for kernel, count in step if kernel.op == "layernorm" and kernel.dims["reads"] > 1.0)


def test_a_sum_takes_the_norm_after_it_along() -> None:
    assert residual_norms(1, 64) == 2 * LAYERS + 1
    assert residual_norms(2, 64) == 0
    assert 8192 * HIDDEN * 2 == CUSTOM_BYTES
    assert residual_norms(2, 8192) == 0
    wide = {**DENSE, "hidden_size": 2 * HIDDEN, "intermediate_size": INNER, "head_dim": 64}
    grid = axes(8192, 8192, 1)
    step = points(load_model(wide, "bf16"), Parallelism(tensor=2), grid)[len(grid.batches) + grid.tokens.index(8192)]
    assert sum(count for kernel, count in step if kernel.op == "layernorm") == 2 * LAYERS + 1
