"""Parity with the published NeuSight: its accounting exactly, and every deliberate difference named."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

import pandas as pd
import pytest

from neusight_jax.graph.configs.build import trace
from neusight_jax.graph.configs.reference import DIFFERENCES, Op, charged, reference_kernels
from neusight_jax.graph.graph import Node
from neusight_jax.kernels.table import Kernel

MEASUREMENTS = Path(
    os.environ.get("NEUSIGHT_MEASUREMENTS", Path(__file__).resolve().parents[2] / "shared" / "measurements")
)
OPGRAPHS = MEASUREMENTS / "fp32" / "opgraphs" / "opgraphs.parquet"
CONFIGS = MEASUREMENTS / "fp32" / "models" / "configs"
MODES = {"inf": "inference", "train": "training"}

TINY = {
    "gpt2": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "n_positions": 4, "vocab_size": 11},
    "opt": {
        "model_type": "opt",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "ffn_dim": 16,
        "max_position_embeddings": 4,
        "vocab_size": 11,
    },
    "bert": {
        "model_type": "bert",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 16,
        "max_position_embeddings": 4,
        "vocab_size": 11,
    },
    "switch": {
        "model_type": "switch_transformers",
        "d_model": 8,
        "d_ff": 16,
        "d_kv": 4,
        "num_heads": 2,
        "num_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 2,
        "expert_capacity": 3,
        "vocab_size": 11,
    },
}
MODELS = ["gpt2-large", "gpt3-xl", "opt-1.3b", "opt-350m", "bert-large", "switch-xl-4"]


def launched(node: Node, phase: str) -> Counter[Op]:
    """Kernels of one execution of a node in the reference's notation; traffic as a number of elements."""
    kernels = node.forward if phase == "forward" else (*node.backward, *node.weight_gradient)
    return Counter(_notation(kernel) for kernel in kernels for _ in range(int(kernel.count)))


def comparable(ops: Iterable[Op]) -> Counter[Op]:
    """Reference ops in the form of `launched`: vector and memory ops by their number of elements."""
    out: Counter[Op] = Counter()
    for kind, args in ops:
        if kind == "MEM":
            out[(kind, (sum(prod(shape) for shape in args),))] += 1
        elif kind.startswith("VEC"):
            out[(kind, (prod(args),))] += 1
        else:
            out[(kind, args)] += 1
    return out


def _notation(kernel: Kernel) -> Op:
    dims = {name: int(value) for name, value in kernel.dims.items() if name not in ("reads", "writes")}
    if kernel.family == "linear":
        return ("Linear", (dims["m"], dims["k"], dims["n"]))
    if kernel.family == "bmm":
        return ("BMM", (dims["batch"], dims["m"], dims["k"], dims["n"]))
    elements = dims["rows"] * dims["cols"]
    if kernel.family == "memory":
        return ("MEM", (round(elements * (kernel.dims["reads"] + kernel.dims["writes"])),))
    names = {"softmax_backward": "softmax", "layernorm": "ln", "add_permuted": "add"}
    return (f"VEC{names.get(kernel.op, kernel.op)}", (elements,))


def vectors_and_products(ops: Counter) -> Counter:
    return Counter({op: count for op, count in ops.items() if op[0] != "MEM"})


def test_gpt2_inference_by_hand() -> None:
    # b=2, S=4: T=8 tokens, H=8, A=2 heads of 4, V=11, 3 layers.
    expected = {
        ("VECadd", (8, 8)): 1 + 2 * 3,
        ("VECln", (8, 8)): 2 * 3 + 1,
        ("Linear", (8, 8, 24)): 3,
        ("BMM", (4, 4, 4, 4)): 2 * 3,
        ("VECdiv", (16, 4)): 3,
        ("VECsoftmax", (16, 4)): 3,
        ("Linear", (8, 8, 8)): 3,
        ("Linear", (8, 8, 32)): 3,
        ("VECmulu", (8, 32)): 3 * 3,
        ("VECpowu", (8, 32)): 3,
        ("VECadd", (8, 32)): 3,
        ("VECtanh", (8, 32)): 3,
        ("VECaddu", (8, 32)): 3,
        ("VECmul", (8, 32)): 3,
        ("Linear", (8, 32, 8)): 3,
        ("Linear", (8, 8, 11)): 1,
    }
    assert vectors_and_products(reference_kernels(TINY["gpt2"], 2, 4)) == expected


