"""Habitat's five networks, a training step each, through the front-end for JAX functions, forecast on four GPUs.

python benchmarks/networks.py prints a Markdown table, milliseconds by the checkpoint and, in brackets, by the roofline;
needs flax. Batch sizes are among those of the paper (Yu et al., USENIX ATC 2021, table 4).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import neusight_jax as nj
from neusight_jax.baselines import load_baseline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import flax_models as models

GPUS = ("V100-PCIE-32GB", "T4", "P100-PCIE-16GB", "A100-PCIE-40GB")
LENGTH = 50


def graphs() -> dict[str, nj.Graph]:
    """A training step of each."""
    plain: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ResNet-50, batch 32": (models.ResNet50(), (models.images(32, 224),)),
        "Inception v3, batch 32": (models.Inception(), (models.images(32, 299),)),
        "Transformer, batch 32": (models.Transformer(), (models.tokens(32, LENGTH), models.tokens(32, LENGTH))),
        "GNMT, batch 32": (models.Gnmt(), (models.tokens(32, LENGTH), models.tokens(32, LENGTH))),
    }
    out = {}
    for name, (model, inputs) in plain.items():
        params, stats = models.split(models.shapes_of(model, *inputs))
        out[name] = nj.graph_from_function(models.step(model), params, stats, *inputs)
    noise, real = jax.ShapeDtypeStruct((128, 1, 1, 100), jnp.float32), models.images(128, 64)
    generator, discriminator = models.Generator(), models.Discriminator()
    both = (
        *models.split(models.shapes_of(generator, noise)),
        *models.split(models.shapes_of(discriminator, real)),
    )
    out["DCGAN, batch 128"] = nj.graph_from_function(models.gan_step(generator, discriminator), *both, noise, real)
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="fp32")
    chosen = parser.parse_args()
    roofline = load_baseline("roofline")
    with jax.numpy_dtype_promotion("standard"):
        found = graphs()
    print("| training step | launches | " + " | ".join(GPUS) + " |\n" + "|---" * (2 + len(GPUS)) + "|")
    for name, graph in found.items():
        cells = [f"{graph.launches():.0f}"]
        for device in GPUS:
            gpu = nj.load_gpu(device)
            ours = nj.predict(nj.load_predictor(chosen.checkpoint, device), gpu, graph)
            bound = nj.predict(roofline, gpu, graph)
            low, high = (seconds * 1e3 for seconds in ours.interval_s or (float("nan"), float("nan")))
            cells.append(f"{ours.total_s * 1e3:.1f}, {low:.0f} to {high:.0f} ({bound.total_s * 1e3:.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
