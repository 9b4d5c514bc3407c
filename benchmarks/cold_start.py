"""A whole `neusight-jax predict` from a cold process beside `python -c "import jax"`, and its memory.

    python benchmarks/cold_start.py [--rounds 5]

The first run compiles and fills the cache of programs (a folder of its own here); the others load them. Target: at most
5 times the import of JAX.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of one process."""
    begin = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Print times, their ratio and the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="gpt2-large")
    chosen = parser.parse_args()
    predict = [sys.executable, "-m", "neusight_jax", "predict", chosen.model, "--gpu", "H100", "--mode", "training"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"}
        first = seconds(predict, environment)
        bare = [seconds([sys.executable, "-c", "import jax"], environment) for _ in range(chosen.rounds)]
        whole = [seconds(predict, environment) for _ in range(chosen.rounds)]
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"import jax {min(bare):.2f} s; predict {min(whole):.2f} s, first {first:.2f} s; at most {memory:.2f} GB")
    print(f"predict / import jax {min(whole) / min(bare):.2f}  (target: at most 5)")


if __name__ == "__main__":
    main()
