"""Costs of a machine: die area, power, dollars, signalling rate per memory pin. Differentiable and replaceable.

A cost model is any pytree with `costs(gpu) -> {name_with_unit: scalar}`; `SiliconCosts` is the one that ships. It is a
first-order model for comparing designs of one kind, not a quotation: every coefficient is a field, so that a user who
knows better replaces it (`dataclasses.replace`, or `--costs FILE`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.arithmetic import DTYPES
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.model.physics import STANDARD
from neusight_jax.model.roofline import joule_per_flop
from neusight_jax.units import GB, MIB, TERA

LANES = 128.0
"""Lanes of the reference SM."""
MATRIX_FLOP_PER_CYCLE = 4096.0
"""fp16 matrix FLOP per clock of the reference SM (GH100)."""
NODE_NM = 4.0
"""Process of the area and wafer coefficients, nm."""
WAFER_MM = 300.0
"""Diameter of a wafer, mm."""


@runtime_checkable
class CostModel(Protocol):
    """Interface that a search asks of a cost model: a pytree with this method."""

    def costs(self, machine: Machine, /) -> dict[str, Float[Array, ""]]:
        """Costs of one GPU, of a cluster with its share of links and network, by names that carry their unit."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SiliconCosts:
    """Area, power and dollars from the figures of a GPU.

    Area: at `NODE_NM`, an SM is sm_mm2 + lane_mm2 · lanes/128 + matrix_mm2 · matrix FLOP per clock/4096; areas but the
    memory interface's grow with the node. The four SM and uncore figures are a least-squares fit (relative) to the
    published areas of eight full dies, from NVIDIA's architecture whitepapers: GP100 610 mm2, GP104 314, GV100 815,
    TU102 754, TU104 545, GA100 826, AD102 608.5, GH100 814; it meets them within 13 % (tests/test_design_cost.py). L2
    and the memory interface are priors of that fit: SRAM at about three times the 0.021 um2 bit cell (TSMC N5, ISSCC
    2020), HBM interface about 25 mm2 per TB/s.

    Power: the energies of the forecast's arithmetic and traffic (`roofline`: FLOP by node, bytes; not what feeding
    narrow matrix units adds, which boards leave to throttling), all lanes busy at the clock, with energy growing as the
    square of the clock over `nominal_clock_hz` because voltage follows frequency (P = C·V²·f), plus leakage by area.

    Dollars: wafer price over good dies, memory by size, board by power. Wafer price 16,988 $ at the 5 nm class, falling
    as 1/node (Khan and Mann, "AI Chips: What They Are and Why They Matter", CSET 2020: 7 nm 9,346 $, 16 nm 3,984 $);
    dies per wafer as de Vries, IEEE Trans. Semiconductor Manufacturing 2005; yield as the negative binomial of
    Cunningham, same journal, 1990, at 0.1 defects/cm2. Memory and board are estimates.

    Links and network of a cluster, per GPU and rate in one direction: switches, cables, adapters, transceivers and
    ports; all four figures are estimates. The die's own end of the links is in its uncore.

    Attributes:
      sm_mm2, lane_mm2, matrix_mm2, uncore_mm2: area of an SM without lanes, its lanes, its matrix unit; of the rest.
      l2_mm2_per_mib: area of 1 MiB of L2.
      memory_mm2_per_tb_per_s: memory interface; it does not shrink with the node.
      enabled_share: SMs and L2 in use over those on the die; the rest are spares.
      nominal_clock_hz: clock of the voltage the energies hold at.
      leakage_w_per_mm2: power of an idle mm2.
      wafer_dollars: price of a wafer at `NODE_NM`.
      defects_per_mm2, defect_clustering: of the yield.
      memory_dollars_per_gb: of device memory.
      board_dollars_per_w: power delivery and cooling.
      memory_pins: data pins to memory (five HBM stacks of 1024).
      link_dollars_per_gb_per_s, nic_dollars_per_gb_per_s, link_w_per_gb_per_s, nic_w_per_gb_per_s: of a cluster.
    """

    sm_mm2: ArrayLike = 1.75
    lane_mm2: ArrayLike = 1.03
    matrix_mm2: ArrayLike = 2.06
    uncore_mm2: ArrayLike = 20.9
    l2_mm2_per_mib: ArrayLike = 0.6
    memory_mm2_per_tb_per_s: ArrayLike = 25.0
    enabled_share: ArrayLike = 0.9
    nominal_clock_hz: ArrayLike = 1.7e9
    leakage_w_per_mm2: ArrayLike = 0.05
    wafer_dollars: ArrayLike = 16988.0
    defects_per_mm2: ArrayLike = 0.001
    defect_clustering: ArrayLike = 3.0
    memory_dollars_per_gb: ArrayLike = 12.0
    board_dollars_per_w: ArrayLike = 1.0
    memory_pins: ArrayLike = 5120.0
    link_dollars_per_gb_per_s: ArrayLike = 5.0
    nic_dollars_per_gb_per_s: ArrayLike = 80.0
    link_w_per_gb_per_s: ArrayLike = 0.1
    nic_w_per_gb_per_s: ArrayLike = 1.4

    def costs(self, machine: Machine) -> dict[str, Float[Array, ""]]:
        """area_mm2, power_w, dollars and pin_bit_per_s of one GPU, of a cluster with its links and network."""
        gpu = gpu_of(machine)
        area = self.area_mm2(gpu)
        power = self.power_w(gpu, area)
        dollars = self.dollars(gpu, area, power)
        if isinstance(machine, Cluster):
            joined = machine.topology
            link, nic = (jnp.asarray(rate) / GB for rate in (joined.link_bytes_per_s, joined.nic_bytes_per_s))
            power = power + self.link_w_per_gb_per_s * link + self.nic_w_per_gb_per_s * nic
            dollars = dollars + self.link_dollars_per_gb_per_s * link + self.nic_dollars_per_gb_per_s * nic
        return {
            "area_mm2": area,
            "power_w": power,
            "dollars": dollars,
            "pin_bit_per_s": 8.0 * jnp.asarray(gpu.mem_bytes_per_s) / self.memory_pins,
        }

    def area_mm2(self, gpu: GPU) -> Float[Array, ""]:
        """Die area, spares included, mm2."""
        cycles = jnp.asarray(gpu.num_sms) * gpu.clock_hz
        lanes = gpu.fp32_flop_per_s / (2.0 * cycles)
        matrix = jnp.maximum(gpu.fp16_flop_per_s, gpu.bf16_flop_per_s) / cycles
        sm = self.sm_mm2 + self.lane_mm2 * lanes / LANES + self.matrix_mm2 * matrix / MATRIX_FLOP_PER_CYCLE
        arrays = gpu.num_sms * sm + self.l2_mm2_per_mib * gpu.l2_bytes / MIB
        shrink = jnp.asarray(gpu.process_nm) / NODE_NM
        memory = self.memory_mm2_per_tb_per_s * gpu.mem_bytes_per_s / TERA
        return jnp.asarray((arrays / self.enabled_share + self.uncore_mm2) * shrink + memory)

    def power_w(self, gpu: GPU, area_mm2: ArrayLike) -> Float[Array, ""]:
        """Power with the busiest path at its peak and memory at full rate, W."""
        joule = joule_per_flop(gpu.process_nm)
        # No model computes in fp64, the last of `DTYPES`: a design is not built to run it at its peak.
        rates = (gpu.matrix_paths() * jnp.array(STANDARD.dtype_energy, joule.dtype))[: DTYPES.index("fp64")]
        # Pairwise, for the reason `roofline.fastest` gives.
        busiest: Array = functools.reduce(jnp.maximum, [*rates, jnp.asarray(gpu.fp32_flop_per_s)])
        voltage = gpu.clock_hz / self.nominal_clock_hz
        return (
            busiest * joule * voltage**2
            + STANDARD.joule_per_byte * gpu.mem_bytes_per_s
            + self.leakage_w_per_mm2 * area_mm2
        )

    def dollars(self, gpu: GPU, area_mm2: ArrayLike, power_w: ArrayLike) -> Float[Array, ""]:
        """Dollars of die, memory and board; not a price: no margin, no design cost."""
        area = jnp.asarray(area_mm2)
        wafer = self.wafer_dollars * NODE_NM / gpu.process_nm
        dies = math.pi * (WAFER_MM / 2.0) ** 2 / area - math.pi * WAFER_MM / jnp.sqrt(2.0 * area)
        good = (1.0 + area * self.defects_per_mm2 / self.defect_clustering) ** (-1.0 * self.defect_clustering)
        memory = self.memory_dollars_per_gb * gpu.mem_bytes / GB
        return jnp.asarray(wafer / (jnp.maximum(dies, 1.0) * good) + memory + self.board_dollars_per_w * power_w)


def costs_for(base: Machine, changes: Mapping[str, Any] | None = None) -> SiliconCosts:
    """The shipped model with a base machine's clock as the nominal one, and coefficients replaced.

    Raises: `InputError` for a coefficient there is not, or one that is not a positive number.
    """
    names = [item.name for item in dataclasses.fields(SiliconCosts)]
    for name, value in (changes or {}).items():
        if name not in names:
            raise unknown_name("cost coefficient", name, names)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"cost coefficient {name} is {value!r}, expected a positive number")
    return SiliconCosts(**{"nominal_clock_hz": gpu_of(base).clock_hz, **(changes or {})})
