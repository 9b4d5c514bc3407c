"""Arbitrary predictors, machines and kernels: what must hold by construction is tested on weights nobody trained."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.arithmetic import DTYPES
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.gpu import GPU, MEMORY_KINDS, VENDORS
from neusight_jax.hardware.variant import PEAKS
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.conv import CHANNELS, CONV, TENSOR_CONV, conv_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Dims, Family, Work
from neusight_jax.kernels.grouped_gemm import GROUPED_GEMM, expert_dims
from neusight_jax.kernels.rowwise import COUNTED, STRIDED, WINDOW
from neusight_jax.kernels.table import KernelBatch, KernelTable
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.predictor import KernelForecast, Predictor
from neusight_jax.model.residuals import EFFECTS, effect_width
from neusight_jax.model.roofline import Isolated, Scalar

NIGHTLY = bool(os.environ.get("NEUSIGHT_NIGHTLY"))
DRAWS = 4096 if NIGHTLY else 512
"""Random kernels and machines of a property test, by seed."""
SEEDS = range(5 if NIGHTLY else 2)
ON_ONE_GPU: tuple[str, ...] = tuple(name for name, family in FAMILIES.items() if not family.linked)
"""Families of kernels that stay on one GPU: those `random_kernels` draws."""
NETWORKS: tuple[str, ...] = tuple(name for name, family in FAMILIES.items() if family.network == name)
KINDS: tuple[str, ...] = ("mixture", "neusight")
RATES: tuple[str, ...] = ("clock_hz", "mem_bytes_per_s", "tdp_w", *PEAKS)
"""Figures per second: scaling all of them scales a machine's time."""


@cache
def _template(kind: str, members: int, hidden: tuple[int, ...]) -> Predictor:
    """Made once a process, by one program: many small ones take three times as long to compile."""
    sizes = {"families": NETWORKS, "hidden": hidden, "members": members}
    template: Predictor = jax.tree.map(np.asarray, jax.jit(lambda: untrained(kind, sizes))())
    return template


