"""GPU files of the user and the importer of reference device files."""

import json
import math
from pathlib import Path

import pytest
from refusals import message

from neusight_jax.hardware.files import load_gpu, load_named_gpu
from neusight_jax.hardware.gpu import GPU, MEMORY_KINDS, REQUIRED_FIELDS, VENDORS

H100_FIELDS = {
    "num_sms": 132,
    "clock_hz": 1.98e9,
    "mem_bytes_per_s": 3.35e12,
    "mem_bytes": 8.59e10,
    "l2_bytes": 5.2e7,
    "tdp_w": 700,
    "link_bytes_per_s": 4.5e11,
    "process_nm": 4,
    "fp32_flop_per_s": 6.69e13,
}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- files of the user ---


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_user_file(tmp_path, suffix):
    path = write(tmp_path / f"mine{suffix}", {"name": "Mine", **H100_FIELDS, "fp8_flop_per_s": 0})
    name, gpu = load_named_gpu(str(path))
    assert name == "Mine"
    assert gpu == GPU(**{field: float(value) for field, value in H100_FIELDS.items()})
    assert load_gpu(path) == gpu


@pytest.mark.parametrize(
    ("said", "vendor"),
    [
        ({}, "NVIDIA"),
        ({"fp32_matrix_flop_per_s": 1e14}, "NVIDIA"),
        ({"vendor": "amd"}, "AMD"),
        ({"vendor": "Intel", "architecture": "cdna3"}, "Intel"),
        ({"architecture": "cdna3"}, "AMD"),
        ({"architecture": "hopper2", "name": "AMD Instinct MI999"}, "AMD"),
        ({"base": "MI250"}, "AMD"),
        ({"base": "MI250", "vendor": "NVIDIA"}, "NVIDIA"),
    ],
)
def test_vendor_of_a_file(tmp_path: Path, said: dict[str, object], vendor: str) -> None:
    """Its own word, or that of its architecture, base or name; never guessed from a peak."""
    gpu = load_gpu(write(tmp_path / "mine.json", {**H100_FIELDS, **said}))
    assert VENDORS[int(gpu.vendor)] == vendor


def test_names_of_figures(tmp_path: Path) -> None:
    gpu = load_gpu(write(tmp_path / "mine.json", {**H100_FIELDS, "memory_kind": "gddr_ecc"}))
    assert MEMORY_KINDS[int(gpu.memory_kind)] == "gddr_ecc"
    sheet = {"Device": "X", "Num_Sm": 80, "Clock": 1500, "Vendor": "Nvida"}
    for content in ({**H100_FIELDS, "vendor": "Nvida"}, sheet):
        text = message(load_gpu, write(tmp_path / "mine.json", content))
        assert text == "mine.json: vendor is 'Nvida', expected one of NVIDIA, AMD, Intel, other"


def test_yaml_reads_a_plain_exponent_as_a_number(tmp_path):
    path = write(tmp_path / "next.yaml", "base: h100_sxm\nmem_bytes_per_s: 8e12\nclock_hz: 2.1e9\ntdp_w: 1e+3\n")
    name, gpu = load_named_gpu(path)
    expected = load_gpu("H100").replace(mem_bytes_per_s=8e12, clock_hz=2.1e9, tdp_w=1000.0)
    assert (name, gpu) == ("next", expected)


