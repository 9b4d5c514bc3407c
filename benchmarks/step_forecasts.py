"""Forecasts of whole steps against this repository's measurements of them: torch modules and JAX programs.

    python benchmarks/step_forecasts.py [measurements/h100 measurements/h200] [--model NAME ...] [--rows FILE.csv]

Every model is read by its front end (`graph_from_torch`, `graph_from_function`) and forecast with `fp32`, or with
`tensorcore` where it computes in another precision. Compared are `gpu_busy_s`, the sum over the kernels of a step, and
`step_s`, by the host's clock; of JAX programs only the latter. Compiled torch steps are left out.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax_steps
import pandas as pd
import torch
import torch.nn.functional as F
from step_models import MODELS

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.optimizers import with_states

ROOT = Path(__file__).resolve().parents[1]
REDUCED = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"adamw_fused": "adamw", "adamw_foreach": "adamw-foreach", "sgd_foreach": "sgd-momentum"}


class Step(torch.nn.Module):
    """A model with its loss, as `training_steps.Running` runs it."""

    def __init__(self, net: torch.nn.Module, words: bool, row: Any) -> None:
        super().__init__()
        self.net, self.words, self.trains = net, words, row.mode == "training"
        self.reduced = REDUCED.get(row.precision)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        cast = torch.autocast("cuda", dtype=self.reduced) if self.reduced else contextlib.nullcontext()
        with cast:
            if self.words:
                return self.net(input_ids=x, labels=x).loss if self.trains else self.net(input_ids=x).logits
            return F.cross_entropy(self.net(x), labels) if self.trains else self.net(x)


def torch_graph(row: Any) -> Graph:
    """The graph of a row of training_steps.csv."""
    model, dtype = MODELS[row.model], WEIGHTS.get(row.precision, torch.float32)
    words = model.layers is not None
    size, batch = int(row.sequence_length if words else row.image_size), int(row.batch_size)
    with torch.device("meta"):
        net = model.make(row.attention if words else "", size).to(dtype)
        x = torch.zeros(batch, size, dtype=torch.long) if words else torch.zeros(batch, 3, size, size, dtype=dtype)
        labels = torch.zeros(batch, dtype=torch.long)
        if row.channels_last:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
    whole = Step(net, words, row)
    whole.train(row.mode == "training")
    path = "tf32" if row.precision == "tf32" else "fp32"
    options = nj.TraceOptions(fp32_products=path, fp32_convolutions=path, name=row.model)
    graph = nj.graph_from_torch(whole, (x, labels), mode=row.mode, trace_options=options)
    return with_states(graph, OPTIMIZERS[row.optimizer], graph.dtype) if isinstance(row.optimizer, str) else graph


def jax_graph(row: Any) -> Graph:
    """The graph of a row of jax_steps.csv."""
    function, shapes = jax_steps.step(row.model, row.mode)
    options = nj.TraceOptions(fp32_products=row.precision, fp32_convolutions=row.precision, name=row.model)
    return nj.graph_from_function(function, *shapes, trace_options=options)


def forecasts(folder: Path, models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a folder with `forecast_s`."""
    for file, kind, read in (("training_steps.csv", "", torch_graph), ("jax_steps.csv", "JAX", jax_graph)):
        if not (folder / "training" / file).exists():
            continue
        for row in pd.read_csv(folder / "training" / file).itertuples():
            if getattr(row, "compiled", 0) or (models and row.model not in models):
                continue
            words = kind == "JAX" or MODELS[row.model].layers is not None
            checkpoint = "fp32" if row.precision == "fp32" else "tensorcore"
            predictor, gpu = nj.load_predictor(checkpoint, row.device), nj.load_gpu(row.device)
            found = nj.predict(predictor, gpu, read(row), gpu_name=row.device).total_s
            facts = {name: getattr(row, name, None) for name in ("device", "model", "precision", "mode", "step_s")}
            facts |= {"attention": getattr(row, "attention", ""), "channels_last": getattr(row, "channels_last", 0)}
            facts["front end"] = kind or ("language models" if words else "image models")
            yield facts | {"gpu_busy_s": getattr(row, "gpu_busy_s", row.step_s), "forecast_s": found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print errors by front end, precision and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [ROOT / "measurements/h100", ROOT / "measurements/h200"]
    parser.add_argument("folders", nargs="*", type=Path, default=default)
    parser.add_argument("--model", nargs="*", default=[], help="of these only")
    parser.add_argument("--rows", type=Path, help="also write every row")
    chosen = parser.parse_args(arguments)
    rows = []
    for folder in chosen.folders:
        for row in forecasts(folder, chosen.model):
            rows.append(row)
            print(f"{len(rows)} {row['device']} {row['model']} {row['precision']} {row['mode']}", flush=True)
    frame = pd.DataFrame(rows)
    if chosen.rows is not None:
        frame.to_csv(chosen.rows, index=False, float_format="%.6g")
    error = 100 * (frame["forecast_s"] / frame["gpu_busy_s"] - 1)
    whole = 100 * (frame["forecast_s"] / frame["step_s"] - 1)
    frame = frame.assign(signed=error, error=error.abs(), step=whole.abs())
    key = ["front end", "precision", "mode"]
    table = frame.groupby([*key, "device"]).agg(
        steps=("error", "size"), mean=("error", "mean"), median=("signed", "median"), step=("step", "mean")
    )
    print(
        "\nError of a forecast, %: mean and signed median beside busy time, mean beside the step by the host's clock\n"
    )
    print("| of | precision | mode | GPU | steps | mean | median | step |\n|---|---|---|---|---:|---:|---:|---:|")
    for (of, precision, mode, device), row in table.iterrows():
        figures = f"{row['mean']:.1f} | {row['median']:+.1f} | {row['step']:.1f}"
        print(f"| {of} | {precision} | {mode} | {device.split()[1]} | {int(row['steps'])} | {figures} |")


if __name__ == "__main__":
    main()
