"""The operators of the schema as torch functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from neusight_jax.profiling.case import Case
from neusight_jax.profiling.jax_operators import POWER, SCALAR

TORCH_DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_POINTWISE: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "addu": lambda x: x + SCALAR,
    "mulu": lambda x: x * SCALAR,
    "divu": lambda x: x / SCALAR,
    "powu": lambda x: x**POWER,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "copy": torch.clone,
}


def torch_operator(case: Case) -> Callable[..., Any]:
    """A function of the case's inputs, in the layouts of `case.operands`."""
    if case.op == "linear":
        # The inputs hold the weight as (in, out); torch keeps it as (out, in), which is a view here.
        return lambda x, weight, bias: F.linear(x, weight.t(), bias)
    if case.op == "bmm":
        product: Callable[..., Any] = torch.bmm
        return product
    if case.op == "conv":
        sizes = case.sizes

        def convolve(image: Any, window: Any) -> Any:
            return F.conv2d(image, window, stride=sizes["stride"], padding=sizes["padding"])

        return convolve
    if case.op in ("prefill", "decode"):
        return _attention(bool(case.sizes["causal"]), case.sizes["heads"] != case.sizes["kv_heads"])
    if case.op == "ln":
        return lambda x, scale, bias: F.layer_norm(x, (x.shape[-1],), scale, bias)
    return _POINTWISE[case.op]


def _attention(causal: bool, grouped: bool) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    return attend
