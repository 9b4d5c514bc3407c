"""docs/extending.md: its example family, registered as an installed package would, from profile to gradient."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "topk"
USE = """
import json, sys
from pathlib import Path
import jax, numpy as np, pandas as pd
import neusight_jax as nj
from neusight_jax.datasets.row_checks import flop_and_bytes
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.profiling.case import case_bytes, make_case
from neusight_jax.profiling.jax_backend import jax_operator
from neusight_jax.profiling.plans import planned
from neusight_jax.scaling.names import read_name
from neusight_jax.scaling.rules import work_of
from neusight_jax.scaling.trace import Measured

folder, said = Path(sys.argv[1]), {}
case = make_case("topk", {"b": 4, "h": 64, "k": 3})
said["plan"] = [c.op for c in planned("quick", nj.load_gpu("T4"), ["fp32"])].count("topk")
said["bytes"] = case_bytes(case)[0]
said["run"] = np.asarray(jax_operator(case)(jax.numpy.arange(256.0).reshape(4, 64))[0]).tolist()
name = read_name("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(float const*, unsigned int)")
said["name"] = (name.kind, name.work)
item = Measured("gatherTopK", "topk", 1e-3, inferred="topk")
said["inferred"] = [n for n, b in work_of([item], nj.load_gpu("T4")).families.items() if b.num_rows]
said["others"] = read_name("void at::native::radixSortKVInPlace<float>()").kind

parts = []
random = np.random.default_rng(0)
for device in ("Tesla V100-PCIE-32GB", "Tesla T4"):
    gpu = nj.load_gpu(device)
    sizes = {n: np.exp(random.uniform(*np.log(span), 64)).round() for n, span in
             {"b": (64, 16384), "h": (128, 8192), "k": (1, 64)}.items()}
    dims = {"rows": sizes["b"], "cols": sizes["h"], "kept": sizes["k"]}
    moved = flop_and_bytes("topk", dims, np.zeros(64, np.int32))[1]
    seconds = 2e-5 + moved / (0.7 * gpu.mem_bytes_per_s)
    parts.append(pd.DataFrame({"device": device, "op": "topk", **sizes, "latency_s": seconds}))
(folder / "kernels").mkdir()
frame = pd.concat(parts)
frame.to_parquet(folder / "kernels" / "topk.parquet")
nj.train([folder], "tiny", folder / "out")
predictor, gpu = nj.load_predictor(folder / "out"), nj.load_gpu("L4")
table = nj.read_kernels(folder / "kernels" / "topk.parquet")
said["families"] = [n for n, b in table.families.items() if b.num_rows]
forecast = nj.predict_kernels(predictor, nj.load_gpu("Tesla T4"), table)
truth = frame["latency_s"].to_numpy()
said["error"] = float(np.abs(np.log(forecast / truth))[64:].mean())
one = table_from_kernels([Kernel("topk", "topk", {"rows": 65536.0, "cols": 8192.0, "kept": 8.0})])
seconds, slope = jax.value_and_grad(nj.latency, argnums=1)(predictor, gpu, one)
said["elasticity"] = float(slope.mem_bytes_per_s * gpu.mem_bytes_per_s / seconds)
plain = Kernel("softmax", "softmax", {"rows": 8.0, "cols": 8.0, "reads": 1.0, "writes": 1.0})
said["plain"] = "topk" in table_from_kernels([plain]).families
print(json.dumps(said))
"""


def installed(folder: Path, points: dict[str, str]) -> dict[str, str]:
    """An environment in which the example is an installed package with these entry points."""
    facts = folder / "topk_family-0.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: topk-family\nVersion: 0.1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[neusight_jax.families]", *lines, ""]))
    path = os.pathsep.join([str(folder), str(EXAMPLE), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def entry_points() -> dict[str, str]:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points: dict[str, str] = project["entry-points"]["neusight_jax.families"]
    return points


@pytest.mark.slow
def test_the_example_is_a_family_like_any_other(tmp_path: Path) -> None:
    """Planned, run, named, trained on, forecast and differentiated, and in no table that has none of it."""
    (tmp_path / "data").mkdir()
    command = [sys.executable, "-c", USE, str(tmp_path / "data")]
    done = subprocess.run(
        command, env=installed(tmp_path / "site", entry_points()), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["plan"] == 4
    assert said["bytes"] == 4 * (4 * 64 + 4 * 3)
    assert said["run"] == [63.0, 62.0, 61.0]
    assert said["name"] == ["topk", "topk"]
    assert said["inferred"] == ["topk"]
    assert said["others"] == "sort"
    assert said["families"] == ["topk"]
    assert said["error"] < 0.2
    assert -1.0 <= said["elasticity"] < -0.5
    assert said["plain"] is False


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("topk_family:NONE", "cannot be loaded (AttributeError: module 'topk_family' has no attribute 'NONE')"),
        ("topk_family:work", "is a function, expected a neusight_jax.kernels.family.Family"),
        ("neusight_jax.kernels.rowwise:SOFTMAX", "there is a family or operator 'softmax' already"),
    ],
)
def test_what_is_no_family_is_one_line(tmp_path: Path, point: str, message: str) -> None:
    command = [sys.executable, "-m", "neusight_jax", "predict", "bert-tiny", "--gpu", "T4"]
    done = subprocess.run(
        command, env=installed(tmp_path / "site", {"topk": point}), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert f"family {point} of the package topk-family" in lines[0]
    assert message in lines[0]


def test_the_page_shows_the_example() -> None:
    """Lines of the page that are code of the example are in it."""
    page = (ROOT / "docs" / "extending.md").read_text()
    code = (EXAMPLE / "topk_family.py").read_text() + (EXAMPLE / "pyproject.toml").read_text()
    block = re.search(r"<!-- topk -->\n```python\n(.*?)```", page, re.DOTALL)
    assert block
    missing = [line for line in block.group(1).splitlines() if line.strip(" .") and line not in code]
    assert missing == []
