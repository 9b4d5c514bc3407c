"""Time of a kernel: what a backend offers, and the sampling that is the same for all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neusight_jax.profiling.case import Case

LOOP_S = 2.5e-3
"""Length of one timed loop, s, whatever time is given: a longer run times more loops and not longer ones, so that the
medians of both are of the same thing. On a machine with other tenants a longer loop holds more interruptions."""
REPEATS = 8
"""Timings of the loop there should at least be: loops are shorter than `LOOP_S` where the time given holds fewer."""
FEWEST_REPEATS = 3
FEWEST_ROUNDS = 2
MOST_CALLS = 12
LEAST_OF_CALL = 0.05
"""A kernel in the loop that takes less than this share of a long single call is not there."""
CALLS_IN_DOUBT = 20
CALL_SHARE = 0.15
"""Share of a kernel's time that goes to single calls."""
WARM_UPS = 2
MOST_TRIES, FASTER = 4, 32
"""Most corrections of the number of rounds, and the largest factor of each."""
DISTURBED = 0.1
"""A row whose quartiles lie further apart than this share of the median is called disturbed."""


class Prepared(Protocol):
    """A kernel compiled and its input sets in memory."""

    sets: int

    def call(self) -> float:
        """Seconds of one launch as a framework makes it, launch overhead included; the sets take turns."""

    def loop(self, rounds: int) -> float:
        """Seconds of `rounds` passes over all sets, one kernel after the other without returning to the host.

        0 rounds takes what starting and ending the loop takes.
        """

    def idle(self, rounds: int) -> float:
        """Seconds of as many rounds with nothing in them, for what a round itself costs."""


class Backend(Protocol):
    """A framework on one device.

    Attributes:
      name: "jax" or "torch"; device: the driver's name, or the processor's; is_cpu: whether it is no GPU.
    """

    name: str
    device: str
    is_cpu: bool

    def prepare(self, case: Case, sets: int, seed: int) -> Prepared:
        """Compile a kernel and draw its inputs."""

    def supports(self, case: Case) -> str:
        """Empty, or why this kernel cannot run here."""

    def free_bytes(self) -> float:
        """Memory that can be had on the device."""

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that run the kernels."""

    def release(self) -> None:
        """Forget compiled programs."""


@dataclass(frozen=True)
class Sample:
    """The timing of one kernel.

    Attributes:
      loop_s: median over `repeats` of the time of one kernel inside the loop; what the loop's first round takes, start
        and end of the loop included, is taken off.
      loop_spread: quartile distance over the median, of the loop.
      call_s: median of single calls; call_spread: likewise.
      repeats, launches: timings, and kernels run in all of them; calls: single calls.
    """

    loop_s: float
    loop_spread: float
    call_s: float
    call_spread: float
    repeats: int
    launches: int
    calls: int


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else math.inf


def sample(
    prepared: Prepared,
    seconds: float,
    between: Callable[[Callable[[], object]], None] | None = None,
    window_s: float = 0.0,
) -> Sample:
    """Time a kernel for about so many seconds.

    Args:
      prepared: the kernel; seconds: to spend, warm-up and compilation aside; less than twelve passes over all sets
        are never made; between: called halfway, while the device is warm, with what runs the kernel without a pause
        for `window_s` (clocks, power).
    Raises: `RuntimeError` when the loop takes no longer than an empty one, or cannot hold the kernel.
    """
    # First calls compile, and find a board at the clock of an idle one.
    for _ in range(WARM_UPS):
        prepared.call()
    calls = [prepared.call()]
    while len(calls) < MOST_CALLS and (len(calls) < FEWEST_REPEATS or sum(calls) < CALL_SHARE * seconds):
        calls.append(prepared.call())
    timed_s = seconds * (1.0 - CALL_SHARE)
    share = min(timed_s / REPEATS, LOOP_S)
    rounds = _rounds(share, statistics.median(calls) * prepared.sets)
    empty = min(prepared.loop(0) for _ in range(5))
    prepared.loop(rounds + 1)
    for _ in range(MOST_TRIES):
        taken = prepared.loop(rounds + 1) - prepared.loop(1)
        one_round = max(taken, 0.01 * share) / rounds
        if taken >= 0.5 * share:
            break
        # Single calls were slow for what the kernel is.
        rounds = min(_rounds(share, one_round), FASTER * rounds)
    # One round more is timed and one round taken off: the first one finds caches, threads and fresh pages cold.
    repeats = max(int(min(timed_s / (one_round * (rounds + 2)), 2.0 * timed_s / share)), FEWEST_REPEATS)
    launches = rounds * prepared.sets
    prepared.idle(rounds)
    turning = max(min(prepared.idle(rounds + 1) for _ in range(3)) - min(prepared.idle(1) for _ in range(3)), 0.0)
    firsts, wholes = [], []
    for index in range(repeats):
        firsts.append(prepared.loop(1))
        wholes.append(prepared.loop(rounds + 1))
        if between is not None and index == repeats // 2:
            between(lambda: prepared.loop(math.ceil(window_s / one_round)))
    first = statistics.median(firsts)  # of the same machine as the median below, interruptions aside
    if statistics.median(wholes) < 1.5 * first:
        first = min(firsts)  # few repeats, and most first rounds interrupted: two rounds cannot take as long as none
    times = [(whole - first - turning) / launches for whole in wholes]
    if statistics.median(times) <= 0.0:
        raise RuntimeError(f"a loop of {launches} kernels takes no longer than an empty one; give more --seconds")
    if _is_missing(statistics.median(times), min(calls), empty):
        again = min(prepared.call() for _ in range(CALLS_IN_DOUBT))  # those calls may have been interrupted
        if _is_missing(statistics.median(times), again, empty):
            raise RuntimeError("the loop is far faster than single calls: the compiler took the kernel out of it")
    return Sample(
        loop_s=statistics.median(times),
        loop_spread=spread(times),
        call_s=statistics.median(calls),
        call_spread=spread(calls),
        repeats=repeats,
        launches=launches * repeats,
        calls=len(calls),
    )


def _is_missing(loop_s: float, call_s: float, empty_s: float) -> bool:
    """Whether a loop is too fast to hold a kernel whose single call takes far longer than a launch."""
    return call_s > 11.0 * empty_s and loop_s < LEAST_OF_CALL * call_s


def _rounds(share: float, one_pass: float) -> int:
    """Rounds beside the two that taking the first one off costs."""
    return max(round(share / max(one_pass, 1e-9)) - 2, FEWEST_ROUNDS)
