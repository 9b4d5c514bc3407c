"""A million forecasts of GPT-3 XL training: time per GPU, memory, the Parquet file; on its own, 2 devices, 2 processes.

    python benchmarks/sweep.py --rows 1000000 [--devices 2 | --processes 2]

Prints time after compilation (a first sweep of one chunk compiles), and the largest resident memory of any process.
On a busy machine the CPU time says more than the clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neusight_jax.sweeps.devices import Processes


def sweep(output: Path, rows: int, checkpoint: str, processes: Processes) -> None:
    """One chunk to compile, then all rows."""
    import jax

    import neusight_jax as nj
    from neusight_jax.sweeps.run import CHUNK

    ranges = (
        nj.Range("num_sms", 40, 300),
        nj.Range("clock_hz", 8e8, 2.5e9),
        nj.Range("mem_bytes_per_s", 5e11, 8e12),
        nj.Range("l2_bytes", 4e6, 2e8),
    )
    graph = nj.graph_from_config("gpt3-xl", batch_size=2, sequence_length=2048, mode="training")
    predictor, gpus = nj.load_predictor(checkpoint), {"H100": nj.load_gpu("H100")}
    begin = time.perf_counter()
    compiled = output.with_suffix(".first.parquet")
    nj.sweep(predictor, gpus, [graph], nj.Samples(ranges, CHUNK), compiled, processes=processes)
    first = time.perf_counter() - begin
    begin, used = time.perf_counter(), time.process_time()
    nj.sweep(predictor, gpus, [graph], nj.Samples(ranges, rows), output, processes=processes)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"process {processes.index} of {processes.count}, {jax.device_count()} devices: {rows} forecasts in "
        f"{seconds:.1f} s, {seconds / rows * 1e6:.1f} us each (CPU time of all its threads {cpu / rows * 1e6:.1f} us), "
        f"first chunk {first:.1f} s, {memory:.2f} GB",
        flush=True,
    )


def main() -> None:
    """Run the sweep as asked and compare it with a plain one if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--checkpoint", default="fp32")
    parser.add_argument("--output", type=Path, help="keep the file here")
    parser.add_argument("--compare", type=Path, help="another sweep's file that must be equal to 1e-6")
    parser.add_argument("--join", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(chosen.devices)
    folder = tempfile.mkdtemp() if chosen.output is None else ""
    output = chosen.output or Path(folder) / "sweep.parquet"
    from neusight_jax.sweeps.devices import ALONE, join_processes

    processes = ALONE
    if chosen.join:
        address, own = chosen.join.split(",")
        processes = join_processes(address, chosen.processes, int(own))
    elif chosen.processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--rows", str(chosen.rows), "--processes", str(chosen.processes)]
        command += ["--output", str(output), "--checkpoint", chosen.checkpoint]
        running = [subprocess.Popen([*command, "--join", f"127.0.0.1:{port},{own}"]) for own in range(chosen.processes)]
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit("a process failed")
    if chosen.join or chosen.processes == 1:
        sweep(output, chosen.rows, chosen.checkpoint, processes)
    if not chosen.join and chosen.compare is not None:
        import numpy as np
        import pandas as pd

        one, two = (pd.read_parquet(path)["seconds"].to_numpy() for path in (chosen.compare, output))
        print(f"largest relative difference: {np.max(np.abs(two / one - 1)):.1e} over {len(one)} rows")
    if not chosen.join:
        print(f"file: {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
