"""Rows over the devices of this process, and over all processes that share a sweep."""

from __future__ import annotations

import hashlib
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from neusight_jax.errors import InputError

AXIS = "gpu"
"""Name of the mesh axis that hypothetical machines are spread over."""
JOIN_S = 300.0
"""Longest wait for the other processes of a sweep, seconds."""
_HELLO = struct.Struct("!8sII")
"""First message of a process: `_MAGIC`, how many share the sweep, which of them it is."""
_MAGIC = b"nj-sweep"
_HELLO_S = 10.0
"""Longest wait for a connection, and for the first words on it, seconds."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that vanished is noticed after 10 + 3 x 5 seconds. A process that ended closes its connection at once."""


@dataclass(frozen=True)
class Processes:
    """This process among those that share a sweep.

    They share no program of JAX's, so nothing has to happen before its backend starts, and one that ends is noticed
    by its connection and not by a time-out of `jax.distributed`, which ends the others with its own messages.

    Attributes:
      index, count: which of how many; by default it is on its own.
      connections: of process 0 to every other one; of another to process 0.
    """

    index: int = 0
    count: int = 1
    connections: Mapping[int, socket.socket] = field(default_factory=dict)

    def barrier(self, text: str) -> None:
        """Wait for all processes; nothing on its own.

        Raises: `InputError` when one of them has ended, or came here with another text.
        """
        token = hashlib.sha256(text.encode()).digest()
        if self.index > 0:
            self._send(0, token)
        for process, theirs in self._receive_all(len(token)):
            if theirs != token:
                raise InputError(
                    f"process {process} of the sweep was asked something else than process {self.index}; "
                    "give all of them one command but for --process-id"
                )
        if self.index == 0:
            for process in self.connections:
                self._send(process, token)

    def check(self) -> None:
        """Raise `InputError` when another process has ended; does not wait."""
        for process, connection in self.connections.items():
            try:
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            raise _ended(process)

    def close(self) -> None:
        """Leave the sweep; the others notice."""
        for connection in self.connections.values():
            connection.close()

    def _send(self, process: int, content: bytes) -> None:
        try:
            self.connections[process].sendall(content)
        except OSError:
            raise _ended(process) from None

    def _receive_all(self, size: int) -> Iterator[tuple[int, bytes]]:
        """So many bytes of every other process as they come; who has ended is noticed while others are awaited."""
        contents = dict.fromkeys(self.connections, b"")
        with selectors.DefaultSelector() as awaited:
            for process, connection in self.connections.items():
                awaited.register(connection, selectors.EVENT_READ, process)
            while awaited.get_map():
                for key, _ in awaited.select():
                    process, connection = key.data, self.connections[key.data]
                    part = _part(connection, size - len(contents[process]))
                    if not part:
                        raise _ended(process)
                    contents[process] += part
                    if len(contents[process]) == size:
                        awaited.unregister(connection)
                        yield process, contents[process]


ALONE = Processes()


def _ended(process: int) -> InputError:
    return InputError(
        f"process {process} of the sweep has ended; its rows so far are kept: start all processes again with --resume"
    )


def join_processes(coordinator: str | None, count: int, index: int, wait_s: float = JOIN_S) -> Processes:
    """Meet the other processes of a sweep.

    Args:
      coordinator: HOST:PORT where process 0 waits for the others; None = on its own.
      count, index: how many share the sweep, and which of them this is.
      wait_s: longest wait for the others, seconds.
    Raises: `InputError` for arguments that do not fit together, or when the others do not come.
    """
    if not 0 <= index < count:
        raise InputError(f"--process-id is {index}, expected 0 to {count - 1} of --num-processes {count}")
    if count == 1 and coordinator is not None:
        raise InputError(f"--coordinator {coordinator[:100]}: how many meet there? give --num-processes of 2 or more")
    if count == 1:
        return ALONE
    if coordinator is None:
        raise InputError(f"--num-processes is {count}; say where they meet: --coordinator HOST:PORT of process 0")
    address = _address(coordinator)
    deadline = time.monotonic() + wait_s
    connections = _others(address, count, deadline) if index == 0 else {0: _first(address, count, index, deadline)}
    for connection in connections.values():
        _settle(connection)
    return Processes(index, count, connections)


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"--coordinator is {coordinator[:100]!r}, expected HOST:PORT, as in 10.0.0.1:4321")
    return host.strip("[]"), int(port)


