"""GGUF: bytes of published files, headers, and products as llama.cpp runs them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from refusals import message

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import footprint
from neusight_jax.hardware.gpu import GPU
from neusight_jax.units import GIB

GB = 1e9
LLAMA_3 = "llama.cpp, tools/quantize/quantize.cpp, QUANT_OPTIONS: GiB of Llama 3 8B"
LLAMA_31 = "llama.cpp, tools/quantize/README.md: GiB of Llama 3.1 8B"
LLAMA_2 = "model card of TheBloke/Llama-2-{7B,13B,70B}-GGUF on Hugging Face: GB of llama-2-*.Q*.gguf"
QWEN = "model card of bartowski/Qwen2.5-14B-Instruct-GGUF on Hugging Face: GB of Qwen2.5-14B-Instruct-Q*.gguf"
PUBLISHED: list[tuple[str, str, float, str]] = [
    ("llama-3-8b", "Q4_0", 4.34 * GIB, LLAMA_3),
    ("llama-3-8b", "Q3_K_M", 3.74 * GIB, LLAMA_3),
    ("llama-3-8b", "Q3_K_L", 4.03 * GIB, LLAMA_3),
    ("llama-3-8b", "Q4_K_S", 4.37 * GIB, LLAMA_3),
    ("llama-3-8b", "Q4_K_M", 4.58 * GIB, LLAMA_3),
    ("llama-3-8b", "Q5_K_M", 5.33 * GIB, LLAMA_3),
    ("llama-3-8b", "Q6_K", 6.14 * GIB, LLAMA_3),
    ("llama-3-8b", "Q8_0", 7.96 * GIB, LLAMA_3),
    ("llama-3.1-8b", "IQ4_XS", 4.17 * GIB, LLAMA_31),
    ("llama-3.1-8b", "IQ4_NL", 4.38 * GIB, LLAMA_31),
    ("llama-2-7b", "Q4_K_M", 4.08 * GB, LLAMA_2),
    ("llama-2-7b", "Q5_K_M", 4.78 * GB, LLAMA_2),
    ("llama-2-13b", "Q4_0", 7.37 * GB, LLAMA_2),
    ("llama-2-70b", "Q4_K_M", 41.42 * GB, LLAMA_2),
    ("llama-2-70b", "Q5_K_M", 48.75 * GB, LLAMA_2),
    ("qwen2.5-14b", "Q4_K_M", 8.99 * GB, QWEN),
    ("qwen2.5-14b", "Q5_K_M", 10.51 * GB, QWEN),
]
"""Model, mixture, bytes of its file as listed, and where."""


@pytest.mark.parametrize(("model", "mixture", "stored", "source"), PUBLISHED)
def test_bytes_of_published_files(model: str, mixture: str, stored: float, source: str) -> None:
    """Weights are within 1 % of the whole file, tokenizer included."""
    work = nj.graph_from_config(model, 1, 128, "decode", weight_dtype=mixture)
    assert footprint(work).weights == pytest.approx(stored, rel=0.01), source


def test_tensors_of_a_mixture() -> None:
    """Llama 3 8B in Q4_K_M has 225 matrices: 33 in Q6_K, the rest Q4_K (the list llama.cpp prints when it loads it)."""
    from neusight_jax.graph.quantization.gguf import mixture_types

    sizes = {"layers": 32, "hidden": 4096, "inner": 14336, "attended": 4096, "heads": 32, "kv_heads": 8, "experts": 1}
    types = list(mixture_types("Q4_K_M", sizes, tied=False).values())
    assert (len(types) - 1, types.count("Q6_K")) == (225, 33)


# --- files ---

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 512,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 4096,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.tokens": [f"<{number}>" for number in range(1000)],
}
TYPES = {"F32": 0, "Q4_0": 2, "Q4_K": 12, "Q6_K": 14}
MATRICES = {"attn_q": 512, "attn_k": 512, "attn_v": 512, "attn_output": 512, "ffn_gate": 512, "ffn_up": 512}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(value: Any) -> bytes:
    """A value with its type: u32, f32, text, or a list of texts."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf_file(path: Path, metadata: dict[str, Any], tensors: dict[str, str], padding: int = 0) -> Path:
    """A GGUF file of a header alone, and so many bytes in place of the weights."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    content += b"".join(text(key) + entry(value) for key, value in metadata.items())
    for name, kind in tensors.items():
        content += text(name) + struct.pack("<IQQIQ", 2, 512, 512, TYPES[kind], 0)
    path.write_bytes(content + bytes(padding))
    return path


def tensors(value: str = "Q6_K", kind: str = "Q4_K") -> dict[str, str]:
    layers = {f"blk.{layer}.{name}.weight": kind for layer in range(2) for name in (*MATRICES, "ffn_down")}
    norms = {f"blk.{layer}.{name}_norm.weight": "F32" for layer in range(2) for name in ("attn", "ffn")}
    values = {"blk.1.attn_v.weight": value}
    return {"token_embd.weight": kind, **layers, **norms, **values, "output.weight": "Q6_K"}


def test_a_file_is_read_by_its_header(tmp_path: Path) -> None:
    """Sizes from the metadata, types from the list of tensors: here the values of the second layer are Q6_K."""
    path = gguf_file(tmp_path / "tiny.gguf", METADATA, tensors())
    work = nj.graph_from_config(path, 1, 128, "decode")
    four, six = 4.5 / 8.0, 6.5625 / 8.0
    layer = 512 * (512 * 2 + 128 * 2) + 3 * 512 * 1536
    by_hand = four * (2 * layer - 128 * 512 + 1000 * 512) + six * (128 * 512 + 1000 * 512) + 5 * 512 * 2
    assert footprint(work).weights == pytest.approx(by_hand, rel=1e-6)
    assert (work.name, work.dtype) == ("tiny", "fp16")
    assert not any("not read" in note for note in work.notes)
    untied = {name: kind for name, kind in tensors().items() if name != "output.weight"}
    tied = nj.graph_from_config(gguf_file(path, METADATA, untied), 1, 128, "decode")
    assert footprint(tied).weights == pytest.approx(by_hand - six * 1000 * 512, rel=1e-6)


def test_a_file_in_parts(tmp_path: Path) -> None:
    names = list(tensors().items())
    gguf_file(tmp_path / "m-00001-of-00002.gguf", METADATA, dict(names[:9]))
    gguf_file(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1}, dict(names[9:]))
    whole = gguf_file(tmp_path / "whole.gguf", METADATA, dict(names))
    parts, one = (nj.graph_from_config(path, 1, 128, "decode") for path in (tmp_path / "m-00001-of-00002.gguf", whole))
    assert footprint(parts).weights == footprint(one).weights


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    assert "no such file" in message(nj.graph_from_config, str(path))
    path.write_bytes(b"GGML" + bytes(40))
    assert "no GGUF file of version 2 or 3" in message(nj.graph_from_config, path)
    content = gguf_file(path, METADATA, tensors()).read_bytes()
    path.write_bytes(content[:200])
    assert "ends early" in message(nj.graph_from_config, path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60))
    assert "ends early" in message(nj.graph_from_config, path)
    gguf_file(path, {**METADATA, "general.architecture": "rwkv7"}, tensors())
    assert "architecture 'rwkv7' is not read from GGUF; expected one of llama" in message(nj.graph_from_config, path)
    unknown = message(lambda: nj.graph_from_config("llama-3-8b", weight_dtype="Q4_K_X"))
    assert unknown.startswith("unknown weight dtype 'Q4_K_X'; nearest: Q4_K_")


# --- products, as llama.cpp runs them ---


def rows_of(work: Graph, node: str) -> list[tuple[str, float, float, float]]:
    """Dtype, columns, rows and launches of a node's products."""
    [found] = [item for item in work.nodes if item.name == node]
    products = [kernel for kernel in found.forward if kernel.family == "linear"]
    return [(kernel.dtype, kernel.dims["n"], kernel.dims["m"], kernel.count) for kernel in products]


