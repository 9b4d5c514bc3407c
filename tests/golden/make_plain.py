"""Pin what `fp32-heldout` of commit 57867b0 forecast, by that commit's own code: writes `plain_fp32.npz` beside this.

    git worktree add ../plain 57867b0
    PYTHONPATH=../plain python tests/golden/make_plain.py

The file holds that checkpoint's weights, the figures of the GPUs it knew, the shapes, and seconds by family
[gpu, condition, row], alone and inside a model. `test_golden` gives today's code the same weights and figures.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load

import neusight_jax as nj
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels

FILE = Path(__file__).with_name("plain_fp32.npz")
COMMIT = "57867b0b4b999fb370e6b4a31bf4ad3f51780c60"
ROWS = 64


def _drawn(name: str) -> list[dict[str, float]]:
    """Dims of one family, log-uniform whole numbers; half of them are whole multiples of 16."""
    random = np.random.default_rng([38, *name.encode()])

    def whole(low: float, high: float) -> float:
        size = float(np.exp(random.uniform(np.log(low), np.log(high))))
        return max(np.round(size / 16) * 16 if random.random() < 0.5 and size > 16 else np.floor(size), 1.0)

    if name in ("linear", "bmm"):
        most = 16384.0 if name == "linear" else 2048.0
        return [
            {"batch": 1.0 if name == "linear" else whole(1, 512)} | {dim: whole(16, most) for dim in "mnk"}
            for _ in range(ROWS)
        ]
    if name == "conv":
        drawn = [(whole(1, 64), whole(3, 512), whole(16, 512), whole(8, 224)) for _ in range(ROWS)]
        return [
            conv_dims(
                "conv",
                **{"batch": batch, "in_channels": into, "out_channels": out, "stride": (1.0, 1.0)},
                **{"in_size": (size, size), "out_size": (size, size), "window": (3.0, 3.0)},
            )
            for batch, into, out, size in drawn
        ]
    reads = (1.0, 2.0) if name == "elementwise" else (1.0,)
    return [
        {"rows": whole(1, 32768), "cols": whole(32, 8192), "reads": reads[row % len(reads)], "writes": 1.0}
        for row in range(ROWS)
    ]


def main() -> None:
    """Write the file."""
    folder = Path(nj.__file__).parent.parent / "checkpoints" / "fp32-heldout"
    weights = load((folder / "weights.safetensors").read_bytes())
    predictor = nj.load_predictor("fp32-heldout")
    gpus = nj.list_gpus()
    figures = [{name: float(value) for name, value in vars(nj.load_gpu(gpu)).items()} for gpu in gpus]
    arrays: dict[str, np.ndarray] = {}
    for name in json.loads((folder / "card.json").read_text())["architecture"]["families"]:
        drawn = _drawn(name)
        table = table_from_kernels([Kernel(name, FAMILIES[name].ops[0], dims) for dims in drawn])
        arrays[f"dims/{name}"] = np.array([[dims[dim] for dim in FAMILIES[name].dims] for dims in drawn], np.float32)
        arrays[f"seconds/{name}"] = np.array(
            [
                [nj.predict_kernels(predictor, nj.load_gpu(gpu), table, isolated=alone) for alone in (True, False)]
                for gpu in gpus
            ],
            np.float32,
        )
    header = {"commit": COMMIT, "date": datetime.date.today().isoformat(), "gpus": gpus, "figures": figures}
    np.savez_compressed(
        FILE, header=np.array(json.dumps(header)), **arrays, **{f"weights/{k}": v for k, v in weights.items()}
    )


if __name__ == "__main__":
    main()
