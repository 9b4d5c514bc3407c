"""A job's step as nodes that wait for each other: what overlaps does so because nothing makes it wait.

Pieces of work stand in the order of the pipeline's schedule, layer by layer (`step_layers`). Gradients of a layer are
sent once the last micro-batch has them, and parameters after a sharded optimizer before the first one needs them. A
forecast adds nodes of their own: launches that kernels wait for ("host"), what messages beside computation add to it
("contention"), what a rank waits for slower ones ("waiting"), and what a step takes beside its work ("beside"). So the
longest path is the forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from neusight_jax.hardware.cluster import Machine
from neusight_jax.job.job import Job, Plan
from neusight_jax.job.schedule import BACKWARD, FORWARD, WEIGHT
from neusight_jax.model.predictor import Predictor
from neusight_jax.reports.step_layers import Cut, Layers, Node, Sent, Track, fitted, layers_of
from neusight_jax.reports.step_pieces import WORK_NAMES, StepPieces, Transfer, step_pieces, weight_in_backward, works

_DONE = {FORWARD: ("forward",), BACKWARD: ("backward", "recomputed"), WEIGHT: ("weight_gradient",)}


def rank_nodes(predictor: Predictor, machine: Machine, job: Job, most: float) -> list[list[Node]]:
    """Nodes of each rank of the pipeline; ranks of the other axes run alike.

    Args:
      predictor, machine, job: as `nj.predict`.
      most: nodes of one rank of the pipeline, about; neighbouring layers are together where there would be more.
    """
    pieces = step_pieces(predictor, machine, job)
    work_s = pieces.total_s - pieces.fixed_s
    step = _Step(job.plan, pieces, most)
    ranks = fitted(step.ranks, lambda made: max(rank.track.end_s for rank in made), work_s)
    hidden_s = work_s - max(rank.track.end_s for rank in ranks)
    for rank in ranks:
        last = rank.track.work("messages beside computation", "contention", hidden_s, rank.last)
        rank.track.work("beside the work", "beside", pieces.fixed_s + min(hidden_s, 0.0), last)
    return [rank.track.nodes for rank in ranks]


class _Rank:
    """A rank of the pipeline: its nodes, those its next work waits for, its last message of gradients, and those that
    follow all work."""

    def __init__(self) -> None:
        self.track = Track()
        self.last: tuple[int, ...] = ()
        self.gradients: tuple[int, ...] = ()
        self.unhidden: list[tuple[str, Transfer, float]] = []

    def place(
        self, layers: Layers, name: str, deps: tuple[int, ...], gates: Mapping[int, tuple[int, ...]]
    ) -> list[int]:
        """Put a piece on the rank; the numbers of its nodes here.

        Args:
          name: of the piece.
          deps: what it waits for.
          gates: what the first computation of each part waits for beside.
        """
        at, places = len(self.track.nodes), list[int]()
        gated = {first: gates.get(part, ()) for part, first in enumerate(layers.firsts)}
        for number, node in enumerate(layers.track.nodes):
            before = (*((places[dep] for dep in node.deps) if node.deps else deps), *gated.get(number, ()))
            more = {field: getattr(node, field) for field in ("flop", "bytes", "op", "group")} | {"tag": at + node.tag}
            places.append(self.track.add(f"{name}, {node.name}", node.kind, node.end_s - node.start_s, before, **more))
        self.last = tuple(places[end] for end in layers.ends) or deps
        return places


class _Step:
    """Puts the ranks of a step together.

    Args:
      plan: of the job.
      pieces: of its step.
      most: as `rank_nodes`.
    """

    def __init__(self, plan: Plan, pieces: StepPieces, most: float) -> None:
        self.plan, self.pieces, self.works = plan, pieces, list(works(plan))
        self.both, self.scale = weight_in_backward(plan.layout), 1.0
        self._overlapped = "gradients" in plan.recipe.overlaps
        self.most = most * plan.layout.pipeline / max(len(self.works), 1)
        shapes = {(plan.kinds[work.stage], work.kind): work.stage for work in self.works}
        self.layers = {place: self._layers(*place, stage) for place, stage in shapes.items()}

    def _layers(self, of_stage: int, kind: int, stage: int) -> Layers:
        piece, plan = self.pieces.pieces[stage][kind], self.plan
        done = _DONE[kind] + (("weight_gradient",) if self.both and kind == BACKWARD else ())
        sent = Sent.of(self.pieces.transfers[of_stage], kind, plan.recipe.overlaps)
        cut = Cut.of(piece, sent, max(plan.layers[of_stage], 1), self.most)
        return layers_of(piece, sent, self.pieces.amount(of_stage, done), cut, first=kind == FORWARD)

    def ranks(self, scale: float) -> list[_Rank]:
        """All of them, with gradients and parameters of `scale` times their seconds."""
        plan, ranks, self.scale = self.plan, [_Rank() for _ in range(self.plan.layout.pipeline)], scale
        ended: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Pieces come as they are scheduled: what one needs from another rank has its nodes already.
        for work in self.works:
            rank, layers = ranks[work.rank], self.layers[plan.kinds[work.stage], work.kind]
            deps, gates = rank.last, dict[int, tuple[int, ...]]()
            if work.needs:
                deps = (*deps, self._message(ranks, work.rank, *ended[work.needs], work.needs))
            if work.kind == FORWARD and work.batch == 0:
                gates = self._parameters(rank, layers.cut, work.stage)
            name = f"{WORK_NAMES[work.kind]} of micro-batch {work.batch}, stage {work.stage}"
            places = rank.place(layers, name, deps, gates)
            rank.last = (*rank.last, *gates.get(layers.cut.parts, ()))
            if work.last and work.kind == (BACKWARD if self.both else WEIGHT):
                self._gradients(rank, layers, [places[last] for last in layers.lasts], deps, work.stage)
            ended[work.place] = (work.rank, rank.last)
        for place, rank in enumerate(ranks):
            self._optimizer(rank, plan.kinds[place :: len(ranks)])
        return ranks

    def _message(self, ranks: Sequence[_Rank], here: int, there: int, deps: tuple[int, ...], tag: int) -> int:
        """A message between stages: sent when the work of the other rank ends; the node that receives it."""
        more, seconds, sender = (
            {"bytes": self.plan.message_bytes, "tag": tag},
            self.pieces.between_s,
            ranks[there].track,
        )
        sent = sender.nodes[sender.add("send", "send", seconds, deps, peer=here, **more)]
        return ranks[here].track.add("receive", "receive", seconds, (), sent.start_s, peer=there, **more)

    def _transfers(self, stage: int, slot: str) -> list[Transfer]:
        return [transfer for transfer in self.pieces.transfers[self.plan.kinds[stage]] if transfer.message.slot == slot]

    def _parameters(self, rank: _Rank, cut: Cut, stage: int) -> dict[int, tuple[int, ...]]:
        """Parameters after a sharded optimizer, handed round before the first micro-batch needs them: what the first
        computation of each part waits for, and after the last part what the piece does."""
        gates, before = dict[int, tuple[int, ...]](), tuple[int, ...]()
        overlapped, transfers = self._overlapped, self._transfers(stage, "parameters")
        for transfer in transfers:
            share = transfer.exposed if overlapped else 1.0
            before = gates[0] = rank.track.send(f"stage {stage}", transfer, transfer.count * share, before, self.scale)
        for part, share in enumerate(cut.shares(first=True) if overlapped else ()):
            for transfer in transfers:
                count = transfer.count * share * (1.0 - transfer.exposed)
                before = gates[part] = rank.track.send(f"stage {stage}", transfer, count, before, self.scale)
        return gates

    def _gradients(self, rank: _Rank, layers: Layers, lasts: Sequence[int], deps: tuple[int, ...], stage: int) -> None:
        """Gradients of a step, those of a layer once they are there; what of them nothing hides comes last.

        Args:
          layers: the piece that makes them; lasts: of its parts, on the rank.
          deps: what the piece waited for.
        """
        shares, ready = layers.cut.shares(first=False), list[tuple[int, ...]]((last,) for last in lasts)
        if not layers.cut.apart:  # of layers that are together, gradients are sent as they come
            ready = [deps, *ready]
        for transfer in self._transfers(stage, "gradients"):
            name, whole = f"stage {stage}", transfer.message.group == "pipeline"  # a table that two stages share
            left = 1.0 - transfer.exposed if self._overlapped and not whole else 0.0
            alone = int(transfer.exposed * layers.cut.parts)  # as in a piece, where both take from each other
            rank.unhidden.append((name, transfer, transfer.count * (1.0 - left)))
            for at, share in enumerate(shares if left else ()):
                before = (*ready[max(at, alone - layers.cut.apart)], *rank.gradients)
                rank.gradients = rank.track.send(name, transfer, transfer.count * share * left, before, self.scale)

    def _optimizer(self, rank: _Rank, kinds: Sequence[int]) -> None:
        """What follows the pipeline on a rank with these kinds of stages."""
        piece, deps = self.pieces.optimizer, (*rank.last, *rank.gradients)
        for name, transfer, count in rank.unhidden:
            deps = rank.track.send(name, transfer, count, deps, self.scale)
        amounts = np.sum([self.pieces.amount(kind, ("optimizer",)) for kind in kinds], axis=0)
        flop, moved = map(float, amounts)
        if piece.kernels_s > 0.0:
            deps = (rank.track.add("optimizer", "compute", piece.kernels_s, deps, flop=flop, bytes=moved),)
        rank.last = rank.track.work("host, optimizer", "host", piece.host_s, deps)