def test_kernels_of_llama_cpp() -> None:
    """One token: a product for each matrix in the activations' dtype, gate and up in one; a prompt: eight-bit integers,
    512 tokens at a time. Each follows a kernel that packs its activations."""
    work = nj.graph_from_config("llama-3.1-8b", 1, 1024, "decode", weight_dtype="Q8_0")
    assert rows_of(work, "layer.attention.qkv") == [("fp16", n, 1.0, 1.0) for n in (4096.0, 1024.0, 1024.0)]
    assert rows_of(work, "layer.mlp.gate_up") == [("fp16", 2 * 14336.0, 1.0, 1.0)]
    assert not {"layer.mlp.activation", "sampling"} & {node.name for node in work.nodes}
    prompt = nj.graph_from_config("llama-3.1-8b", 1, 1024, "prefill", weight_dtype="Q8_0")
    assert rows_of(prompt, "layer.mlp.gate_up") == [("int8", 14336.0, 512.0, 2.0)] * 2
    for node in (*work.nodes, *prompt.nodes):
        packing = [kernel for kernel in node.forward if kernel.op == "quantize"]
        assert len(packing) == len([kernel for kernel in node.forward if kernel.family == "linear"])
    on_volta = prompt.on(nj.load_gpu("V100").paths)
    assert rows_of(on_volta, "layer.mlp.down") == [("fp16", 4096.0, 512.0, 2.0)]


