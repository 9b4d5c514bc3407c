"""Architectures of transformers through `graph_from_torch`, from small configs: launches, and what is not modelled.

python benchmarks/architectures.py prints a Markdown table; needs torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import neusight_jax as nj
from neusight_jax.forecast import Forecast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from torch_models import ARCHITECTURES, make


def unmodelled(forecast: Forecast) -> str:
    """Operators nobody has modelled and their share of the time, as the forecast's own note lists them."""
    notes = [note for note in forecast.notes if note.startswith("not modelled")]
    return notes[0].split(": ", 1)[1].removesuffix(" of the time") if notes else "0"


def row(name: str, predictor: Any, gpu: Any, torch: Any, transformers: Any) -> str:
    """One line of the table; an architecture that fails is a line that says so."""
    cells = []
    for mode in ("inference", "training"):
        try:
            model, inputs = make(name, torch, transformers)
            graph = nj.graph_from_torch(model, (), inputs, mode)
            forecast = nj.predict(predictor, gpu, graph)
        except Exception as error:  # the table is about what fails
            cells += ["-", f"{type(error).__name__}: {str(error)[:80]}"]
        else:
            cells += [f"{graph.launches():.0f}", unmodelled(forecast)]
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="fp32")
    parser.add_argument("--gpu", default="V100-PCIE-32GB")
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    predictor, gpu = nj.load_predictor(chosen.checkpoint), nj.load_gpu(chosen.gpu)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(
        "| architecture | launches, inference | unmodelled | launches, training | unmodelled |\n|---|---|---|---|---|"
    )
    for name in chosen.names:
        print(row(name, predictor, gpu, torch, transformers), flush=True)


if __name__ == "__main__":
    main()
