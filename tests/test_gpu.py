"""GPU record and catalog."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import message

import neusight_jax as nj
from neusight_jax.arithmetic import DTYPES, PATHS
from neusight_jax.errors import InputError
from neusight_jax.hardware import catalog as gpu_catalog
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu, fold_name, gpu_info, list_gpus
from neusight_jax.hardware.files import load_gpu, load_named_gpu
from neusight_jax.hardware.gpu import FIELDS, GPU, MEMORY_KINDS, VENDORS, check_figure, peak_field, stack_gpus
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.residuals import other_vendor

SHORT_NAMES = [
    "P4",
    "P100",
    "V100",
    "T4",
    "A10",
    "A30",
    "A40",
    "A6000",
    "A100",
    "RTX3090",
    "RTX4090",
    "RTX5090",
    "RTX-6000-Ada",
    "L4",
    "L20",
    "L40",
    "L40S",
    "H20",
    "H800",
    "H100",
    "H200",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "RTX-PRO-6000",
    "MI100",
    "MI210",
    "MI250",
    "MI300X",
    "Arc-B60",
    "A100-40GB",
    "A100-80GB",
    "A100-PCIe",
    "A100-SXM",
    "H100-PCIe",
    "h100_sxm",
    "h200_sxm",
    "b200_sxm",
    "b300_sxm",
    "a100_sxm",
    "rtx_pro_6000_server",
]

MEASUREMENTS = Path(os.environ.get("NEUSIGHT_MEASUREMENTS", Path(__file__).parents[2] / "shared" / "measurements"))

# --- the record ---


def test_every_field_is_a_traced_float():
    leaves = jax.tree.leaves(load_gpu("H100"))
    assert len(leaves) == len(FIELDS) == 27
    assert all(type(leaf) is float for leaf in leaves)
    assert [field for field in FIELDS if field.endswith("flop_per_s")] == [peak_field(path) for path in PATHS]


def test_gradient_with_respect_to_the_gpu():
    gpu = load_gpu("H100")
    grads = jax.jit(jax.grad(lambda g: jnp.log(1e9 / g.mem_bytes_per_s)))(gpu)
    assert isinstance(grads, GPU)
    np.testing.assert_allclose(grads.mem_bytes_per_s * gpu.mem_bytes_per_s, -1.0, rtol=1e-6)
    assert grads.num_sms == 0


def test_a_second_gpu_compiles_nothing_new():
    count = 0

    @jax.jit
    def ratio(gpu):
        nonlocal count
        count += 1
        return gpu.mem_bytes_per_s / gpu.l2_bytes

    for name in ("H100", "P4", "MI250"):
        ratio(load_gpu(name))
    assert count == 1


def test_vmap_over_stacked_gpus():
    names = ["T4", "H100", "MI250"]
    gpus = [load_gpu(name) for name in names]
    stacked = stack_gpus(gpus)
    assert stacked.num_sms.shape == (3,)
    peaks = jax.vmap(GPU.matrix_paths)(stacked)
    assert peaks.shape == (3, len(DTYPES))
    np.testing.assert_array_equal(peaks, jnp.stack([gpu.matrix_paths() for gpu in gpus]))
    np.testing.assert_array_equal(peaks, stacked.matrix_paths())


def test_vmap_over_one_field():
    axes = GPU(**{field: 0 if field == "mem_bytes_per_s" else None for field in FIELDS})
    gpu = load_gpu("H100").replace(mem_bytes_per_s=jnp.array([1e12, 2e12]))
    seconds = jax.vmap(lambda g: 1e12 / g.mem_bytes_per_s, in_axes=(axes,))(gpu)
    np.testing.assert_allclose(seconds, [1.0, 0.5])


def test_stacking_nothing_is_an_error():
    assert "at least one" in message(stack_gpus, [])


def test_matrix_paths_takes_the_fp32_matrix_path_where_there_is_one():
    mi100, h100 = load_gpu("MI100"), load_gpu("H100")
    np.testing.assert_allclose(mi100.matrix_paths()[DTYPES.index("fp32")], 46.1e12, rtol=1e-6)
    np.testing.assert_allclose(h100.matrix_paths()[DTYPES.index("fp32")], h100.fp32_flop_per_s, rtol=1e-6)
    np.testing.assert_allclose(h100.matrix_paths()[DTYPES.index("bf16")], 989.4e12, rtol=1e-6)
    assert h100.matrix_paths()[DTYPES.index("fp4")] == 0
    np.testing.assert_allclose(h100.matrix_paths()[DTYPES.index("fp64")], 66.9e12, rtol=1e-3)
    np.testing.assert_allclose(mi100.matrix_paths()[DTYPES.index("fp64")], 11.5e12, rtol=1e-3)


def test_gradient_of_matrix_paths_goes_to_the_path_in_use():
    fp32 = jax.jit(jax.grad(lambda gpu: gpu.matrix_paths()[DTYPES.index("fp32")]))
    assert (fp32(load_gpu("H100")).fp32_flop_per_s, fp32(load_gpu("H100")).fp32_matrix_flop_per_s) == (1.0, 0.0)
    assert (fp32(load_gpu("MI100")).fp32_flop_per_s, fp32(load_gpu("MI100")).fp32_matrix_flop_per_s) == (0.0, 1.0)


def test_paths_and_peaks():
    assert load_gpu("V100").paths == ("fp32", "fp16", "fp64")
    assert load_gpu("H100").peak_flop_per_s("fp8") == 1978.9e12
    text = message(load_gpu("V100").peak_flop_per_s, "fp8")
    assert text == "this GPU has no arithmetic path 'fp8'; expected one of fp32, fp16, fp64"
    assert "'fp12'" in message(load_gpu("V100").peak_flop_per_s, "fp12")


def test_hypothetical_gpu():
    h100 = load_gpu("H100")
    wider = h100.replace(mem_bytes_per_s=4.8e12, num_sms=160)
    assert (wider.mem_bytes_per_s, wider.num_sms, wider.clock_hz) == (4.8e12, 160.0, h100.clock_hz)
    assert type(wider.num_sms) is float
    assert h100.mem_bytes_per_s == 3.35e12
    with pytest.raises(InputError, match=r"a GPU has no field 'bandwidth'; expected one of num_sms, clock_hz"):
        h100.replace(bandwidth=1e12)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("mem_bytes_per_s", math.nan, "GPU: mem_bytes_per_s is nan, expected a finite number, 1e10 to 1e14"),
        ("l2_bytes", math.inf, "GPU: l2_bytes is inf, expected a finite number, 1e5 to 1e10"),
        ("tdp_w", 0.0, "GPU: tdp_w is 0, expected a positive number, 5 to 1e5"),
        ("fp32_flop_per_s", 0.0, "GPU: fp32_flop_per_s is 0, expected a positive number, 1e10 to 1e17"),
        (
            "fp8_flop_per_s",
            -1.0,
            "GPU: fp8_flop_per_s is -1, expected a positive number, 1e10 to 1e19, or 0 for a path the chip lacks",
        ),
    ],
)
def test_a_figure_out_of_range(field, value, expected):
    assert message(check_figure, field, value, "GPU") == expected


def believable(gpu, where):
    for field in FIELDS:
        check_figure(field, float(getattr(gpu, field)), where)


# --- the catalog ---


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_short_names(name):
    believable(load_gpu(name), name)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 sxm", "NVIDIA H100 80GB HBM3"),
        ("nvidia_h100-sxm", "NVIDIA H100 80GB HBM3"),
        ("v100_pcie", "Tesla V100-PCIE-32GB"),
        ("V100", "Tesla V100-SXM2-16GB"),
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("mi250", "AMD Instinct MI250"),
        ("A10G", "NVIDIA A10G"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("GH200", "NVIDIA GH200 480GB"),
        ("gh200 144gb", "NVIDIA GH200 144G HBM3e"),
        ("RTX 3080", "NVIDIA GeForce RTX 3080"),
        ("MI325X", "AMD Instinct MI325X"),
        ("mi355x", "AMD Instinct MI355X"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "Intel Arc Pro B60"),
    ],
)
def test_aliases(name, canonical):
    assert canonical_name(name) == canonical
    assert load_named_gpu(name) == (canonical, catalog_gpu(canonical))


def test_no_alias_is_ambiguous():
    owner: dict[str, str] = {}
    for name in list_gpus():
        for known in (name, *gpu_info(name).aliases):
            assert owner.setdefault(fold_name(known), name) == name, known


def test_unknown_gpu_offers_the_nearest():
    text = message(load_gpu, "H1000")
    assert text.startswith("unknown GPU 'H1000'; nearest: H100")
    assert "`neusight-jax gpus` lists all; or give a JSON or YAML file with its figures" in text
    assert canonical_name("H1000") is None
    assert "unknown GPU ''" in message(load_gpu, "")
    assert "unknown GPU 'X1'" in message(gpu_info, "X1")


def test_kinds_of_memory():
    """Pascal's first HBM is a kind of its own, and so is another vendor's."""
    kinds = ("V100", "A100-80GB", "H100", "T4", "P4", "L4", "RTX 4090", "P100", "MI210")
    found = [MEMORY_KINDS[int(load_gpu(name).memory_kind)] for name in kinds]
    assert found == [*["hbm"] * 3, *["gddr_ecc"] * 3, "gddr", "pascal hbm", "AMD hbm"]


@pytest.mark.parametrize("name", list_gpus())
def test_catalog_entry(name):
    gpu, info = catalog_gpu(name), gpu_info(name)
    believable(gpu, name)
    assert info.vendor in VENDORS
    assert VENDORS[int(gpu.vendor)] == info.vendor
    assert info.architecture
    entry = gpu_catalog._entries()[name]
    assert set(entry) - set(FIELDS) - {"base_clock_hz"} == {
        "aliases",
        "architecture",
        "memory",
        "lanes_per_sm",
        "sources",
        "estimates",
    }
    said = info.sources["mem_bytes"]  # "16 GB GDDR6 = 16 GiB, less 1/16 for ECC: 15 GiB shown by the driver"
    by_text = (
        "hbm"
        if "HBM" in said
        else "gddr_ecc"
        if "for ECC" in said
        else "gddr"
        if "GDDR" in said
        else "lpddr"
        if "LPDDR" in said
        else None
    )
    assert info.memory == (by_text or "hbm")  # GB300 says how its size was estimated
    assert by_text or name == "NVIDIA GB300"
    figures = {field for field in entry if field in FIELDS}
    assert set(info.sources) == figures | {"lanes_per_sm"} | ({"base_clock_hz"} & set(entry))
    assert 0.25 * float(gpu.clock_hz) < entry.get("base_clock_hz", gpu.clock_hz) <= gpu.clock_hz
    assert all(isinstance(source, str) and len(source) > 5 for source in info.sources.values())
    assert set(info.estimates) <= figures
    assert all(re.search("estimate|reported", info.sources[field]) for field in info.estimates)
    assert not any("estimate" in info.sources[field] for field in figures - set(info.estimates))


@pytest.mark.parametrize("name", list_gpus())
def test_fp32_peak_is_sms_times_lanes_times_two_times_clock(name):
    gpu, info = catalog_gpu(name), gpu_info(name)
    derived = gpu.num_sms * info.lanes_per_sm * 2 * gpu.clock_hz
    tolerance = 0.15 if "fp32_flop_per_s" in info.estimates else 0.02  # H20: reported peak and clock disagree
    assert gpu.fp32_flop_per_s == pytest.approx(derived, rel=tolerance)


@pytest.mark.parametrize("name", list_gpus())
def test_peaks_of_a_chip_agree_with_each_other(name):
    gpu = catalog_gpu(name)
    peak = {path: gpu.peak_flop_per_s(path) for path in gpu.paths}
    if "bf16" in peak:
        assert peak["fp16"] / peak["bf16"] == pytest.approx(2.0 if name == "AMD Instinct MI100" else 1.0, rel=0.01)
    if "tf32" in peak:
        assert peak["bf16"] / peak["tf32"] == pytest.approx(2.0, rel=0.03)
    if "fp8" in peak:
        assert peak["fp8"] / peak["bf16"] == pytest.approx(2.0, rel=0.03)
    if "fp4" in peak:
        assert 1.9 < peak["fp4"] / peak["fp8"] < 4.1
    if "fp32_matrix" in peak:
        assert 1.0 <= peak["fp32_matrix"] / peak["fp32"] <= 2.1
    assert all(value >= 0.99 * peak["fp32"] for path, value in peak.items() if not path.startswith("fp64"))
    if "fp64" in peak:
        assert 1 / 68 < peak["fp64"] / peak["fp32"] <= 1.0
    if "fp64_matrix" in peak:
        assert 0.99 <= peak["fp64_matrix"] / peak["fp64"] <= 2.02


def test_facts_that_other_sheets_have_wrong():
    assert load_gpu("P4").num_sms == 20
    assert (load_gpu("L4").num_sms, load_gpu("L4").l2_bytes) == (58, 48 * 2**20)
    assert load_gpu("MI210").l2_bytes == load_gpu("MI250").l2_bytes == 8 * 2**20
    assert (load_gpu("MI250").num_sms, load_gpu("MI250").mem_bytes) == (104, 64 * 2**30)
    assert load_gpu("H100").mem_bytes_per_s == 3.35e12
    # AWS's card is another one than A10: more SMs, whose tensor cores do half as much a clock.
    a10, a10g = load_gpu("A10"), load_gpu("A10G")
    assert (a10.num_sms, a10g.num_sms) == (72, 80)
    rates = [gpu.fp16_flop_per_s / (gpu.num_sms * gpu.clock_hz) for gpu in (a10, a10g)]
    assert rates == pytest.approx([1024, 512], rel=0.01)
    # Hopper's matrix units do 4096 FLOP a clock; the sheet of H100 NVL counts them at less than its boost clock.
    nvl = load_gpu("H100 NVL")
    assert 0.8 < nvl.fp16_flop_per_s / (132 * 4096 * nvl.clock_hz) < 1.0
    # CDNA 4 doubles the 16-bit rate of a CU, and has no tf32.
    old, new = load_gpu("MI325X"), load_gpu("MI355X")
    assert new.bf16_flop_per_s / (256 * new.clock_hz) == pytest.approx(
        2 * old.bf16_flop_per_s / (304 * old.clock_hz), 0.01
    )
    assert "tf32" in old.paths
    assert "tf32" not in new.paths


def test_catalog_agrees_with_the_measured_devices():
    sheet = MEASUREMENTS / "fp32" / "gpus.json"
    if not sheet.exists():
        pytest.skip(f"no measurements folder at {MEASUREMENTS}")
    devices = {name: row for name, row in json.loads(sheet.read_text()).items() if "note" not in row}
    for name, row in devices.items():
        gpu = catalog_gpu(name)
        assert gpu.mem_bytes_per_s == pytest.approx(row["memory_bandwidth_gb_per_s"] * 1e9, rel=0.03)
        assert gpu.mem_bytes == pytest.approx(row["memory_size_gb"] * 2**30, rel=0.07)
        assert gpu.clock_hz == pytest.approx(row["clock_mhz"] * 1e6, rel=0.04)
        peak = row.get("peak_fp32_gflop_per_s", row.get("peak_fp32_vector_gflop_per_s"))
        assert gpu.fp32_flop_per_s == pytest.approx(peak * 1e9, rel=0.04)


@pytest.mark.parametrize("peak", [1e10, 1e12])
def test_a_slow_matrix_path_changes_nothing(peak: float) -> None:
    """fp32 products take the faster path: 10 GFLOP/s beside 14 TFLOP/s neither hold them up nor make another vendor's
    GPU of it."""
    graph, v100 = nj.graph_from_config("gpt2", batch_size=1, sequence_length=64), nj.load_gpu("V100-PCIE-32GB")
    predictor = nj.load_predictor("fp32")
    now, then = (nj.predict(predictor, gpu, graph) for gpu in (v100, v100.replace(fp32_matrix_flop_per_s=peak)))
    assert then.total_s == pytest.approx(now.total_s, rel=1e-6)
    assert then.interval_s == pytest.approx(now.interval_s, rel=1e-6)


def test_the_vendor_is_said_and_not_inferred() -> None:
    """Intel's GPUs run neither the default libraries nor have an fp32 matrix path to be known by."""
    said = {name: bool(other_vendor(load_gpu(name))) for name in ("H100", "P4", "MI250", "MI300X", "Arc Pro B60")}
    assert said == {"H100": False, "P4": False, "MI250": True, "MI300X": True, "Arc Pro B60": True}
    assert not other_vendor(load_gpu("H100").replace(fp32_matrix_flop_per_s=1e14))
    assert other_vendor(load_gpu("MI250").replace(fp32_matrix_flop_per_s=0.0))
    stacked = stack_gpus([load_gpu("T4"), load_gpu("MI250")])
    assert other_vendor(stacked).tolist() == [False, True]


