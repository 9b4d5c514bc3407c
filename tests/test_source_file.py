"""`neusight-jax predict path/to/file.py:function`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from graphs import product_flop

from neusight_jax.cli.app import run
from neusight_jax.cli.options import WorkloadOptions
from neusight_jax.cli.workloads import trace_options
from neusight_jax.errors import InputError
from neusight_jax.graph.traced.source_file import graph_from_source, is_source

SOURCE = """
from helper import WIDTH

def step():
    import jax, jax.numpy as jnp
    def loss(w, x):
        return jnp.mean((x @ w) ** 2)
    shapes = jax.ShapeDtypeStruct((WIDTH, 32), jnp.float32), jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    return jax.value_and_grad(loss), shapes

def named():
    import jax, jax.numpy as jnp
    return (lambda x, scale: x * scale), (jax.ShapeDtypeStruct((64, 64), jnp.float32),), {"scale": 2.0}

def three():
    return 3

def valued():
    raise RuntimeError("Tensor.item() cannot be called on meta tensors")

def fails():
    raise KeyError("weights")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


def test_what_is_a_source() -> None:
    assert is_source("a/b.py:make")
    assert not is_source("gpt2-large")
    assert not is_source("config.json")
    assert not is_source("C:/configs/config.json")
    assert not is_source("a/b.py")


def test_graphs(source: Path) -> None:
    graph = graph_from_source(f"{source}:step")
    assert (graph.name, graph.mode, graph.fused) == ("step", "training", True)
    assert len([node for node in graph.nodes if node.op == "dot_general"]) == 2
    assert graph_from_source(f"{source}:named").launches() == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("three", r"model.py:three returned a int, expected \(callable, arguments\)"),
        ("fails", r"model.py:fails failed \(KeyError: 'weights'\)"),
        ("valued", r"make the module outside `torch.device\('meta'\)`, then move it"),
        ("stp", r"unknown function in .*model.py 'stp'; nearest: step"),
    ],
)
def test_bad_sources(source: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        graph_from_source(f"{source}:{function}")
    with pytest.raises(InputError, match="no such file; expected a Python file"):
        graph_from_source(f"{source.parent}/other.py:step")


def test_command_line(source: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", f"{source}:step", "--gpu", "T4", "--checkpoint", str(checkpoint)]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["mode"], found["fused"]) == ("step", "training", True)
    assert run([*arguments, "--eager"]) == 0
    text = capsys.readouterr().out
    assert "step on Tesla T4: training, fp32" in text
    assert "sequence" not in text.splitlines()[0]


def test_command_line_refuses(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", f"{source}:step", "--gpu", "T4", "--batch-size", "4"]) == 2
    assert "leave --batch-size out" in capsys.readouterr().err
    for command in ("predict", "sensitivity", "compare"):
        assert run([command, f"{source}:step", "--gpu", "T4", "--kv-length", "4", "--tensor-parallel", "2"]) == 2
        assert "leave --kv-length, --tensor-parallel out" in capsys.readouterr().err
    assert run(["predict", f"{source}:three", "--gpu", "T4"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1


LOOPS = """
import jax

def loop():
    s = jax.ShapeDtypeStruct
    run = lambda x, n: jax.lax.fori_loop(0, n, lambda i, y: y @ x, x)
    return run, (s((256, 256), "float32"), s((), "int32"))

def until():
    run = lambda x: jax.lax.while_loop(lambda y: y.sum() < 9.0, lambda y: (y @ y) @ y, x)
    return run, (jax.ShapeDtypeStruct((64, 64), "float32"),)

def choice():
    run = lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1.0, x)
    return run, (jax.ShapeDtypeStruct((64, 64), "float32"),)
"""


@pytest.mark.parametrize(
    ("function", "option", "flop"),
    [
        ("loop", WorkloadOptions(trip_count=10), 10 * 2 * 256**3),
        ("loop", WorkloadOptions(trip_count=0), 0),
        ("until", WorkloadOptions(trip_count=3), 3 * 2 * 2 * 64**3),
        ("choice", WorkloadOptions(), 2 * 64**3),
        ("choice", WorkloadOptions(branch="1"), 2 * 64**3),
        ("choice", WorkloadOptions(branch="0"), 0),
    ],
)
def test_what_a_trace_asks_has_an_option(tmp_path: Path, function: str, option: WorkloadOptions, flop: int) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    graph = graph_from_source(f"{tmp_path / 'loops.py'}:{function}", options=trace_options(option))
    assert product_flop(graph) == flop


def test_the_trip_count_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    arguments = ["predict", f"{tmp_path / 'loops.py'}:loop", "--gpu", "H100", "--json", "--trip-count", "10"]
    assert run([*arguments, "--fp32-products", "tf32", "--checkpoint", "tensorcore"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["most_expensive"]
    assert (row["flop"], row["count"], row["dtype"]) == (2 * 256**3, 10, "tf32")


@pytest.mark.parametrize(
    ("model", "option", "message"),
    [
        ("loops.py:loop", [], "say how often its body runs with --trip-count N"),
        ("loops.py:loop", ["--trip-count", "-1"], "while_trips is -1, expected a whole number of at least 0"),
        ("loops.py:choice", ["--branch", "2"], "branch is 2, but a cond has 2 branches"),
        ("loops.py:choice", ["--branch", "best"], "branch is 'best', expected 'worst' or the index"),
        ("loops.py:choice", ["--fp32-products", "fp64"], "expected 'fp32' or 'tf32'"),
        ("loops.py:choice", ["--tensor-parallel", "2"], "say batch, lengths and dtypes; leave --tensor-parallel out"),
        ("gpt2-large", ["--trip-count", "2"], "gpt2-large is no PATH.py:FUNCTION; leave --trip-count out"),
    ],
)
def test_options_of_traces_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, option: list[str], message: str
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    path = str(tmp_path / model) if ".py" in model else model
    assert run(["predict", path, "--gpu", "H100", *option]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_torch_module(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    make: Callable[[str], str] = (
        "import torch\ndef net():\n    return torch.nn.Linear(8, 4), (torch.zeros(2, 8),)\n".format
    )
    (tmp_path / "net.py").write_text(make(""))
    graph = graph_from_source(f"{tmp_path / 'net.py'}:net", "training")
    assert (graph.name, graph.mode, graph.fused) == ("net", "training", False)
