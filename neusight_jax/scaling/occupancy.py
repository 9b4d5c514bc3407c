"""Blocks an SM can hold at a time, from a launch and the limits of its architecture.

Limits are of NVIDIA's CUDA programming guide, "Technical specifications per compute capability"; another architecture
is taken as Hopper. Registers are handed out in blocks of 256 per warp, as in the occupancy calculator.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from neusight_jax.hardware.catalog import canonical_name, gpu_info
from neusight_jax.scaling.trace import Launch


class Limits(NamedTuple):
    """What one SM holds: threads, blocks, shared memory in bytes; 65536 registers on all of them."""

    threads: int
    blocks: int
    shared_bytes: int


REGISTERS, WARP = 65536, 32
LIMITS: dict[str, Limits] = {
    "pascal": Limits(2048, 32, 64 << 10),
    "volta": Limits(2048, 32, 96 << 10),
    "turing": Limits(1024, 16, 64 << 10),
    "ampere": Limits(2048, 32, 164 << 10),
    "ampere, 128 lanes": Limits(1536, 16, 100 << 10),
    "ada": Limits(1536, 24, 100 << 10),
    "hopper": Limits(2048, 32, 228 << 10),
    "blackwell": Limits(2048, 32, 228 << 10),
    "blackwell_rtx": Limits(1536, 24, 100 << 10),
}
DEFAULT = LIMITS["hopper"]


def limits_of(gpu_name: str) -> Limits:
    """Limits of a GPU of the catalog by its architecture (Ampere's GA10x apart from GA100); any other: `DEFAULT`."""
    if canonical_name(gpu_name) is None:
        return DEFAULT
    info = gpu_info(gpu_name)
    wide = LIMITS.get(f"{info.architecture}, {info.lanes_per_sm:.0f} lanes")
    return wide or LIMITS.get(info.architecture, DEFAULT)


def resident_blocks(launch: Launch, limits: Limits) -> float:
    """Blocks of a launch one SM holds at a time, at least 1."""
    warps = math.ceil(launch.threads / WARP)
    bounds = [limits.threads // (warps * WARP), limits.blocks]
    if launch.registers > 0:
        per_warp = math.ceil(launch.registers * WARP / 256) * 256
        bounds.append(REGISTERS // per_warp // warps)
    if launch.shared_bytes > 0:
        bounds.append(int(limits.shared_bytes // launch.shared_bytes))
    return float(max(min(bounds), 1))