def test_figures_with_units(tmp_path: Path) -> None:
    """As on a command line: bandwidth, clock, sizes, power and peaks, with a space or without."""
    given = {"mem_bytes_per_s": "3.35TB/s", "clock_hz": "1.8 GHz", "mem_bytes": "80GiB", "tdp_w": "0.7kW"}
    given |= {"l2_bytes": "50 MiB", "fp8_flop_per_s": "1979 TFLOP/s", "process_nm": "4nm", "num_sms": "132"}
    gpu = load_gpu(write(tmp_path / "mine.yaml", {**H100_FIELDS, **given}))
    assert (gpu.mem_bytes_per_s, gpu.clock_hz, gpu.mem_bytes, gpu.tdp_w) == (3.35e12, 1.8e9, 80 * 2**30, 700.0)
    assert (gpu.l2_bytes, gpu.fp8_flop_per_s, gpu.process_nm, gpu.num_sms) == (50 * 2**20, 1.979e15, 4.0, 132.0)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("mem_bytes_per_s", 3350, "is 3350, expected 1e10 to 1e14; this looks like GB/s, multiply by 1e9"),
        ("mem_bytes_per_s", 3.35, "is 3.35, expected 1e10 to 1e14; this looks like TB/s, multiply by 1e12"),
        ("clock_hz", 1980, "is 1980, expected 1e8 to 1e10; this looks like MHz, multiply by 1e6"),
        ("clock_hz", 1.98, "is 1.98, expected 1e8 to 1e10; this looks like GHz, multiply by 1e9"),
        ("fp32_flop_per_s", 66.9, "is 66.9, expected 1e10 to 1e17; this looks like TFLOP/s, multiply by 1e12"),
        ("fp32_flop_per_s", 66908, "is 66908, expected 1e10 to 1e17; this looks like GFLOP/s, multiply by 1e9"),
        ("fp32_flop_per_s", 5699, "is 5699, expected 1e10 to 1e17; this looks like GFLOP/s, multiply by 1e9"),
        ("bf16_flop_per_s", 989, "is 989, expected 1e10 to 1e19; this looks like TFLOP/s, multiply by 1e12"),
        ("fp4_flop_per_s", 9, "is 9, expected 1e10 to 1e19; this looks like PFLOP/s, multiply by 1e15"),
        ("mem_bytes", 80, "is 80, expected 1e9 to 1e14; this looks like GB or GiB, multiply by 1e9 or 1073741824"),
        ("mem_bytes", 81920, "is 81920, expected 1e9 to 1e14; this looks like MiB, multiply by 1048576"),
        ("l2_bytes", 50, "is 50, expected 1e5 to 1e10; this looks like MB, multiply by 1048576"),
        ("link_bytes_per_s", 450, "is 450, expected 1e8 to 1e14; this looks like GB/s, multiply by 1e9"),
        ("tdp_w", 0.7, "is 0.7, expected 5 to 1e5; this looks like kW, multiply by 1e3"),
        ("process_nm", 7e-9, "is 7e-9, expected 0.1 to 200; this looks like metres, multiply by 1e9"),
        ("num_sms", 1e9, "is 1e9, expected 1 to 1e5; check its unit"),
        ("num_sms", 0, "is 0, expected a positive number, 1 to 1e5"),
        ("clock_hz", -1.98e9, "is -1.98e9, expected a positive number, 1e8 to 1e10"),
        ("clock_hz", math.nan, "is nan, expected a finite number, 1e8 to 1e10"),
        ("clock_hz", math.inf, "is inf, expected a finite number, 1e8 to 1e10"),
        ("clock_hz", 10**400, "is inf, expected a finite number, 1e8 to 1e10"),
        ("clock_hz", "fast", "is 'fast', expected a number in base units, e.g. 1.98e9 or 1.98 GHz"),
        ("clock_hz", "3 TB/s", "is '3 TB/s', in B/s, expected Hz, e.g. 1.98e9 or 1.98 GHz"),
        ("clock_hz", "1.98THz", "is 1.98e12, expected 1e8 to 1e10; check its unit"),
        ("num_sms", "132GHz", "is '132GHz', in Hz, expected a number without a unit, e.g. 132"),
        ("clock_hz", True, "is True, expected a number in base units, e.g. 1.98e9 or 1.98 GHz"),
        ("clock_hz", None, "is empty, expected a number in base units, e.g. 1.98e9 or 1.98 GHz"),
        ("clock_hz", [1e9], "is [1000000000.0], expected a number in base units, e.g. 1.98e9 or 1.98 GHz"),
    ],
)
def test_bad_figure(tmp_path, field, value, expected):
    path = write(tmp_path / "h100.json", {**H100_FIELDS, field: value})
    assert message(load_gpu, path) == f"h100.json: {field} {expected}"