def test_the_width_of_matrix_units_follows_the_peaks() -> None:
    """A new 16-bit peak makes them wider, so that energy is that of a GPU given with all its figures; SMs and clocks at
    fixed peaks do not, and a width that is said stays."""
    h100 = load_gpu("H100")
    width, peak = h100.matrix_flop_per_cycle, h100.bf16_flop_per_s
    twice = {"bf16_flop_per_s": 2 * peak, "fp16_flop_per_s": 2 * peak}
    assert h100.replace(**twice).matrix_flop_per_cycle == pytest.approx(2 * width)
    assert h100.replace(**twice, num_sms=264).matrix_flop_per_cycle == pytest.approx(width)
    assert vary_plainly(h100, twice).matrix_flop_per_cycle == pytest.approx(2 * width, rel=1e-6)
    assert h100.replace(**twice, matrix_flop_per_cycle=512.0).matrix_flop_per_cycle == 512.0
    for same in ({"num_sms": 264}, {"clock_hz": 1e9}, {"fp8_flop_per_s": 1e15}):
        assert h100.replace(**same).matrix_flop_per_cycle == width
    assert vary_plainly(h100, {"num_sms": 264.0}).matrix_flop_per_cycle == pytest.approx(width)
    p4 = load_gpu("P4").replace(bf16_flop_per_s=1e14)
    assert p4.matrix_flop_per_cycle == pytest.approx(1e14 / (p4.num_sms * p4.clock_hz))


