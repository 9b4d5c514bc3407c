"""`--help`: groups, one example of every command that parses, units, completion."""

from __future__ import annotations

import shlex

import pytest

from neusight_jax.cli import run
from neusight_jax.cli.app import _program, _spread
from neusight_jax.cli.help import EXAMPLES, GROUPS, QUESTIONS, gpu_names, model_names
from neusight_jax.cli.workloads import numbers
from neusight_jax.errors import InputError

Capture = pytest.CaptureFixture[str]
COMMANDS = sorted(_program().commands)


def test_a_bare_command_shows_questions_and_a_bare_group_its_help(capsys: Capture) -> None:
    assert run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(QUESTIONS) == 6
    for question, command in QUESTIONS.items():
        assert lines[lines.index(f"  {question}") + 1] == f"    neusight-jax {EXAMPLES[command]}"
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for group in GROUPS:
        assert f"{group}:" in text
    assert run(["import"]) == 0
    assert "aiconfigurator" in capsys.readouterr().out


def test_every_command_stands_in_a_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(COMMANDS) <= set(grouped)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(name: str, capsys: Capture) -> None:
    command, names = _program().commands[name], [name]
    if name == "import":
        command, names = command.commands["neusight"], [*command.commands]
    for each in names:
        words = shlex.split(EXAMPLES[each])
        assert words[0] == name
        where = command if name != "import" else _program().commands["import"].commands[each]
        where.make_context(each, _spread(words)[2 if name == "import" else 1 :], resilient_parsing=False)
        assert run([*words[: 2 if name == "import" else 1], "--help"]) == 0
        assert f"Example:\n  neusight-jax {EXAMPLES[each]}" in capsys.readouterr().out


def test_options_stand_in_groups(capsys: Capture) -> None:
    assert run(["predict", "--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n{head}:") for head in ("Options", "Workload", "Functions", "Jobs")]
    assert places == sorted(places)
    assert text.index("--batch-size") > places[1]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("l2_bytes", "16MiB", 16 * 2**20),
        ("mem_bytes_per_s", "3.35TB/s", 3.35e12),
        ("clock_hz", "1.8GHz", 1.8e9),
        ("latency_s", "50ms", 0.05),
        ("bf16_flop_per_s", "990TFLOP/s", 9.9e14),
        ("mem_bytes", "80e9", 8e10),
        ("tdp_w", "0.7kW", 700.0),
        ("num_sms", "132", 132.0),
    ],
)
def test_values_take_units(name: str, text: str, value: float) -> None:
    assert numbers("--set", f"{name}={text}", [text], name) == [pytest.approx(value)]


def test_a_wrong_unit_is_refused() -> None:
    with pytest.raises(InputError, match=r"--set 'clock_hz=3TB/s': 3TB/s is in B/s, expected Hz"):
        numbers("--set", "clock_hz=3TB/s", ["3TB/s"], "clock_hz")
    with pytest.raises(InputError, match=r"expected a number without a unit"):
        numbers("--set", "num_sms=3GHz", ["3GHz"], "num_sms")
    with pytest.raises(InputError, match=r"expected numbers in base units, .* or with units: 3.35TB/s"):
        numbers("--set", "num_sms=many", ["many"], "num_sms")


def test_names_are_completed() -> None:
    assert "gpt2-large" in model_names("gpt2")
    assert "H100" in gpu_names("h10")
    assert gpu_names("no such") == []
