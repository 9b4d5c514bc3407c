"""Requests of the explorer's page, as records, and the work that they are of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.build import assumed_length, graph_from_config
from neusight_jax.graph.configs.config import language_config, load_model_config, model_names, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES
from neusight_jax.graph.configs.shape import ModelShape
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.hardware.cluster import TRACED_FIELDS, Cluster, Machine
from neusight_jax.hardware.files import TopologyFile, checked, load_named_cluster, load_named_gpu, load_named_server
from neusight_jax.hardware.gpu import GPU, check_figure
from neusight_jax.hardware.variant import require_field, vary_plainly
from neusight_jax.job.job import Job, job_from_config
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.units import figure_text, title_of

WAYS: tuple[str, ...] = ("tensor", "pipeline", "context", "zero", "micro_batch_size", "recompute")
"""Fields of `Parallelism` that the page says; the rest of the GPUs are replicas."""
MOST_MACHINES = 2
QUESTIONS: tuple[str, ...] = ("serving", "power", "design", "codesign")
MOST_BUDGETS = 16
"""Points of a front that a request may ask for."""
MOST = 1_000_000
"""Most GPUs, sequences and tokens in a request."""


@dataclass(frozen=True)
class Workload:
    """Workload as the page states it; an empty dtype is the model's own.

    On several `gpus` training is a job: `batch_size` is that of all replicas, the rest as in `Parallelism`. A forward
    pass is split over all of them (`tensor`).
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

    @property
    def is_job(self) -> bool:
        """Whether it is a training job."""
        return self.gpus > 1 and self.mode == "training"

    def __post_init__(self) -> None:
        for attribute in fields(self):
            name, value = attribute.name, getattr(self, attribute.name)
            if attribute.type == "str" and not isinstance(value, str):
                raise InputError(f"{name} is {value!r}, expected text")
            least = int(name != "zero")
            if attribute.type == "int" or (attribute.type != "str" and value is not None):
                _check_amount(name, value, least, whole=True)


@dataclass(frozen=True)
class Question:
    """Question that takes some seconds: serving, caps of power, or the best chip or model under budgets.

    Attributes:
      kind: one of `QUESTIONS`.
      input_tokens, output_tokens: of a request, of serving and of a codesign.
      users, ttft_ms, tpot_ms: of serving: requests at once, and targets.
      price_per_hour: of one GPU, 0 = none.
      area_mm2, power_w: budgets of a design, 0 = as much as the base has.
      front_w: other budgets of power, for the front.
    """

    kind: str = "power"
    input_tokens: int = 1000
    output_tokens: int = 200
    users: int = 50
    ttft_ms: int = 2000
    tpot_ms: int = 50
    price_per_hour: float = 0.0
    area_mm2: float = 0.0
    power_w: float = 0.0
    front_w: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in QUESTIONS:
            raise InputError(f"question {self.kind!r}, expected one of {', '.join(QUESTIONS)}")
        if not isinstance(self.front_w, list | tuple) or len(self.front_w) > MOST_BUDGETS:
            raise InputError(f"front_w is {self.front_w!r}, expected a list of at most {MOST_BUDGETS} numbers")
        object.__setattr__(self, "front_w", tuple(self.front_w))
        amounts = {attribute.name: (getattr(self, attribute.name),) for attribute in fields(self)[1:-1]}
        for name, values in {**amounts, "front_w": self.front_w}.items():
            whole = type(getattr(Question, name)) is int
            for value in values:
                _check_amount(name, value, int(whole), whole=whole)


def _check_amount(name: str, value: Any, least: int, *, whole: bool) -> None:
    fits = type(value) is int if whole else isinstance(value, int | float) and not isinstance(value, bool)
    if not (fits and least <= value <= MOST):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{name} is {value!r}, expected {kind} from {least} to {MOST:,}")


@dataclass(frozen=True)
class Catalog:
    """Choices the page may ask for: names of the catalogs, and the model and GPU that the explorer was started with.

    Attributes:
      model, gpu: those it was started with, names or files.
    """

    model: str
    gpu: str

    def check_model(self, name: str) -> None:
        """`InputError` for a model that is not of the catalog."""
        if name != self.model and name.lower() not in model_names():
            load_model_config(name)

    def check_gpu(self, name: str) -> None:
        """`InputError` for a GPU that is not of the catalog."""
        if name != self.gpu and canonical_name(name) is None:
            catalog_gpu(name)