def random_predictor(kind: str, seed: int, members: int = 1, hidden: tuple[int, ...] = (8,)) -> Predictor:
    """A predictor with every leaf moved away from its start: last layers, floors, norms, shifts and effects too."""
    local, linked = np.random.default_rng(seed), np.random.default_rng([seed, 5])

    def moved(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        random = linked if any(f"'{family}'" in name for family in FAMILIES if FAMILIES[family].linked) else local
        noise = random.normal(size=leaf.shape)
        if name.endswith("center"):
            value = 6.0 + 3.0 * noise
        elif name.endswith("scale"):
            value = 2.0 * np.exp(0.5 * noise)
        else:
            value = np.asarray(leaf) + 0.5 * noise
        return jnp.asarray(value.astype(np.float32))

    predictor: Predictor = jax.tree_util.tree_map_with_path(moved, _template(kind, members, hidden))
    return predictor


def level_effect(network: str, value: float) -> list[float]:
    """A device effect that shifts every head and the floor alike, without tilts."""
    return [value] * len(EFFECTS) + [0.0] * (effect_width(FAMILIES[network]) - len(EFFECTS))


def random_gpus(seed: int, count: int, absent: float = 0.0) -> GPU:
    """Machines [count], every figure log-uniform over more than real machines span; SM counts are whole.

    Args:
      absent: share of machines without a separate fp32 matrix path.
    """
    random = np.random.default_rng([seed, 1])

    def draw(low: float, high: float) -> np.ndarray:
        return np.exp(random.uniform(np.log(low), np.log(high), count)).astype(np.float32)

    figures = {
        "num_sms": np.ceil(draw(1, 1000)),
        "clock_hz": draw(3e8, 5e9),
        "mem_bytes_per_s": draw(3e10, 5e13),
        "mem_bytes": draw(4e9, 1e12),
        "l2_bytes": draw(5e5, 1e9),
        "tdp_w": draw(20, 4e3),
        "link_bytes_per_s": draw(1e9, 1e13),
        "process_nm": draw(2, 40),
        **{name: draw(5e11, 5e15) for name in PEAKS},
    }
    lacking = random.random(count) < absent
    figures["fp32_matrix_flop_per_s"] = np.where(lacking, 0.0, figures["fp32_matrix_flop_per_s"]).astype(np.float32)
    for name, values in (("exp_per_s", figures["exp_per_s"]), ("matrix_flop_per_cycle", draw(64, 32768))):
        figures[name] = np.where(random.random(count) < 0.5, 0.0, values).astype(np.float32)
    figures["memory_kind"] = random.integers(0, len(MEMORY_KINDS), count).astype(np.float32)
    figures["l2_partitions"] = random.integers(0, 4, count).astype(np.float32)
    figures["warp_schedulers"] = random.integers(0, 5, count).astype(np.float32)
    caches = np.random.default_rng([seed, 9])
    figures["l1_bytes"] = caches.choice(np.array([0.0, 16384.0, 262144.0], np.float32), count)
    figures["resident_threads"] = caches.choice(np.array([0.0, 1024.0, 2048.0], np.float32), count)
    figures["vendor"] = np.random.default_rng([seed, 8]).integers(0, len(VENDORS), count).astype(np.float32)
    most = np.random.default_rng([seed, 7]).choice(np.array([0.0, 2e-12, 6e-12, 2e-11], np.float32), count)
    return GPU(**figures, fp32_joule_per_flop=most)


def random_convolutions(random: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Dims of convolutions of all passes, windows and strides."""

    def whole(low: float, high: float) -> np.ndarray:
        return np.floor(np.exp(random.uniform(np.log(low), np.log(high), rows)))

    size, window = whole(3, 300), random.choice(np.array([1.0, 3.0, 3.0, 5.0, 7.0]), rows)
    stride, groups = random.choice(np.array([1.0, 1.0, 2.0]), rows), random.choice(np.array([1.0, 1.0, 32.0]), rows)
    passes = [
        conv_dims(
            op,
            batch=whole(1, 256),
            in_channels=groups * whole(1, 2048),
            out_channels=groups * whole(1, 2048),
            in_size=(size, size),
            out_size=(np.ceil(size / stride),) * 2,
            window=(window, window),
            stride=(stride, stride),
            groups=groups,
        )
        for op in CONV.ops
    ]
    chosen = random.integers(len(passes), size=rows)
    return {
        name: np.choose(chosen, [np.broadcast_to(dims[name], rows) for dims in passes]).astype(np.float32)
        for name in (*CONV.dims, CHANNELS)
    }


def random_dims(family: Family, random: np.random.Generator, seed: int, rows: int) -> dict[str, np.ndarray]:
    """Dims of `random_kernels`."""

    def whole(high: float) -> np.ndarray:
        return np.floor(np.exp(random.uniform(0.0, np.log(high), rows))).astype(np.float32)

    if family is TENSOR_CONV:  # drawn apart, as below
        dims = random_convolutions(np.random.default_rng([seed, 5]), rows)
    elif family is CONV:
        dims = random_convolutions(random, rows)
    elif family.generations == "attention":
        heads = random.choice(np.array([1.0, 4.0, 8.0]), rows)
        group = random.choice(np.array([1.0, 3.0, 8.0]), rows)
        queries = whole(16384) if family.name == "prefill" else np.ones(rows)
        sizes = {
            "heads": heads * group,
            "kv_heads": heads,
            "head_size": random.choice(np.array([64.0, 128.0]), rows),
            "window": random.choice(np.array([0.0, 128.0]), rows),
            "kv_share": random.choice(np.array([0.5, 1.0]), rows),
            "repeat": whole(256),
        }
        drawn = attention_dims(queries, queries - 1.0 + whole(131072), **sizes)  # type: ignore[arg-type]
        dims = {name: np.asarray(values, np.float32) for name, values in drawn.items()}
    elif family is GROUPED_GEMM:
        experts = random.choice(np.array([8.0, 64.0, 256.0]), rows)
        drawn = expert_dims(
            whole(32768),
            experts=experts,
            local_experts=experts / random.choice(np.array([1.0, 8.0]), rows),
            top_k=random.choice(np.array([1.0, 2.0, 8.0]), rows),
            hidden=whole(8192),
            inner=whole(16384),
        )
        dims = {name: np.asarray(values, np.float32) for name, values in drawn.items()}
    elif family.matrix:
        dims = {"batch": whole(256), "m": whole(32768), "n": whole(32768), "k": whole(32768)}
    elif family is COUNTED:  # drawn apart, as the next two
        apart = np.random.default_rng([seed, 6])
        dims = {name: np.floor(np.exp(apart.uniform(0.0, 11.0, rows))).astype(np.float32) for name in family.dims}
        dims["reads"], dims["writes"] = np.full((2, rows), 1.0, np.float32)
        dims["flop"] = (dims["rows"] * dims["cols"] * 4.0 ** apart.integers(0, 8, rows)).astype(np.float32)
    elif family is STRIDED:  # drawn apart: the families after it stay as they were
        apart = np.random.default_rng([seed, 4])
        dims = {name: np.floor(np.exp(apart.uniform(0.0, 11.0, rows))).astype(np.float32) for name in family.dims}
        dims["reads"], dims["writes"] = np.full((2, rows), 2.0, np.float32)
        dims["scattered"] = apart.choice(np.array([0.0, 1.0, 2.0], np.float32), rows)
    elif family is WINDOW:
        apart = np.random.default_rng([seed, 5])
        dims = {name: np.floor(np.exp(apart.uniform(0.0, 11.0, rows))).astype(np.float32) for name in family.dims}
        dims["reads"], dims["writes"] = np.full((2, rows), 1.0, np.float32)
        dims["taps"] = apart.choice(np.array([1.0, 9.0, 49.0], np.float32), rows)
    else:
        dims = {"rows": whole(1e6), "cols": whole(65536)}
        dims["reads"] = random.choice(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0], np.float32), rows)
        dims["writes"] = random.choice(np.array([1.0, 2.0], np.float32), rows)
    return dims


def random_kernels(seed: int, rows: int, dtypes: int = len(DTYPES)) -> KernelTable:
    """As many kernels of every family on one GPU, shapes log-uniform; not padded, so that rows pair with GPUs.

    Args:
      dtypes: of the first so many of `DTYPES`.
    """
    random = np.random.default_rng([seed, 2])

    def batch(family: Family) -> KernelBatch:
        dims = random_dims(family, random, seed, rows)
        position = np.arange(rows, dtype=np.int32)
        return KernelBatch(
            dims=dims,
            op=np.zeros(rows, np.int32),
            dtype=random.integers(dtypes, size=rows).astype(np.int32),
            count=np.ones(rows, np.float32),
            phase=np.zeros(rows, np.int32),
            node=position,
            row=position,
        )

    return KernelTable({name: batch(FAMILIES[name]) for name in ON_ONE_GPU})


def work_of(family: Family, dims: Dims, element_bytes: Any) -> Work:
    """What kernels do, in NumPy, by one program a family: op by op it is dozens."""
    work: Work = jax.tree.map(np.asarray, _works(family.name)(dims, element_bytes))
    return work


@cache
def _works(name: str) -> Any:
    return jax.jit(FAMILIES[name].work)


def repadded(table: KernelTable, length: int) -> KernelTable:
    """The table with every family padded to at least this length."""

    def pad(values: np.ndarray, fill: float) -> np.ndarray:
        return np.pad(values, (0, max(length - len(values), 0)), constant_values=fill)

    fills = {"op": 0, "dtype": 0, "count": 0, "phase": 0, "node": -1, "row": -1}
    families = {}
    for name, batch in table.families.items():
        columns = {column: pad(getattr(batch, column), fill) for column, fill in fills.items()}
        families[name] = KernelBatch(dims={key: pad(size, 1.0) for key, size in batch.dims.items()}, **columns)
    return KernelTable(families)


def only(table: KernelTable, *names: str) -> KernelTable:
    """Some families of a table: quicker to compile."""
    return KernelTable({name: table.families[name] for name in names})


def as_float64(tree: Any) -> Any:
    """Floating leaves in double precision; use under `jax.enable_x64(True)`."""

    def cast(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array

    return jax.tree.map(cast, tree)


def scaled(gpu: GPU, fields: tuple[str, ...], factor: Any) -> GPU:
    """A machine with some figures times a factor."""
    return replace(gpu, **{name: getattr(gpu, name) * factor for name in fields})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Backwards:
    """A wrong predictor, the control of the physics checks: its memory slows down as bandwidth grows."""

    inner: Predictor

    def covers(self, family: Family) -> bool:
        return self.inner.covers(family)

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Scalar = 0.0
    ) -> KernelForecast:
        gpu = gpu_of(machine)
        mirrored = replace(gpu, mem_bytes_per_s=1.5e24 / jnp.asarray(gpu.mem_bytes_per_s))
        return self.inner.forecast_kernels(family, mirrored, batch, isolated=isolated, relaxation=relaxation)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TooFast:
    """A wrong predictor, the control of the speed-of-light check: a tenth of what the inner one says."""

    inner: Predictor

    def covers(self, family: Family) -> bool:
        return self.inner.covers(family)

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Scalar = 0.0
    ) -> KernelForecast:
        forecast = self.inner.forecast_kernels(family, machine, batch, isolated=isolated, relaxation=relaxation)
        return replace(forecast, seconds=0.1 * forecast.bounds.speed_of_light_s)
