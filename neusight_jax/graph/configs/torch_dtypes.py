"""Dtypes by PyTorch's name, as configs spell them."""

from __future__ import annotations

TORCH_DTYPES: dict[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
}
"""Their names here."""
