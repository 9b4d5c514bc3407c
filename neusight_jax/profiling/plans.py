"""Kernels to measure: drawn over the range that models use, or read from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.arithmetic import dtype_index
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.kernels.families import OPERATORS
from neusight_jax.kernels.rowwise import BINARY_OPS, UNARY_OPS
from neusight_jax.profiling.case import MEASURED_OPS, Case, case_bytes, make_case, operands

QUICK: dict[str, int] = {
    **{"linear": 14, "bmm": 12, **dict.fromkeys(("add", "mul", "gelu", "tanh"), 4), "softmax": 10, "ln": 10},
    **{"conv": 6, "prefill": 3, "decode": 3, "copy": 4},
}
FULL: dict[str, int] = {
    **{"linear": 250, "bmm": 200, **dict.fromkeys((*BINARY_OPS, *UNARY_OPS), 20), "softmax": 120, "ln": 120},
    **{"conv": 120, "prefill": 60, "decode": 60, "copy": 40},
}
QUICK |= dict.fromkeys((op for op in OPERATORS if op in MEASURED_OPS), 4)
FULL |= dict.fromkeys((op for op in OPERATORS if op in MEASURED_OPS), 40)
PLANS: dict[str, tuple[dict[str, int], float]] = {"quick": (QUICK, 2e-3), "full": (FULL, 50e-3)}
"""Kernels of each operator, and the longest of them in seconds at the speed of light."""
COLLECTIVES = "collectives"
"""Plan of messages between the GPUs of this machine."""
NAMES: tuple[str, ...] = (*PLANS, COLLECTIVES)
GROUPS: tuple[int, ...] = (2, 4, 8)
MESSAGE_BYTES: tuple[int, ...] = tuple(2**power for power in range(10, 30, 2))
"""Its sizes: 1 KiB to 256 MiB."""
LARGEST_BYTES = 2.0**32
TRIES = 200
"""Draws before an operator is said not to fit."""

DIMS: dict[str, dict[str, tuple[int, ...] | list[int]]] = {
    "linear": {"m": (16, 16384, 64), "n": (64, 16384, 64), "k": (64, 16384, 64)},
    "bmm": {"b": (1, 256, 4), "m": (16, 2048, 16), "n": (16, 2048, 16), "k": (16, 2048, 16)},
    "conv": {
        **{"kernel_size": [1, 3, 3, 3, 5], "b": (1, 64, 4), "input_channels": (3, 512, 16)},
        **{"output_channels": (16, 512, 16), "input_size": [7, 14, 28, 56, 112], "stride": [1, 1, 1, 2]},
    },
    "prefill": {"query_length": (64, 4096, 64), "batch_size": (1, 16, 1)},
    "decode": {"batch_size": (1, 128, 4), "kv_length": (128, 16384, 64)},
    **{op: dict(operator.columns) for op, (_, operator) in OPERATORS.items()},
}
"""Dims of drawn kernels: one of a list, or log-uniform between two sizes; of those two thirds are multiples of the
third number, as in models, the others any whole number. What else an operator needs follows (`_draw`)."""
ROWS: dict[str, tuple[int, ...] | list[int]] = {"b": (32, 65536, 32), "h": (64, 16384, 64)}
"""Dims of row-wise operators."""


def planned(plan: str, gpu: GPU, dtypes: Sequence[str]) -> list[Case]:
    """The kernels of a plan, families mixed, each kernel once; the same list every time.

    Args:
      plan: "quick", "full", "collectives", or a .csv or .parquet file with the columns op and its dims.
      gpu: kernels of drawn plans take it no longer than the plan's limit at the speed of light.
      dtypes: every kernel is measured in each; a file's own column `dtype` goes before.
    Raises: `InputError` for an unknown plan, an unreadable file or rows that are no kernels.
    """
    for dtype in dtypes:
        dtype_index(dtype)
    cases = _messages() if plan == COLLECTIVES else _drawn(plan, gpu) if plan in PLANS else _read(plan)
    spread = [
        case if dtype is None else Case(case.op, case.dims, dtype)
        for case, has_dtype in cases
        for dtype in ([None] if has_dtype else dtypes)
    ]
    return list({case.key: case for case in spread}.values())


def _messages() -> list[tuple[Case, bool]]:
    """Every collective in every group, small messages first; two ranks of a group send and receive."""
    return [
        (make_case(op, {"bytes": size, "ranks": ranks, "nodes": 1}), False)
        for size in MESSAGE_BYTES
        for op in COLLECTIVE_OPS
        for ranks in (GROUPS[:1] if op == "send_recv" else GROUPS)
    ]


def _drawn(plan: str, gpu: GPU) -> list[tuple[Case, bool]]:
    counts, longest_s = PLANS[plan]
    peak, bandwidth = float(np.asarray(gpu.fp32_flop_per_s)), float(np.asarray(gpu.mem_bytes_per_s))
    parts: list[list[Case]] = []
    for index, (op, count) in enumerate(counts.items()):
        # Every operator draws for itself, so that its kernels stay when the counts of others change.
        random = np.random.default_rng([0, index])
        drawn: dict[str, Case] = {}
        for _ in range(TRIES * count):
            case = make_case(op, _draw(op, random))
            moved = case_bytes(case)[0]
            least_s = max(operands(case).flop / peak, moved / bandwidth)
            if least_s <= longest_s and moved <= LARGEST_BYTES:
                drawn.setdefault(case.key, case)
            if len(drawn) == count:
                break
        parts.append(list(drawn.values()))
    # Operators take turns, so that what was measured is of all families if the run ends early.
    order = sorted((place / len(part), index, place) for index, part in enumerate(parts) for place in range(len(part)))
    return [(parts[index][place], False) for _, index, place in order]


def _read(plan: str) -> list[tuple[Case, bool]]:
    path = Path(plan)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise unknown_name("plan", plan, NAMES, "or give a .csv or .parquet file with the columns op and its dims")
    if not path.is_file():
        raise InputError(f"{plan}: no such file; expected a plan, .csv or .parquet, or one of {', '.join(NAMES)}")
    try:
        frame = pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError, LookupError, TypeError) as error:  # what pyarrow, decoders and pandas raise
        raise InputError(f"{plan}: not readable ({str(error).splitlines()[0][:200]}); write it again") from None
    if "op" not in frame.columns or frame.empty:
        raise InputError(f"{plan}: holds no kernels; expected rows with the columns op and its dims")
    cases = []
    for row, record in enumerate(frame.to_dict("records")):
        dims = {str(name): value for name, value in record.items() if pd.notna(value)}
        has_dtype = isinstance(dims.get("dtype"), str)
        try:
            cases.append((make_case(str(dims["op"]), dims, str(dims["dtype"]) if has_dtype else "fp32"), has_dtype))
        except InputError as error:
            raise InputError(f"{plan} row {row} (from 0): {error}") from None
    return cases


def _draw(op: str, random: np.random.Generator) -> dict[str, int]:
    dims = {
        name: int(random.choice(sizes)) if isinstance(sizes, list) else _size(random, *sizes)
        for name, sizes in DIMS.get(op, ROWS).items()
    }
    if op == "conv":
        dims["padding"] = dims["kernel_size"] // 2
    if op in ("prefill", "decode"):
        kept, group = int(2 ** random.integers(0, 5)), int(2 ** random.integers(0, 3))
        dims |= {"heads": kept * group, "kv_heads": kept, "head_dim": int(random.choice([64, 128])), "causal": 0}
    if op == "prefill":
        dims |= {"kv_length": dims["query_length"], "causal": int(random.uniform() < 0.75)}
    return {"query_length": 1, **dims}


def _size(random: np.random.Generator, low: float, high: float, step: int) -> int:
    drawn = math.exp(random.uniform(math.log(low), math.log(high)))
    multiple = step if random.uniform() < 2 / 3 else 1
    return max(round(drawn / multiple), 1) * multiple
