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

    from neusight_jax.comparison import compare
    from neusight_jax.datasets.measurements import read_kernels
    from neusight_jax.designs.answers import codesign, design
    from neusight_jax.errors import InputError
    from neusight_jax.graph.configs.adapters import Lora
    from neusight_jax.graph.configs.build import graph_from_config
    from neusight_jax.graph.configs.config import list_models
    from neusight_jax.graph.configs.shape import ModelShape, kernels_of
    from neusight_jax.graph.traced.jax_program import graph_from_function
    from neusight_jax.graph.traced.operation import TraceOptions
    from neusight_jax.graph.traced.torch_export import graph_from_torch
    from neusight_jax.hardware.catalog import list_gpus, list_servers
    from neusight_jax.hardware.cluster import Cluster, Topology
    from neusight_jax.hardware.files import load_cluster, load_gpu
    from neusight_jax.hardware.gpu import GPU, stack_gpus
    from neusight_jax.hardware.prices import read_prices
    from neusight_jax.job.job import job_from_config, job_from_graph
    from neusight_jax.job.parallelism import Parallelism, Space
    from neusight_jax.job.step import calibrate_steps, energy, latency
    from neusight_jax.layouts.answers import parallelize
    from neusight_jax.layouts.finetune import finetune
    from neusight_jax.model.checkpoint import list_checkpoints, load_card, load_predictor
    from neusight_jax.model.kernel_intervals import predict_kernel_intervals
    from neusight_jax.model.latency import predict_kernels, predict_kernels_power
    from neusight_jax.model.saving import save_predictor
    from neusight_jax.model.software import Software
    from neusight_jax.power_curves import power_curve
    from neusight_jax.prediction import predict
    from neusight_jax.runs import Run
    from neusight_jax.scaling.rules import scale_trace
    from neusight_jax.sensitivities import sensitivity
    from neusight_jax.serving.answers import serve
    from neusight_jax.serving.times import Engine
    from neusight_jax.sweeps.run import sweep
    from neusight_jax.sweeps.space import Grid, Range, Samples
    from neusight_jax.training.calibration import calibrate
    from neusight_jax.training.evaluation.scores import evaluate
    from neusight_jax.training.identification import identify
    from neusight_jax.training.plan import suggest
    from neusight_jax.training.recipes import train

__all__ = [
    "GPU",
    "Cluster",
    "Engine",
    "Grid",
    "InputError",
    "Lora",
    "ModelShape",
    "Parallelism",
    "Range",
    "Run",
    "Samples",
    "Software",
    "Space",
    "Topology",
    "TraceOptions",
    "__version__",
    "calibrate",
    "calibrate_steps",
    "codesign",
    "compare",
    "design",
    "energy",
    "evaluate",
    "finetune",
    "graph_from_config",
    "graph_from_function",
    "graph_from_torch",
    "identify",
    "job_from_config",
    "job_from_graph",
    "kernels_of",
    "latency",
    "list_checkpoints",
    "list_gpus",
    "list_models",
    "list_servers",
    "load_card",
    "load_cluster",
    "load_gpu",
    "load_predictor",
    "parallelize",
    "power_curve",
    "predict",
    "predict_kernel_intervals",
    "predict_kernels",
    "predict_kernels_power",
    "read_kernels",
    "read_prices",
    "save_predictor",
    "scale_trace",
    "sensitivity",
    "serve",
    "stack_gpus",
    "suggest",
    "sweep",
    "train",
]

_HOMES = {
    "comparison": ("compare",),
    "datasets.measurements": ("read_kernels",),
    "designs.answers": ("codesign", "design"),
    "errors": ("InputError",),
    "graph.configs.adapters": ("Lora",),
    "graph.configs.build": ("graph_from_config",),
    "graph.configs.config": ("list_models",),
    "graph.configs.shape": ("ModelShape", "kernels_of"),
    "graph.traced.jax_program": ("graph_from_function",),
    "graph.traced.operation": ("TraceOptions",),
    "graph.traced.torch_export": ("graph_from_torch",),
    "hardware.catalog": ("list_gpus", "list_servers"),
    "hardware.cluster": ("Cluster", "Topology"),
    "hardware.files": ("load_cluster", "load_gpu"),
    "hardware.gpu": ("GPU", "stack_gpus"),
    "hardware.prices": ("read_prices",),
    "job.job": ("job_from_config", "job_from_graph"),
    "job.parallelism": ("Parallelism", "Space"),
    "job.step": ("calibrate_steps", "energy", "latency"),
    "layouts.answers": ("parallelize",),
    "layouts.finetune": ("finetune",),
    "model.checkpoint": ("list_checkpoints", "load_card", "load_predictor"),
    "model.kernel_intervals": ("predict_kernel_intervals",),
    "model.latency": ("predict_kernels", "predict_kernels_power"),
    "model.saving": ("save_predictor",),
    "model.software": ("Software",),
    "power_curves": ("power_curve",),
    "prediction": ("predict",),
    "runs": ("Run",),
    "scaling.rules": ("scale_trace",),
    "sensitivities": ("sensitivity",),
    "serving.answers": ("serve",),
    "serving.times": ("Engine",),
    "sweeps.run": ("sweep",),
    "sweeps.space": ("Grid", "Range", "Samples"),
    "training.calibration": ("calibrate",),
    "training.evaluation.scores": ("evaluate",),
    "training.identification": ("identify",),
    "training.plan": ("suggest",),
    "training.recipes": ("train",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MOVED = {
    "Comparison": "comparison.Comparison",
    "Design": "designs.answers.Design",
    "Forecast": "forecast.Forecast",
    "Graph": "graph.graph.Graph",
    "Job": "job.job.Job",
    "KernelTable": "kernels.table.KernelTable",
    "Layouts": "layouts.answers.Layouts",
    "Prices": "hardware.prices.Prices",
    "ScaledRun": "scaling.rules.ScaledRun",
    "Sensitivity": "sensitivities.Sensitivity",
    "Serving": "serving.choices.Serving",
    "StepForecast": "forecast.Forecast",
    "StepSensitivity": "sensitivities.Sensitivity",
    "Sweep": "sweeps.run.Sweep",
    "kernel_latency": "model.latency.kernel_latency",
    "list_nodes": "list_servers",
    "read_measurements": "datasets.measurements.read_measurements",
    "stack_clusters": "hardware.cluster.stack_clusters",
    "use_compile_cache": "model.programs.use_compile_cache",
    "workload": "workloads.workload",
}
"""Old public name -> where it is now, below `neusight_jax`. Goes with the next version."""

_root = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.exists(_os.path.join(_root, "pyproject.toml")) and _os.path.isdir(_os.path.join(_root, "training")):
    # A source checkout: `training/`, `datasets/` and `checkpoints/` lie beside this folder and install below it.
    __path__.append(_root)


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"{__name__}.{name} is {__name__}.{_MOVED[name]} now", DeprecationWarning, stacklevel=2)
        module, _, name = f"{__name__}.{_MOVED[name]}".rpartition(".")
        return getattr(importlib.import_module(module), name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
