"""The machine and the forecast of the page as a file, a command and a notebook cell."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from neusight_jax.explorer.asked import Catalog, Variant, Workload, call_of, read
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Machine, gpu_of
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import FIELDS, LIMITS, WIDTH, WIDTH_PEAKS

FILE = "machine.yaml"
"""The file that a copied command writes and reads."""
_FLAGS = {
    "tensor": "--tensor-parallel",
    "pipeline": "--pipeline-parallel",
    "context": "--context-parallel",
    "zero": "--zero",
    "micro_batch_size": "--micro-batch-size",
    "recompute": "--recompute",
}
"""Options of `neusight-jax predict` for the ways a job is split."""


def machine_yaml(catalog: Catalog, content: Any) -> str:
    """The machine of a request as a file for `--gpu`, or of several GPUs for `--cluster`."""
    load, (*_, variant), _ = read(catalog, content)
    return _yaml(load, variant, *(variant.named() if load.gpus == 1 else variant.cluster(load.gpus)))


def _changed(variant: Variant, machine: Machine) -> dict[str, float]:
    """Every figure of a GPU that differs from the base, and what holds it back."""
    base, gpu = load_named_gpu(variant.base)[1], gpu_of(machine)
    figures = {name: float(np.asarray(getattr(gpu, name))) for name in FIELDS}
    same = {name: math.isclose(value, getattr(base, name), rel_tol=1e-6) for name, value in figures.items()}
    changed = {name: value for name, value in figures.items() if not same[name]}
    if changed.keys() & set(WIDTH_PEAKS):
        changed[WIDTH] = figures[WIDTH]  # left out, it would follow the peaks
    return changed | {name: value for name, value in variant.figures.items() if name in LIMITS}


def _yaml(load: Workload, variant: Variant, name: str, machine: Machine) -> str:
    base = load_named_gpu(variant.base)[0]
    changed = _changed(variant, machine)
    content: dict[str, Any] = {"name": name, "base": base, **changed}
    if isinstance(machine, Cluster):
        joined: Mapping[str, Any] = {field: getattr(machine.topology, field) for field in TOPOLOGY_FIELDS}
        topology = {field: value if isinstance(value, int) else float(value) for field, value in joined.items()}
        gpu = {"name": f"{base}, changed", "base": base, **changed} if changed else base
        content = {"name": name, "gpu": gpu, "count": load.gpus, "topology": topology}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def copies(load: Workload, variant: Variant, name: str, machine: Machine, checkpoint: str) -> dict[str, str]:
    """The forecast of the page as lines for a shell, and as a cell for a notebook.

    Args:
      load, variant: of the request.
      name, machine: of the forecast.
      checkpoint: that made it.
    """
    command = _command(load, _yaml(load, variant, name, machine), checkpoint)
    return {"command": command, "cell": _cell(load, variant, machine, checkpoint)}


def _command(load: Workload, file: str, checkpoint: str) -> str:
    """Lines that write the machine's file and forecast it; by its name a measured GPU would be forecast otherwise."""
    _, arguments = call_of(load)
    words = ["neusight-jax", "predict", load.model, "--gpu" if load.gpus == 1 else "--cluster", FILE]
    words += ["--mode", load.mode, "--checkpoint", checkpoint]
    if load.is_job:
        words += [word for name, flag in _FLAGS.items() for word in (flag, str(getattr(load, name)))]
    names = ("batch_size", "global_batch_size", "sequence_length", "dtype", "tensor_parallel")
    stated = {name: arguments[name] for name in names if arguments.get(name) is not None}
    words += [word for name, value in stated.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return f"cat > {FILE} <<'END'\n{file}END\n{shlex.join(words)}"


def _cell(load: Workload, variant: Variant, machine: Machine, checkpoint: str) -> str:
    name, arguments = call_of(load)
    gpu_figures = ", ".join(f"{field}={value!r}" for field, value in _changed(variant, machine).items())
    if isinstance(machine, Cluster):
        links = {field: value for field, value in variant.figures.items() if field in TOPOLOGY_FIELDS}
        link_figures = ", ".join(f"{field}={value!r}" for field, value in links.items())
        made = f'cluster = nj.load_cluster("{load.gpus}x {variant.base}")\n'
        made += f"machine = cluster.replace(gpu=cluster.gpu.replace({gpu_figures}), "
        made += f"topology=cluster.topology.replace({link_figures}))"
    else:
        made = f"machine = nj.load_gpu({variant.base!r}).replace({gpu_figures})"
    texts = {key: f"nj.{value!r}" if key == "layout" else repr(value) for key, value in arguments.items()}
    work = ", ".join(f"{key}={text}" for key, text in texts.items())
    return "\n".join(
        [
            "import neusight_jax as nj",
            made,
            f"work = nj.{name}({work})",
            f"forecast = nj.predict(nj.load_predictor({checkpoint!r}), machine, work)",
            "forecast",
        ]
    )
