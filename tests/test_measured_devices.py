"""Names of devices mean boards that were measured, wherever a command reads measurements."""

import json
from pathlib import Path

import pandas as pd
import pytest
from refusals import Fails

from neusight_jax.cli import run
from neusight_jax.datasets.devices import measured_device
from neusight_jax.datasets.measurements import find_measured, measured_names, read_measurements
from neusight_jax.errors import InputError
from neusight_jax.model.checkpoint import load_card
from synthetic import synthetic_rows

V100_32, V100_16, V100_SXM = "Tesla V100-PCIE-32GB", "Tesla V100-PCIE-16GB", "Tesla V100-SXM2-16GB"


@pytest.mark.parametrize(
    ("name", "measured", "meant"),
    [
        ("V100", {V100_32, "Tesla T4"}, V100_32),  # the catalog's V100 is the SXM2 board
        ("v100 pcie", {V100_32, V100_16}, V100_32),  # an alias of one of them
        ("V100", {V100_32, V100_SXM}, V100_SXM),
        ("Tesla V100", {V100_16}, V100_16),  # no alias at all
        ("V100-PCIE", {V100_16, "Tesla T4"}, V100_16),
        ("A100", {"NVIDIA A100-PCIE-40GB", "Tesla P100-PCIE-16GB"}, "NVIDIA A100-PCIE-40GB"),
        ("A100", {"NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB"}, "may be NVIDIA A100-PCIE-40GB or NVIDIA A100-SXM"),
        (V100_SXM, {V100_32}, f"{V100_SXM} ('{V100_SXM}') has no rows in the measurements; measured here: {V100_32}"),
        (
            "H100",
            {V100_32, "Tesla T4"},
            "has no rows in the measurements; measured here: Tesla T4, Tesla V100-PCIE-32GB",
        ),
        ("P4", {"Tesla P100-PCIE-16GB"}, "has no rows"),
        ("PCIE", {V100_32}, f"unknown GPU 'PCIE'; measured here: {V100_32}"),
        ("16GB", {V100_16}, "unknown GPU '16GB'"),
        ("bench card", {"bench card", "Tesla T4"}, "bench card"),  # of a gpu.json
        ("", {"Tesla T4"}, "unknown GPU ''"),
    ],
)
def test_which_measured_device_a_name_means(name: str, measured: set[str], meant: str) -> None:
    if meant in measured:
        assert measured_device(name, measured) == meant
        return
    with pytest.raises(InputError) as caught:
        measured_device(name, measured)
    assert meant in str(caught.value)


def test_names_are_those_of_measured_devices(tmp_path: Path) -> None:
    """Reading, holding out and calibrating alike: V100 is the board that was measured, A100 none."""
    rows = pd.concat([synthetic_rows("softmax", name, 12) for name in (V100_32, "Tesla T4")], ignore_index=True)
    rows.to_parquet(tmp_path / "softmax.parquet", index=False)
    assert measured_names([tmp_path]) == {V100_32, "Tesla T4"}
    assert find_measured(["V100", "T4"], [tmp_path]) == [V100_32, "Tesla T4"]
    assert set(read_measurements(tmp_path, devices=["V100"]).frame["device"]) == {V100_32}
    with pytest.raises(
        InputError, match=r"A100.* has no rows in the measurements; measured here: Tesla T4, Tesla V100"
    ):
        read_measurements(tmp_path, devices=["T4", "A100"])


def test_commands_say_which_board_they_take(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    rows = pd.concat([synthetic_rows("softmax", name, 12) for name in (V100_32, "Tesla T4")], ignore_index=True)
    (tmp_path / "measured").mkdir()
    rows.to_parquet(tmp_path / "measured" / "softmax.parquet", index=False)
    measured = ("--measurements", str(tmp_path / "measured"))
    taken = f"note: V100 is taken for {V100_32}, which was measured; {V100_SXM} was not"
    train = ("train", *measured, "--recipe", "li", "--output", str(tmp_path / "li"), "--hold-out")
    for recipe in ("li", "tiny"):
        asked = [recipe if word == "li" else word for word in train]
        assert "has no rows in the measurements; measured here: Tesla T4" in fails(*asked, "H100")
    assert not (tmp_path / "li").exists()
    assert run([*train, "V100"]) == 0
    assert taken in capsys.readouterr().err
    assert load_card(tmp_path / "li")["held_out"] == [V100_32]
    assert run(["evaluate", *measured, "--checkpoint", str(checkpoint), "--device", "V100", "--json"]) == 0
    captured = capsys.readouterr()
    assert {row["device"] for row in json.loads(captured.out)["kernels"]} == {V100_32}
    assert taken in captured.err
    own = ("calibrate", *measured, "--checkpoint", str(checkpoint), "--output", str(tmp_path / "own"), "--gpu")
    assert "measured here: Tesla T4, Tesla V100-PCIE-32GB" in fails(*own, "H100")
    assert run([*own, "V100"]) == 0
    assert load_card(tmp_path / "own")["calibrated"]["gpu"] == V100_32
