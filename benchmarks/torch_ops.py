"""Single operators of eager PyTorch, measured on an H100, against their forecasts.

PYTHONPATH=. python -m benchmarks.torch_ops MEASUREMENTS prints a row an operator and, with and without convolutions,
how far forecasts are off; none of the rows is in any fit. Needs torch. `MEASUREMENTS/torch_ops/h100_eager.csv` lists
operators as `torch.export` names them, shapes of inputs and weights, and seconds. `--kernels` also prints the kernels
that each operator launches.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import neusight_jax as nj
from neusight_jax.model.checkpoint import default_checkpoint

GPU = "NVIDIA H100 80GB HBM3"
TENSOR = "x"
"""A tensor among the arguments of an operator."""
LONG_ROW, FEW_ROWS = 2.0**18, 8192.0
"""Elements of a row from which it is long, and the most rows that are few."""


def calls(text: str) -> Iterator[tuple[str, list[Any]]]:
    """Operators and their arguments, `TENSOR` for tensors."""
    for item in text.split("; "):
        name, _, inside = item.rstrip(")").partition("(")
        if "einsum" in name:  # its equation is not quoted
            inside = re.sub(r"^(\S+), ", r"'\1', ", inside)
        inside = re.sub(r"(?<![\w'>])x\b", repr(TENSOR), inside)
        yield name, list(ast.literal_eval(f"[{inside}]"))


def filled(arguments: Sequence[Any], tensors: Iterator[torch.Tensor]) -> list[Any]:
    """Arguments with tensors in their places."""
    return [
        filled(item, tensors) if isinstance(item, list) else next(tensors) if item == TENSOR else item
        for item in arguments
    ]


class Operators(torch.nn.Module):
    """Operators one after another; an operator takes what no other has taken yet, and then inputs again.

    Args:
      text: the operators.
      weights: shapes of parameters.
      inputs: example inputs on the meta device, by which operands are put in the order that fits.
    """

    def __init__(self, text: str, weights: Sequence[Sequence[int]], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(*shape)) for shape in weights)
        self.steps: list[tuple[Any, list[Any], tuple[int, ...]]] = []
        values: list[Any] = [*inputs, *self.weights]
        unused = list(range(len(values)))
        for name, arguments in calls(text):
            if "getitem" in name:
                continue
            operator = torch.ops.aten
            for part in name.split(".")[1:]:
                operator = getattr(operator, part)
            wanted = str(arguments).count(repr(TENSOR))
            taken = unused[:wanted]
            taken = list(range(wanted - len(taken))) + taken
            for order in itertools.permutations(taken):
                try:
                    made = operator(*filled(arguments, iter([values[at] for at in order])))
                except RuntimeError:
                    continue
                break
            else:
                raise ValueError(f"{name}: no order of its operands fits")
            self.steps.append((operator, arguments, order))
            unused = [at for at in unused if at not in taken] + [len(values)]
            values.append(made)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what the last operator makes."""
        values: list[Any] = [*inputs, *self.weights]
        for operator, arguments, order in self.steps:
            values.append(operator(*filled(arguments, iter([values[at] for at in order]))))
        return values[-1]


def module_of(row: Any) -> tuple[Operators, tuple[torch.Tensor, ...]]:
    """The module of a row and its example inputs, on the meta device."""
    with torch.device("meta"):
        shapes = [shape for shape in ast.literal_eval(row.inputs) if isinstance(shape, list)]
        inputs = [torch.zeros(*shape) for shape in shapes]
        if "cross_entropy" in row.operators:
            inputs[1] = inputs[1].long()
        module = Operators(row.operators, ast.literal_eval(row.weights), inputs).eval()
    return module, tuple(inputs)


def forecasts(measured: pd.DataFrame, kernels: bool) -> pd.DataFrame:
    """Measured rows with `forecast_s`, `low_s` and `high_s`, and what they launch."""
    gpu, predictors, rows = nj.load_gpu(GPU), {}, []
    for row in measured.itertuples():
        module, inputs = module_of(row)
        graph = nj.graph_from_torch(module, inputs)
        checkpoint = default_checkpoint(graph.kernels)
        if checkpoint not in predictors:
            predictors[checkpoint] = nj.load_predictor(checkpoint)
        forecast = nj.predict(predictors[checkpoint], gpu, graph)
        launched = [(node, kernel) for node in graph.nodes for kernel in node.forward]
        few = any(
            kernel.family in ("softmax", "norm") and kernel.dims["cols"] >= LONG_ROW and kernel.dims["rows"] <= FEW_ROWS
            for _, kernel in launched
        )
        kind = "convolution" if "conv" in row.operators else "few long rows" if few else "other"
        rows.append((forecast.total_s, *forecast.interval_s, kind))
        if kernels:
            for node, kernel in launched:
                dims = " ".join(f"{name}={size:.6g}" for name, size in kernel.dims.items())
                print(f"    {row.id} {node.op}: {kernel.family} {kernel.op} {kernel.dtype} x{kernel.count:g} {dims}")
    return measured.assign(**dict(zip(("forecast_s", "low_s", "high_s", "kind"), zip(*rows, strict=True), strict=True)))


def summary(rows: pd.DataFrame, name: str) -> str:
    """How far forecasts of some rows are off."""
    ratio = rows.forecast_s / rows.eager_s
    error = (ratio - 1.0).abs()
    inside = ((rows.low_s <= rows.eager_s) & (rows.eager_s <= rows.high_s)).mean()
    factor = np.exp(np.log(ratio).abs().max())
    return f"| {name} | {len(rows)} | {error.mean():.1%} | {error.median():.1%} | {factor:.2f} | {inside:.0%} |"


def main() -> None:
    """Print the rows and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--ids", type=int, nargs="*", help="only these rows")
    options = parser.parse_args()
    measured = pd.read_csv(options.measurements / "torch_ops" / "h100_eager.csv", keep_default_na=False)
    if options.ids:
        measured = measured[measured.id.isin(options.ids)]
    rows = forecasts(measured, options.kernels)
    print("| row | operators | measured, ms | forecast, ms | ratio | inside |\n|---:|---|---:|---:|---:|---|")
    for row in rows.itertuples():
        inside = "yes" if row.low_s <= row.eager_s <= row.high_s else "no"
        ratio = row.forecast_s / row.eager_s
        print(
            f"| {row.id} | {row.operators[:60]} | {row.eager_s * 1e3:.2f} | {row.forecast_s * 1e3:.2f} | {ratio:.2f} |"
            f" {inside} |"
        )
    print("\n| rows | number | mean | median | worst factor | inside 80 % |\n|---|---:|---:|---:|---:|---:|")
    print(summary(rows, "all"))
    print(summary(rows[rows.kind != "convolution"], "without convolutions"))
    for kind, part in rows.groupby("kind"):
        print(summary(part, kind))


if __name__ == "__main__":
    main()
