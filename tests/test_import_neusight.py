"""Import of a NeuSight checkout, on a synthetic tree of its layout."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.datasets.neusight import import_neusight
from neusight_jax.errors import InputError
from synthetic import synthetic_rows

T4, V100, MI100 = "Tesla T4", "Tesla V100-PCIE-32GB", "AMD Instinct MI100"


def _source(rows: pd.DataFrame, *, device: bool = True, op: bool = True) -> pd.DataFrame:
    """Rows as the source spells them: capital letters, milliseconds."""
    grid = {f"grid_{axis}": f"Grid {axis}" for axis in "xyz"}
    names = {"device": "Device", "op": "OPName", "kernel_name": "Kernel Name", **grid}
    names |= {name: name.upper() for name in "bmnkh"}
    out = rows.rename(columns=names)
    out["Latency"] = 1e3 * out.pop("latency_s")
    return out.drop(columns=[*([] if device else ["Device"]), *([] if op else ["OPName"])])


def _write(frame: pd.DataFrame, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=True)  # with the unnamed index column pandas leaves


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Raw per-GPU files (device by column, by folder, by file name), merged ones, and files that are something else."""
    root = tmp_path / "NeuSight"
    dataset = root / "data" / "dataset"
    bmm = {device: synthetic_rows("bmm", device, 6) for device in (T4, V100, MI100)}
    _write(_source(bmm[T4], op=False), dataset / "raw" / "Tesla_T4" / "bmm.csv")
    _write(_source(bmm[MI100], device=False, op=False), dataset / "raw" / "AMD_Instinct_MI100" / "bmm.csv")
    _write(_source(synthetic_rows("ln", T4, 5), device=False, op=False), dataset / "raw" / "ln_Tesla_T4.csv")
    merged = pd.concat([bmm[T4].iloc[:4], bmm[V100]])
    _write(_source(merged, op=False), dataset / "train" / "bmm.csv")
    ops = [synthetic_rows(op, device, 3) for op in ("add", "gelu") for device in (T4, V100)]
    vector = _source(pd.concat(ops))
    vector["OPName"] = "VEC" + vector["OPName"]
    _write(vector, dataset / "train" / "vec.csv")
    _write(pd.DataFrame({"model": ["gpt2"], "speed": [1]}), root / "results" / "summary.csv")
    _write(pd.DataFrame({"Latency": [1.0], "B": [1], "H": [2]}), root / "results" / "add.csv")
    (root / ".git").mkdir()
    _write(_source(bmm[T4], op=False), root / ".git" / "bmm.csv")
    return root


def test_imports_a_tree(tree: Path, tmp_path: Path) -> None:
    report = import_neusight(tree, tmp_path / "out")
    assert report.rows == {"bmm": 18, "ln": 5, "add": 6, "gelu": 6}
    assert list(report.left_out.values()) == [0, 4]
    assert sorted(report.remarks) == [
        "not recognised: results/add.csv: no device, neither as a column nor in its path",
        "not recognised: results/summary.csv: no latency column",
    ]
    assert sorted(path.name for path in (tmp_path / "out" / "kernels").iterdir()) == [
        "add.parquet",
        "bmm.parquet",
        "gelu.parquet",
        "ln.parquet",
    ]
    assert [path.name for path in (tmp_path / "out" / "kernels_amd").iterdir()] == ["bmm.parquet"]
    lines = report.lines()
    assert "35 rows from 5 files (add 6, bmm 18, gelu 6, ln 5)" in lines[0]
    assert "not recognised: results/summary.csv: no latency column" in lines
    assert any("4 rows of merged files" in line for line in lines)


def test_imported_rows_are_the_source_in_seconds(tree: Path, tmp_path: Path) -> None:
    import_neusight(tree, tmp_path / "out")
    read = read_measurements([tmp_path / "out"], devices=[T4], ops=["bmm"]).frame
    source = synthetic_rows("bmm", T4, 6)
    np.testing.assert_allclose(read["latency_s"], source["latency_s"], rtol=1e-12)
    assert (read["m"] == source["m"]).all()
    assert (read["k"] == source["n"]).all()
    assert (read["tile"] == "64x128").all()
    assert read["blocks"].notna().all()