def test_slopes_of_a_peak_have_its_energy() -> None:
    """L4 is bound by its power: slopes through `replace` are those of finite differences, energy of a FLOP included."""
    gpu, predictor = load_gpu("L4"), nj.load_predictor("tensorcore")
    sizes = {"batch": 1.0, "m": 8192.0, "n": 8192.0, "k": 8192.0}
    kernels = table_from_kernels([Kernel("gemm", "linear", sizes, dtype="bf16")])

    def log_seconds(log_more: Any) -> Any:
        more = {name: getattr(gpu, name) * jnp.exp(log_more) for name in ("bf16_flop_per_s", "fp16_flop_per_s")}
        return jnp.log(nj.latency(predictor, gpu.replace(**more), kernels))

    slope = float(jax.grad(log_seconds)(0.0))
    step = 0.02
    assert slope == pytest.approx(float(log_seconds(step) - log_seconds(-step)) / (2 * step), rel=0.02)
    alone = jax.grad(nj.latency, argnums=1)(predictor, gpu, kernels)
    seconds = float(nj.latency(predictor, gpu, kernels))
    held = sum(getattr(alone, name) * getattr(gpu, name) for name in ("bf16_flop_per_s", "fp16_flop_per_s")) / seconds
    fed = float(alone.matrix_flop_per_cycle) * gpu.matrix_flop_per_cycle / seconds
    assert fed < -0.1
    assert slope == pytest.approx(float(held) + fed, rel=1e-3)
