"""A job's step as Chakra execution traces, one file a rank: what ASTRA-sim simulates on networks of its own.

Nodes of a rank are those of the forecast's schedule (`step_pieces`). Computation has its forecast time in whole
microseconds, its FLOP and its bytes. Messages have their sizes, and how long the forecast takes for them; a simulator
puts its own time there. Computation that messages run beside is cut in two, so that the longest path through a step is
the forecast. All messages of one kind in a piece of work are one node.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax import __version__
from neusight_jax.files import atomic_folder, refuse_existing
from neusight_jax.hardware.cluster import Machine, as_cluster
from neusight_jax.job.job import KINDS, WORK, Job
from neusight_jax.job.messages import Message
from neusight_jax.job.parallelism import GROUPS, Parallelism, groups, strides
from neusight_jax.job.schedule import BACKWARD, FORWARD, WEIGHT
from neusight_jax.job.step import message_seconds, message_size, once
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import element_bytes
from neusight_jax.reports.chakra_schema import COLLECTIVES, NODE_TYPES, VERSION, messages
from neusight_jax.reports.step_pieces import (
    BESIDE,
    LAST,
    WORK_NAMES,
    Piece,
    StepTimes,
    step_times,
    weight_in_backward,
    works,
)
from neusight_jax.units import US

GROUP_FILE = "comm_group.json"
"""Ranks of every group by its number, for ASTRA-sim's `--comm-group-configuration`."""


@dataclass(frozen=True)
class Node:
    """A node of every rank of one stage of the pipeline; seconds.

    Attributes:
      type: one of `NODE_TYPES`; deps: nodes of the same rank that end before it starts.
      flop, bytes: of computation; bytes also of a message.
      op, group: of messages of a group; op "send_recv" goes along its ring.
      peer, tag: of a message between stages: the other rank of the pipeline, and what tells the pair apart.
    """

    name: str
    type: str
    start_s: float
    end_s: float
    deps: tuple[int, ...]
    flop: float = 0.0
    bytes: float = 0.0
    op: str = ""
    group: str = ""
    peer: int = -1
    tag: int = 0


@dataclass
class _Rank:
    """Nodes of one rank of the pipeline, and those its next piece of work waits for."""

    nodes: list[Node] = field(default_factory=list)
    last: tuple[int, ...] = ()

    def add(self, name: str, type: str, start_s: float, seconds: float, deps: Sequence[int], **more: Any) -> int:
        """Add a node and give its number, which others wait for.

        Args:
          type: one of `NODE_TYPES`.
          start_s: on the clock of the step, seconds.
          deps: numbers of the nodes of this rank it waits for.
          more: further fields of `Node`.
        """
        self.nodes.append(Node(name, type, start_s, start_s + seconds, tuple(deps), **more))
        return len(self.nodes) - 1


@dataclass(frozen=True)
class _Sizes:
    """FLOP, bytes and messages of a job's pieces.

    Attributes:
      flop, bytes: of kernels, [kind of stage, work].
      sent: messages by kind of stage, each with its bytes and seconds, those of one pass together.
    """

    flop: np.ndarray
    bytes: np.ndarray
    sent: Mapping[int, list[tuple[Message, float, float]]]


def rank_nodes(predictor: Predictor, machine: Machine, job: Job) -> list[list[Node]]:
    """Nodes of each rank of the pipeline; ranks of the other axes run alike."""
    plan, times = job.plan, step_times(predictor, machine, job)
    sizes, order = _sizes(predictor, machine, job), job.plan.kinds
    ranks = [_Rank() for _ in range(plan.layout.pipeline)]
    ended: dict[int, tuple[int, tuple[int, ...], float]] = {}
    both = weight_in_backward(plan.layout)
    # Pieces come as they are scheduled: what one needs from another rank has its nodes already.
    for work in works(plan, times):
        rank, deps = ranks[work.rank], ranks[work.rank].last
        if work.needs:
            deps = (*deps, _message(ranks, work.rank, *ended[work.needs], work.needs, times, plan.message_bytes))
        kind = order[work.stage]
        done = {FORWARD: ("forward",), BACKWARD: ("backward", "recomputed"), WEIGHT: ("weight_gradient",)}[work.kind]
        done += ("weight_gradient",) if both and work.kind == BACKWARD else ()
        sent = [transfer for transfer in sizes.sent[kind] if transfer[0].slot in BESIDE[work.kind]]
        name = f"{WORK_NAMES[work.kind]} of micro-batch {work.batch}, stage {work.stage}"
        amount = _amount(sizes, kind, done)
        rank.last = _piece(rank, name, work.start_s, times.pieces[work.stage][work.kind], deps, amount, sent)
        ended[work.place] = (work.rank, rank.last, work.end_s)
    for place, rank in enumerate(ranks):
        kinds = order[place :: len(ranks)]
        sent = [transfer for kind in kinds for transfer in sizes.sent[kind] if transfer[0].slot in LAST]
        amounts = np.sum([_amount(sizes, kind, ("optimizer",)) for kind in kinds], axis=0)
        start_s = max((rank.nodes[index].end_s for index in rank.last), default=0.0)
        last = _piece(rank, "optimizer of the step", start_s, times.tail, rank.last, amounts, sent)
        end_s = max((rank.nodes[index].end_s for index in last), default=0.0)
        rank.add("beside the work", "COMP_NODE", end_s, times.fixed_s, last)
    return [rank.nodes for rank in ranks]


