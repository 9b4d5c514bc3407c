"""Synthetic measurement folders: latencies from a simple analytic law with log-normal noise. No measured data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import find_device
from neusight_jax.datasets.row_checks import flop_and_bytes

DEVICES: tuple[str, ...] = ("Tesla V100-PCIE-32GB", "Tesla T4")
FLOOR_S = 20e-6
OPS: tuple[str, ...] = (*schema.GEMM_OPS, *schema.VECTOR_OPS, *schema.CONV_OPS, *schema.COPY_OPS)
"""Operators made here: those of fp32."""


def _log_uniform(random: np.random.Generator, low: int, high: int, rows: int) -> np.ndarray:
    return np.exp(random.uniform(np.log(low), np.log(high), rows)).astype(np.int64)


def synthetic_rows(op: str, device: str, rows: int = 64, seed: int = 0) -> pd.DataFrame:
    """Rows of one operator on one device, in the schema: 20 us + max(flop / 0.7 peak, bytes / 0.75 bandwidth)."""
    random = np.random.default_rng([seed, schema.OPS.index(op), sum(device.encode())])
    frame = pd.DataFrame({"device": device, "op": op}, index=range(rows))
    if op in schema.GEMM_OPS:
        frame["b"] = 1 if op == "linear" else _log_uniform(random, 1, 64, rows)
        for name in ("m", "n", "k"):
            frame[name] = _log_uniform(random, 32, 4096 if op == "linear" else 1024, rows)
    elif op in (*schema.VECTOR_OPS, *schema.COPY_OPS):
        frame["b"], frame["h"] = _log_uniform(random, 64, 16384, rows), _log_uniform(random, 64, 4096, rows)
    else:
        for name, high in (("b", 32), ("input_channels", 512), ("output_channels", 512), ("input_size", 56)):
            frame[name] = _log_uniform(random, 4, high, rows)
        frame["kernel_size"], frame["stride"], frame["padding"] = 3, 1, 1
    gpu = find_device(device)[1]
    noise = np.exp(random.normal(0.0, 0.03, rows))
    columns = {name: frame[name].to_numpy(np.float64) for name in schema.op_columns(op)}
    family, dims = schema.row_dims(op, columns)
    flop, moved = flop_and_bytes(family, dims, np.zeros(rows, np.int32))
    compute_s = flop / (0.7 * float(gpu.fp32_flop_per_s))
    body_s = np.maximum(compute_s, moved / (0.75 * float(gpu.mem_bytes_per_s)))
    frame["latency_s"] = (FLOOR_S + body_s) * noise
    if op in schema.GEMM_OPS:
        frame["kernel_name"] = "volta_sgemm_128x64_tn"
        grid = (-(-frame["k"] // 128), -(-frame["m"] // 64), frame["b"])
        for name, blocks in zip(schema.GRID_COLUMNS, grid, strict=True):
            frame[name] = blocks
        frame["block_x"], frame["block_y"], frame["block_z"] = 256, 1, 1
    return frame


def write_softmax_alone(folder: Path, rows: int = 64) -> Path:
    """`write_synthetic_measurements` with the sweep of softmax alone; returns the folder."""
    write_synthetic_measurements(folder, rows=rows)
    for file in (folder / "kernels").glob("*.parquet"):
        if file.stem != "softmax":
            file.unlink()
    return folder


def write_synthetic_measurements(
    folder: Path | str, devices: Sequence[str] = DEVICES, rows: int = 64, seed: int = 0
) -> Path:
    """Write `kernels/<op>.parquet` for every operator of `OPS` and `models/end_to_end.csv`; returns the folder.

    Args:
      folder: made if missing.
      devices: catalog names.
      rows: rows per operator and device.
      seed: of dims and noise.
    """
    folder = Path(folder)
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "models").mkdir(exist_ok=True)
    for op in OPS:
        parts = [synthetic_rows(op, device, rows, seed) for device in devices]
        pd.concat(parts, ignore_index=True).to_parquet(folder / "kernels" / f"{op}.parquet", index=False)
    models = []
    for device in devices:
        peak = float(find_device(device)[1].fp32_flop_per_s)
        for batch_size, mode in ((4, "inf"), (8, "inf"), (4, "train")):
            forward_s = batch_size * 2e12 / (0.7 * peak)
            backward_s = 2.0 * forward_s if mode == "train" else float("nan")
            models.append(
                {
                    "device": device,
                    "model": "gpt2_large",
                    "mode": mode,
                    "sequence_length": 1024,
                    "batch_size": batch_size,
                    "option": "",
                    "num_layers": 36,
                    "e2e_s": forward_s + np.nan_to_num(backward_s),
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                }
            )
    pd.DataFrame(models).to_csv(folder / "models" / "end_to_end.csv", index=False)
    return folder
