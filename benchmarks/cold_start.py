"""CPU seconds of a fresh process for the first answer of five commands: without kept programs, and with them.

    python benchmarks/cold_start.py [--rounds 3] [--against CHECKOUT]

CPU seconds are user and system time of the process and its threads, the least of all rounds. Targets: without kept
programs `predict` 6 and the others 20; with them 3. `--against` runs another checkout's package in turn with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MODEL = ("gpt2-large", "--gpu", "H100", "--mode", "training", "--batch-size", "4", "--sequence-length", "1024")
COMMANDS: dict[str, tuple[str, ...]] = {
    "predict": ("predict", *MODEL),
    "compare": ("compare", *MODEL),
    "sensitivity": ("sensitivity", *MODEL),
    "scale-trace": ("scale-trace", "trace.json", "--from", "A100-SXM4-40GB", "--to", "H100"),
    "design": (
        *("design", "bert-large,batch_size=8", "--base", "H100", "--budget", "power_w<=600"),
        *("--free", "num_sms=60:220", "mem_bytes_per_s=1e12:8e12"),
    ),
}
TRACE = {
    "traceEvents": [
        {
            **{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 50},
            "args": {"External id": 1, "Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]},
        },
        {
            **{"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x128_nn", "pid": 0, "tid": 7, "ts": 20},
            "dur": 9000,
            "args": {"External id": 1, "stream": 7},
        },
    ]
}


def cpu_seconds(root: Path, arguments: tuple[str, ...], folder: str, cache: str | None) -> float:
    """User and system time of one process of a checkout's package; `cache` is its folder of programs, None = none."""
    kept = {"NEUSIGHT_JAX_CACHE": "0"} if cache is None else {"XDG_CACHE_HOME": cache}
    environment = {name: value for name, value in os.environ.items() if name != "NEUSIGHT_JAX_CACHE"}
    environment |= {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", **kept}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "neusight_jax", *arguments]
    subprocess.run(
        command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path)
    chosen = parser.parse_args()
    roots = {"": HERE, **({"against": chosen.against.resolve()} if chosen.against else {})}
    print("command       checkout  without  with programs kept   (CPU seconds)")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "trace.json").write_text(json.dumps(TRACE))
        for name, arguments in COMMANDS.items():
            cold: dict[str, list[float]] = {root: [] for root in roots}
            warm: dict[str, list[float]] = {root: [] for root in roots}
            for root, path in roots.items():
                cpu_seconds(path, arguments, folder, f"{folder}/{root or 'this'}")
            for _ in range(chosen.rounds):
                for root, path in roots.items():
                    cold[root].append(cpu_seconds(path, arguments, folder, None))
                    warm[root].append(cpu_seconds(path, arguments, folder, f"{folder}/{root or 'this'}"))
            for root in roots:
                print(f"{name:12s}  {root or 'this':8s}  {min(cold[root]):7.1f}  {min(warm[root]):7.1f}", flush=True)


if __name__ == "__main__":
    main()