def test_gpt2_training_by_hand() -> None:
    ops = reference_kernels(TINY["gpt2"], 1, 4, "training")
    assert ops[("Linear", (4, 11, 8))] == 1  # head: input gradient
    assert ops[("Linear", (11, 4, 8))] == 1  # head: weight gradient
    assert ops[("VECadd", (1, 88))] == 2  # head and embedding accumulate
    assert ops[("MEM", ((11, 8),))] == 2  # embedding: fill, scatter
    # Both attention products have 4×4×4 in every phase: forward and two backward each.
    assert ops[("BMM", (2, 4, 4, 4))] == 3 * 6
    assert ops[("VECadd", (1, 8))] == 2 * 7 + 2 * 3  # layer norms, and biases of width 8
    assert ops[("VECpowu", (4, 32))] == 2 * 3


def test_opt_inference_by_hand() -> None:
    # Same sizes, feed-forward 16, explicit copies; small kernels on (2, 4) ids.
    expected = {
        ("VECaddu", (1, 4)): 1,
        ("VECmul", (2, 4)): 1,
        ("VECaddu", (2, 4)): 1,
        ("VECadd", (8, 8)): 1 + 2 * 3,
        ("VECln", (8, 8)): 2 * 3 + 1,
        ("Linear", (8, 8, 8)): 4 * 3,
        ("VECmulu", (8, 8)): 3,
        ("BMM", (4, 4, 4, 4)): 2 * 3,
        ("VECadd", (16, 4)): 3,
        ("VECsoftmax", (16, 4)): 3,
        ("Linear", (8, 8, 16)): 3,
        ("VECrelu", (8, 16)): 3,
        ("Linear", (8, 16, 8)): 3,
        ("Linear", (8, 8, 11)): 1,
    }
    assert vectors_and_products(reference_kernels(TINY["opt"], 2, 4)) == expected


def test_bert_by_hand() -> None:
    layer = {
        ("Linear", (8, 8, 8)): 4 * 3,
        ("BMM", (4, 4, 4, 4)): 2 * 3,
        ("VECdivu", (16, 4)): 3,
        ("VECadd", (16, 4)): 3,
        ("VECsoftmax", (16, 4)): 3,
        ("VECadd", (8, 8)): 2 + 2 * 3,
        ("VECln", (8, 8)): 1 + 2 * 3,
        ("Linear", (8, 8, 16)): 3,
        ("VECgelu", (8, 16)): 3,
        ("Linear", (8, 16, 8)): 3,
    }
    head = {
        ("VECmulu", (2, 4)): 1,
        ("Linear", (2, 8, 8)): 1,
        ("VECrelu", (2, 8)): 1,
        ("Linear", (2, 8, 2)): 1,
    }
    assert vectors_and_products(reference_kernels(TINY["bert"], 2, 4)) == {**layer, **head}
    training = reference_kernels(TINY["bert"], 2, 4, "training")
    assert training[("Linear", (8, 8, 11))] == 1  # decoder
    assert training[("Linear", (11, 8, 8))] == 1
    assert training[("VECgelu", (8, 8))] == 2  # prediction head, forward and backward


