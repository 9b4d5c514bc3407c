"""The cost model against published dies, prices and powers, and by hand."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.designs.cost import CostModel, SiliconCosts, costs_for
from neusight_jax.errors import InputError
from neusight_jax.hardware.gpu import FIELDS

# Whole dies as NVIDIA's whitepapers give them: area mm2, node nm, SMs, fp32 lanes and fp16 matrix FLOP per clock of
# an SM, L2 MiB, and the bandwidth of all memory interfaces on the die, TB/s.
DIES = {
    "GP104": (314.0, 16.0, 20, 128, 0, 2, 0.320),
    "GP100": (610.0, 16.0, 60, 64, 256, 4, 0.732),
    "GV100": (815.0, 12.0, 84, 64, 1024, 6, 0.900),
    "TU104": (545.0, 12.0, 48, 64, 1024, 4, 0.448),
    "TU102": (754.0, 12.0, 72, 64, 1024, 6, 0.672),
    "GA100": (826.0, 7.0, 128, 64, 2048, 48, 1.866),
    "GH100": (814.0, 4.0, 144, 128, 4096, 60, 4.0),
    "AD102": (608.5, 4.0, 144, 128, 1024, 96, 1.008),
}


@pytest.mark.parametrize("die", DIES)
def test_areas_of_published_dies(die: str) -> None:
    """Within 13 %; nothing disabled."""
    area, node, sms, lanes, matrix, l2, memory = DIES[die]
    clock = 1.5e9
    gpu = nj.load_gpu("H100").replace(
        num_sms=float(sms),
        clock_hz=clock,
        process_nm=node,
        l2_bytes=l2 * 2.0**20,
        mem_bytes_per_s=memory * 1e12,
        fp32_flop_per_s=2.0 * sms * lanes * clock,
        fp16_flop_per_s=float(sms * matrix) * clock,
        bf16_flop_per_s=0.0,
    )
    model = dataclasses.replace(SiliconCosts(), enabled_share=1.0)
    assert float(model.area_mm2(gpu)) == pytest.approx(area, rel=0.13)


@pytest.mark.parametrize(("name", "watts"), [("P100", 250), ("V100", 300), ("A100-SXM4-80GB", 400), ("H100", 700)])
def test_power_of_data_centre_gpus(name: str, watts: float) -> None:
    """Cards that are built to run at their peak: board power of the data sheet within 15 %."""
    gpu = nj.load_gpu(name)
    assert float(costs_for(gpu).costs(gpu)["power_w"]) == pytest.approx(watts, rel=0.15)


@pytest.mark.parametrize(("node", "price"), [(16.0, 3984.0), (7.0, 9346.0)])
def test_wafer_prices(node: float, price: float) -> None:
    """CSET 2020, table 9; the model falls as 1/node from 16,988 $ at the 5 nm class."""
    assert float(SiliconCosts().wafer_dollars) * 4.0 / node == pytest.approx(price, rel=0.08)


def test_dollars_by_hand() -> None:
    gpu = nj.load_gpu("H100").replace(mem_bytes=80e9, process_nm=4.0)
    dies = math.pi * 150**2 / 800 - math.pi * 300 / math.sqrt(1600)  # 88.36 − 23.56 = 64.79
    expected = 16988 / (dies * (1 + 0.8 / 3) ** -3) + 12 * 80 + 500
    assert float(SiliconCosts().dollars(gpu, 800.0, 500.0)) == pytest.approx(expected, rel=1e-5)


def test_power_grows_with_the_cube_of_the_clock() -> None:
    """Peaks follow the clock, voltage too: by hand, memory and leakage apart."""
    from neusight_jax.hardware.variant import vary

    base = nj.load_gpu("H100")
    model = dataclasses.replace(costs_for(base), leakage_w_per_mm2=1e-9)
    still = 50e-12 * float(base.mem_bytes_per_s)
    powers = [
        float(model.costs(vary(base, {"clock_hz": factor * float(base.clock_hz)}))["power_w"]) - still
        for factor in (1.0, 1.5)
    ]
    assert powers[1] / powers[0] == pytest.approx(1.5**3, rel=1e-3)


def test_costs_never_fall_with_a_figure_and_differentiate() -> None:
    base = nj.load_gpu("H100")
    model = costs_for(base)
    assert isinstance(model, CostModel)
    floats = jax.tree.map(lambda value: jax.numpy.asarray(value, float), base)
    slopes = jax.jacrev(model.costs)(floats)
    for cost, slope in slopes.items():
        values = np.array([float(getattr(slope, field)) for field in FIELDS])
        assert np.all(np.isfinite(values))
        for field in ("num_sms", "l2_bytes", "mem_bytes_per_s", "mem_bytes"):
            # At fixed peaks more SMs have fewer lanes each: the area of lanes stays.
            assert float(getattr(slope, field)) >= 0.0, (cost, field)
    assert float(slopes["area_mm2"].mem_bytes_per_s) == pytest.approx(25e-12, rel=1e-4)
    assert float(slopes["pin_bit_per_s"].mem_bytes_per_s) == pytest.approx(8 / 5120, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_mm": 1.0}, "unknown cost coefficient 'sm_mm'; nearest: sm_mm2"),
        ({"sm_mm2": -1.0}, "sm_mm2 is -1.0, expected a positive number"),
        ({"sm_mm2": "big"}, "sm_mm2 is 'big', expected a positive number"),
        ({"sm_mm2": True}, "sm_mm2 is True"),
    ],
)
def test_bad_coefficients(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        costs_for(nj.load_gpu("H100"), changes)