def test_bad_files(tmp_path):
    gone = tmp_path / "gone.json"
    expected = "expected a GPU file in JSON or YAML; `neusight-jax gpus` lists names of the catalog"
    for path in (str(gone), "gone.yml", "some/where"):
        assert message(load_gpu, path) == f"{path}: no such file; {expected}"
    assert message(load_gpu, tmp_path) == f"{tmp_path} is a folder, {expected}"
    text = message(load_gpu, write(tmp_path / "a.json", "{num_sms: 132"))
    assert "a.json: not JSON: Expecting property name" in text
    assert text.endswith("; mend the syntax")
    text = message(load_gpu, write(tmp_path / "a.yaml", "num_sms: 132\nclock_hz: [1"))
    assert "a.yaml: not YAML: " in text
    assert "line" in text
    text = message(load_gpu, write(tmp_path / "b.json", [1, 2]))
    assert text == f"{tmp_path}/b.json: holds a list, expected a mapping of names to figures: {expected[9:]}"
    text = message(load_gpu, write(tmp_path / "b.yaml", ""))
    assert "b.yaml: holds nothing, expected a mapping of names to figures" in text
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in message(load_gpu, tmp_path / "c.json")


def test_figures_under_the_name_of_their_device(tmp_path: Path) -> None:
    """One device under its name is read as that device, in either layout; several are one line."""
    path = tmp_path / "mine.json"
    for figures in (H100_FIELDS, {"base": "H100", "clock_hz": 1.5e9}, P4_SHEET):
        nested = load_named_gpu(write(path, {"MyGPU": {**figures}}))
        assert nested == load_named_gpu(write(path, {"name": "MyGPU", **figures}))
    assert load_named_gpu(write(path, {"MyGPU": {**H100_FIELDS, "name": "Other"}}))[0] == "Other"
    assert message(load_gpu, write(path, {"A": H100_FIELDS, "B": P4_SHEET})) == (
        "mine.json: holds 2 devices, 'A', 'B'; give each device a file of its own"
    )
    assert "mine.json: missing num_sms" in message(load_gpu, write(path, {"A": {}}))


def test_unknown_and_missing_fields(tmp_path):
    path = tmp_path / "d.json"
    text = message(load_gpu, write(path, {**H100_FIELDS, "mem_byte_per_s": 1e12}))
    assert text == "d.json: unknown field 'mem_byte_per_s'; nearest: mem_bytes_per_s"
    assert "unknown field 'zzz'; expected one of name, base, architecture, num_sms" in message(
        load_gpu, write(path, {**H100_FIELDS, "zzz": 1})
    )
    few = {field: value for field, value in H100_FIELDS.items() if field not in ("tdp_w", "clock_hz")}
    text = message(load_gpu, write(path, few))
    hint = "add the figures, or `base` with the name of a GPU to take them from"
    assert text == f"d.json: missing clock_hz, tdp_w; {hint}"
    assert "d.json: missing num_sms" in message(load_gpu, write(path, {}))
    assert "d.json: base: unknown GPU 'H1O0'" in message(load_gpu, write(path, {"base": "H1O0"}))
    assert set(REQUIRED_FIELDS) == set(H100_FIELDS)


# --- device files of the NeuSight repository ---

P4_SHEET = {
    "Device": "Tesla P4",
    "Vendor": "NVIDIA",
    "Dev_Mem": 8,
    "Mem_Bw": 192,
    "Num_Sm": 40,
    "Cores_Per_Sm": 64,
    "Clock": 1113,
    "L2Cache": 2,
    "SingleFLOPs": 5699,
}


def test_reference_sheet_with_a_known_slip(tmp_path):
    path = write(tmp_path / "P4.json", P4_SHEET)
    name, gpu = load_named_gpu(path)
    assert name == "Tesla P4"
    assert (gpu.num_sms, gpu.fp32_flop_per_s, gpu.mem_bytes_per_s) == (20.0, 5699e9, 192e9)
    assert (gpu.mem_bytes, gpu.l2_bytes, gpu.clock_hz) == (8 * 2**30, 2 * 2**20, 1.113e9)
    assert gpu.tdp_w == load_gpu("P4").tdp_w


