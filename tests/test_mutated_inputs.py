"""Spoilt files and odd requests, a few of those of `benchmarks/mutated_inputs.py`, and the doors they come in by."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import Fails, message
from trace_files import sums

import neusight_jax as nj
from benchmarks.mutated_inputs import BOMB, try_files
from benchmarks.odd_requests import try_requests
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import MOST_ECHOED, MOST_SHOWN, InputError, one_line
from neusight_jax.hardware.prices import Prices, read_prices
from neusight_jax.scaling.rules import read_trace
from neusight_jax.tables import MOST_BYTES, read_content
from synthetic import synthetic_rows


def test_spoilt_files_are_answered_or_refused_in_one_line() -> None:
    counts, faults = try_files(60, seed=7)
    assert faults == []
    assert sum(outcomes["refused"] for outcomes in counts.values()) > 30


def test_odd_requests_get_a_status_and_print_nothing() -> None:
    pytest.importorskip("plotly")
    counts, faults = try_requests(20, seed=7)
    assert faults == []
    assert sum(counts.values()) == 20


READERS: dict[str, Callable[[Path], object]] = {
    "gpu.yaml": nj.load_gpu,
    "gpu.json": nj.load_gpu,
    "cluster.yaml": nj.load_cluster,
    "prices.json": read_prices,
    "prices.csv": read_prices,
    "config.json": nj.graph_from_config,
    "trace.json": read_trace,
    "kernels.csv": read_trace,
    "rows.parquet": read_measurements,
}


@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_of_a_bounded_size_are_read(name: str, tmp_path: Path) -> None:
    """A pipe or a device may never end."""
    path = tmp_path / name
    os.mkfifo(path)
    assert "is a pipe, expected" in message(READERS[name], path) or name == "rows.parquet"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "is a device, expected" in message(READERS[name], path) or name == "rows.parquet"
    path.unlink()
    if name.startswith(("gpu", "cluster", "prices", "config")):
        with open(path, "wb") as file:
            file.truncate(MOST_BYTES + 1)
        assert f"{MOST_BYTES + 1:,} bytes, expected" in message(READERS[name], path)
        assert f"of at most {MOST_BYTES:,} bytes" in message(READERS[name], path)


@pytest.mark.parametrize(
    ("suffix", "text", "line"),
    [
        (".json", '{"name": "a", "name": "b"}', "'name' is given twice, expected once"),
        (".yaml", "num_sms: 1\nclock_hz: 1e9\nnum_sms: 2\n", "'num_sms' is given twice, expected once"),
        (".yaml", "a: {b: 1, b: 2}", "'b' is given twice"),
        (".yaml", BOMB, "has a YAML alias"),
        (".yaml", "a: &x [1]\nb: *x", "has a YAML alias"),
        (".json", "[" * 100_000, "nested too deeply"),
        (".json", "[" * 150 + "]" * 150, "nested too deeply"),
        (".yaml", "[" * 150 + "]" * 150, "nested too deeply"),
        (".yaml", "[" * 100_000, "not YAML: exceeded maximum nesting depth"),
        (".yaml", 'a: !!int ""', "not YAML"),
        (".yaml", "a: !!python/object/apply:os.system [ls]", "not YAML: could not determine a constructor"),
        (".json", "9" * 5000, "not JSON"),
    ],
)
def test_what_a_description_may_not_hold(tmp_path: Path, suffix: str, text: str, line: str) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_text(text)
    assert f"{path}: {line}" in message(read_content, path, "a description")


def test_names_are_printable_and_numbers_are_floats(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"red\\u001b[31m": "\\ud800 \\u202eback", "big": ' + "9" * 310 + ', "list": [1, "*"]}')
    assert read_content(path, "a description") == {"red?[31m": "? ?back", "big": float("inf"), "list": [1, "*"]}


def test_a_name_no_terminal_can_show_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from neusight_jax.cli import run

    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "\ud800 \x1b[2J", "base": "T4"}))
    assert run(["predict", "bert-tiny", "--gpu", str(path), "--sequence-length", "16"]) == 0
    assert "? ?[2J" in capsys.readouterr().out
    path.write_text(json.dumps({"name": "x" * 300, "base": "T4"}))
    assert "expected text of at most 200 characters" in message(nj.load_gpu, path)


@pytest.mark.parametrize("price", [10**310, 1e13, 0, -1, True, float("nan")])
def test_a_price_no_hour_costs(price: float) -> None:
    with pytest.raises(InputError, match=r"price of H100 is .*, expected a positive number per hour"):
        Prices({"H100": price})


def test_a_price_that_is_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("T4,1\nL4,2\nT4,3\n")
    assert f"{path}: 'T4' is given twice" in message(read_prices, path)
    with pytest.raises(InputError, match="has two prices"):
        Prices({"T4": 1.0, "Tesla T4": 2.0})


@pytest.mark.parametrize("echoed", ["x" * 5000, "many words " * 500, "[1, 2], " * 800])
@pytest.mark.parametrize(
    "form", ["unknown GPU {!r}; nearest: T4", "{!r}: no such file", "the list is {}, not a number"]
)
def test_a_message_repeats_little_of_what_it_was_given(echoed: str, form: str) -> None:
    line = str(InputError(form.format(echoed if "{!r}" in form else [echoed])))
    assert len(line) <= MOST_ECHOED + len(form)
    assert line.endswith(form.rpartition("}")[2])
    assert len(one_line(echoed)) <= MOST_SHOWN


def test_what_is_not_long_stays_as_it_is() -> None:
    line = "the card's effect of linear has 2 numbers, the model's 'weights' need 3; " + "expected one of a, b, c " * 20
    assert one_line(line) == " ".join(line.split())


def test_a_long_argument_is_cut(fails: Fails) -> None:
    for arguments in (["predict", "gpt2", "--gpu", "x" * 9000], ["x" * 9000], ["gpus", "--" + "x" * 9000]):
        assert len(fails(*arguments)) < 700
    assert "\x1b" not in fails("predict", "gpt2", "--gpu", "\x1b[31mred")


def test_what_the_mutations_showed(tmp_path: Path) -> None:
    """Rows of measured models that no workload is, lists in a column of kernels, and control characters in a trace."""
    head = "device,model,mode,option,sequence_length,batch_size,num_layers,e2e_s,forward_s,backward_s\n"
    path = tmp_path / "end_to_end.csv"
    for mode, size, problem in (("sleep", "1", "unknown mode"), ("inf", "inf", "bad size"), ("inf", "0", "bad size")):
        path.write_text(f"{head}Tesla T4,bert_base,{mode},,128,{size},12,0.1,,\n")
        assert f"(1 {problem})" in message(read_measurements, path)
    with open(path, "wb") as file:
        file.truncate(20 << 30)
    assert "bytes, expected a CSV file of the measurement schema of at most" in message(read_measurements, path)
    rows = synthetic_rows("linear", "Tesla T4", 2)
    rows.assign(op=[["a"], ["b"]]).to_parquet(tmp_path / "rows.parquet")
    assert "a column holds lists" in message(read_measurements, tmp_path / "rows.parquet")
    (tmp_path / "kernels.csv").write_text(sums(("red\x1b[31m", 1000, 1)))
    assert [item.name for item in read_trace(tmp_path / "kernels.csv").items] == ["red?[31m"]
