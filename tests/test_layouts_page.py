"""docs/layouts.md runs: its Python with a tiny model by roofline, its commands exist, and `parallelize` answers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.model.predictor import RooflinePredictor

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "layouts.md").read_text(encoding="utf-8")
SMALLER = {
    '"llama-3.1-70b"': "CONFIG",
    '"qwen3-32b"': "CONFIG",
    "64x H100": "8x H100",
    "tensor=8, pipeline=4, data=2": "tensor=2, pipeline=2, data=2",
    "global_batch_size=256": "global_batch_size=16",
    "global_batch_size=64": "global_batch_size=16",
    "sequence_length=4096": "sequence_length=256",
    "settings=Settings()": "settings=Settings(1, 1, rounds=1, candidates=2)",
}


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(nj, "load_predictor", lambda name: RooflinePredictor())
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    for said, smaller in SMALLER.items():
        assert said in code
        code = code.replace(said, smaller)
    exec(compile(code, "docs/layouts.md", "exec"), {"__name__": "page", "CONFIG": TINY})
    out = capsys.readouterr().out
    for part in ("faster than the next", "What it does", "nic_bytes_per_s"):
        assert part in out


def test_its_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    texts = re.findall(r"```\n(neusight-jax .*?)```", PAGE, re.DOTALL)
    commands = [shlex.split(text.replace("\\\n", " "))[1:] for text in texts]
    assert {words[0] for words in commands} == {"parallelize", "design"}
    for words in commands:
        assert run([words[0], "--help"]) == 0
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, words


@pytest.mark.skipif("tensorcore" not in nj.list_checkpoints(), reason="no checkpoint tensorcore here")
def test_the_command_ranks_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import neusight_jax.model.checkpoint as checkpoint

    monkeypatch.setattr(checkpoint, "load_predictor", lambda *names: RooflinePredictor())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    asked = ["--gpu", "H100", "--gpus", "4", "--global-batch-size", "4", "--sequence-length", "256", "--json"]
    assert run(["parallelize", str(file), *asked]) == 0
    content = json.loads(capsys.readouterr().out)
    (machine,) = content["machines"]
    assert machine["gpus"] == 4
    assert machine["layouts"][0]["rank"] == 1
    layout = machine["layouts"][0]["workload"]["layout"]
    assert layout["tensor"] * layout["pipeline"] * layout["data"] * layout["context"] == 4
