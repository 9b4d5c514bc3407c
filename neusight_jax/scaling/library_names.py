"""Kernel names with a grammar of their own: those that libraries generate, with dtypes, tensor-core shapes and tiles.

Each reader takes the name itself (`demangle.NameParts.base`) and returns what it says, or None for another library's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from neusight_jax.scaling.demangle import words

DTYPE_WORDS: tuple[tuple[str, str], ...] = (
    ("fp8", "float e4m3|float e5m2|(?:nv |hip )?fp8|f8|float8|e4m3|e5m2|e4m3fn|e4m3fnuz|e5m2fnuz"),
    ("fp4", "float e2m1|(?:nv |mx )?fp4|f4|float4|e2m1|e2m1fn|nvfp4|mxfp4"),
    ("bf16", "b float16|bfloat16|bf16|bhalf"),
    ("fp16", "half2?|fp16|f16|float16"),
    ("tf32", "tf32|tfloat32|xf32"),
    ("int8", "int8|i8|s8|signed char"),
    ("fp64", "double(?! buffer)|f64|fp64|float64"),
    ("fp32", "float|f32|fp32|float32"),
)
"""Dtype -> its words in names (`demangle.words`): CUDA's, PyTorch's, CUTLASS's, ROCm's."""
_DTYPE = re.compile(" (?:" + "|".join(f"(?P<{dtype}>{text})" for dtype, text in DTYPE_WORDS) + ")(?= )")
_SPLIT_TYPES = re.compile(r"tf32|bf16|f16|f32|f64|e4m3|e5m2|e2m1|i8|i32|u8|i4|b1")
_TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?!\d)")


@dataclass(frozen=True)
class LibraryName:
    """What a library's name says: kind, dtype of the arithmetic (None: not said), output tile of a product."""

    kind: str
    dtype: str | None = None
    tile: tuple[int, int] | None = None


def dtype_in(text: str) -> str | None:
    """The first dtype whose word is in a text; None without one."""
    found = _DTYPE.search(words(text))
    return found.lastgroup if found else None


def _tile(text: str) -> tuple[int, int] | None:
    found = _TILE.search(text)
    return (int(found[1]), int(found[2])) if found else None


_XMMA = re.compile(rf"xmma_([a-z0-9_]*?)_?((?:{_SPLIT_TYPES.pattern})+)_((?:{_SPLIT_TYPES.pattern})+)_")


def xmma(base: str) -> LibraryName | None:
    """cuBLAS and cuDNN since CUDA 11: `sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_...`.

    Types of the operands, of multiplication and accumulation, of the output; the middle ones are the arithmetic.
    """
    found = _XMMA.search(base)
    if found is None:
        return None
    first = _SPLIT_TYPES.match(found[3])
    dtype = dtype_in(first[0]) if first else None
    conv = re.search(r"fprop|dgrad|wgrad|conv", found[1])
    return LibraryName("conv" if conv else "gemm", dtype, _tile(base[base.find("tilesize") :]))


_NVJET = re.compile(r"(?:^|_)nvjet_(?:sm\d+[a-z]?_)?([a-z])[a-z]*_")
NVJET_DTYPES: dict[str, str] = {
    "t": "bf16",
    "h": "fp16",
    "s": "fp32",
    "d": "fp64",
    "q": "fp8",
    "r": "fp8",
    "o": "fp4",
}
"""First letter of nvjet's types -> dtype of the operands: `tst` bf16 in and out, `qqtst` fp8 in and bf16 out."""


def nvjet(base: str) -> LibraryName | None:
    """cuBLAS since Hopper: `nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT`, `nvjet_sm100_qqtst_...`."""
    found = _NVJET.search(base)
    if found is None:
        return None
    tile = re.search(r"(\d+)x(\d+)", base[found.end() :])
    return LibraryName("gemm", NVJET_DTYPES.get(found[1]), (int(tile[1]), int(tile[2])) if tile else None)


_CODE = re.compile(
    r"(?:^|_)(?P<letter>[shdiz]|g?c)?(?P<mma>\d+x\d+x\d+|\d{3,6})?(?P<inner>tf32|bf16|f16)?"
    r"(?P<op>gemm|cudnn|fprop|dgrad|wgrad)(?=_|$)"
)
_FAMILY = re.compile(
    r"(?:^|_)(?P<name>maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell|cutlass\w*?)_(?P<sm>sm\d+|\d+)?"
)


