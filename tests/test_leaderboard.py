"""The leaderboard page from files written by hand, and entries of others on synthetic measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from refusals import Fails, message

from neusight_jax.cli.app import run
from neusight_jax.records import as_text
from neusight_jax.training.evaluation.leaderboard import ENTER, public_rows, read_entry, score_entry, template
from synthetic import write_synthetic_measurements


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
    for given, expected in ((other, "no scores in it"), (tmp_path / "none.json", "no such file")):
        assert run(["leaderboard", str(given), "--output", str(tmp_path / "x.md")]) == 2
        assert expected in capsys.readouterr().err
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


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_synthetic_measurements(tmp_path_factory.mktemp("measured"), rows=6)
    for file in (folder / "kernels").glob("*.parquet"):
        if file.stem not in ("linear", "softmax"):
            file.unlink()
    return folder


@pytest.fixture(scope="module")
def rows(measured: Path) -> pd.DataFrame:
    return public_rows([measured], "checkpoint")


@pytest.fixture
def filled(rows: pd.DataFrame) -> pd.DataFrame:
    """A template, every time predicted as 1 ms."""
    return template(rows).assign(predicted_s=1e-3)


def _board(folder: Path, *rows: dict[str, object]) -> None:
    columns = ["split", "system", "family", "device", "rows", "mean", "median", "p90", "sd"]
    pd.DataFrame([{"split": "checkpoint", **row} for row in rows], columns=columns).to_csv(folder / "board.csv")


def test_an_entry_is_scored_beside_the_board(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus, file = ("Tesla V100-PCIE-32GB", "Tesla T4"), tmp_path / "mine.csv"
    own = [{**_score("ours", "linear", gpu, 10.0), "rows": 6} for gpu in gpus]
    _board(tmp_path, *own, _score("ours", "softmax", gpus[0], 5.0), _score("ours", "linear", "Tesla P4", 90.0))
    given = ["--measurements", str(measured), "--split", "checkpoint", "--board", str(tmp_path / "board.csv")]
    assert run(["leaderboard", "--template", str(file), *given]) == 0
    blank = pd.read_csv(file)
    assert blank["predicted_s"].isna().all()
    assert not {"measured_s", "latency_s"} & set(blank)
    shuffled = blank.assign(predicted_s=1e-3)[["predicted_s", "row"]].sample(frac=1.0, random_state=0)
    shuffled.to_csv(file, index=False)
    capsys.readouterr()
    assert run(["leaderboard", "--entry", str(file), *given, "--json", "--device", *gpus]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = pd.DataFrame(found["scores"]).set_index(["family", "device"])
    seconds = pd.read_parquet(measured / "kernels" / "linear.parquet").groupby("device")["latency_s"]
    for gpu in gpus:
        errors = 100.0 * abs(1e-3 / seconds.get_group(gpu) - 1.0)
        assert scores.loc[("linear", gpu), "mean"] == pytest.approx(errors.mean(), rel=1e-5)
        assert scores.loc[("linear", gpu), "rows"] == 6
        assert scores.loc[("end to end", gpu), "rows"] == 3
    assert [note.split(":")[0] for note in found["notes"]] == ["linear", "softmax"]  # P4; softmax of one GPU
    assert {row["device"] for row in found["board"]} == set(gpus)
    (tmp_path / "mine.json").write_text(json.dumps(found))
    page = tmp_path / "page.md"
    assert run(["leaderboard", str(tmp_path / "mine.json"), "--output", str(page)]) == 0
    assert "| mine | " in page.read_text()
    assert ENTER in page.read_text()


def test_families_left_blank_are_not_scored(rows: pd.DataFrame, filled: pd.DataFrame, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    filled.assign(predicted_s=filled["predicted_s"].where(filled["family"] == "softmax")).to_csv(file, index=False)
    text = as_text(score_entry(file, rows, "checkpoint"), 100)
    assert "system  softmax" in text
    assert "linear" not in text
    assert "mine  " in text


def test_rows_of_a_gpu_left_out_are_those_of_the_protocol(measured: Path) -> None:
    rows = public_rows([measured], "logo")
    assert set(rows["device"]) == {"Tesla V100-PCIE-32GB", "Tesla T4"}
    assert set(rows["family"]) == {"linear", "softmax"}
    raw = pd.read_parquet(measured / "kernels" / "linear.parquet")
    linear = rows[rows["family"] == "linear"]
    places = linear["row"].str.removeprefix("kernels/linear.parquet:").astype(int)
    for name, own in (("measured_s", "latency_s"), ("n", "n"), ("k", "k"), ("device", "device")):
        assert linear[name].tolist() == raw.loc[places, own].tolist()


def _second(rows: pd.DataFrame, column: str, value: object) -> pd.DataFrame:
    changed = rows.astype({column: object})
    changed.loc[1, column] = value
    return changed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda rows: rows.drop(index=1),
            "1 of 30 rows are missing, first kernels/linear.parquet:1; expected every row",
        ),
        (lambda rows: pd.concat([rows, rows[1:3]]), "row kernels/linear.parquet:1 is there twice (2 such rows)"),
        (lambda rows: _second(rows, "predicted_s", -1.0), "line 3: row kernels/linear.parquet:1 has predicted_s -1.0"),
        (
            lambda rows: _second(rows, "predicted_s", "soon"),
            "has predicted_s soon (the only such row)",
        ),
        (lambda rows: _second(rows, "row", "linear:1"), "line 3: row linear:1 is unknown (the only such row)"),
        (lambda rows: _second(rows, "n", 7), "line 3: row kernels/linear.parquet:1 is of another n"),
        (lambda rows: _second(rows, "device", "Tesla P4"), "is of another device"),
        (lambda rows: rows.assign(predicted_s=""), "nothing is predicted; fill the column predicted_s, seconds"),
        (lambda rows: rows.drop(columns="row"), "no column row; expected row, predicted_s, as in a filled --template"),
    ],
)
def test_bad_entries_are_one_line(
    rows: pd.DataFrame,
    filled: pd.DataFrame,
    tmp_path: Path,
    change: Callable[[pd.DataFrame], pd.DataFrame],
    expected: str,
) -> None:
    file = tmp_path / "mine.csv"
    change(filled).to_csv(file, index=False)
    assert expected in message(read_entry, file, rows)


def test_bad_options_of_entries(fails: Fails, measured: Path, rows: pd.DataFrame, tmp_path: Path) -> None:
    file, board = tmp_path / "mine.csv", pd.DataFrame([{"split": "logo", **_score("mine", "linear", "A", 1.0)}])
    template(rows).assign(predicted_s=1.0).to_csv(file, index=False)
    assert "system 'mine' is on the leaderboard; give the entry another --name" in message(
        score_entry, file, rows, "logo", board
    )
    asked = ["leaderboard", "--entry", str(file), "--measurements", str(measured)]
    assert "not readable as CSV" in fails(*asked, "--board", str(tmp_path / "none.csv"))
    assert "unknown split 'all'" in fails(*asked, "--split", "all")
    assert "give one of --entry, --template" in fails(*asked, "--template", str(tmp_path / "t.csv"))
    assert "need --measurements DIR" in fails(*asked[:3])
    assert "expected EVALUATION... and --output FILE.md" in fails("leaderboard")
