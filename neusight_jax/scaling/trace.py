"""Trace: what was measured on the origin, kernel by kernel, and its work, whatever file it came from."""

from __future__ import annotations

import codecs
import gzip
import math
import zipfile
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.errors import InputError, printable
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES, OPERATORS
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.names import read_name
from neusight_jax.tables import check_regular

USUAL_SHARE = 0.7
"""Share of peak or bandwidth assumed when a size is inferred from a time."""
USUAL_COLS = 1024.0


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel, as far as the trace says.

    Attributes:
      blocks: thread blocks of the grid; threads: threads of a block.
      registers: of a thread, 0 if unknown; shared_bytes: of a block.
    """

    blocks: float
    threads: float
    registers: float = 0.0
    shared_bytes: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Launches that are alike, measured together.

    Attributes:
      name: kernel or node name, for people.
      kind: what the name says it is (`names.KINDS`).
      seconds: measured time of all launches together; count: how many.
      kernels: the work behind one launch in terms this package forecasts; empty if its shapes are unknown.
      dtype: of that work; "int4" too, which no forecast takes.
      launch: grid and block, if known.
      operator: what launched it, `aten::mm` or an HLO operator; "" if the trace does not say.
      inferred: the work a size can be inferred of (`names.KernelName.work`); "" = none.
      tile: output tile of a matrix product, if its name says.
      dtype_said: whether name or operands said the dtype; else it is taken to be fp32.
    """

    name: str
    kind: str
    seconds: float
    count: float = 1.0
    kernels: tuple[Kernel, ...] = ()
    dtype: str = "fp32"
    launch: Launch | None = None
    operator: str = ""
    inferred: str = ""
    tile: tuple[int, int] | None = None
    dtype_said: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))
        object.__setattr__(self, "operator", printable(self.operator))

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix product, by its work or by its name."""
        return is_product(self.kernels) or (not self.kernels and self.inferred in ("product", "vector"))

    def dtype_on(self, peaks: Mapping[str, float]) -> str:
        """Dtype it runs in on a GPU of these peaks of products: libraries take fp32 where there is no tf32.

        Row-wise work in a dtype that this package, or some GPU, does not have counts as fp32: what it moves is known by
        its time.
        """
        if self.dtype == "tf32" and "tf32" not in peaks:
            return "fp32"
        return self.dtype if (self.dtype in DTYPES and self.dtype != "fp64") or self.multiplies else "fp32"

    def lacks_path(self, peaks: Mapping[str, float]) -> bool:
        """Whether it is a product in a dtype that a GPU of these peaks, or this package, has no path for."""
        return self.multiplies and self.dtype_on(peaks) not in peaks

    def work_on(self, origin: GPU, peaks: Mapping[str, float]) -> tuple[Kernel, ...]:
        """Its work; nothing where the origin has no path for it.

        By its shapes, else of the kind its name says what would take its time on the origin at `USUAL_SHARE` of the
        limit.

        Args:
          origin: GPU it was measured on; peaks: of its products, FLOP/s by dtype.
        """
        seconds = self.seconds / max(self.count, 1.0)
        if self.lacks_path(peaks):
            return ()
        if self.kernels or not self.inferred or not seconds > 0.0:
            return self.kernels
        dtype = self.dtype_on(peaks)
        if self.inferred == "product":
            flop = USUAL_SHARE * peaks[dtype] * seconds
            if self.tile is None or self.launch is None:
                side = k = _usual_size((flop / 2.0) ** (1 / 3))
            else:
                area = self.launch.blocks * self.tile[0] * self.tile[1]
                side, k = _usual_size(math.sqrt(area)), _usual_size(flop / (2.0 * area))
            return (Kernel("linear", "linear", {"batch": 1, "m": side, "n": side, "k": k}),)
        elements = USUAL_SHARE * float(np.asarray(origin.mem_bytes_per_s)) * seconds / dtype_bytes(dtype)
        if self.inferred == "vector":  # the matrix is read once
            side = _usual_size(math.sqrt(elements))
            return (Kernel("linear", "linear", {"batch": 1, "m": 1, "n": side, "k": side}),)
        for op, (family, operator) in OPERATORS.items():
            if family.name == self.inferred and operator.sized:
                return (Kernel(family.name, op, operator.sized(elements)),)
        dims = {"rows": max(round(elements / 2.0 / USUAL_COLS), 1), "cols": USUAL_COLS, "reads": 1.0, "writes": 1.0}
        ops = {"softmax": "softmax", "norm": "layernorm", "elementwise": "gelu", "memory": "copy"}
        return (Kernel(self.inferred, ops[self.inferred], dims),)


@dataclass(frozen=True)
class Trace:
    """A measured run.

    Attributes:
      source: file name, for people.
      items: everything that took time.
      busy_s: time in which at least one kernel ran; less than the sum where streams overlap.
      span_s: from the first start to the last end.
      notes: what was odd in the file, and how it was taken.
      gpus: names of the GPUs it says it was measured on; empty if it does not say.
    """

    source: str
    items: tuple[Measured, ...]
    busy_s: float
    span_s: float
    notes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def kernel_s(self) -> float:
        """Seconds of all kernels, one after another."""
        return float(sum(item.seconds for item in self.items))


def is_product(kernels: Sequence[Kernel]) -> bool:
    """Whether any kernel multiplies matrices."""
    return any(FAMILIES[kernel.family].matrix for kernel in kernels)


def _usual_size(size: float) -> int:
    """A multiple of 16 elements, as sizes of models are: rows of products then begin where libraries want them."""
    return 16 * max(round(size / 16.0), 1)


def kernel_of_name(
    name: str,
    seconds: float,
    count: float,
    launch: Launch | None = None,
    *,
    operator: str = "",
    work: tuple[Kernel, ...] = (),
    operand_dtype: str | None = None,
) -> Measured:
    """A measured kernel by what its name says, and what its operator says where the name does not.

    Args:
      name: of the kernel; seconds, count: of all its launches; launch: grid and block.
      operator: what launched it; work: what the operator computes. A product, or attention, is the work of the kernel
        that multiplies, not of a copy or a reduction launched beside it.
      operand_dtype: of the operator's operands; a product runs in the dtype its kernel names, as with tf32.
    """
    reading = read_name(name)
    if reading.kind == "unknown" and operator:
        reading = replace(read_name(operator.removeprefix("aten::")), dtype=reading.dtype)
    product = is_product(work)
    attention = any(FAMILIES[kernel.family].generations == "attention" for kernel in work)
    multiplying = ("attention", "unknown") if attention else ("gemm", "moe", "unknown")
    # A copy or a reduction that is launched beside a product has its shapes, but not its work.
    fits = reading.kind in multiplying if product else reading.kind not in ("gemm", *MOVES)
    kernels = work if fits else ()
    dtype = reading.dtype or operand_dtype if product or not work else operand_dtype or reading.dtype
    multiplies = product or reading.work in ("product", "vector")
    if dtype not in DTYPES and not multiplies:
        dtype = "fp32" if dtype else None  # what only moves bytes is told apart by their number alone
    return Measured(
        *(name, reading.kind, seconds, count, kernels, dtype or "fp32", launch, operator),
        inferred="" if kernels else reading.work,
        tile=reading.tile,
        dtype_said=dtype is not None or not multiplies,
    )


MOVES: tuple[str, ...] = ("collective", "transfer", "copy")
"""Kinds that are not the operator's own work, whatever launched them."""