def blas(base: str) -> LibraryName | None:
    """cuBLAS and cuDNN by architecture, and CUTLASS: `volta_fp16_s884gemm_fp16_128x128_...`, `ampere_sgemm_32x32_nn`,
    `cutlass_80_tensorop_bf16_s16816gemm_bf16_...`, `cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_...`.

    The letter is the accumulator as in BLAS (s, d, h, c, z, i), digits behind it are the shape of the tensor-core
    instruction; without them the kernel runs on vector lanes, whatever type it stores (`sgemm_fp16`).
    """
    family = _FAMILY.search(base)
    codes = sorted(_CODE.finditer(base), key=lambda code: code["letter"] is None)
    if family is None or not codes:
        return None
    found = codes[0]  # `cudnn_infer_volta_scudnn_...`: the one with a letter
    before, after = base[: found.start()], base[found.end() :]
    kind = "gemm" if found["op"] == "gemm" and "implicit_" not in before else "conv"
    dtype = _blas_dtype(found, before, after, turing=family["name"] == "turing" or family["sm"] == "75")
    return LibraryName(kind, dtype, _tile(after))


def _blas_dtype(code: re.Match[str], before: str, after: str, *, turing: bool) -> str | None:
    letter = code["letter"] or ""
    if letter in ("d", "z"):
        return "fp64"
    if letter == "i":
        return "int8" if dtype_in(after) != "fp4" and "_s4" not in after else "int4"
    named = dtype_in(code["inner"] or "") or dtype_in(after) or dtype_in(before)
    on_tensor_cores = code["mma"] is not None or "tensorop" in before
    if not on_tensor_cores:
        return {"s": "fp32", "c": "fp32", "gc": "fp32", "h": "fp16"}.get(letter, named)
    if named == "fp32" or (named is None and code["mma"] == "1688" and letter != "h" and not turing):
        return "tf32"  # tensor cores take fp32 operands as tf32, and from Ampere on 16x8x8 is the shape for it
    return named or "fp16"


_TENSILE = re.compile(r"Cijk_[A-Z][a-z]+_[A-Z][a-z]+_(?:(F8|B8|N8|F4|I8|4xi8|[HBSDCZ])([A-Z0-9]*))((?:_MX)?)")
_TENSILE_DTYPES: dict[str, str] = {
    **dict.fromkeys(("F8", "B8", "N8"), "fp8"),
    **{"F4": "fp4", "I8": "int8", "4xi8": "int8"},
    **{"H": "fp16", "B": "bf16", "S": "fp32", "D": "fp64", "C": "fp32", "Z": "fp64"},
}


def tensile(base: str) -> LibraryName | None:
    """rocBLAS and hipBLASLt: `Cijk_Ailk_Bljk_SB_MT128x128x16_...`, `..._HHS_BH_...`, `..._BBS_BH_...`, `..._F8BS_...`.

    The letters behind the two operands' indices are types, that of the operands first; `_MX` is xf32, AMD's tf32.
    Names without indices (`Cijk_SB_GA`, `..._PostGSU8`) scale the output or add up partial products.
    """
    if "Cijk_" not in base:
        return None
    found = _TENSILE.search(base)
    if found is None or "PostGSU" in base:
        return LibraryName("reduce", None)
    dtype = "tf32" if found[3] else _TENSILE_DTYPES[found[1]]
    tile = re.search(r"_MT(\d+)x(\d+)", base)
    return LibraryName("gemm", dtype, (int(tile[1]), int(tile[2])) if tile else None)


_GENERATED = re.compile(r"^(?:bmm|gemm)_(\w+?)_((?:Mx|[A-Z])\w*?)_Fp32_\w*?t(\d+)x(\d+)x")
_ROWWISE = re.compile(r"^(f8|bf16|f16|i8|f4)(?:f8|bf16|f16|i8|f4|i4)(?:bf16|f16|f32)?(?:_\w+)?$")


def generated(base: str) -> LibraryName | None:
    """TensorRT-LLM's generated products (`bmm_Bfloat16_E4m3E4m3_Fp32_t128x8x128u2_...`: output, operands, sums) and
    FBGEMM's (`f8f8bf16_rowwise`: operands, output)."""
    found = _GENERATED.search(base)
    if found is not None:
        return LibraryName("gemm", dtype_in(found[2]), (int(found[3]), int(found[4])))
    row = _ROWWISE.match(base)
    return LibraryName("gemm", dtype_in(row[1])) if row else None


LIBRARIES: tuple[Callable[[str], LibraryName | None], ...] = (xmma, nvjet, tensile, blas, generated)
