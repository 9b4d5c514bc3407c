"""A synthetic trace of the PyTorch profiler, of any size, to time `neusight-jax scale-trace` on.

python benchmarks/trace.py trace.json --bytes 1e9
/usr/bin/time -v neusight-jax scale-trace trace.json --from V100-PCIE-32GB --to T4 A100-PCIE-40GB
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

KERNELS: tuple[tuple[str, str, list[list[int]], list[str]], ...] = (
    (
        "volta_sgemm_128x64_tn",
        "aten::addmm",
        [[1024], [2048, 1024], [1024, 1024], [], []],
        ["float", "float", "float", "Scalar", ""],
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>",
        "aten::gelu",
        [[2048, 4096], []],
        ["float", ""],
    ),
    (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "aten::native_layer_norm",
        [[8, 256, 1024], [], [1024], [1024], []],
        ["float", "", "float", "float", ""],
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>",
        "aten::_softmax",
        [[8, 16, 256, 256], [], []],
        ["float", "", ""],
    ),
    ("my_own_kernel(float*, int)", "mine::op", [[10]], ["float"]),
)
"""Kernel, the operator that launches it, its operands and their types; the last is known to nobody."""


def launch(number: int) -> Iterator[dict[str, Any]]:
    """The events of one launch, as the profiler writes them: operator, runtime call, flow, kernel."""
    name, operator, dims, types = KERNELS[number % len(KERNELS)]
    if number % len(KERNELS) == 0:
        dims = [[1024], [2048 * (1 + number % 7), 1024], *dims[2:]]
    start = 15.0 * number
    host = {"ph": "X", "pid": 1, "tid": 1}
    shapes = {"Input type": types, "Input Strides": dims, "Input Dims": dims, "Ev Idx": number}
    yield {**host, "cat": "cpu_op", "name": operator, "ts": start, "dur": 5, "args": {"External id": number, **shapes}}
    call = {"External id": number, "cbid": 211, "correlation": number}
    yield {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start + 2, "dur": 2, "args": call}
    yield {"ph": "s", "id": number, "pid": 1, "tid": 1, "ts": start + 2, "cat": "ac2g", "name": "ac2g"}
    grid = {"grid": [400, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}
    args = {"External id": number, "device": 0, "stream": 7, "correlation": number, "blocks per SM": 5.0, **grid}
    length = 8 + number % len(KERNELS)
    yield {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start + 20, "dur": length, "args": args}


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--bytes", type=float, default=1e9)
    chosen = parser.parse_args()
    number = written = 0
    with open(chosen.output, "w", encoding="utf-8") as file:
        written += file.write('{"schemaVersion": 1, "traceEvents": [\n{"ph": "M", "name": "process_name", "pid": 0}')
        while written < chosen.bytes:
            written += sum(file.write(",\n" + json.dumps(event)) for event in launch(number))
            number += 1
        file.write("\n]}\n")
    print(f"{number} kernels, {written / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
