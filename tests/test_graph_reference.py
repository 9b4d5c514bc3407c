"""Parity with the published NeuSight: its products exactly, and every deliberate difference named in docs/graphs.md."""

from __future__ import annotations

import json
import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.kernels.table import Kernel

HERE = Path(__file__).resolve().parent
MEASUREMENTS = Path(os.environ.get("NEUSIGHT_MEASUREMENTS", HERE.parents[1] / "shared" / "measurements"))
OPGRAPHS = MEASUREMENTS / "fp32" / "opgraphs" / "opgraphs.parquet"
CONFIGS = MEASUREMENTS / "fp32" / "models" / "configs"
MODES = {"inf": "inference", "train": "training"}
PHASES = ("forward", "backward")

CASES: list[dict[str, Any]] = json.loads((HERE / "data" / "published_charges.json").read_text(encoding="utf-8"))
"""Small models with what the published NeuSight charges: data/README.md says how they were made."""


def differences() -> dict[tuple[str, str], str]:
    """Operator and phase ("backward" with weight gradients) -> name of the deliberate difference, from the page."""
    page = (HERE.parent / "docs" / "graphs.md").read_text(encoding="utf-8")
    table = page.partition("| difference | operators | phase | reason |\n| --- | --- | --- | --- |\n")[2].split("\n\n")[
        0
    ]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {(op, phase): name for name, ops, phase, _ in rows for op in ops.split(", ")}


DIFFERENCES = differences()


def launched(node: Node, phase: str) -> Counter[str]:
    """Kernels of one execution of a node in the notation of the cases: traffic and vectors by elements alone."""
    kernels = node.forward if phase == "forward" else (*node.backward, *node.weight_gradient)
    return Counter(_notation(kernel) for kernel in kernels for _ in range(int(kernel.count)))


def _notation(kernel: Kernel) -> str:
    dims = {name: int(value) for name, value in kernel.dims.items() if name not in ("reads", "writes")}
    if kernel.family == "linear":
        return f"Linear {dims['m']}x{dims['k']}x{dims['n']}"
    if kernel.family == "bmm":
        return f"BMM {dims['batch']}x{dims['m']}x{dims['k']}x{dims['n']}"
    elements = dims["rows"] * dims["cols"]
    if kernel.family == "memory":
        return f"MEM {round(elements * (kernel.dims['reads'] + kernel.dims['writes']))}"
    names = {"softmax_backward": "softmax", "layernorm": "ln", "add_permuted": "add"}
    return f"VEC{names.get(kernel.op, kernel.op)} {elements}"


def products(ops: Counter[str]) -> Counter[str]:
    """The matrix products among kernels."""
    return Counter({op: count for op, count in ops.items() if op.startswith(("Linear", "BMM"))})


def graph_of(case: dict[str, Any]) -> Graph:
    """The eager graph of a case."""
    sizes = (case[name] for name in ("batch_size", "sequence_length", "mode"))
    return graph_from_config(case["config"], *sizes, dtype="fp32", fused=False)


def discrepancies(case: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Nodes that differ without a named difference, and the names that were needed."""
    nodes = {node.name: node for node in graph_of(case).nodes}
    charged = {name: (op, tuple(map(Counter, phases))) for name, op, *phases in case["nodes"]}
    unexplained, used = [], set()
    for name in nodes.keys() | charged.keys():
        op, charges = charged.get(name, (nodes[name].op if name in nodes else "", ()))
        for phase, theirs in zip(PHASES, (*charges, Counter(), Counter()), strict=False):
            ours = launched(nodes[name], phase) if name in nodes else Counter[str]()
            if products(ours) != products(theirs):
                unexplained.append(f"{name} {phase}: products {ours}, reference {theirs}")
            if ours == theirs:
                continue
            used.add(DIFFERENCES.get((op, phase), ""))
            if (op, phase) not in DIFFERENCES:
                unexplained.append(f"{name} ({op}) {phase}: ours {dict(ours)}, reference {dict(theirs)}")
    return unexplained, used


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']} {case['mode']}")
def test_every_difference_is_named(case: dict[str, Any]) -> None:
    assert case["nodes"]
    assert discrepancies(case)[0] == []


def test_every_named_difference_occurs() -> None:
    used = set[str]().union(*(discrepancies(case)[1] for case in CASES))
    assert used == set(DIFFERENCES.values())


def test_another_difference_is_found() -> None:
    """Control: a product of another size, and traffic charged for what is no difference."""
    case = json.loads(json.dumps(CASES[0]))
    charges = {name: phases for name, _, phases in case["nodes"]}
    charges["head"]["Linear 4x8x12"] = charges["head"].pop("Linear 4x8x11")
    charges["layer.norm_1"]["MEM 1"] = 1
    found = " ".join(discrepancies(case)[0])
    assert "head forward: products" in found
    assert "layer.norm_1 (norm) forward" in found


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("model", ["bert_large", "gpt2_large", "gpt3_27", "gpt3_xl", "opt_13", "switchxl4"])
def test_products_are_those_of_the_published_graphs(model: str, mode: str) -> None:
    if not OPGRAPHS.exists():
        pytest.skip(f"measurements not found at {MEASUREMENTS}; set NEUSIGHT_MEASUREMENTS")
    frame = pd.read_parquet(OPGRAPHS, filters=[("model", "==", model), ("mode", "==", mode)])
    assert frame["batch_size"].nunique() == 2
    for (sequence, batch), rows in frame.groupby(["sequence_length", "batch_size"]):
        published: Counter[str] = Counter()
        for *phases, repeat in rows[["fw_ops", "bw_ops", "acc_ops", "layer_repeat"]].itertuples(index=False):
            for kind, sizes in (op for phase in phases for op in json.loads(phase)):
                if kind in ("Linear", "BMM"):
                    published[f"{kind} {'x'.join(map(str, sizes))}"] += int(repeat)
        graph = graph_from_config(
            CONFIGS / f"{model}.json", int(batch), int(sequence), MODES[mode], "fp32", fused=False
        )
        ours: Counter[str] = Counter()
        for node in graph.nodes:
            for phase in PHASES:
                for op, count in products(launched(node, phase)).items():
                    ours[op] += count * node.repeat
        if model == "switchxl4":  # some of its attention is charged as Linear: the same work
            published, ours = _by_work(published), _by_work(ours)
        assert published == ours, (sequence, batch)


def _by_work(ops: Counter[str]) -> Counter[str]:
    """Products by their multiply-adds alone."""
    work: Counter[str] = Counter()
    for op, count in ops.items():
        work[str(prod(map(int, op.split()[1].split("x"))))] += count
    return work
