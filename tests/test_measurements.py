"""The measurement schema and its checks: every bad row is counted, every bad file is one line."""

import os
import random
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import find_device
from neusight_jax.datasets.measurements import Measurements, read_kernels, read_measurements, table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.kernels.families import FAMILIES
from synthetic import DEVICES, synthetic_rows, write_synthetic_measurements
from synthetic import OPS as MADE

MEASURED = Path(os.environ.get("NEUSIGHT_MEASUREMENTS", Path(__file__).parents[2] / "shared" / "measurements")) / "fp32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_measurements(tmp_path_factory.mktemp("synthetic"), rows=16)


def _file(tmp_path: Path, frame: pd.DataFrame, name: str = "linear.parquet") -> Path:
    path = tmp_path / name
    frame.to_parquet(path, index=False)
    return path


def _linear(rows: int = 8) -> pd.DataFrame:
    return synthetic_rows("linear", "Tesla T4", rows)


def _refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_measurements([path])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_letters_are_converted_at_the_door() -> None:
    columns = {name: np.array([size]) for name, size in {"b": 2, "m": 3, "n": 5, "k": 7}.items()}
    family, dims = schema.row_dims("bmm", columns)
    assert family == "bmm"
    sizes = {"batch": 2, "m": 3, "n": 7, "k": 5, "weight_share": 1, "scale_block": 0}
    assert {name: int(values[0]) for name, values in dims.items()} == sizes
    # (b, m, n) × (b, n, k): n is contracted, so operands and result hold b·(mn + nk + mk) elements.
    work = FAMILIES[family].work(
        {name: jnp.asarray(values, jnp.float32) for name, values in dims.items()}, jnp.full(1, 4.0, jnp.float32)
    )
    assert float(work.flop[0]) == 2 * 2 * 3 * 5 * 7
    assert float(work.bytes_moved[0]) == 4 * 2 * (3 * 5 + 5 * 7 + 3 * 7)


def test_linear_without_batch_column() -> None:
    family, dims = schema.row_dims("linear", {name: np.array([2.0]) for name in ("m", "n", "k")})
    assert (family, dims["batch"][0]) == ("linear", 1.0)


@pytest.mark.parametrize(("op", "reads"), [("add", 2.0), ("pow", 2.0), ("addu", 1.0), ("gelu", 1.0), ("softmax", 1.0)])
def test_vector_dims(op: str, reads: float) -> None:
    _, dims = schema.row_dims(op, {"b": np.array([4.0]), "h": np.array([8.0])})
    assert {name: float(values[0]) for name, values in dims.items()} == {
        "rows": 4,
        "cols": 8,
        "reads": reads,
        "writes": 1,
    }


def test_every_op_has_a_family() -> None:
    for op in schema.OPS:
        family, name = schema.family_op(op)
        assert name in FAMILIES[family].ops
    with pytest.raises(InputError, match="unknown op 'sofmax'; nearest: softmax"):
        schema.op_columns("sofmax")
    with pytest.raises(InputError, match="unknown op"):
        schema.family_op("lineer")


@pytest.mark.parametrize(
    ("kernel_name", "tile"),
    [
        ("volta_sgemm_128x64_tn", "64x128"),
        ("ampere_sgemm_32x32_sliced1x4_nn", "32x32"),
        ("sgemm_32x64x32_NN_vec", "64x32"),
        ("void cutlass::Kernel<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", "128x256"),
        ("sm80_xmma_gemm_f32f32_tilesize128x64x8_stage3", "64x128"),
        ("Cijk_Ailk_Bljk_SB_MT128x64x16_MI32x32x2x1_SE", "64x128"),
        ("void gemv2T_kernel_val<int>", None),
    ],
)
def test_tile_of_a_kernel_name(kernel_name: str, tile: str | None) -> None:
    assert schema.parse_tile(kernel_name) == tile