def _amount(sizes: _Sizes, kind: int, work: Iterable[str]) -> np.ndarray:
    """FLOP and bytes of a kind of stage's work."""
    places = [WORK.index(name) for name in work]
    return np.array([sizes.flop[kind, places].sum(), sizes.bytes[kind, places].sum()])


def _message(
    ranks: Sequence[_Rank],
    here: int,
    there: int,
    deps: tuple[int, ...],
    end_s: float,
    tag: int,
    times: StepTimes,
    size: float,
) -> int:
    """A message between stages: sent when the work of the other rank ends; the node that receives it."""
    more = {"bytes": size, "tag": tag}
    ranks[there].add("send", "COMM_SEND_NODE", end_s, times.between_s, deps, peer=here, **more)
    return ranks[here].add("receive", "COMM_RECV_NODE", end_s, times.between_s, (), peer=there, **more)


def _piece(
    rank: _Rank,
    name: str,
    start_s: float,
    piece: Piece,
    deps: tuple[int, ...],
    amount: np.ndarray,
    sent: Sequence[tuple[Message, float, float]],
) -> tuple[int, ...]:
    """Computation, its part beside messages cut off, and the messages one after another; the nodes it ends with."""
    if piece.whole_s <= 0:
        return deps
    beside_s = piece.drawn_s if sent else piece.whole_s - piece.compute_s
    alone_s = piece.whole_s - beside_s
    at, total_s = start_s + alone_s, sum(seconds for _, _, seconds in sent)

    def compute(part: str, start_s: float, seconds: float, deps: tuple[int, ...]) -> tuple[int, ...]:
        """Add a part of the computation; its share of FLOP and bytes is that of the time.

        Args:
          part: what its name says after that of the piece.
          start_s: on the clock of the step, seconds.
          deps: numbers of the nodes it waits for; given back where the part takes no time.
        """
        if seconds <= 0:
            return deps
        flop, moved = map(float, amount * (seconds / piece.compute_s))
        return (rank.add(name + part, "COMP_NODE", start_s, seconds, deps, flop=flop, bytes=moved),)

    before = compute("", start_s, alone_s, deps)
    ends = compute(", beside messages", at, piece.compute_s - alone_s, before)
    for message, size, seconds in sent:
        length = beside_s * seconds / total_s if total_s > 0 else beside_s / len(sent)
        before = _collective(rank, message, f"{message.slot}, {name}", at, length, before, size)
        at += length
    return tuple(dict.fromkeys((*ends, *before)))


def _collective(
    rank: _Rank, message: Message, name: str, start_s: float, seconds: float, deps: tuple[int, ...], size: float
) -> tuple[int, ...]:
    """The nodes of a message: one, or two where a rank of a ring sends to the next and receives from the one before."""
    more: dict[str, Any] = {"bytes": size, "op": message.op, "group": message.group}
    types: tuple[str, ...] = ("COMM_COLL_NODE",)
    if message.op == "send_recv":
        types, more["tag"] = ("COMM_SEND_NODE", "COMM_RECV_NODE"), len(rank.nodes)
    return tuple(rank.add(name, kind, start_s, seconds, deps, **more) for kind in types)


def _sizes(predictor: Predictor, machine: Machine, job: Job) -> _Sizes:
    plan, flop, moved = job.plan, np.zeros((KINDS, len(WORK))), np.zeros((KINDS, len(WORK)))
    for name, batch in job.kernels.families.items():
        dims, dtype = jax.tree.map(jnp.asarray, (batch.dims, batch.dtype))
        work, counts = FAMILIES[name].work(dims, element_bytes(dtype)), np.asarray(job.counts[name])
        for out, amount in ((flop, work.flop), (moved, work.bytes_moved)):
            out += np.where(counts > 0, counts * np.asarray(amount, np.float64), 0.0).sum(axis=-1)
    cluster = as_cluster(machine)
    placed = groups(plan.layout, cluster.topology.gpus_per_domain or plan.layout.gpus)
    traffic = [message for _, message in plan.messages]
    seconds = np.asarray(message_seconds(predictor, cluster, traffic, placed, once)) if traffic else np.zeros(0)
    sent: dict[int, list[tuple[Message, float, float]]] = {kind: [] for kind in plan.kinds}
    for (kind, message), message_s in zip(plan.messages, seconds, strict=True):
        ranks = placed[message.group].ranks
        if ranks > 1 and message.count > 0:
            size = message_size(message, placed[message.group])[0] * message.count
            share = size / ranks if message.op == "all_gather" else size  # ASTRA-sim counts what a rank brings along
            sent[kind].append((message, share, float(message_s) * message.count))
    return _Sizes(flop, moved, sent)


