"""What the explorer's page asks for, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neusight_jax.cluster import Cluster
from neusight_jax.cluster_file import check_topology, load_named_cluster
from neusight_jax.errors import InputError
from neusight_jax.gpu import GPU, check_figure
from neusight_jax.gpu_file import load_named_gpu
from neusight_jax.hypothetical import require_field, vary_plainly
from neusight_jax.topology import TRACED_FIELDS
from neusight_jax.units import figure_text

MOST_MACHINES = 2


@dataclass(frozen=True)
class Workload:
    """What the page says of a workload; an empty dtype is the model's own.

    On several `gpus` it is a training job: `batch_size` is that of all replicas, the rest as in `Parallelism`.
    """

    model: str
    mode: str = "inference"
    batch_size: int = 1
    sequence_length: int | None = None
    dtype: str = ""
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    zero: int = 0
    micro_batch_size: int = 1
    recompute: str = "none"


@dataclass(frozen=True)
class Variant:
    """A base GPU, by name or file, and the figures of it that were changed."""

    base: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def named(self) -> tuple[str, GPU]:
        """A name that says what was changed, and the machine; peaks that were not changed follow SMs and clock."""
        name, gpu = load_named_gpu(self.base)
        return self._name(name), _varied(name, gpu, self.figures)

    def cluster(self, gpus: int) -> tuple[str, Cluster]:
        """The same of many GPUs in their usual servers; figures of `Topology` are of the links between them."""
        name, cluster = load_named_cluster(f"{gpus}x {self.base}")
        joined = {each: value for each, value in self.figures.items() if each in TRACED_FIELDS}
        check_topology(joined, name)
        own = {each: value for each, value in self.figures.items() if each not in TRACED_FIELDS}
        gpu = _varied(name, cluster.gpu, own)
        return self._name(name), cluster.replace(gpu=gpu, topology=cluster.topology.replace(**joined))

    def _name(self, name: str) -> str:
        changed = ", ".join(f"{each} {figure_text(each, value)}" for each, value in self.figures.items())
        return f"{name} with {changed}" if changed else name


def _varied(name: str, gpu: GPU, figures: Mapping[str, float]) -> GPU:
    for field_name, value in figures.items():
        check_figure(require_field(field_name), value, name)
    return vary_plainly(gpu, figures) if figures else gpu


def read(asked: Mapping[str, Any]) -> tuple[Workload, list[Variant]]:
    """A request of the page as records; `InputError` for one that is none."""
    try:
        load = Workload(**asked["workload"])
        variants = [
            Variant(str(each["base"]), {str(name): float(value) for name, value in each.get("figures", {}).items()})
            for each in asked["machines"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not a request of the page ({error!r}); expected workload and machines") from None
    for name in ("gpus", "tensor", "pipeline", "context", "micro_batch_size", "zero"):
        value = getattr(load, name)
        if type(value) is not int or value < (name != "zero"):
            raise InputError(f"{name} is {value!r}, expected a whole number from {int(name != 'zero')}")
    if not 1 <= len(variants) <= MOST_MACHINES:
        raise InputError(f"{len(variants)} machines, expected 1 or {MOST_MACHINES}")
    return load, variants