def test_reads_a_folder(folder: Path) -> None:
    read = read_measurements([folder])
    assert len(read.frame) == 16 * 2 * len(MADE)
    assert set(read.frame["device"]) == {find_device(name)[0] for name in DEVICES}
    assert set(read.frame["family"]) == {"linear", "bmm", "conv", "elementwise", "softmax", "norm", "memory"}
    assert read.problems.empty
    assert read.per_op is None
    assert read.end_to_end is not None
    assert len(read.end_to_end) == 6
    assert set(read.end_to_end["option"]) == {""}
    assert not read.notes
    gemm = read.frame[read.frame["family"] == "bmm"]
    assert set(gemm["tile"]) == {"64x128"}
    expected = np.ceil(gemm["m"] / 64) * np.ceil(gemm["n"] / 128) * gemm["batch"]
    assert (gemm["blocks"] == expected).all()
    assert gemm["rows"].isna().all()
    assert read.frame[read.frame["family"] == "norm"]["tile"].isna().all()


def test_dims_of_the_frame_are_ours(folder: Path) -> None:
    raw = pd.read_parquet(folder / "kernels" / "linear.parquet")
    frame = read_measurements(folder / "kernels" / "linear.parquet").frame
    assert (frame["m"] == raw["m"]).all()
    assert (frame["n"] == raw["k"]).all()
    assert (frame["k"] == raw["n"]).all()
    assert (frame["row"] == np.arange(len(raw))).all()


@pytest.mark.parametrize("part", ["kernels", "kernels/add.parquet", "models", "models/end_to_end.csv"])
def test_reads_parts_of_a_folder(folder: Path, part: str) -> None:
    read = read_measurements([folder / part])
    assert read.frame.empty == part.startswith("models")
    assert (read.end_to_end is not None) == part.startswith("models")


def test_filters(folder: Path) -> None:
    read = read_measurements([folder], devices=["T4"], ops=["elementwise", "ln"])
    assert set(read.frame["device"]) == {find_device("Tesla T4")[0]}
    assert set(read.frame["family"]) == {"elementwise", "norm"}
    assert read.end_to_end is not None
    assert len(read.end_to_end) == 3
    assert set(read_measurements([folder], ops=["relu"]).frame["op"]) == {"relu"}


