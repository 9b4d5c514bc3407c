"""Ctrl-C at random moments of five commands: exit code, time to exit, what is said, what is left behind.

    python benchmarks/interrupts.py MEASUREMENTS [--times 10] [--seed 0] [--latest 15] [--only predict sweep]

Programs are compiled anew in every run (no cache), so that most interruptions fall into compilations, where Python
cannot run a signal handler. Moments are drawn evenly over the first 15 s (`--latest`), or to the end of a command that
ends sooner, from when the program listens: 0.05 s of CPU after its start. Before, the interpreter itself is starting,
and ends by the signal (130 in a shell, with its own traceback) or, rarely, overhears it. What `sweep` and `train` keep
to go on with (a hidden folder) is not left behind: the last column counts the runs that kept some, each of which must
say `--resume`, and no other.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

WITHIN_S = 2.0
POINTS = ("--range", "num_sms=10:160", "mem_bytes_per_s=1e11:1e13", "--samples", "20000", "--chunk", "256")


@dataclass
class Tally:
    """What came of the interruptions of one command."""

    good: int = 0
    slowest_s: float = 0.0
    left: int = 0
    resumable: int = 0
    odd: list[str] = field(default_factory=list)


def commands(measurements: str, home: Path) -> dict[str, list[str]]:
    """The commands, by name; what they write goes below `home`."""
    model = ["gpt2-large", "--batch-size", "2", "--sequence-length", "512"]
    free = ["--base", "H100", "--free", "num_sms=60:200:2", "mem_bytes_per_s=1e12:5e12", "--budget", "area_mm2<=900"]
    return {
        "predict": ["predict", *model, "--gpu", "H100", "--mode", "training"],
        "sweep": ["sweep", *model, "--gpu", "H100", *POINTS, "--output", str(home / "sweep.parquet")],
        "train": ["train", "--measurements", measurements, "--recipe", "tiny", "--output", str(home / "trained")],
        "design": ["design", *model, *free, "--output", str(home / "design")],
        "evaluate": ["evaluate", "--measurements", measurements, "--json", str(home / "scores.json")],
    }


def started(arguments: list[str], home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NEUSIGHT_JAX_CACHE": "0", "TMPDIR": str(home / "tmp")}
    command = [sys.executable, "-m", "neusight_jax", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(arguments: list[str], home: Path, moment_s: float, tally: Tally) -> bool:
    """Interrupt one run; False if it had ended by itself."""
    process = started(arguments, home)
    while len(os.listdir(f"/proc/{process.pid}/task")) < 2 and process.poll() is None:
        time.sleep(0.002)  # it listens from its second thread on
    try:
        _, said = process.communicate(timeout=moment_s)
        if process.returncode:
            sys.exit(f"{' '.join(arguments)}: exit {process.returncode}: {said}")
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, said = process.communicate()
    seconds = time.monotonic() - begin
    if process.returncode == 0 and seconds <= WITHIN_S:
        return False  # its output was out
    lines = [line for line in said.splitlines() if line.startswith("interrupted; ")]
    strange = [line for line in said.splitlines() if "Traceback" in line or "Error" in line or "Fatal" in line]
    left = [path for path in home.rglob("*") if path.name != "tmp" and not _resumable(path, home)]
    resumable = any(_resumable(path, home) for path in home.rglob("*"))
    tally.slowest_s, tally.left = max(tally.slowest_s, seconds), tally.left + bool(left)
    tally.resumable += resumable
    if resumable != ("--resume goes on" in said):
        strange.append(f"kept: {resumable}, said: {lines}")
    if process.returncode == 130 and seconds <= WITHIN_S and len(lines) == 1 and not strange and not left:
        tally.good += 1
    else:
        tally.odd.append(
            f"at {moment_s:.2f} s: exit {process.returncode} after {seconds:.2f} s, {strange} {left} {said!r}"
        )
    return True


def _resumable(path: Path, home: Path) -> bool:
    return path.relative_to(home).parts[0] in (".trained.partial", ".sweep.parquet.parts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latest", type=float, default=15.0)
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    moments = random.Random(chosen.seed)
    print(f"{'command':10} {f'130 in {WITHIN_S:.0f} s':>16} {'slowest s':>10} {'left behind':>12} {'--resume':>9}")
    for name in chosen.only or commands(chosen.measurements, Path()):
        tally, done, latest_s = Tally(), 0, chosen.latest
        while done < chosen.times:
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                (home / "tmp").mkdir()
                moment_s = moments.uniform(0.0, latest_s)
                if interrupt(commands(chosen.measurements, home)[name], home, moment_s, tally):
                    done += 1
                else:
                    latest_s = moment_s
        share = f"{tally.good} of {chosen.times}"
        print(f"{name:10} {share:>16} {tally.slowest_s:>10.2f} {tally.left:>12} {tally.resumable:>9}", flush=True)
        for line in tally.odd:
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