def test_engine_and_format_are_said() -> None:
    packed = nj.graph_from_config("llama-3.1-8b", 1, 128, "decode", weight_dtype="q4_k_m")
    assert packed.options["engine"] == "llama.cpp"
    assert "engine llama.cpp assumed: weights of GGUF" in packed.notes
    plain = nj.graph_from_config("llama-3.1-8b", 1, 128, "decode", engine="llama.cpp")
    assert rows_of(plain, "layer.attention.output") == [("fp16", 4096.0, 1.0, 1.0)]
    for load in ({"engine": "ollama"}, {"engine": "llama.cpp", "execution": "eager"}):
        assert "llama.cpp" in message(lambda load=load: nj.graph_from_config("llama-3.1-8b", 1, 128, "decode", **load))


KINDS = ("Q3_K_S", "Q4_K_S")


@pytest.fixture(scope="module")
def predictor() -> Any:
    return nj.load_predictor("tensorcore")


def test_unpacking_takes_time_on_a_slow_clock(predictor: Any) -> None:
    """Q3_K has fewer bytes than Q4_K and more instructions: at half the clock it is no longer the faster one."""
    gpu = nj.load_gpu("RTX 3090")
    works = {kind: nj.graph_from_config("llama-3.1-8b", 1, 512, "decode", weight_dtype=kind) for kind in KINDS}

    def seconds(machine: GPU) -> dict[str, float]:
        return {kind: float(nj.latency(predictor, machine, work.kernels)) for kind, work in works.items()}

    full, slow = (
        seconds(gpu),
        seconds(gpu.replace(clock_hz=gpu.clock_hz / 3.0, fp32_flop_per_s=gpu.fp32_flop_per_s / 3.0)),
    )
    assert full["Q3_K_S"] < full["Q4_K_S"]
    assert slow["Q3_K_S"] > slow["Q4_K_S"]
    assert all(slow[kind] > full[kind] for kind in KINDS)


def test_a_forecast_says_what_fits(predictor: Any) -> None:
    """First: whether it fits, and the longest context that would; then how fast, in a wide interval that is said."""
    gpu = nj.load_gpu("RTX 3060")
    work = nj.graph_from_config("llama-3.1-8b", 1, 4096, "decode", weight_dtype="Q4_K_M")
    forecast = nj.predict(predictor, gpu, work)
    longest = forecast.longest_context
    assert longest is not None
    at_most = nj.graph_from_config("llama-3.1-8b", 1, longest, "decode", weight_dtype="Q4_K_M")
    assert gpu.mem_bytes - 131_072 <= footprint(at_most).total <= gpu.mem_bytes
    text = str(forecast)
    assert text.index("memory ") < text.index("total ")
    assert f"fits in 12.0 GiB; contexts of up to {longest:,} tokens fit" in text
    assert forecast.interval_s is not None
    assert forecast.interval_s[1] / forecast.interval_s[0] > 2.0
    assert any("packed weights" in note and "never measured" in note for note in forecast.notes)
    large = nj.predict(predictor, gpu, nj.graph_from_config("llama-3.1-70b", 1, 128, "decode", weight_dtype="Q4_K_M"))
    assert any("partial offload" in note for note in large.notes)
    assert "DOES NOT FIT in 12.0 GiB; weights of 11" in str(large)