def test_filters_that_match_nothing(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown GPU"):
        read_measurements([folder], devices=["Tesla T5000"])
    with pytest.raises(InputError, match="unknown op 'lineer'; nearest: linear"):
        read_measurements([folder], ops=["lineer"])
    with pytest.raises(InputError, match=r"P4.* has no rows in the measurements"):
        read_measurements([folder], devices=["Tesla P4"])


def test_rows_of_other_devices_are_not_checked(tmp_path: Path) -> None:
    other = synthetic_rows("linear", "Tesla V100-PCIE-32GB", 4).assign(latency_s=-1.0)
    path = _file(tmp_path, pd.concat([other, _linear()], ignore_index=True))
    frame = read_measurements(path, devices=["Tesla T4"]).frame
    assert list(frame["row"]) == list(range(4, 12))


@pytest.mark.parametrize(
    ("column", "value", "kind", "detail"),
    [
        ("device", "Tesla T44", "unknown device", "unknown GPU 'Tesla T44'; nearest: .*T4"),
        ("device", None, "unknown device", "no device is given"),
        ("op", "lineer", "unknown op", "unknown op 'lineer'; nearest: linear"),
        ("latency_s", 0.0, "bad latency", r"latency_s is 0\.0, expected seconds above 1e-15"),
        ("latency_s", 1e-320, "bad latency", r"expected seconds above 1e-15"),
        ("latency_s", -1e-5, "bad latency", "latency_s is -1e-05"),
        ("latency_s", float("nan"), "bad latency", "latency_s is nan"),
        ("latency_s", float("inf"), "bad latency", "latency_s is inf"),
        ("latency_s", 1e-12, "too fast", "latency_s is 1e-12 on .*T4, expected at least its speed of light"),
        ("m", 0.0, "bad dims", r"m of linear is 0\.0, expected a whole number of at least 1"),
        ("n", 2.5, "bad dims", r"n of linear is 2\.5"),
        ("k", float("nan"), "bad dims", "k of linear is nan"),
    ],
)
def test_bad_rows(tmp_path: Path, column: str, value: object, kind: str, detail: str) -> None:
    frame = _linear().astype({column: object if isinstance(value, str) or value is None else float})
    frame.loc[3, column] = value
    path = _file(tmp_path, frame)
    with pytest.raises(InputError, match=detail) as caught:
        read_measurements([path])
    message = str(caught.value)
    assert message.startswith(f"1 of 8 measurement rows are bad (1 {kind}); first: {path} row 3 (from 0): ")
    assert message.endswith("mend them (`neusight-jax check` lists them), or leave them out with --drop-invalid")
    read = read_measurements([path], on_invalid="drop")
    assert list(read.frame["row"]) == [0, 1, 2, 4, 5, 6, 7]
    assert read.problems[["row", "problem"]].to_numpy().tolist() == [[3, kind]]


def test_problems_are_counted_by_kind(tmp_path: Path) -> None:
    frame = _linear()
    frame.loc[[1, 2], "latency_s"] = -1.0
    frame.loc[2, "m"] = 0
    frame.loc[5, "device"] = "Voodoo 2"
    message = _refused(_file(tmp_path, frame))
    assert message.startswith("3 of 8 measurement rows are bad (2 bad latency, 1 ")
    assert "1 bad dims" in message
    assert "1 unknown device" in message


def test_all_rows_bad(tmp_path: Path) -> None:
    path = _file(tmp_path, _linear().assign(latency_s=0.0))
    with pytest.raises(InputError, match=r"all 8 measurement rows of .* are bad"):
        read_measurements(path, on_invalid="drop")


def test_light_lets_a_warm_cache_beat_the_memory_roof(tmp_path: Path) -> None:
    gpu = find_device("Tesla V100-PCIE-32GB")[1]
    frame = synthetic_rows("relu", "Tesla V100-PCIE-32GB", 2)
    for share, legal in ((1.0, True), (2.0, False)):
        frame["h"] = 1024
        frame["b"] = int(share * float(gpu.l2_bytes) / (2 * 4 * 1024))
        frame["latency_s"] = 0.8 * share * float(gpu.l2_bytes) / float(gpu.mem_bytes_per_s)
        path = _file(tmp_path, frame)
        if legal:
            assert len(read_measurements(path).frame) == 2
        else:
            assert "2 too fast" in _refused(path)


def test_light_is_the_peak_of_the_dtype(tmp_path: Path) -> None:
    gpu = find_device("Tesla V100-PCIE-32GB")[1]
    frame = synthetic_rows("linear", "Tesla V100-PCIE-32GB", 1).assign(m=4096, n=4096, k=4096)
    frame["latency_s"] = 2 * 4096.0**3 / float(gpu.fp32_flop_per_s) / 2
    assert "1 too fast" in _refused(_file(tmp_path, frame))
    assert len(read_measurements(_file(tmp_path, frame.assign(dtype="fp16"))).frame) == 1
    assert "1 unknown dtype" in _refused(_file(tmp_path, frame.assign(dtype="fp17")))


def test_duplicates_are_fine(tmp_path: Path) -> None:
    path = _file(tmp_path, pd.concat([_linear(), _linear()], ignore_index=True))
    assert len(read_measurements(path).frame) == 16


def test_bad_files(tmp_path: Path) -> None:
    whole = _file(tmp_path, _linear())
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(whole.read_bytes()[:200])
    assert "truncated.parquet is not a readable Parquet file" in _refused(truncated)
    foreign = tmp_path / "foreign.parquet"
    foreign.write_text("not,parquet\n1,2\n")
    assert "foreign.parquet is not a readable Parquet file" in _refused(foreign)
    empty = tmp_path / "empty.parquet"
    empty.write_bytes(b"")
    assert "empty.parquet is not a readable Parquet file" in _refused(empty)
    assert "holds no rows" in _refused(_file(tmp_path, _linear().iloc[:0], "norows.parquet"))
    assert "nowhere does not exist" in _refused(tmp_path / "nowhere")
    other = pd.DataFrame({"a": [1], "c": [2]})
    assert "column 'device' is missing; it has a, c" in _refused(_file(tmp_path, other, "other.parquet"))
    for column in ("op", "latency_s", "m"):
        assert f"column '{column}' is missing" in _refused(
            _file(tmp_path, _linear().drop(columns=column), "lacks.parquet")
        )


def test_damage_to_a_footer(tmp_path: Path) -> None:
    """What pandas wrote of its own into a footer need not be right; anything else that is no text is one line."""
    file = _file(tmp_path, _linear())
    whole = file.read_bytes()
    place = whole.index(b'"pandas_type"')
    for damage in (b"\xff", b"}", b"Z"):
        file.write_bytes(whole[: place + 1] + damage + whole[place + 2 :])
        assert len(read_measurements(file).frame) == 8
    for text in (b"latency_s", b"Tesla"):
        file.write_bytes(whole.replace(text, b"\xff\xfe" + text[2:]))
        _refused(file)


def test_any_damage_is_one_line_or_good_rows(tmp_path: Path) -> None:
    dice = random.Random(0)
    file = _file(tmp_path, _linear())
    whole = file.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for trial in range(150):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(footer if trial % 3 else 0, len(whole))] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged if dice.random() < 0.8 else damaged[: dice.randrange(len(damaged))])
        try:
            read_measurements(file)
        except InputError:
            refused += 1
    assert refused > 50


