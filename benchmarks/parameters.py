"""Weights of modules of torchvision and transformers, against `sum(p.numel())`: every parameter once, to the byte.

python benchmarks/parameters.py prints a Markdown table; needs torch, torchvision and transformers. Nothing is loaded:
models of torchvision have their full size, those of transformers a small config (tests/torch_models.py).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import neusight_jax as nj
from neusight_jax.graph.memory import footprint
from neusight_jax.units import MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from torch_models import ARCHITECTURES, IMAGE_MODELS, make, make_image_model


def row(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bool]:
    """One line of the table, and whether all its numbers are exact."""
    parameters = list(model.parameters())
    elements, weights = (float(sum(size(item) for item in parameters)) for size in (_elements, _bytes))
    learned = [item for item in parameters if item.requires_grad]
    gradients, moments = (
        float(sum(size(item) for item in learned)) for size in (_bytes, lambda item: 8 * _elements(item))
    )
    cells, exact = [], True
    for mode, expected in (("inference", (weights, 0.0, 0.0)), ("training", (weights, gradients, moments))):
        graph = nj.graph_from_torch(model, args, kwargs, mode)
        found = footprint(graph)
        same = (found.weights, found.gradients, found.optimizer) == expected and graph.parameters == elements
        exact = exact and same
        shown = (found.weights, found.gradients, found.optimizer, found.buffers, found.activations)
        cells.append(" + ".join(f"{size / MIB:.4g}" for size in shown))
    return (
        f"| {name} | {elements:,.0f} | {weights / MIB:.4g} | {' | '.join(cells)} | {'yes' if exact else 'NO'} |",
        exact,
    )


def _elements(parameter: Any) -> int:
    return int(parameter.numel())


def _bytes(parameter: Any) -> int:
    return int(parameter.numel() * parameter.element_size())


def main() -> None:
    """Print the table; exit code 1 when a number is not exact."""
    import torch
    import torchvision
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*IMAGE_MODELS, *ARCHITECTURES])
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, transformers {transformers.__version__}")
    print("MiB: weights + gradients + optimizer + buffers + activations\n")
    print(
        "| module | parameters | sum(p.numel()) x size, MiB | inference | training | exact |\n|---|---|---|---|---|---|"
    )
    right = []
    for name in chosen.names:
        if name in IMAGE_MODELS:
            model, images = make_image_model(name, torch, torchvision)
            line, exact = row(name, model.eval(), (images,), {})
        else:
            model, inputs = make(name, torch, transformers)
            line, exact = row(name, model, (), inputs)
        right.append(exact)
        print(line, flush=True)
    print(f"\n{sum(right)} of {len(right)} exact")
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
