"""Layouts: how a replica of a model may be split over GPUs, what of it fits, and its step times on each machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Experts
from neusight_jax.graph.configs.decoder import read_decoder
from neusight_jax.graph.graph import RUNTIME_BYTES
from neusight_jax.hardware.cluster import Cluster, Machine, as_cluster
from neusight_jax.hardware.files import load_named_cluster, load_named_gpu, load_named_server
from neusight_jax.job.footprint import COMMUNICATION_BYTES
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.model.predictor import Predictor
from neusight_jax.serving.steady import Lengths
from neusight_jax.serving.steps import (
    Model,
    Points,
    Steps,
    activation_bytes,
    axes,
    cache_bytes,
    needed_paths,
    points,
    tabled,
    weight_bytes,
)
from neusight_jax.serving.times import Engine, Options, Times, bounded_times

TENSOR: tuple[int, ...] = (1, 2, 4, 8)
"""Ranks of a replica that are tried where nobody says."""


@dataclass(frozen=True)
class Capacity:
    """Device memory of one rank, bytes; an estimate.

    Attributes:
      weights, activations, runtime: what an engine holds before any request.
      cache_bytes: what is left for the KV cache; request_bytes: of a request of mean length; mem_bytes: of the GPU.
      attention_ranks: ranks of a replica that hold requests of their own.
    """

    weights: float
    activations: float
    runtime: float
    cache_bytes: float
    request_bytes: float
    mem_bytes: float
    attention_ranks: int = 1

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by what holds them, and of the whole GPU."""
        return {name: value for name, value in vars(self).items() if name not in ("request_bytes", "attention_ranks")}

    @property
    def requests(self) -> float:
        """Requests of mean length that fit a replica at once."""
        return self.attention_ranks * self._of_rank

    @property
    def _of_rank(self) -> float:
        return max(self.cache_bytes, 0.0) / self.request_bytes

    @property
    def fits(self) -> bool:
        """Whether one request fits a rank."""
        return self._of_rank >= 1.0

    def most(self, max_batch: int) -> float:
        """Requests of mean length that run on a replica at once, where a rank takes so many."""
        return self.attention_ranks * min(float(max_batch), float(np.floor(self._of_rank)))


def capacity(model: Model, layout: Parallelism, mem_bytes: float, options: Options, context: float) -> Capacity:
    """Memory of one rank of a layout.

    Args:
      context: mean length of a sequence while it runs; longer ones borrow what shorter ones do not need.
    """
    weights = weight_bytes(model, layout)
    activations = activation_bytes(model, layout, options.chunk_tokens)
    runtime = RUNTIME_BYTES + COMMUNICATION_BYTES * (layout.gpus > 1)
    left = mem_bytes * options.memory_share - weights - activations - runtime
    (request,) = cache_bytes(model, layout, [max(int(context), 1)])
    return Capacity(weights, activations, runtime, left, float(max(request, 1.0)), mem_bytes, layout.data)


@dataclass(frozen=True)
class Replica:
    """One replica of a model on a machine.

    Attributes:
      gpu: its name; layout: how it is split, its `data` ranks those of data-parallel attention; memory: of a rank.
      times: step times, with those of the low and the high ends of the kernels' intervals; None where it cannot run.
      most: requests that run at once; reason: why it cannot run.
    """

    gpu: str
    layout: Parallelism
    options: Options
    memory: Capacity | None = None
    times: tuple[Times, Times, Times] | None = None
    most: float = 0.0
    reason: str = ""


def named_machines(
    machines: str | Machine | Sequence[str | os.PathLike[str]] | Mapping[str, Machine],
) -> dict[str, Cluster]:
    """Machines by name: GPUs in their usual servers, or clusters, whose count is no limit here.

    Raises: `InputError` for an unknown name, or none at all.
    """
    if isinstance(machines, Mapping):
        clusters = {name: as_cluster(machine) for name, machine in machines.items()}
    elif isinstance(machines, str | os.PathLike):
        clusters = dict([_named(machines)])
    elif isinstance(machines, Sequence):
        clusters = dict(map(_named, machines))
    else:
        clusters = {"": as_cluster(machines)}
    if not clusters:
        raise InputError("no GPU to serve on; expected at least one name")
    return clusters


def _named(name: str | os.PathLike[str]) -> tuple[str, Cluster]:
    try:
        return load_named_server(name)
    except InputError:
        try:
            return load_named_cluster(name)
        except InputError:
            load_named_gpu(name)  # its own message says which GPUs there are
            raise