def test_bad_folders(tmp_path: Path) -> None:
    assert "holds no measurements; expected *.parquet or *.csv" in _refused(tmp_path)
    with pytest.raises(InputError, match="no measurements were given"):
        read_measurements([])
    with pytest.raises(InputError, match="unknown on_invalid 'ignore'"):
        read_measurements([tmp_path], on_invalid="ignore")  # type: ignore[arg-type]


def test_model_tables_are_checked(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "end_to_end.csv"
    table = pd.read_csv(folder / "models" / "end_to_end.csv")
    table.loc[1, "e2e_s"] = -1.0
    table.loc[2, "device"] = "Voodoo 2"
    table.to_csv(path, index=False)
    assert "2 of 6 measurement rows are bad" in _refused(tmp_path)
    read = read_measurements(tmp_path, on_invalid="drop")
    assert read.end_to_end is not None
    assert len(read.end_to_end) == 4
    table.drop(columns="mode").to_csv(path, index=False)
    assert "column 'mode' is missing" in _refused(tmp_path)
    path.write_text("")
    assert "not a readable CSV file" in _refused(tmp_path)
    table.iloc[:0].to_csv(path, index=False)
    assert "holds no rows" in _refused(tmp_path)


def test_per_op_table(tmp_path: Path) -> None:
    row = {"device": "T4", "model": "x", "mode": "inf", "sequence_length": 8, "batch_size": 1, "option": ""}
    row |= {"node_index": 0, "name": "linear", "forward_s": 1e-5, "backward_s": 0.0, "accumulate_s": 0.0}
    table = pd.DataFrame([{**row, "total_s": 1e-5, "layer_repeat": 1}] * 2)
    table.to_parquet(tmp_path / "per_op.parquet")
    read = read_measurements(tmp_path)
    assert read.per_op is not None
    assert list(read.per_op["device"]) == [find_device("T4")[0]] * 2
    table.assign(total_s=[1e-5, -1.0]).to_parquet(tmp_path / "per_op.parquet")
    assert "total_s is -1.0, expected seconds of at least 0" in _refused(tmp_path)


def test_read_kernels_keeps_file_order(tmp_path: Path) -> None:
    mixed = pd.concat([_linear(5), synthetic_rows("ln", "Tesla T4", 5), synthetic_rows("add", "Tesla T4", 5)])
    mixed = mixed.sample(frac=1.0, random_state=0)
    table = read_kernels(_file(tmp_path, mixed))
    assert table.num_rows == 15
    assert list(table.families) == ["linear", "elementwise", "norm"]
    batch = table.families["linear"]
    real = batch.row >= 0
    where = np.flatnonzero(mixed["op"] == "linear")
    assert (batch.row[real] == where).all()
    assert (batch.dims["k"][real] == mixed["n"].to_numpy()[where]).all()
    assert (batch.count[real] == 1).all()


def test_csv_is_read_as_parquet_is(tmp_path: Path) -> None:
    """Also in a folder, beside tables of other kinds; sizes that an operator may lack may be empty."""
    mixed = pd.concat([_linear(4).drop(columns="b"), synthetic_rows("ln", "Tesla T4", 4)], ignore_index=True)
    mixed.to_csv(tmp_path / "mine.csv", index=False)
    (tmp_path / "other.csv").write_text("model,tokens\nx,1\n")
    expected = read_measurements(_file(tmp_path / "..", mixed, f"{tmp_path.name}.parquet")).frame
    for path in (tmp_path, tmp_path / "mine.csv"):
        pd.testing.assert_frame_equal(read_measurements(path).frame.drop(columns="file"), expected.drop(columns="file"))
    assert set(expected.loc[expected["op"] == "linear", "batch"]) == {1.0}
    assert read_kernels(tmp_path / "mine.csv").num_rows == 8


def test_gpu_files_stand_among_measurements(tmp_path: Path) -> None:
    path, figures = _file(tmp_path, _linear().assign(device="My GPU X1")), tmp_path / "x1.yaml"
    figures.write_text("name: My GPU X1\nbase: T4\n")
    assert set(read_measurements([path, figures]).frame["device"]) == {"My GPU X1"}
    message = _refused(path)
    assert "as gpu.json beside the measurements or as --gpu-file FILE" in message
    assert "`neusight-jax check --template gpu` prints one" in message


def test_read_kernels_asks_little(tmp_path: Path) -> None:
    frame = _linear()
    for asked in (frame.assign(device="Voodoo 2"), frame.drop(columns="latency_s"), frame.drop(columns="device")):
        assert read_kernels(_file(tmp_path, asked)).num_rows == 8


def test_read_kernels_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"1 of 8 .* \(1 bad dims\)"):
        read_kernels(_file(tmp_path, _linear().assign(m=[0] + [1] * 7).drop(columns="latency_s")))
    with pytest.raises(InputError, match="is a folder, expected one file"):
        read_kernels(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_kernels(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("x")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_kernels(tmp_path / "text.parquet")


def test_many_rows_are_fast(tmp_path: Path) -> None:
    path = _file(tmp_path, synthetic_rows("bmm", "Tesla T4", 100_000))
    read_kernels(path)
    start = time.perf_counter()
    assert read_kernels(path).num_rows == 100_000
    assert time.perf_counter() - start < 3.0  # 0.3 s on an idle machine


def _measured() -> Measurements:
    if not MEASURED.is_dir():
        pytest.skip(f"needs the measurements of the NeuSight authors in {MEASURED}")
    return read_measurements([MEASURED])


def test_measured_rows_are_all_legal() -> None:
    read = _measured()
    assert len(read.frame) == 251722 + 51551
    assert read.frame.loc[read.frame["family"].isin(["linear", "bmm"]), "tile"].notna().all()
    assert read.end_to_end is not None
    assert read.per_op is not None
    assert table_from_frame(read.frame).num_rows == len(read.frame)
