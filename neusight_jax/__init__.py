"""neusight_jax: forecast how long a deep-learning model takes on a GPU, as one differentiable JAX function.

The public names below load their module on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
import os as _os
import warnings

__version__ = "0.2.0"

TYPE_CHECKING = False  # not of `typing`, whose import takes as long as all of this file
if TYPE_CHECKING:
    from typing import Any

    from neusight_jax.comparison import Comparison, compare
    from neusight_jax.datasets.measurements import read_kernels, read_measurements
    from neusight_jax.designs.answers import Design, design
    from neusight_jax.errors import InputError
    from neusight_jax.forecast import Forecast
    from neusight_jax.graph.configs.adapters import Lora
    from neusight_jax.graph.configs.build import graph_from_config
    from neusight_jax.graph.configs.config import list_models
    from neusight_jax.graph.graph import Graph
    from neusight_jax.graph.traced.jax_program import graph_from_function
    from neusight_jax.graph.traced.operation import TraceOptions
    from neusight_jax.graph.traced.torch_export import graph_from_torch
    from neusight_jax.hardware.catalog import list_gpus
    from neusight_jax.hardware.cluster import Cluster, Topology, stack_clusters
    from neusight_jax.hardware.files import list_nodes, load_cluster, load_gpu
    from neusight_jax.hardware.gpu import GPU, stack_gpus
    from neusight_jax.hardware.prices import Prices, read_prices
    from neusight_jax.job.job import Job, job_from_config
    from neusight_jax.job.parallelism import Parallelism, Space
    from neusight_jax.job.step import calibrate_steps, energy, latency
    from neusight_jax.kernels.table import KernelTable
    from neusight_jax.layouts.answers import Layouts, parallelize
    from neusight_jax.model.checkpoint import list_checkpoints, load_card, load_predictor
    from neusight_jax.model.kernel_intervals import predict_kernel_intervals
    from neusight_jax.model.latency import kernel_latency, predict_kernels, predict_kernels_power
    from neusight_jax.model.programs import use_compile_cache
    from neusight_jax.model.saving import save_predictor
    from neusight_jax.model.software import Software
    from neusight_jax.prediction import predict
    from neusight_jax.scaling.rules import ScaledRun, scale_trace
    from neusight_jax.sensitivities import Sensitivity, sensitivity
    from neusight_jax.serving.answers import serve
    from neusight_jax.serving.choices import Serving
    from neusight_jax.serving.times import Engine
    from neusight_jax.sweeps.run import Sweep, sweep
    from neusight_jax.sweeps.space import Grid, Range, Samples
    from neusight_jax.training.calibration import calibrate
    from neusight_jax.training.evaluation.scores import evaluate
    from neusight_jax.training.recipes import train
    from neusight_jax.workloads import workload

__all__ = [
    "GPU",
    "Cluster",
    "Comparison",
    "Design",
    "Engine",
    "Forecast",
    "Graph",
    "Grid",
    "InputError",
    "Job",
    "KernelTable",
    "Layouts",
    "Lora",
    "Parallelism",
    "Prices",
    "Range",
    "Samples",
    "ScaledRun",
    "Sensitivity",
    "Serving",
    "Software",
    "Space",
    "Sweep",
    "Topology",
    "TraceOptions",
    "__version__",
    "calibrate",
    "calibrate_steps",
    "compare",
    "design",
    "energy",
    "evaluate",
    "graph_from_config",
    "graph_from_function",
    "graph_from_torch",
    "job_from_config",
    "kernel_latency",
    "latency",
    "list_checkpoints",
    "list_gpus",
    "list_models",
    "list_nodes",
    "load_card",
    "load_cluster",
    "load_gpu",
    "load_predictor",
    "parallelize",
    "predict",
    "predict_kernel_intervals",
    "predict_kernels",
    "predict_kernels_power",
    "read_kernels",
    "read_measurements",
    "read_prices",
    "save_predictor",
    "scale_trace",
    "sensitivity",
    "serve",
    "stack_clusters",
    "stack_gpus",
    "sweep",
    "train",
    "use_compile_cache",
    "workload",
]

_HOMES = {
    "comparison": ("Comparison", "compare"),
    "datasets.measurements": ("read_kernels", "read_measurements"),
    "designs.answers": ("Design", "design"),
    "errors": ("InputError",),
    "forecast": ("Forecast",),
    "graph.configs.adapters": ("Lora",),
    "graph.configs.build": ("graph_from_config",),
    "graph.configs.config": ("list_models",),
    "graph.graph": ("Graph",),
    "graph.traced.jax_program": ("graph_from_function",),
    "graph.traced.operation": ("TraceOptions",),
    "graph.traced.torch_export": ("graph_from_torch",),
    "hardware.catalog": ("list_gpus",),
    "hardware.cluster": ("Cluster", "Topology", "stack_clusters"),
    "hardware.files": ("list_nodes", "load_cluster", "load_gpu"),
    "hardware.gpu": ("GPU", "stack_gpus"),
    "hardware.prices": ("Prices", "read_prices"),
    "job.job": ("Job", "job_from_config"),
    "job.parallelism": ("Parallelism", "Space"),
    "model.software": ("Software",),
    "job.step": ("calibrate_steps", "energy", "latency"),
    "kernels.table": ("KernelTable",),
    "layouts.answers": ("Layouts", "parallelize"),
    "model.checkpoint": ("list_checkpoints", "load_card", "load_predictor"),
    "model.kernel_intervals": ("predict_kernel_intervals",),
    "model.latency": ("kernel_latency", "predict_kernels", "predict_kernels_power"),
    "model.programs": ("use_compile_cache",),
    "model.saving": ("save_predictor",),
    "prediction": ("predict",),
    "scaling.rules": ("ScaledRun", "scale_trace"),
    "sensitivities": ("Sensitivity", "sensitivity"),
    "serving.answers": ("serve",),
    "serving.choices": ("Serving",),
    "serving.times": ("Engine",),
    "sweeps.run": ("Sweep", "sweep"),
    "sweeps.space": ("Grid", "Range", "Samples"),
    "training.calibration": ("calibrate",),
    "training.evaluation.scores": ("evaluate",),
    "training.recipes": ("train",),
    "workloads": ("workload",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_RENAMED = {"StepForecast": "Forecast", "StepSensitivity": "Sensitivity"}

_root = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.exists(_os.path.join(_root, "pyproject.toml")) and _os.path.isdir(_os.path.join(_root, "training")):
    # A source checkout: `training/`, `datasets/` and `checkpoints/` lie beside this folder and install below it.
    __path__.append(_root)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"neusight_jax.{name} is {_RENAMED[name]} now", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