def test_reference_sheet_of_l4_and_of_amd(tmp_path):
    l4 = {"device": "NVIDIA L4", "NUM_SM": 60, "single_flops": 31334, "mem bw": 300, "freq": 2040, "l2_cache": 48}
    gpu = load_named_gpu(write(tmp_path / "l4.json", l4))[1]
    assert (gpu.num_sms, gpu.fp32_flop_per_s, gpu.clock_hz) == (58.0, 30.29e12, 2.04e9)
    assert gpu.mem_bytes == load_gpu("L4").mem_bytes
    amd = {
        "Device": "AMD Instinct MI210",
        "Num_Sm": 104,
        "SingleFLOPsMM": 45300,
        "SingleFLOPsVEC": 22600,
        "L2Cache": 16,
    }
    gpu = load_gpu(write(tmp_path / "mi210.json", amd))
    assert (gpu.fp32_flop_per_s, gpu.fp32_matrix_flop_per_s, gpu.l2_bytes) == (22.6e12, 45.3e12, 8 * 2**20)


def test_sheet_in_snake_case_with_ghz(tmp_path):
    sheet = {
        "device": "NVIDIA A100-SXM4-40GB",
        "memory_size_gb": 40,
        "memory_bandwidth_gb_per_s": 1500,
        "number_of_sms": 108,
        "cores_per_sm": 64,
        "clock_mhz": 1.41,
        "l2_cache_mb": 40,
        "peak_fp32_gflop_per_s": 19492,
    }
    gpu = load_gpu(write(tmp_path / "a100.json", sheet))
    assert gpu.mem_bytes_per_s == 1.5e12
    assert gpu.clock_hz == pytest.approx(1.41e9)
    assert gpu.link_bytes_per_s == load_gpu("A100-SXM4-40GB").link_bytes_per_s


def test_reference_sheet_of_a_device_outside_the_catalog(tmp_path):
    path = tmp_path / "x1.json"
    sheet = {**P4_SHEET, "Device": "X1"}
    text = message(load_named_gpu, write(path, sheet))
    assert text == "x1.json: 'X1' is not in the GPU catalog and the file has no tdp_w; add tdp_w"
    name, gpu = load_named_gpu(write(path, {**sheet, "tdp_w": 75, "link_bytes_per_s": 16e9, "process_nm": 16}))
    assert (name, gpu.num_sms, gpu.tdp_w) == ("X1", 40.0, 75.0)
    del sheet["L2Cache"]
    assert message(load_gpu, write(path, sheet)).endswith("the file has no l2_bytes; add L2Cache (MB)")


def test_bad_reference_sheets(tmp_path):
    path = tmp_path / "p4.json"
    text = message(load_named_gpu, write(path, {**P4_SHEET, "SingleFLOPs": 1_979_000}))
    assert text.startswith("p4.json: the fp32 peak is 1979000 GFLOP/s but SMs x cores x 2 x clock is 5699;")
    assert "p4.json: Mem_Bw is '192 GB/s', expected a number in GB/s" in message(
        load_named_gpu, write(path, {**P4_SHEET, "Mem_Bw": "192 GB/s"})
    )
    assert "p4.json: l2_bytes is nan" in message(load_named_gpu, write(path, {**P4_SHEET, "L2Cache": math.nan}))
    assert "p4.json: mem_bytes_per_s is 1.92e20, expected" in message(
        load_named_gpu, write(path, {**P4_SHEET, "Mem_Bw": 192e9})
    )
    assert "p4.json: holds a list" in message(load_named_gpu, write(path, [1]))
    assert "p4.json: not JSON" in message(load_named_gpu, write(path, "{"))
    assert "no such file" in message(load_named_gpu, tmp_path / "gone.json")
    assert "is a folder" in message(load_named_gpu, tmp_path)
