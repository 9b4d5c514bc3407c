"""Kernel names: `tests/data/kernel_names.txt` says what each has to say, and what no name may do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neusight_jax.arithmetic import DTYPES
from neusight_jax.scaling.names import KINDS, WORK, name_parts, read_name, words

FILE = Path(__file__).resolve().parent / "data" / "kernel_names.txt"


def _cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Library, name, and what it says, of every line."""
    library, cases = "", []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            library = line[2:]
        elif line:
            name, _, said = line.rpartition("|")
            cases.append((library, name, tuple(said.split())))
    return cases


CASES = _cases()
PLACES = [pytest.param(name, said, id=f"{at}-{name[:40]}") for at, (_, name, said) in enumerate(CASES)]


@pytest.mark.parametrize(("name", "said"), PLACES)
def test_what_a_name_says(name: str, said: tuple[str, ...]) -> None:
    found = read_name(name)
    assert found.kind == said[0]
    for word in said[1:]:
        if word == "-":
            assert found.dtype is None
        elif "x" in word:
            assert found.tile == tuple(int(size) for size in word.split("x"))
        else:
            assert found.dtype == word


def test_the_table_is_whole() -> None:
    assert len(CASES) >= 300
    assert len({name for _, name, _ in CASES}) == len(CASES)
    assert {said[0] for _, _, said in CASES} == set(KINDS) - {"idle", "host"}
    assert {word for _, _, said in CASES for word in said} >= set(DTYPES)
    assert WORK.keys() <= set(KINDS)


def test_a_name_in_a_wrapper_says_the_same() -> None:
    """Cut off, mangled into a namespace, or as the first template argument of CUTLASS's wrapper."""
    for name in ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "nvjet_qqtst_128x128_128x6_2x1_v_bz_coopA_TNN"):
        for wrapped in (f"void {name}(Params)", f"{name}.kd", f"_ZN3lib{len(name)}{name}EPf", f"{name[:40]}"):
            assert read_name(wrapped) == read_name(name)
    inner = "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x3_nn_align8"
    assert read_name(f"void cutlass::Kernel2<{inner}>({inner}::Params)") == read_name(inner)


def test_words_are_whole() -> None:
    assert words("LayerNormForward_v2") == " layer norm forward v2 "
    assert words("c10::BFloat16") == " c10 b float16 "
    assert read_name("deconvert").kind == "unknown"  # neither a convolution nor a conversion
    assert read_name("my_gemmology").kind == "gemm"  # a word that begins with it
    assert read_name("fbgemm_gpu::my_thing").kind == "unknown"
    assert read_name("reduction_of_convoy").kind == "reduce"


def test_parts_of_a_name() -> None:
    parts = name_parts("void at::native::(anonymous namespace)::foo<float, a::b<int>>(int*, c<d>) [clone .kd]")
    assert (parts.spaces, parts.base) == (("at", "native", "anonymous"), "foo")
    assert parts.arguments == "float, a::b<int>"
    mangled = name_parts("_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIN3c108BFloat16EEEEEviT0_")
    assert (mangled.spaces, mangled.base) == (("at", "native"), "vectorized_elementwise_kernel")
    assert "BFloat16" in mangled.arguments


def test_defaults() -> None:
    assert (read_name("xyz").dtype, read_name("xyz").tile) == (None, None)
    assert read_name("matmul_kernel").dtype is None
    assert read_name("void gemv2T_kernel_val<float>").work == "vector"
    assert (read_name("fused_moe_kernel").work, read_name("moe_align_block_size_kernel").work) == ("product", "memory")


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([name for _, name, _ in CASES]),
    cut=st.integers(0, 200),
    inserted=st.text(alphabet="<>(){}[]:_ZNIEL0129é\x00 ", max_size=6),
)
def test_any_text_is_a_name(name: str, cut: int, inserted: str) -> None:
    """No text is an error, and none takes long."""
    found = read_name(name[:cut] + inserted + name[cut:])
    assert found.kind in KINDS
    assert found.work in ("", "product", "vector", *set(WORK.values()))
    read_name(inserted * 500 + name[cut:])


@pytest.mark.parametrize("name", ["_Z" + "9" * 5000, "<" * 10000, "_ZN" + "1a" * 5000, "moe " * 500, "a_" * 5000, ""])
def test_monsters(name: str) -> None:
    assert read_name(name).kind in KINDS