@dataclass(frozen=True)
class Variant:
    """A base GPU, by name or file, and the figures of it that were changed."""

    base: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def named(self) -> tuple[str, GPU]:
        """A name that says what was changed, and the machine; peaks that were not changed follow SMs and clock."""
        name, gpu = load_named_gpu(self.base)
        return self._name(name), _varied(name, gpu, self.figures)

    def cluster(self, gpus: int, *, serves: bool = False) -> tuple[str, Cluster]:
        """The same of many GPUs in their usual servers; figures of `Topology` are of the links between them.

        `serves`: for a model that is split over some GPUs of a server.
        """
        name, cluster = load_named_server(self.base) if serves else load_named_cluster(f"{gpus}x {self.base}")
        joined = {figure: value for figure, value in self.figures.items() if figure in TRACED_FIELDS}
        checked(TopologyFile, joined, name)
        gpu_figures = {figure: value for figure, value in self.figures.items() if figure not in TRACED_FIELDS}
        gpu = _varied(name, cluster.gpu, gpu_figures)
        return self._name(name), cluster.replace(gpu=gpu, topology=cluster.topology.replace(**joined))

    def _name(self, name: str) -> str:
        changed = ", ".join(
            f"{title_of(figure)} {figure_text(figure, value)}" for figure, value in self.figures.items()
        )
        return f"{name} with {changed}" if changed else name


def _varied(name: str, gpu: GPU, figures: Mapping[str, float]) -> GPU:
    for field_name, value in figures.items():
        check_figure(require_field(field_name), value, name)
    return vary_plainly(gpu, figures) if figures else gpu


def machine_of(load: Workload, variant: Variant) -> tuple[str, Machine]:
    """A machine with as many GPUs as a workload takes, and its name."""
    return variant.named() if load.gpus == 1 else variant.cluster(load.gpus, serves=not load.is_job)


def read(catalog: Catalog, content: Any) -> tuple[Workload, list[Variant], Question | None]:
    """A request of the page as records; `InputError` for one that is none, or for files the page may not open."""
    try:
        load = Workload(**content["workload"])
        question = Question(**content["question"]) if "question" in content else None
        variants = [
            Variant(
                str(machine["base"]), {str(name): float(value) for name, value in machine.get("figures", {}).items()}
            )
            for machine in content["machines"]
        ]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not a request of the page ({error!r}); expected workload and machines") from None
    if not 1 <= len(variants) <= MOST_MACHINES:
        raise InputError(f"{len(variants)} machines, expected 1 or {MOST_MACHINES}")
    # A path in a request would have the server read any file of this machine: names of the catalog alone pass.
    catalog.check_model(load.model)
    for variant in variants:
        catalog.check_gpu(variant.base)
    return load, variants, question


def call_of(load: Workload) -> tuple[str, dict[str, Any]]:
    """The public function that makes the work of a request, and its arguments."""
    if not load.is_job:
        if load.tensor not in (1, load.gpus):
            raise InputError(f"a forward pass is split over all {load.gpus} GPUs; expected tensor {load.gpus}")
        sizes = {name: getattr(load, name) for name in ("batch_size", "sequence_length", "mode")}
        split = {"tensor_parallel": load.gpus} if load.gpus > 1 else {}
        return "graph_from_config", {"config": load.model, **sizes, "dtype": load.dtype or None, **split}
    taken = load.tensor * load.pipeline * load.context
    if taken < 1 or load.gpus % taken:
        raise InputError(f"{load.gpus} GPUs are no multiple of tensor · pipeline · context = {taken}; mend one")
    layout = Parallelism(data=load.gpus // taken, **{name: getattr(load, name) for name in WAYS})
    tokens = load.sequence_length or usual_length(load.model)
    sizes = {"global_batch_size": load.batch_size, "sequence_length": tokens, "dtype": load.dtype or "bf16"}
    return "job_from_config", {"config": load.model, "layout": layout, **sizes}


@functools.lru_cache(maxsize=16)
def work_of(load: Workload) -> Graph | Job:
    """The work of a request."""
    name, arguments = call_of(load)
    made: Graph | Job = graph_from_config(**arguments) if name == "graph_from_config" else job_from_config(**arguments)
    return made


@functools.lru_cache(maxsize=256)
def is_decoder(model: str) -> bool:
    """Whether a model answers prompts: it has every mode, and engines serve it."""
    return language_config(read_config(model)).values.get("model_type") in MODEL_TYPES


@functools.lru_cache(maxsize=256)
def has_sizes(model: str) -> bool:
    """Whether the sizes of a model may vary."""
    try:
        ModelShape.from_config(model)
    except InputError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def usual_length(model: str) -> int | None:
    """Tokens of a sequence where nobody says how many, as in every command; None where a model takes any number."""
    try:
        tokens, _ = assumed_length(language_config(read_config(model)), None, "training", None)
    except InputError:
        return None
    return tokens if isinstance(tokens, int) else None