def group_members(layout: Parallelism) -> dict[str, list[list[int]]]:
    """Ranks of all groups of each kind that have more than one, in order; of "pipeline" the two ends."""
    step, every = strides(layout), range(layout.gpus)
    place = {axis: [rank // step[axis] % getattr(layout, axis) for rank in every] for axis in step}

    def split(axes: Sequence[str]) -> list[list[int]]:
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank in every:
            parts.setdefault(tuple(place[axis][rank] for axis in step if axis not in axes), []).append(rank)
        return list(parts.values())

    stages, size = split(GROUPS["expert"]), layout.expert
    rosters = {name: split(axes) for name, axes in GROUPS.items() if name != "expert"}
    rosters["expert"] = [stage[at : at + size] for stage in stages for at in range(0, len(stage), size)]
    rosters["expert_data"] = [stage[at::size] for stage in stages for at in range(size)]
    rosters["pipeline"] = [[members[0], members[-1]] for members in split(("pipeline",))]
    return {name: [ranks for ranks in members if len(set(ranks)) > 1] for name, members in rosters.items()}


def write_chakra(folder: Path | str, predictor: Predictor, machine: Machine, job: Job) -> list[Path]:
    """Write a step as `MODEL.RANK.et`, one a rank, and the groups as `comm_group.json`, all or nothing.

    Args:
      folder: to write, new or empty.
      machine: what each rank runs on, a cluster where ranks talk to each other.
      job: the training step, its kernels and messages planned.
    Raises: `InputError` without protobuf, or where the folder holds something.
    """
    messages()
    refuse_existing(folder)
    nodes, layout = rank_nodes(predictor, machine, job), job.plan.layout
    members = group_members(layout)
    used = {node.group for rank in nodes for node in rank if node.group}
    communicators = list(dict.fromkeys(tuple(ranks) for name in members if name in used for ranks in members[name]))
    numbers = {ranks: number for number, ranks in enumerate(communicators, 1)}
    name = Path(job.plan.model).stem or "step"
    with atomic_folder(folder) as target:
        for rank in range(layout.gpus):
            memberships = {kind: next((ranks for ranks in members[kind] if rank in ranks), []) for kind in used}
            at = rank // strides(layout)["pipeline"] % layout.pipeline
            _write(target / f"{name}.{rank}.et", nodes[at], rank, at, layout, memberships, numbers)
        groups_text = json.dumps({str(number): list(ranks) for ranks, number in numbers.items()})
        (target / GROUP_FILE).write_text(groups_text, encoding="utf-8")
    return sorted(Path(folder).iterdir())


def _write(
    path: Path,
    nodes: Sequence[Node],
    rank: int,
    at: int,
    layout: Parallelism,
    memberships: Mapping[str, list[int]],
    numbers: Mapping[tuple[int, ...], int],
) -> None:
    """One rank's file: its metadata, then its nodes, each with its length before it."""
    from google.protobuf.proto import serialize_length_prefixed

    metadata, make = messages()
    head = metadata(version=VERSION)
    head.attr.add(name="made_by", string_val=f"neusight-jax {__version__}")
    step = strides(layout)["pipeline"]
    with path.open("wb") as out:
        serialize_length_prefixed(head, out)
        for number, node in enumerate(nodes):
            start, end = (round(moment / US) for moment in (node.start_s, node.end_s))
            record = make(id=number, name=node.name, data_deps=node.deps, type=NODE_TYPES.index(node.type))
            record.start_time_micros, record.duration_micros = start, end - start
            record.attr.add(name="is_cpu_op", bool_val=False)
            for key, value in _attributes(node, rank, rank + (node.peer - at) * step, memberships, numbers).items():
                record.attr.add(name=key, **value)
            serialize_length_prefixed(record, out)


def _attributes(
    node: Node, rank: int, peer: int, memberships: Mapping[str, list[int]], numbers: Mapping[tuple[int, ...], int]
) -> dict[str, dict[str, Any]]:
    """Attributes that ASTRA-sim reads of a node, with the types it reads them as: another type is 0 to it.

    Args:
      peer: the other rank of a message between stages; memberships: ranks of each of this rank's groups.
    """
    size = round(node.bytes)
    if node.type == "COMP_NODE":
        return {"num_ops": {"int64_val": round(node.flop)}, "tensor_size": {"uint64_val": size}}
    attributes: dict[str, dict[str, Any]] = {"comm_size": {"int64_val": size}}
    if node.type == "COMM_COLL_NODE":
        number = numbers[tuple(memberships[node.group])]
        return {
            "comm_type": {"int64_val": COLLECTIVES.index(node.op.upper())},
            **attributes,
            "pg_name": {"string_val": str(number)},
        }
    to, source = peer, peer
    if node.group:
        ring = memberships[node.group]
        place = ring.index(rank)
        to, source = ring[(place + 1) % len(ring)], ring[place - 1]
    ends = (rank, to) if node.type == "COMM_SEND_NODE" else (source, rank)
    pairs = zip(("comm_src", "comm_dst", "comm_tag"), (*ends, node.tag), strict=True)
    return attributes | {name: {"int32_val": value} for name, value in pairs}
