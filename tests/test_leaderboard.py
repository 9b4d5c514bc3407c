"""The leaderboard page from files written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import Fails

from neusight_jax.cli.app import run


def _score(system: str, family: str, device: str, mean: float, sd: float = 0.0) -> dict[str, object]:
    names = {"system": system, "family": family, "device": device}
    return {**names, "rows": 3, "mean": mean, "median": 1, "p90": 2, "sd": sd}


@pytest.fixture
def logo(tmp_path: Path) -> Path:
    folder = tmp_path / "logo"
    folder.mkdir()
    scores = [
        _score("ours", "linear", "A", 10.0, 1.0),
        _score("ours", "linear", "B", 20.0, 2.0),
        _score("theirs", "linear", "A", 30.0),
        _score("theirs", "linear", "B", 10.0),
        _score("ours", "softmax", "A", 9.0),
        _score("theirs", "softmax", "A", 5.0),
    ]
    (folder / "scores.json").write_text(json.dumps({"protocol": "logo", "seeds": 3, "scores": scores}))
    return folder


def test_the_page(logo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [{key: value for key, value in _score("fp32", "linear", "A", 7.0).items() if key != "sd"}]
    labels = {"system": "fp32", "device": "A", "labels": 4, "mean": 6.0, "median": 5.0, "p90": 9.0}
    models = [{**labels, "option": "eager"}, {**labels, "option": "fusion", "mean": 99.0}]
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps({"kernels": kernels, "models_by_device": models}))
    page = tmp_path / "board.md"
    assert run(["leaderboard", str(logo), str(file), "--output", str(page), "--note", "Of commit 12ab."]) == 0
    text = page.read_text()
    # GPUs count equally: ours (10 + 20) / 2 = 15 on linear, theirs 20; ours 12 over both families, theirs 12.5.
    assert "| system | linear | softmax |" in text
    assert "| ours | **15.0 ± 1.5** | 9.0 |" in text
    assert "| theirs | 20.0 | **5.0** |" in text
    assert text.index("| ours |") < text.index("| theirs |")
    assert "| system | linear | end to end |" in text
    assert "| fp32 | **7.0** | **6.0** |" in text
    assert text.index("nobody has measured") < text.index("## GPUs in training")
    assert "\nGPUs: 2. Seeds, where something is random: 3; ± is the standard deviation over them.\n" in text
    assert "\nGPUs: 1.\n" in text
    assert text.endswith("from logo, checkpoint.json. Of commit 12ab.\n")
    rows = page.with_suffix(".csv").read_text().splitlines()
    assert rows[0] == "split,system,family,device,rows,mean,median,p90,sd"
    assert len(rows) == 1 + 6 + 2
    assert "wrote" in capsys.readouterr().err


def test_bad_evaluations(logo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for given, message in ((other, "no scores in it"), (tmp_path / "none.json", "no such file")):
        assert run(["leaderboard", str(given), "--output", str(tmp_path / "x.md")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "x.md").exists()
    assert run(["leaderboard", str(logo), "--output", str(tmp_path / "x.html")]) == 2
    assert "expected a Markdown file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        {
            "protocol": "few-shot",
            "seeds": 1,
            "scores": [{"family": "linear", "device": "T4", "mean": 5.0}],
        },
        {"protocol": "logo-models", "seeds": 1, "scores": [{"system": "mixture", "option": "eager", "device": "T4"}]},
        {"protocol": "logo", "seeds": 1, "scores": [1]},
        {"kernels": [{"system": "fp32"}], "models_by_device": []},
    ],
)
def test_scores_of_another_kind_are_one_line(fails: Fails, tmp_path: Path, content: dict[str, object]) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(content))
    words = "the leaderboard takes those of `evaluate` with --protocol logo, logo-size, architecture, seen, or of a"
    assert words in fails("leaderboard", str(tmp_path / "scores.json"), "--output", str(tmp_path / "page.md"))
    assert not (tmp_path / "page.md").exists()
