"""How far the forecast ratio of two machines is off: `intervals.REACH`, and what ratio intervals hold.

    neusight-jax import aiconfigurator --output IMPORTED
    python -m benchmarks.ratio_spread FP32_FOLDER CLOCKS.csv IMPORTED

Three sets of measured ratios, each against the forecasts of one predictor on both machines:

- architectures: whole models on pairs of GPUs, forecast by fits that saw neither of the two (FP32_FOLDER);
- clocks: whole models on an A100-PCIE-40GB at eleven locked clocks (yifueve/energaizer-ispass26-artifact, cd60749, MIT:
  columns `set`, `workload`, `clock_mhz`, `step_s`);
- bandwidth: kernels on H100 and H200, by weights that saw neither.

Prints the coverage of the first at several correlations, and of the others at several reaches.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

import neusight_jax as nj
from benchmarks.counterfactual import shared_shapes
from neusight_jax.datasets.measurements import Measurements, read_measurements, table_from_frame
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.checkpoint import with_libraries
from neusight_jax.model.intervals import (
    REACH,
    error_correlation,
    gpu_ratios,
    gpu_widening,
    has_intervals,
    machine_distance,
    range_of,
)
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.data import NETWORKS, devices_with, join_rows, model_rows, sweep_rows, thin
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, Settings, fit
from neusight_jax.training.intervals import Residuals, conformal_interval
from neusight_jax.training.left_out import merged
from neusight_jax.training.objectives import MixtureObjective, effect_penalties
from neusight_jax.training.whole_models import model_scores

RUN = ["model", "mode", "batch_size", "sequence_length"]
ROWS = 3000
"""Sweep rows of each GPU and family that the fits of pairs see."""
LONG_S = 20e-6
"""Kernels of H100 and H200 that are shorter say more of their launch than of the bandwidth."""
MOST = 6000
"""Kernels of a family that are compared."""
CLOCK_MODELS = {"gpt2model_gpt2": "gpt2", "optmodel_opt-1p3b": "opt-1.3b"}
"""Names of models in the file of clocks."""
REACHES = np.round(np.arange(0.5, 3.01, 0.1), 2)


def coverage(ratios: pd.DataFrame, correlation: np.ndarray | float) -> float:
    """Share of measured ratios in their intervals, each unit (a pair, a workload, a family) weighing the same.

    Args:
      ratios: unit, error (log of measured over forecast ratio), one, other (half-widths of the two intervals).
    """
    square = ratios.one**2 + ratios.other**2 - 2.0 * correlation * ratios.one * ratios.other
    inside = ratios.error.abs() <= np.sqrt(np.maximum(square, 0.0))
    return float(inside.groupby(ratios.unit).mean().mean())


def at_reach(ratios: pd.DataFrame, reach: float) -> float:
    """`coverage` of machines of one architecture at a reach; REACH itself is 1 in these units."""
    scale = REACH / reach
    return coverage(ratios, np.array([error_correlation(scale * distance) for distance in ratios.distance]))


def half_width(bounds: tuple[float, float] | None) -> float:
    """Of an interval, in logarithms."""
    assert bounds is not None
    return 0.5 * math.log(bounds[1] / bounds[0])


class Pairs:
    """Fits of fp32 families that leave out two GPUs of the same vendor together."""

    def __init__(self, data: Measurements, gpus: Sequence[str]) -> None:
        self.data, self.pairs = data, list(itertools.combinations(gpus, 2))
        jobs = tuple(Job(0, pair) for pair in self.pairs)
        self.fits: dict[str, Any] = {}
        for name in NETWORKS:
            devices = devices_with(data, name, gpus)
            if devices:
                rows = join_rows([thin(sweep_rows(data, name, devices), ROWS), model_rows(data, name, devices)])
                tile = fit_tile(rows, Job(0))
                objective = MixtureObjective(tile, penalties=effect_penalties(rows))
                self.fits[name] = rows, tile, fit(objective, rows, jobs, Settings(steps=1000)).best

    def predictor(self, place: int, device: str) -> MixturePredictor:
        """The predictor that saw neither GPU of a pair, for one of them."""
        families = {}
        for name, (rows, _, best) in self.fits.items():
            members = jax.tree.map(lambda leaf: leaf[place : place + 1], best)
            families[name] = merged(members, rows, generation_of=device if device in rows.devices else None)
        return with_libraries(MixturePredictor(families, {name: each[1] for name, each in self.fits.items()}), device)

    def errors(self) -> pd.DataFrame:
        """log(measured / forecast) of every whole model on both GPUs of every pair."""
        labels = self.data.end_to_end
        assert labels is not None
        labels = labels[labels.option == ""]
        parts = []
        for place, pair in enumerate(self.pairs):
            chosen = labels[labels.device.isin(pair)]
            rows, _ = model_scores(chosen, {"": lambda device, at=place: self.predictor(at, device)}, self.data.gpu)
            parts.append(rows.assign(one=pair[0], other=pair[1], error=np.log(rows.measured_s / rows.forecast_s)))
        return pd.concat(parts, ignore_index=True)

    def ratios(self, errors: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Errors of ratios, with the half-widths that errors of further GPUs give to the two; and of single GPUs."""
        figures = {name: np.asarray(gpu_ratios(self.data.gpu(name))) for name in {*errors.one, *errors.other}}

        def widening(device: str, seen: Sequence[str]) -> float:
            return float(gpu_widening(figures[device], range_of(np.stack([figures[name] for name in seen]))))

        records, singles = [], []
        for (one, other), rows in errors.groupby(["one", "other"]):
            rest = [name for name in figures if name not in (one, other)]
            apart = errors[~(errors.one.isin((one, other)) | errors.other.isin((one, other)))]
            residuals: Residuals = {
                name: part.groupby(RUN).error.mean().to_numpy() / widening(name, [gpu for gpu in rest if gpu != name])
                for name, part in apart.groupby("device")
            }
            width = conformal_interval(residuals).width
            sides = [rows[rows.device == name].set_index(RUN).error for name in (one, other)]
            gap = (sides[0] - sides[1]).dropna()
            widths = {"one": width * widening(one, rest), "other": width * widening(other, rest)}
            records += [{"unit": f"{one} | {other}", "error": error, **widths} for error in gap]
            for side, side_errors in zip(("one", "other"), sides, strict=True):
                singles += [
                    {"unit": f"{one} | {other}", "error": error, "one": widths[side], "other": 0.0}
                    for error in side_errors
                ]
        return pd.DataFrame(records), pd.DataFrame(singles)


