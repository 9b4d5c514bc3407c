"""Writer: nodes in order of execution, by section; what both ways of recording a model are built on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from neusight_jax.graph.graph import Fuse, Node, Operand, Shape
from neusight_jax.kernels.table import Kernel


class Writer:
    """Writes nodes down; `training` decides whether backward kernels are kept."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.nodes: list[Node] = []
        self.repeat: Any = 1
        self.layers: tuple[int, ...] = ()
        self._section = ""

    @contextmanager
    def section(self, name: str, repeat: Any = 1, layers: Sequence[int] = ()) -> Iterator[None]:
        """Nodes written inside are named `name.…` and run `repeat` times; `layers`: their indices in the model."""
        outer = self._section, self.repeat, self.layers
        self._section, self.repeat, self.layers = name, repeat, tuple(layers)
        yield
        self._section, self.repeat, self.layers = outer

    def write(
        self,
        name: str,
        op: str,
        phases: tuple[Sequence[Kernel], Sequence[Kernel], Sequence[Kernel]],
        operands: Sequence[Operand],
        shape: Shape,
        *,
        fuse: Fuse = "",
        saved_bytes: float = 0.0,
        rebuilt_bytes: float = 0.0,
    ) -> str:
        """Write one node down; returns its full name.

        Args:
          name: inside the section.
          phases: kernels of one execution: forward, backward, weight gradient; the last two are kept in training alone.
          operands: tensors it reads.
          shape: of its output.
          fuse, saved_bytes, rebuilt_bytes: as of `Node`.
        """
        full = f"{self._section}.{name}" if self._section else name
        forward, backward, weight_gradient = phases
        self.nodes.append(
            Node(
                name=full,
                op=op,
                forward=tuple(forward),
                backward=tuple(backward) if self.training else (),
                weight_gradient=tuple(weight_gradient) if self.training else (),
                repeat=self.repeat,
                section=self._section,
                operands=tuple(operands),
                shape=shape,
                fuse=fuse,
                saved_bytes=saved_bytes,
                rebuilt_bytes=rebuilt_bytes,
            )
        )
        return full