def test_exact_duplicates_are_dropped(tree: Path, tmp_path: Path) -> None:
    rows = _source(synthetic_rows("bmm", T4, 6), op=False)
    _write(rows.iloc[:2], tree / "data" / "copy" / "bmm.csv")
    report = import_neusight(tree, tmp_path / "out")
    assert report.rows["bmm"] == 18
    assert "left out: 2 exact duplicate rows" in report.lines()


def test_conv_and_grids_in_brackets(tmp_path: Path) -> None:
    conv = synthetic_rows("conv", T4, 3)
    _write(_source(conv), tmp_path / "in" / "conv.csv")
    linear = _source(synthetic_rows("linear", T4, 3).drop(columns=["grid_x", "grid_y", "grid_z"]), op=False)
    linear["grid"] = "[2, 3, 1]"
    _write(linear.drop(columns="B"), tmp_path / "in" / "linear.csv")
    report = import_neusight(tmp_path / "in", tmp_path / "out")
    assert report.rows == {"conv": 3, "linear": 3}
    frame = read_measurements(tmp_path / "out").frame
    assert list(frame.loc[frame["family"] == "linear", "blocks"]) == [6.0] * 3


def test_bad_rows_are_refused_or_dropped(tree: Path, tmp_path: Path) -> None:
    rows = _source(synthetic_rows("linear", T4, 4), op=False)
    rows.loc[1, "Latency"] = 0.0
    rows.loc[2, "Device"] = "Voodoo 2"
    _write(rows, tree / "data" / "linear.csv")
    with pytest.raises(InputError, match=r"2 of 39 .*data/linear\.csv row 1 \(from 0\): latency_s is 0\.0"):
        import_neusight(tree, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = import_neusight(tree, tmp_path / "out", on_invalid="drop")
    assert report.rows["linear"] == 2
    assert "dropped: 2 bad rows" in "\n".join(report.lines())


def test_device_sheets(tree: Path, tmp_path: Path) -> None:
    sheet = {
        "Device": "Tesla T4",
        "Mem_Bw": 320,
        "Num_Sm": 40,
        "Dev_Mem": 16,
        "SingleFLOPs": 8141,
        "L2Cache": 4,
        "Clock": 1590,
        "Num_Core": 64,
    }
    (tree / "data" / "device_configs").mkdir()
    (tree / "data" / "device_configs" / "Tesla_T4.json").write_text(json.dumps(sheet))
    (tree / "data" / "device_configs" / "broken.json").write_text("{")
    (tree / "data" / "device_configs" / "odd.json").write_text(json.dumps({**sheet, "Num_Sm": "many"}))
    (tree / "data" / "device_configs" / "model.json").write_text('{"n_layer": 3}')
    report = import_neusight(tree, tmp_path / "out")
    assert "gpus.json: 1 devices (Tesla T4)" in report.remarks
    written = json.loads((tmp_path / "out" / "gpus.json").read_text())
    assert list(written) == ["Tesla T4"]
    assert written["Tesla T4"]["mem_bytes_per_s"] == 320e9
    unrecognised = [remark for remark in report.remarks if remark.startswith("not recognised")]
    assert any(remark.startswith("not recognised: data/device_configs/odd.json: odd.json: ") for remark in unrecognised)
    assert len(unrecognised) == 3


def test_refusals(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder; expected a checkout"):
        import_neusight(tmp_path / "none", tmp_path / "out")
    (tmp_path / "bare").mkdir()
    with pytest.raises(InputError, match="holds no NeuSight measurements"):
        import_neusight(tmp_path / "bare", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    with pytest.raises(InputError, match="is not empty"):
        import_neusight(tree, tmp_path / "full")
    with pytest.raises(InputError, match="unknown on_invalid"):
        import_neusight(tree, tmp_path / "out", on_invalid="ignore")  # type: ignore[arg-type]


def test_an_interrupt_leaves_nothing(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_neusight(tree, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["NeuSight"]