def duration_text(seconds: float) -> str:
    """A duration for people: 12.3 ms."""
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
    return f"{seconds / size:.4g} {unit}"


def busy_seconds(starts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Length of the union of intervals, and the span they lie in; seconds. (0, 0) without intervals."""
    if not len(starts):
        return 0.0, 0.0
    # Streams overlap: a moment in which two kernels run is busy once.
    order = np.argsort(starts, kind="stable")
    begin, end = starts[order], starts[order] + seconds[order]
    reached = np.maximum.accumulate(end)
    covered_until = np.concatenate([[-np.inf], reached[:-1]])
    busy = np.maximum(end - np.maximum(begin, covered_until), 0.0)
    return float(busy.sum()), float(reached[-1] - begin[0])


# Timed events of a GPU as compact columns, and a trace from them: what is double, overlaps, or was left out.

LONGEST_S = 1e9
"""A duration or start beyond this (30 years) is no measurement."""


def number(value: Any) -> float | None:
    """A finite number, or None; old exporters write numbers as text."""
    try:
        figure = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return figure if math.isfinite(figure) else None


def identifier(args: Mapping[str, Any], *names: str) -> int:
    """A whole number under the first of these names, as 64 bits; -1 without one."""
    try:
        integer = int(next(args[name] for name in names if name in args))
    except (StopIteration, TypeError, ValueError, OverflowError):
        return -1
    # Some profilers write 64 bits without sign, which a column of signed numbers would not hold.
    return (integer + (1 << 63)) % (1 << 64) - (1 << 63)


def encodable(name: str) -> str:
    """A name without lone surrogates, which no terminal takes."""
    return name.encode("utf-8", "replace").decode()


def hashable(value: Any) -> Hashable:
    """A value of JSON as a key; a list or object as its text."""
    if isinstance(value, int | float | type(None)):
        return value
    return encodable(value if isinstance(value, str) else repr(value))


def launch_of(grid: Any, block: Any, registers: Any = None, shared: Any = None) -> Launch | None:
    """A launch from sizes as a file gives them; None if they are no sizes.

    Args:
      grid: blocks along each axis, numbers or text.
      block: threads along each axis.
      registers: of a thread.
      shared: shared memory of a block, bytes.
    """
    try:
        blocks, threads = (math.prod(float(size) for size in sizes) for sizes in (grid or [0], block or [0]))
    except (TypeError, ValueError, OverflowError):
        return None
    if not (1 <= blocks < 1e15 and 1 <= threads <= 65536):
        return None
    return Launch(blocks, threads, max(number(registers) or 0.0, 0.0), max(number(shared) or 0.0, 0.0))


class Events:
    """Events taken in one by one, a few numbers each, so that millions of alike ones fit.

    Attributes:
      names: what ran -> its number, in order of first sight; lanes: likewise what it ran on.
    """

    def __init__(self) -> None:
        self.names: dict[Any, int] = {}
        self.lanes: dict[Any, int] = {}
        self._numbers, self._seconds = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._seconds) // 2

    def add(self, name: Hashable, lane: Hashable, start_s: float, seconds: float, link: int, correlation: int) -> None:
        """Take in one event more.

        Args:
          name: what ran; alike events have an equal one.
          lane: what it ran on: (GPU, stream), or (process, thread).
          start_s: seconds from any origin that all events share.
          seconds: its duration.
          link: number of what launched it, -1 = not known.
          correlation: number of its launch, -1 = not known.
        """
        what = self.names.setdefault(name, len(self.names))
        self._numbers.extend((what, self.lanes.setdefault(lane, len(self.lanes)), link, correlation))
        self._seconds.extend((start_s, seconds))

    def frame(self) -> pd.DataFrame:
        """The columns what, lane, link, correlation, start_s, seconds."""
        numbers, seconds = np.frombuffer(self._numbers, np.int64), np.frombuffer(self._seconds)
        whole = pd.DataFrame(numbers.reshape(-1, 4), columns=["what", "lane", "link", "correlation"])
        return whole.assign(start_s=seconds[::2], seconds=seconds[1::2])


class Account:
    """Rows that were left out, merged or kept against doubt: by reason, how many and how long."""

    def __init__(self) -> None:
        self.reasons: dict[str, tuple[int, float]] = {}

    def add(self, reason: str, seconds: float = 0.0, count: int = 1) -> None:
        """Rows of a reason, which reads after their number."""
        rows, total = self.reasons.get(reason, (0, 0.0))
        self.reasons[reason] = (rows + count, total + seconds)

    def notes(self) -> list[str]:
        """One note that says them all; none without any."""
        parts = [
            f"{count} {reason}{f' ({duration_text(seconds)})' if seconds > 0.0 else ''}"
            for reason, (count, seconds) in self.reasons.items()
            if count
        ]
        return ["; ".join(parts)] if parts else []


def trace_of_kernels(
    path: Path,
    events: pd.DataFrame,
    devices: Sequence[Hashable],
    item: Callable[[int, int, float, int], Measured],
    account: Account,
    notes: Iterable[str] = (),
    gpus: tuple[str, ...] = (),
) -> Trace:
    """A trace from the events of GPUs.

    Args:
      events: as `Events.frame`; `link` is what launched each. devices: GPU of every lane.
      item: from the number of what ran (of `Events.names`), that of what launched it, the seconds of all alike launches
        together and their count.
      account: what was left out so far. notes, gpus: of the trace.
    """
    # Events of no duration may well be alike, so only others count as written twice.
    double = events.duplicated(["lane", "start_s", "what", "seconds", "correlation"]) & (events["seconds"] > 0.0)
    if double.any():
        seconds = float(events["seconds"][double].sum())
        account.add("GPU events written twice, counted once", seconds, int(double.sum()))
        events = events[~double]
    if zero := int((events["seconds"] == 0.0).sum()):
        account.add("GPU events of no duration, kept: they add nothing", count=zero)
    busy_s, span_s = busy_seconds(events["start_s"].to_numpy(), events["seconds"].to_numpy())
    remarks = [*account.notes(), *notes]
    sums = events["seconds"].groupby(events["lane"].map(lambda lane: devices[lane]), sort=False).sum()
    if len(sums) > 1:
        shown = ", ".join(f"{device}: {duration_text(seconds)}" for device, seconds in list(sums.items())[:8])
        remarks.append(f"{len(sums)} GPUs in this trace ({shown} of kernels): their kernels are summed, as if on one")
    total = float(events["seconds"].sum())
    if total > 1.001 * busy_s:
        remarks.append(
            f"streams overlap: {duration_text(total)} of kernels in {duration_text(busy_s)}; kernels are summed one "
            "after another, and the overlap is kept as a share in the time with idle time"
        )
    return Trace(path.name, grouped(events, item), busy_s, span_s, tuple(remarks), gpus)


def grouped(events: pd.DataFrame, item: Callable[[int, int, float, int], Measured]) -> tuple[Measured, ...]:
    """Events that are alike, together."""
    sums = events.groupby(["what", "link"])["seconds"].agg(["sum", "count"]).reset_index()
    return tuple(item(*row) for row in sums.itertuples(index=False, name=None))


# Trace files as bytes and text, whatever they are packed in: plain, gzip, or a zip archive of one file.

_MARKS = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "parquet", b"SQLite format 3\x00": "sqlite"}
_BYTE_ORDERS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""A shell of Windows writes what it redirects as UTF-16."""
EXPECTED = "a trace (.json, .json.gz), a CSV or a Parquet table"
MOST_TEXT_BYTES = 256 << 20
"""Size of a table of kernels, unpacked: it is read whole."""
PACKED: tuple[str, ...] = (".gz", ".zip")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's content as a stream, unpacked by what it holds and not by its name.

    Raises: `InputError` when the file is not there, is no regular one, or what it is packed in is damaged.
    """
    check_regular(path, EXPECTED)
    try:
        with open(path, "rb", buffering=1 << 20) as file:
            kind = _kind(file.read(16))
            file.seek(0)
            if kind == "gzip":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(IO[bytes], unpacked)
            elif kind == "zip":
                with zipfile.ZipFile(file) as archive, archive.open(_member(path, archive)) as member:
                    yield member
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise InputError(f"{path}: the archive is cut off or damaged ({reason}); copy or export it again") from None


def content_kind(path: Path) -> str:
    """Kind of a file's content once it is unpacked: "json", "parquet", "sqlite", "text" or "empty"."""
    with opened(path) as stream:
        head = stream.read(4096)
    if kind := _kind(head):
        return kind
    text = head.decode(encoding_of(head), "replace").lstrip("\ufeff \t\r\n")
    if not text:
        return "empty"
    is_row = text[0] == "[" and text[1:2].isalpha()  # of a table, such as `[CUDA memcpy],1,2`
    return "json" if text[0] in "{[" and not is_row else "text"


def encoding_of(head: bytes) -> str:
    """Encoding by a file's first bytes; UTF-8 without a byte-order mark."""
    return next((name for mark, name in _BYTE_ORDERS.items() if head.startswith(mark)), "utf-8")


def read_text(path: Path) -> str:
    """A file's whole text. `InputError` when it is not text."""
    with opened(path) as stream:
        raw = stream.read(MOST_TEXT_BYTES + 1)
    if len(raw) > MOST_TEXT_BYTES:
        raise InputError(f"{path}: more than {MOST_TEXT_BYTES:,} bytes, expected a table of at most that; cut it")
    try:
        return raw.decode(encoding_of(raw[:4]))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text (byte {error.start}); export it as UTF-8") from None


def _kind(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
    if len(names) != 1:
        shown = ", ".join(names[:4]) or "nothing"
        raise InputError(f"{path}: holds {len(names)} files ({shown}), expected one trace; unpack it and give one file")
    return names[0]