def _others(address: tuple[str, int], count: int, deadline: float) -> dict[int, socket.socket]:
    """Process 0's connections to all others."""
    place = f"{address[0]}:{address[1]}"
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server(address, family=family, backlog=count)
    except OSError as error:
        raise InputError(
            f"--coordinator {place}: process 0 cannot wait there ({error.strerror or error}); "
            "expected a free port and an address of this machine"
        ) from None
    connections: dict[int, socket.socket] = {}
    with server:
        # Processes come in any order, and a stranger may knock: each is heard until all are there or time is up.
        while missing := [process for process in range(1, count) if process not in connections]:
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                connection, _ = server.accept()
            except OSError:
                raise InputError(
                    f"process {missing[0]} of the sweep did not come to {place}; start it with the same command and "
                    f"--process-id {missing[0]}"
                ) from None
            process = _greeted(connection, count, connections)
            if process is not None:
                connections[process] = connection
    return connections


def _greeted(connection: socket.socket, count: int, taken: Mapping[int, Any]) -> int | None:
    """Index of the process that has come; None for what is no process of a sweep."""
    connection.settimeout(_HELLO_S)
    hello = _received(connection, _HELLO.size)
    if len(hello) < _HELLO.size or not hello.startswith(_MAGIC):
        connection.close()
        return None
    _, their_count, process = _HELLO.unpack(hello)
    if their_count != count:
        raise InputError(f"--num-processes is {count}, but process {process} says {their_count}; expected one number")
    if process in taken:
        raise InputError(
            f"two processes of the sweep have --process-id {process}; expected 0 to {count - 1}, each once"
        )
    try:
        connection.sendall(_MAGIC)
    except OSError:
        return None
    return int(process)


def _first(address: tuple[str, int], count: int, index: int, deadline: float) -> socket.socket:
    """The connection of another process to process 0, which may come later."""
    place = f"{address[0]}:{address[1]}"
    # Process 0 may be started after this one, so it is asked again until the deadline.
    while True:
        try:
            connection = socket.create_connection(address, timeout=_HELLO_S)
            if connection.getsockname() != connection.getpeername():
                break
            # A port that nobody listens on may be given to the very socket that asks for it: it met itself.
            connection.close()
        except socket.gaierror as error:
            raise InputError(
                f"--coordinator {place}: {error.strerror or error}; expected a host that is there"
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"process 0 of the sweep is not at {place} ({error.strerror or error}); start it with the same "
                    "command and --process-id 0"
                ) from None
            time.sleep(0.2)
    connection.settimeout(max(deadline - time.monotonic(), _HELLO_S))
    with suppress(OSError):  # no answer comes then
        connection.sendall(_HELLO.pack(_MAGIC, count, index))
    if _received(connection, len(_MAGIC)) != _MAGIC:
        raise InputError(f"process 0 of the sweep at {place} has ended or takes no process {index}; see its message")
    return connection


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other end is gone."""
    content = b""
    while len(content) < size and (part := _part(connection, size - len(content))):
        content += part
    return content


def _part(connection: socket.socket, size: int) -> bytes:
    """At most so many bytes, none where the other end is gone."""
    try:
        return connection.recv(size)
    except OSError:
        return b""


def _settle(connection: socket.socket) -> None:
    """Wait on it as long as the other end is there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(frozen=True)
class Spread:
    """Layout of a chunk's rows on processes and devices: equal runs in order, the last ones padded.

    Attributes:
      sharding: of the first axis, over this process's devices.
      rows: padded rows on them, a multiple of their count.
      start, stop: rows of the chunk that are this process's.
    """

    sharding: NamedSharding
    rows: int
    start: int
    stop: int

    def put(self, columns: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's columns [at most `rows`] on its devices [rows], single precision; the last row fills them."""
        return {
            name: jax.device_put(
                np.pad(values.astype(np.float32), (0, self.rows - len(values)), mode="edge"), self.sharding
            )
            for name, values in columns.items()
        }


def spread_rows(chunk: int, processes: Processes = ALONE) -> Spread:
    """Spread chunks of so many rows over all processes, and this one's over its devices."""
    devices = jax.local_devices()
    share = -(-chunk // processes.count)
    spec: Any = PartitionSpec
    sharding = NamedSharding(Mesh(np.array(devices), (AXIS,)), spec(AXIS))
    rows = -(-share // len(devices)) * len(devices)
    return Spread(sharding, rows, processes.index * share, (processes.index + 1) * share)


def on_host(tree: Any) -> Any:
    """Leaves as NumPy arrays, which a program spread over devices takes."""
    return jax.tree.map(np.asarray, tree)