def test_switch_inference_by_hand() -> None:
    ops = reference_kernels(TINY["switch"], 1, 4)
    # Self-attention in 4 blocks, cross-attention in 2; q, k, v and o of each are 8×8. Decoder attention comes after
    # the 4 encoder products, so product 4 is its first: counted as a Linear.
    assert ops[("Linear", (4, 8, 8))] == 4 * 6
    assert ops[("BMM", (2, 4, 4, 4))] == 2 * 6 - 1
    assert ops[("Linear", (8, 4, 4))] == 1
    # One dense and one sparse block a side; two experts of 3 rows each.
    assert ops[("Linear", (4, 8, 16))] == ops[("Linear", (4, 16, 8))] == 2
    assert ops[("Linear", (3, 8, 16))] == ops[("Linear", (3, 16, 8))] == 2 * 2
    assert ops[("Linear", (4, 8, 2))] == 2
    assert ops[("Linear", (4, 8, 11))] == 1
    # RMS norms: 2 per encoder block, 3 per decoder block, one per stack.
    assert ops[("VECpowu", (4, 8))] == 2 * 2 + 2 * 3 + 2


def discrepancies(config: object, batch: int, sequence: int, mode: str) -> tuple[list[str], set[str]]:
    """Nodes that differ without a named difference, and the names that were needed."""
    unexplained, used = [], set()
    _, nodes = trace(config, batch, sequence, mode)  # type: ignore[arg-type]
    for node in nodes:
        for phase in ("forward", "backward") if mode == "training" else ("forward",):
            ours, theirs = launched(node, phase), comparable(charged(node, phase))
            products = [
                Counter({op: n for op, n in ops.items() if op[0] in ("Linear", "BMM")}) for ops in (ours, theirs)
            ]
            if products[0] != products[1]:
                unexplained.append(f"{node.name} {phase}: products {products}")
            if ours == theirs:
                continue
            names = {name for name, item in DIFFERENCES.items() if node.op in item.ops and item.phase == phase}
            used |= names
            if not names:
                unexplained.append(f"{node.name} ({node.op}) {phase}: ours {dict(ours)}, reference {dict(theirs)}")
    return unexplained, used


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("config", [*TINY, *MODELS])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_difference_is_named(config: str, mode: str, batch: int) -> None:
    sequence = 4 if config in TINY else 512
    unexplained, _ = discrepancies(TINY.get(config, config), batch, sequence, mode)
    assert not unexplained


def test_every_named_difference_occurs() -> None:
    used = set()
    for config in TINY.values():
        used |= discrepancies(config, 2, 4, "training")[1]
    assert used == set(DIFFERENCES)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("model", ["bert_large", "gpt2_large", "gpt3_27", "gpt3_xl", "opt_13", "switchxl4"])
def test_published_graphs_match_exactly(model: str, mode: str) -> None:
    if not OPGRAPHS.exists():
        pytest.skip(f"measurements not found at {MEASUREMENTS}; set NEUSIGHT_MEASUREMENTS")
    frame = pd.read_parquet(OPGRAPHS, filters=[("model", "==", model), ("mode", "==", mode)])
    assert frame["batch_size"].nunique() == 2
    for (sequence, batch), graph in frame.groupby(["sequence_length", "batch_size"]):
        published: Counter = Counter()
        for forward, backward, gradient, repeat in zip(
            graph["fw_ops"], graph["bw_ops"], graph["acc_ops"], graph["layer_repeat"], strict=True
        ):
            for kind, args in (*json.loads(forward), *json.loads(backward), *json.loads(gradient)):
                published[(kind, _tuples(args))] += int(repeat)
        ours = reference_kernels(CONFIGS / f"{model}.json", int(batch), int(sequence), MODES[mode])
        assert _settled(published, int(batch)) == _settled(ours, int(batch)), (sequence, batch)


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _settled(ops: Counter, batch: int) -> Counter:
    """Without arithmetic on sizes; rows gathered for an expert, which depend on random weights, made anonymous."""
    out: Counter = Counter()
    for (kind, args), count in ops.items():
        if kind == "MEM":
            if all(shape in ((), (1,)) for shape in args):
                continue
            args = tuple(
                ("rows", 1024) if len(shape) == 2 and shape[1] == 1024 and shape[0] <= 64 * batch else shape
                for shape in args
            )
        out[(kind, args)] += count
    return out


def test_documentation_lists_every_difference() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "graphs.md").read_text(encoding="utf-8")
    for name, item in DIFFERENCES.items():
        assert f"| {name} | {', '.join(item.ops)} | {item.phase} | {item.reason} |" in text
