"""One piece of a micro-batch's work as nodes that wait for each other, layer by layer, with its messages between them.

Messages that computation waits for stand between the computation that makes and that needs them. Those that a recipe
runs beside computation start with it, and what comes next waits for both; shards travel one layer ahead. They take SMs
and memory bandwidth away, which no network sees: the share that a message still adds (`Software.overlap`) is a message
of its own that computation waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neusight_jax.job.schedule import BACKWARD, FORWARD
from neusight_jax.reports.step_pieces import Piece, Transfer, overlap_class

MESSAGES: tuple[str, ...] = ("collective", "send", "receive")
"""Kinds of nodes that are messages; all others take the rank's time."""
LEAST_HOST = 0.01
"""Share of a piece from which launches are nodes of their own, not part of the computation."""
HALVINGS = 20
"""Of an interval, where a forecast hides more of messages than their order does."""
_BACK = {FORWARD: "forward", BACKWARD: "backward"}


@dataclass(frozen=True)
class Node:
    """A node of every rank of one rank of the pipeline; seconds.

    Attributes:
      kind: "compute", "host", "contention", "waiting", "beside" or one of `MESSAGES`.
      deps: nodes of the same rank that end before it starts.
      flop, bytes: of computation; bytes also of a message.
      op, group: of messages of a group; op "send_recv" goes along its ring.
      peer, tag: of a message between stages: the other rank of the pipeline, and what tells the pair apart.
    """

    name: str
    kind: str
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
class Track:
    """Nodes of one rank of the pipeline, or of one piece."""

    nodes: list[Node] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When all of it has ended."""
        return max((node.end_s for node in self.nodes), default=0.0)

    def add(self, name: str, kind: str, seconds: float, deps: Sequence[int], start_s: float = 0.0, **more: Any) -> int:
        """Add a node and give its number, which others wait for.

        Args:
          deps: numbers of the nodes of this track it waits for.
          start_s: when it starts where it waits for none, seconds.
          more: further fields of `Node`.
        """
        start_s = max((self.nodes[dep].end_s for dep in deps), default=start_s)
        self.nodes.append(Node(name, kind, start_s, start_s + seconds, tuple(dict.fromkeys(deps)), **more))
        return len(self.nodes) - 1

    def work(self, name: str, kind: str, seconds: float, deps: tuple[int, ...]) -> tuple[int, ...]:
        """Add what takes a rank's time; the nodes to wait for, which are `deps` where it takes none.

        Args:
          name, kind: as of `Node`; seconds: of the rank.
          deps: numbers of the nodes of this track it waits for.
        """
        return (self.add(name, kind, seconds, deps),) if seconds > 0.0 else deps

    def send(
        self, name: str, transfer: Transfer, count: float, deps: tuple[int, ...], scale: float = 1.0
    ) -> tuple[int, ...]:
        """Add a message, of a ring the sending and the receiving of it; the nodes to wait for, `deps` for none.

        Args:
          name: of what sends it.
          count: messages that are one node.
          scale: of their seconds.
        """
        if count <= 0.0:
            return deps
        message, tag = transfer.message, len(self.nodes)
        kinds = ("send", "receive") if message.op == "send_recv" else ("collective",)
        more: dict[str, Any] = {"bytes": count * transfer.bytes, "op": message.op, "group": message.group, "tag": tag}
        seconds = count * scale * transfer.seconds
        return tuple(self.add(f"{message.slot}, {name}", kind, seconds, deps, **more) for kind in kinds)


@dataclass(frozen=True)
class Sent:
    """Messages of a piece by what waits for them.

    Attributes:
      between: what computation waits for at once.
      beside: what runs beside the computation of a layer.
      gathers, reduces: shards, a layer ahead and behind.
    """

    between: tuple[Transfer, ...] = ()
    beside: tuple[Transfer, ...] = ()
    gathers: tuple[Transfer, ...] = ()
    reduces: tuple[Transfer, ...] = ()

    @classmethod
    def of(cls, transfers: Iterable[Transfer], kind: int, overlaps: Sequence[str]) -> Sent:
        """Those of a kind of work, with what a recipe overlaps."""
        places: dict[str, list[Transfer]] = {"between": [], "beside": [], "gathers": [], "reduces": []}
        for transfer in transfers:
            name, _, back = transfer.message.slot.partition("_")
            overlapped = overlap_class(transfer.message) in overlaps
            if back and back == _BACK.get(kind):
                places["beside" if overlapped else "between"].append(transfer)
            elif (name, kind) in (("gather", FORWARD), ("gather", BACKWARD), ("reduce", BACKWARD)):
                places[f"{name}s" if overlapped else "between"].append(transfer)
        return cls(**{name: tuple(sent) for name, sent in places.items()})


@dataclass(frozen=True)
class Cut:
    """How a piece is cut.

    Attributes:
      layers: that it has; parts: that are apart, fewer where neighbouring layers are together.
      slices: pieces of computation of a part, with messages between them.
      host: whether launches are nodes of their own.
    """

    layers: int
    parts: int
    slices: int
    host: bool

    @classmethod
    def of(cls, piece: Piece, sent: Sent, layers: int, most: float) -> Cut:
        """With at most so many nodes, about.

        Args:
          piece, sent: what is cut, and its messages.
          layers: that it has; most: nodes.
        """
        slices = 2 if any(transfer.count > 1.5 * layers for transfer in sent.between) else 1
        host = piece.host_s > LEAST_HOST * piece.base_s
        transfers = (*sent.between, *sent.beside, *sent.gathers, *sent.reduces)
        of_layer = slices * (1 + host) + sum(
            transfer.count / layers * (2 if transfer.message.op == "send_recv" else 1) for transfer in transfers
        )
        return cls(layers, int(min(max(most / of_layer, 1.0), layers)), slices, host)

    @property
    def apart(self) -> bool:
        """Whether every layer is."""
        return self.parts == self.layers

    def shares(self, *, first: bool) -> list[float]:
        """Shares of what is sent for all layers: layer by layer, or that of one layer first, or last, and those of
        parts."""
        alone = 1.0 / self.layers
        if self.apart:
            return [alone] * self.layers
        parts = [(1.0 - alone) / self.parts] * self.parts
        return [alone, *parts] if first else [*parts, alone]


@dataclass(frozen=True)
class Layers:
    """A piece by itself, from time 0: its nodes, those it ends with, the first and last computation of each part."""

    track: Track
    cut: Cut
    ends: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    lasts: tuple[int, ...] = ()


def layers_of(piece: Piece, sent: Sent, amount: np.ndarray, cut: Cut, *, first: bool) -> Layers:
    """A piece of work that takes `piece.whole_s`.

    Args:
      piece: its seconds.
      sent: its messages.
      amount: its FLOP and bytes.
      cut: how fine.
      first: whether the first layer waits for its shards, as in a forward pass.
    """
    if piece.whole_s <= 0.0:
        return Layers(Track(), cut)

    def made(scale: float) -> Layers:
        return _Layering(piece, sent, amount, cut, scale, first).layers()

    layers = fitted(made, lambda made: made.track.end_s, piece.base_s)
    track, ends = layers.track, layers.ends
    ends = track.work("messages beside computation", "contention", piece.base_s - track.end_s, ends)
    ends = track.work("other ranks", "waiting", piece.whole_s - piece.base_s, ends)
    return Layers(track, cut, ends, layers.firsts, layers.lasts)


def fitted(make: Callable[[float], Any], end_of: Callable[[Any], float], most_s: float) -> Any:
    """What `make` gives of messages as long as they are or, where it ends after `most_s`, as fit in."""
    made = make(1.0)
    if end_of(made) <= most_s * (1.0 + 1e-6):
        return made
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if end_of(make(middle)) <= most_s else (low, middle)
    return make(low)


class _Layering:
    """Puts the layers of a piece together, without contention and waiting."""

    def __init__(self, piece: Piece, sent: Sent, amount: np.ndarray, cut: Cut, scale: float, first: bool) -> None:
        self.piece, self.sent, self.cut, self.scale, self.first = piece, sent, cut, scale, first
        self.track, self.pieces = Track(), cut.parts * cut.slices
        self.amount = amount / self.pieces
        self.shards: tuple[int, ...] = ()
        self.gate: tuple[int, ...] = ()

    def layers(self) -> Layers:
        """All of them."""
        cut, chain, firsts, lasts = self.cut, tuple[int, ...](), [], []
        # The chain is what the next piece waits for: what is left out of it runs beside, as nothing makes it wait.
        for at in range(self.pieces):
            part, inside = divmod(at, cut.slices)
            name = f"layer {part}" if cut.apart else f"part {part}"
            shards = self._shards(part) if inside == 0 else []
            if inside == 0:
                chain = self._wait(part, name, chain)
            chain = self._between(at, name, chain, gathers=True)
            chain, first, last = self._compute(name, chain, shards)
            firsts += [first] if inside == 0 else []
            lasts += [last] if inside + 1 == cut.slices else []
            chain = self._between(at, name, chain, gathers=False)
        for transfer in self.sent.reduces:
            count = transfer.count / cut.layers
            self.shards = self.track.send(name, transfer, count, (*chain, *self.shards), self.scale)
        return Layers(self.track, cut, (*chain, *self.gate, *self.shards), tuple(firsts), tuple(lasts))

    def _wait(self, part: int, name: str, chain: tuple[int, ...]) -> tuple[int, ...]:
        """Wait for the shards of a part, which nothing hides of the first one."""
        if part == 0 and self.first:
            for transfer in self.sent.gathers:
                self.gate = self.track.send(name, transfer, transfer.count / self.cut.layers, self.gate, self.scale)
        chain, self.gate = (*chain, *self.gate), ()
        return chain

    def _shards(self, part: int) -> list[tuple[Transfer, float]]:
        """What travels beside a part, and how many: shards of the next one, and gradients of the one before."""
        cut, sent = self.cut, self.sent
        ahead = [*cut.shares(first=True)[1:], 0.0] if self.first else [1.0 / cut.parts] * cut.parts
        behind = [0.0, *cut.shares(first=False)] if cut.apart else cut.shares(first=False)
        both = ((sent.gathers, ahead[part]), (sent.reduces, behind[part]))
        return [
            (transfer, share * transfer.count) for transfers, share in both for transfer in transfers if share > 0.0
        ]

    def _compute(
        self, name: str, chain: tuple[int, ...], shards: Sequence[tuple[Transfer, float]]
    ) -> tuple[tuple[int, ...], int, int]:
        """Computation, its launches, and messages beside it: what comes next waits for, and its first and last node.

        Of both, the share that they add to each other comes alone: c beside k takes max(c, k) + λ min(c, k), which is
        λ (c + k) and then the longer of what is left.
        """
        piece, cut, track = self.piece, self.cut, self.track
        rings = [(transfer, transfer.count / self.pieces) for transfer in self.sent.beside]
        alone = max((transfer.exposed for transfer, _ in rings), default=0.0)
        alone = min(max([alone, *(transfer.exposed * cut.slices for transfer, _ in shards)]), 1.0)
        for transfer, count in (*shards, *rings):
            before = (*chain, *self.shards) if (transfer, count) in shards else chain
            chain = track.send(name, transfer, count * transfer.exposed, before, self.scale)
        host_s = piece.host_s / self.pieces if cut.host else 0.0
        seconds = (piece.kernels_s + piece.host_s) / self.pieces - host_s

        def compute(share: float, deps: tuple[int, ...]) -> int:
            flop, moved = map(float, share * self.amount)
            return track.add(name, "compute", share * seconds, deps, flop=flop, bytes=moved)

        computed = [compute(alone, chain)] if alone > 0.0 else []
        chain = (*computed,) or chain
        for transfer, count in shards:
            left = count * (1.0 - transfer.exposed)
            self.shards = track.send(name, transfer, left, (*chain, *self.shards), self.scale)
            self.gate = self.shards if transfer in self.sent.gathers else self.gate
        ends = chain
        if alone < 1.0:
            computed.append(compute(1.0 - alone, chain))
            ends = (computed[-1],)
        ends = track.work(f"host, {name}", "host", host_s, ends)
        ring = dict[str, tuple[int, ...]]()  # messages of one class go one after another
        for transfer, count in rings:
            number, kind = max(round(count), 1) if cut.apart else 1, overlap_class(transfer.message)
            for _ in range(number):
                left = count * (1.0 - transfer.exposed) / number
                ring[kind] = track.send(name, transfer, left, ring.get(kind, chain), self.scale)
        return (*ends, *(end for ends_of in ring.values() for end in ends_of)), computed[0], computed[-1]

    def _between(self, at: int, name: str, chain: tuple[int, ...], *, gathers: bool) -> tuple[int, ...]:
        """Messages that computation waits for, those that gather what it needs before it, all others after it."""
        for transfer in self.sent.between:
            if (transfer.message.op == "all_gather") != gathers:
                continue
            whole = max(round(transfer.count), 1)
            # Messages need not divide evenly among pieces, and none of them may be lost.
            here = (at + 1) * whole // self.pieces - at * whole // self.pieces
            if transfer.count < self.cut.layers:  # of the ends, not of layers
                here = whole if at + 1 == self.pieces else 0
            number, size = (here, 1.0) if self.cut.apart else (min(here, 1), float(here))
            for _ in range(number):
                chain = self.track.send(name, transfer, size * transfer.count / whole, chain)
        return chain