@dataclass(frozen=True)
class Ranks:
    """Ways a replica may be split, those to try; None = the usual ones.

    Attributes:
      tensor: ranks that layers are split over, usually powers of two up to 8 within a domain of fast links.
      expert: 1 = experts are split as layers are, or as many as all ranks: they stay whole; usually both.
      data: ranks that hold requests of their own and share the experts (data-parallel attention), usually 1.
    """

    tensor: Sequence[int] | None = None
    expert: Sequence[int] | None = None
    data: Sequence[int] | None = None


def layouts(model: Model, cluster: Cluster, ranks: Ranks) -> list[Parallelism]:
    """Layouts to try.

    Args:
      model: as the engine loads it; only models with experts split them, or share them between data ranks.
      cluster: whose domain of fast links bounds the ranks that are tried where none are stated.
      ranks: those to try.
    Raises: `InputError` where no stated number of expert ranks goes with the others, or for data ranks of a model
      without experts.
    """
    domain = cluster.topology.gpus_per_domain or TENSOR[-1]
    routed = any(isinstance(layer.feed_forward, Experts) for layer in model.decoder.layers)
    if not routed and set(ranks.data or (1,)) != {1}:
        raise InputError(
            f"data_parallel {list(ranks.data or ())}, but {model.config.name} has no experts that ranks could share; "
            "leave it out: each replica holds requests of its own"
        )
    out = []
    for copies in dict.fromkeys(ranks.data or (1,)):
        for width in ranks.tensor or [size for size in TENSOR if size * copies <= max(domain, copies)]:
            gpus = width * copies
            choices = ranks.expert or ((1, gpus) if routed and gpus > 1 else (1,))
            out += [
                Parallelism(tensor=width, data=copies, expert=split)
                for split in dict.fromkeys(choices)
                if split in (1, gpus)
            ]
    if not out:
        raise InputError(
            f"expert_parallel {list(ranks.expert or ())} goes with no replica of {list(ranks.tensor or TENSOR)} tensor "
            f"and {list(ranks.data or (1,))} data ranks; expected 1 or as many as all of them"
        )
    return out


def replicas(
    predictor: Predictor,
    machines: Mapping[str, Cluster],
    model: Model,
    lengths: Lengths,
    longest: int,
    options: Mapping[str, Options],
    engine: Engine,
    ranks: Ranks,
) -> Iterator[Replica]:
    """Every replica that can be tried, one after another, the steps of each layout written down once.

    Args:
      predictor: forecasts the kernels.
      machines: clusters by the name of their GPU.
      model: as the engine loads it.
      lengths: mean tokens of a request, for the KV cache it takes.
      longest: tokens of the longest sequence, for which steps are written down.
      options: how the engine is set up on each machine, by the same names.
      engine: numbers of the engine's own time.
      ranks: as of `layouts`.
    Raises: `InputError` for sequences the model has no positions for.
    """
    read_decoder(model.config, longest)  # refuses what the model has no positions for
    most = max(limits.max_batch * (limits.draft_tokens + 1) for limits in options.values())
    chunk = max(limits.chunk_tokens for limits in options.values())
    grid = axes(longest, chunk, most)

    @functools.cache
    def points_of(layout: Parallelism) -> Points:
        return points(model, layout, grid)

    @functools.cache
    def steps_of(layout: Parallelism, domain: int, paths: tuple[str, ...]) -> Steps:
        return tabled(points_of(layout), layout, paths, domain, grid, model.dtypes.products)

    # A replica that cannot run is yielded too, with its reason, so that an answer can say why it is no choice.
    for name, cluster in machines.items():
        setup, domain = options[name], cluster.topology.gpus_per_domain or TENSOR[-1]
        for layout in layouts(model, cluster, ranks):
            replica = Replica(name, layout, setup)
            try:
                memory = capacity(model, layout, float(np.asarray(cluster.gpu.mem_bytes)), setup, lengths.mean_context)
                replica = replace(replica, memory=memory, most=memory.most(setup.max_batch))
                if not memory.fits:
                    yield replace(replica, reason=_too_large(memory))
                    continue
                paths = needed_paths(points_of(layout), cluster.gpu.paths)
                written = steps_of(layout, domain, paths)
                cluster.gpu.peak_flop_per_s(model.dtypes.products)  # refuses what the GPU has no arithmetic for
                yield replace(replica, times=bounded_times(predictor, cluster, written, engine))
            except InputError as error:
                yield replace(replica, reason=str(error))


def _too_large(memory: Capacity) -> str:
    needed = memory.weights + memory.activations + memory.runtime + memory.request_bytes
    return (
        f"does not fit: one request needs {needed / 1e9:.1f} GB a GPU, of {memory.mem_bytes / 1e9:.1f} GB the engine "
        "may take its share"
    )