def clock_ratios(path: Path) -> pd.DataFrame:
    """Ratios of steps of one GPU at two locked clocks, at least 5 % apart."""
    frame = pd.read_csv(path)
    base, records = nj.load_gpu("A100-PCIE-40GB"), []
    for name, rows in frame[frame["set"] == "dvfs"].groupby("workload"):
        words = re.match(r"(.+)_p(bf16|fp32)_b(\d+)_s(\d+)_", str(name))
        if words is None or words[1] not in CLOCK_MODELS:
            continue
        sizes = {"batch_size": int(words[3]), "sequence_length": int(words[4])}
        graph = nj.graph_from_config(CLOCK_MODELS[words[1]], mode="inference", dtype=words[2], **sizes)
        predictor = nj.load_predictor("fp32" if words[2] == "fp32" else "tensorcore")
        steps = []
        for row in rows.itertuples():
            gpu = vary_plainly(base, {"clock_hz": 1e6 * row.clock_mhz})
            forecast = nj.predict(predictor, gpu, graph)
            steps.append((gpu, math.log(row.step_s / forecast.total_s), half_width(forecast.interval_s)))
        records += [{"unit": name, **each} for each in _two_by_two(steps)]
    return pd.DataFrame(records)


def _two_by_two(steps: Sequence[tuple[Any, float, float]]) -> Iterator[Mapping[str, float]]:
    for (gpu, error, one), (changed, other_error, other) in itertools.combinations(steps, 2):
        distance = machine_distance(gpu, changed)
        if distance > 0.05:
            yield {"error": error - other_error, "one": one, "other": other, "distance": distance}


def bandwidth_ratios(folder: Path) -> pd.DataFrame:
    """Ratios of kernels on H200 and H100, which differ in their memory, by weights that saw neither."""
    frame = read_measurements([folder], on_invalid="drop").frame
    predictor = nj.load_predictor("tensorcore-heldout-hopper")
    both = shared_shapes(frame, "H100", "H200")
    both = both[both[["first_s", "second_s"]].min(axis=1) >= LONG_S]
    gpus, parts = [nj.load_gpu(name) for name in ("H100", "H200")], []
    for name, rows in both.groupby("family", observed=True):
        if FAMILIES[str(name)].linked or not has_intervals(predictor, FAMILIES[str(name)]):
            continue
        chosen = rows.sample(min(len(rows), MOST), random_state=0).reset_index(drop=True)
        table, logs, widths = table_from_frame(chosen), [], []
        for gpu in gpus:
            low, high = nj.predict_kernel_intervals(predictor, gpu, table)
            logs.append(np.log(nj.predict_kernels(predictor, gpu, table).astype(float)))
            widths.append(0.5 * np.log(high.astype(float) / low))
        error = np.log(chosen.second_s / chosen.first_s) - (logs[1] - logs[0])
        part = {"unit": name, "error": error, "one": widths[0], "other": widths[1]}
        parts.append(pd.DataFrame(part).assign(distance=machine_distance(*gpus)))
    return pd.concat(parts, ignore_index=True)


def main() -> None:
    """Print what intervals of ratios hold."""
    folder, clocks, imported = map(Path, sys.argv[1:4])
    data = read_measurements([folder, folder / "kernels_models"], on_invalid="drop")
    labels = data.end_to_end
    assert labels is not None
    gpus = [name for name in dict.fromkeys(labels[labels.option == ""].device) if not name.startswith("AMD")]
    pairs = Pairs(data, gpus)
    of_pairs, singles = pairs.ratios(pairs.errors())
    print(f"{len(of_pairs)} ratios of whole models, {of_pairs.unit.nunique()} pairs of GPUs left out together")
    print(f"  single forecasts of the same: {coverage(singles, 0.0):.1%} in their intervals")
    rest = of_pairs[~of_pairs.unit.str.contains("P4")]
    for correlation in (0.0, 0.3, 0.6, 0.9):
        text = f"{coverage(of_pairs, correlation):.1%} in their intervals, {coverage(rest, correlation):.1%} without P4"
        print(f"  correlation {correlation}: {text}")
    experiments = {"clocks": clock_ratios(clocks), "bandwidth": bandwidth_ratios(imported)}
    table = pd.DataFrame(
        {name: [at_reach(ratios, reach) for reach in REACHES] for name, ratios in experiments.items()}, index=REACHES
    )
    table["mean"] = table.mean(axis=1)
    print({name: f"{len(ratios)} ratios, {ratios.unit.nunique()} units" for name, ratios in experiments.items()})
    print(table.round(3).to_string())
    print(f"REACH {table.index[table['mean'] >= 0.8].max()}")


if __name__ == "__main__":
    main()
