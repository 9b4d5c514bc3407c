"""A job's step as Chakra execution traces, one file a rank: what ASTRA-sim simulates on networks of its own.

Nodes of a rank are those of `step_nodes`, layer by layer. Computation has its forecast time in whole microseconds, its
FLOP and its bytes. Messages have their sizes, and how long the forecast takes for them; a simulator puts its own time
there, and hides as much of it as nothing waits for.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neusight_jax import __version__
from neusight_jax.files import atomic_folder, refuse_existing
from neusight_jax.hardware.cluster import Machine
from neusight_jax.job.job import Job
from neusight_jax.job.parallelism import GROUPS, Parallelism, strides
from neusight_jax.model.predictor import Predictor
from neusight_jax.reports.chakra_schema import COLLECTIVES, NODE_TYPES, VERSION, messages
from neusight_jax.reports.step_layers import Node
from neusight_jax.reports.step_nodes import rank_nodes
from neusight_jax.units import US

GROUP_FILE = "comm_group.json"
"""Ranks of every group by its number, for ASTRA-sim's `--comm-group-configuration`."""
MOST_NODES = 1_000_000
"""Of all files together, about: of larger jobs, neighbouring layers are one node."""
_TYPES = {"collective": "COMM_COLL_NODE", "send": "COMM_SEND_NODE", "receive": "COMM_RECV_NODE"}
"""Types of nodes by their kind; all others are computation."""


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
    layout = job.plan.layout
    nodes = rank_nodes(predictor, machine, job, MOST_NODES / layout.gpus)
    members = group_members(layout)
    used = {node.group for rank in nodes for node in rank if node.group}
    communicators = list(dict.fromkeys(tuple(ranks) for name in members if name in used for ranks in members[name]))
    numbers = {ranks: number for number, ranks in enumerate(communicators, 1)}
    groups_of = {kind: {rank: ranks for ranks in members[kind] for rank in ranks} for kind in used}
    name, writer = Path(job.plan.model).stem or "step", _Writer(nodes, layout, numbers)
    with atomic_folder(folder) as target:
        for rank in range(layout.gpus):
            memberships = {kind: of.get(rank, []) for kind, of in groups_of.items()}
            with (target / f"{name}.{rank}.et").open("wb") as out:
                out.writelines(writer.records(rank, memberships))
        groups_text = json.dumps({str(number): list(ranks) for ranks, number in numbers.items()})
        (target / GROUP_FILE).write_text(groups_text, encoding="utf-8")
    return sorted(Path(folder).iterdir())


class _Writer:
    """Writes nodes of every rank, with their lengths before them; what ranks have alike is made once.

    Args:
      nodes: of each rank of the pipeline.
      layout: of the job.
      numbers: of the groups, by their ranks.
    """

    def __init__(
        self, nodes: Sequence[Sequence[Node]], layout: Parallelism, numbers: Mapping[tuple[int, ...], int]
    ) -> None:
        self.nodes, self.layout, self.numbers = nodes, layout, numbers
        self.step = strides(layout)["pipeline"]
        self.alike: dict[tuple[int, int, int], bytes] = {}

    def records(self, rank: int, memberships: Mapping[str, list[int]]) -> Iterator[bytes]:
        """The metadata of a rank's file, then its nodes.

        Args:
          rank: of the job.
          memberships: ranks of each of its groups.
        """
        metadata, _ = messages()
        head = metadata(version=VERSION)
        head.attr.add(name="made_by", string_val=f"neusight-jax {__version__}")
        yield _record(head)
        at = rank // self.step % self.layout.pipeline
        # Ranks at one place of the pipeline differ in groups and peers alone: their records are packed once.
        for number, node in enumerate(self.nodes[at]):
            peers = node.kind in ("send", "receive")
            group = self.numbers[tuple(memberships[node.group])] if node.group else 0
            key = (at, number, -1 - rank if peers else group)
            if key not in self.alike:
                peer = rank + (node.peer - at) * self.step
                record = _record(_message(node, number, _attributes(node, rank, peer, memberships, group)))
                if peers:
                    yield record
                    continue
                self.alike[key] = record
            yield self.alike[key]


def _record(message: Any) -> bytes:
    """A message with its length before it."""
    from google.protobuf import proto

    out = io.BytesIO()
    proto.serialize_length_prefixed(message, out)
    return out.getvalue()


def _message(node: Node, number: int, attributes: Mapping[str, Mapping[str, Any]]) -> Any:
    start, end = (round(moment / US) for moment in (node.start_s, node.end_s))
    type = NODE_TYPES.index(_TYPES.get(node.kind, "COMP_NODE"))
    record = messages()[1](id=number, name=node.name, data_deps=node.deps, type=type)
    record.start_time_micros, record.duration_micros = start, end - start
    record.attr.add(name="is_cpu_op", bool_val=False)
    for key, value in attributes.items():
        record.attr.add(name=key, **value)
    return record


def _attributes(
    node: Node, rank: int, peer: int, memberships: Mapping[str, list[int]], group: int
) -> dict[str, dict[str, Any]]:
    """Attributes that ASTRA-sim reads of a node, with the types it reads them as: another type is 0 to it.

    Args:
      peer: the other rank of a message between stages.
      memberships: ranks of each of this rank's groups.
      group: the number of the node's.
    """
    if node.kind not in _TYPES:
        return {"num_ops": {"int64_val": round(node.flop)}, "tensor_size": {"uint64_val": round(node.bytes)}}
    attributes: dict[str, dict[str, Any]] = {"comm_size": {"int64_val": max(round(node.bytes), 1)}}
    if node.kind == "collective":
        return {
            "comm_type": {"int64_val": COLLECTIVES.index(node.op.upper())},
            **attributes,
            "pg_name": {"string_val": str(group)},
        }
    to, source = peer, peer
    if node.group:
        ring = memberships[node.group]
        place = ring.index(rank)
        to, source = ring[(place + 1) % len(ring)], ring[place - 1]
    ends = (rank, to) if node.kind == "send" else (source, rank)
    pairs = zip(("comm_src", "comm_dst", "comm_tag"), (*ends, node.tag), strict=True)
    return attributes | {name: {"int32_val": value} for name, value in pairs}
