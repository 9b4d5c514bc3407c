"""The examples in docs/front_ends.md run."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

import neusight_jax as nj

PAGE = Path(__file__).resolve().parents[1] / "docs" / "front_ends.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.skipif("fp32" not in nj.list_checkpoints(), reason="no checkpoint fp32 here")
@pytest.mark.parametrize("block", BLOCKS, ids=["jax", "torch", "devices"])
def test_examples_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "import torch" in block:
        pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(block, PAGE.name, "exec"), {"__name__": "page"})
    assert ("all_reduce" if "shard_map" in block else "on H100: training, fp32") in capsys.readouterr().out
