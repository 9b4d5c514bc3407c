"""Forward and backward time of kernels, and of optimizer steps, with torch.

    python benchmarks/backward_kernels.py backward.parquet [--seconds 300]
    python benchmarks/backward_kernels.py backward.parquet --small      # a few small ones, on the CPU too

A kernel runs on two to six input sets in turn, together more than the last-level cache, as one CUDA graph between two
events: a row is the median of eight such loops (three, where one takes 50 ms), with the distance of the quartiles over
the median as `spread`. The backward pass is that of autograd from a given gradient of the output to all inputs and
weights. On the CPU the calls are timed by the host's clock, once.

Columns: `device`, `op`, `dtype`, the dims of the operator, and `forward_s`, `backward_s` with their spreads, or
`step_s` of an optimizer. In `linear`, m × n are the rows and n the contraction, as in the measurement schema.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

Dims = dict[str, int]
Tensors = tuple[Tensor, ...]
Timed = tuple[float, float]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "dropout": lambda x: F.dropout(x, 0.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
}
OPTIMIZERS = ("adamw_fused", "adamw_foreach", "sgd_foreach", "sgd_fused")
ROWWISE = ("ln", "rmsnorm", "softmax", "gelu", "silu", "relu", "dropout", "cross_entropy")
VOCABULARIES = (1000, 30522, 50257, 50304, 128256, 32000)
CONVOLUTIONS = (
    # input channels, output channels, image, window, stride: of ResNet-50, VGG-16 and neighbours
    *((64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 128, 56, 1, 1), (128, 128, 56, 3, 2)),
    *((128, 128, 28, 3, 1), (512, 256, 28, 1, 1), (256, 256, 14, 3, 1), (256, 1024, 14, 1, 1), (512, 512, 7, 3, 1)),
    *((512, 2048, 7, 1, 1), (3, 64, 224, 7, 2), (64, 128, 112, 3, 1), (512, 512, 28, 3, 1), (512, 512, 14, 3, 1)),
    (1024, 2048, 14, 1, 2),
)


def cases() -> list[tuple[str, str, Dims]]:
    """Operator, dtype and dims of every kernel, shuffled; the same every time."""
    draw = random.Random(0)
    found = [*_attention(draw), *_rowwise(draw), *_embedding(draw), *_linear(draw), *_images(), *_optimizers()]
    draw.shuffle(found)
    return found


def small_cases() -> list[tuple[str, str, Dims]]:
    """One small kernel of every operator."""
    image = {"b": 2, "input_size": 7, "channels_last": 1}
    attention = {"batch_size": 1, "sequence_length": 16, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": 1}
    conv = {"input_channels": 4, "output_channels": 8, "kernel_size": 3, "stride": 1, "padding": 1}
    return [
        ("attention", "bf16", attention),
        *((op, "fp32", {"b": 8, "h": 64}) for op in ROWWISE),
        ("embedding", "bf16", {"b": 16, "vocab": 100, "h": 64}),
        ("linear", "fp32", {"m": 16, "n": 32, "k": 64}),
        ("conv", "fp32", {**image, **conv}),
        ("batchnorm", "fp32", {**image, "input_channels": 4}),
        *((op, "fp32", {"parameters": 1000, "tensors": 10}) for op in OPTIMIZERS),
    ]


def _size(draw: random.Random, low: float, high: float, multiple: int) -> int:
    """A log-uniform multiple."""
    drawn = math.exp(draw.uniform(math.log(low), math.log(high)))
    return max(multiple, round(drawn / multiple) * multiple)


def _attention(draw: random.Random) -> Iterator[tuple[str, str, Dims]]:
    for dtype, count in (("bf16", 22), ("fp16", 8), ("fp32", 8)):
        for _ in range(count):
            kv_heads = 2 ** draw.randint(0, 4)
            heads = kv_heads * 2 ** draw.randint(0, 2)
            yield (
                "attention",
                dtype,
                {
                    "batch_size": draw.choice([1, 1, 2, 4, 8]),
                    "sequence_length": _size(draw, 128, 2048 if dtype == "fp32" else 8192, 64),
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "head_dim": draw.choice([64, 128, 128]),
                    "causal": draw.choice([0, 1, 1]),
                },
            )


def _rowwise(draw: random.Random) -> Iterator[tuple[str, str, Dims]]:
    for op in ROWWISE:
        for dtype in ("bf16", "fp32"):
            for _ in range(8 if op in ("ln", "softmax", "cross_entropy") else 5):
                b, h = _size(draw, 256, 32768, 32), _size(draw, 256, 16384, 64)
                if op == "cross_entropy":
                    b, h = _size(draw, 256, 16384, 64), draw.choice(VOCABULARIES)
                yield op, dtype, {"b": 256 if b * h > 1.2e9 else b, "h": h}


def _embedding(draw: random.Random) -> Iterator[tuple[str, str, Dims]]:
    for dtype in ("bf16", "fp32"):
        for _ in range(8):
            b = _size(draw, 512, 32768, 64)
            vocab = draw.choice([30522, 50257, 128256, 32000])
            yield "embedding", dtype, {"b": b, "vocab": vocab, "h": _size(draw, 512, 8192, 64)}


def _linear(draw: random.Random) -> Iterator[tuple[str, str, Dims]]:
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        for _ in range(30 if dtype == "bf16" else 12):
            m, n, k = (_size(draw, low, 16384, 64) for low in (64, 128, 128))
            yield "linear", dtype, {"m": m, "n": n, "k": k}


def _images() -> Iterator[tuple[str, str, Dims]]:
    for dtype, last in (("bf16", 1), ("bf16", 0), ("fp16", 1), ("tf32", 0), ("fp32", 0)):
        for inputs, outputs, size, window, stride in CONVOLUTIONS:
            for batch in (16, 64, 256) if dtype == "bf16" else (64,):
                image = {"b": batch, "input_size": size, "channels_last": last}
                kernel = {"kernel_size": window, "stride": stride, "padding": window // 2}
                yield "conv", dtype, {"input_channels": inputs, "output_channels": outputs, **image, **kernel}
    for dtype, last in (("bf16", 1), ("bf16", 0), ("fp32", 0)):
        for channels, size in ((64, 112), (256, 56), (128, 28), (1024, 14), (512, 7)):
            image = {"b": 64, "input_size": size, "channels_last": last}
            yield "batchnorm", dtype, {"input_channels": channels, **image}


def _optimizers() -> Iterator[tuple[str, str, Dims]]:
    for op in OPTIMIZERS:
        for dtype in ("fp32", "bf16"):
            for millions, tensors in ((10, 100), (124, 148), (350, 300), (1500, 580)):
                yield op, dtype, {"parameters": 1_000_000 * millions, "tensors": tensors}


class Bench:
    """Times kernels on one device.

    Backward passes run on the stream of their forward pass and are captured there, hence one stream for all.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.gpu = device == "cuda"
        self.stream = torch.cuda.Stream() if self.gpu else None
        if self.gpu:
            torch.cuda.set_stream(self.stream)

    def timed(self, call: Callable[[int], object], sets: int) -> Timed:
        """Median seconds of a call and the distance of the quartiles over it; `call(i)` runs on input set i."""

        def one_pass() -> None:
            for number in range(sets):
                call(number)

        one_pass()
        if not self.gpu:
            start = time.perf_counter()
            one_pass()
            return (time.perf_counter() - start) / sets, 0.0
        one_pass()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            one_pass()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        one_s = _between_events(graph.replay, 1)
        rounds = max(1, min(100, int(0.003 / max(one_s, 1e-7))))
        found = sorted(_between_events(graph.replay, rounds) / sets for _ in range(8 if one_s * rounds < 0.05 else 3))
        middle, quarter = found[len(found) // 2], len(found) // 4
        return middle, (found[-1 - quarter] - found[quarter]) / middle

    def measure(self, op: str, dtype: str, dims: Dims) -> dict[str, float]:
        """Seconds and spreads of one case."""
        if op in OPTIMIZERS:
            step_s, spread = self._optimizer(op, DTYPES[dtype], dims["parameters"] // dims["tensors"], dims["tensors"])
            return {"step_s": step_s, "step_spread": spread}
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
        make, forward, elements = self._kernel(op, DTYPES[dtype], dims)
        set_bytes = elements * torch.finfo(DTYPES[dtype]).bits // 8
        count = min(max(math.ceil(1.2e8 / set_bytes), 2), 6)
        sets = [make() for _ in range(count)]
        outputs = [forward(*each) for each in sets]
        gradients = [torch.randn_like(each) for each in outputs]
        leaves = [[tensor for tensor in each if tensor.requires_grad] for each in sets]

        def run(number: int) -> None:
            with torch.no_grad():
                forward(*sets[number])

        def back(number: int) -> None:
            torch.autograd.grad(outputs[number], leaves[number], gradients[number], retain_graph=True)

        forward_s, forward_spread = self.timed(run, count)
        backward_s, backward_spread = self.timed(back, count)
        return {
            "forward_s": forward_s,
            "forward_spread": forward_spread,
            "backward_s": backward_s,
            "backward_spread": backward_spread,
        }

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)

    def _image(self, *shape: int, dtype: torch.dtype, last: int) -> Tensor:
        form = torch.channels_last if last else torch.contiguous_format
        plain = torch.randn(shape, device=self.device, dtype=dtype)
        return plain.contiguous(memory_format=form).requires_grad_(True)

    def _indices(self, count: int, below: int) -> Tensor:
        return torch.randint(0, below, (count,), device=self.device)

    def _kernel(
        self, op: str, dtype: torch.dtype, dims: Dims
    ) -> tuple[Callable[[], Tensors], Callable[..., Tensor], int]:
        """What makes a set of inputs, the operator, and about how many elements a set and its output have."""

        def normal(*shape: int) -> Tensor:
            return self._random(*shape, dtype=dtype)

        if op == "attention":
            batch, length, heads, kv_heads, size, causal = dims.values()
            grouped = heads != kv_heads
            return (
                lambda: tuple(normal(batch, each, length, size) for each in (heads, kv_heads, kv_heads)),
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=grouped),
                4 * batch * length * heads * size,
            )
        if op == "embedding":
            b, vocab, h = dims.values()
            return lambda: (self._indices(b, vocab), normal(vocab, h)), F.embedding, vocab * h
        if op == "linear":
            m, n, k = dims.values()
            return lambda: (normal(m, n), normal(k, n), normal(k)), F.linear, m * n + n * k + m * k
        if op in ("conv", "batchnorm"):
            return self._of_images(op, dtype, dims)
        b, h = dims["b"], dims["h"]
        if op == "ln":
            return (
                lambda: (normal(b, h), normal(h), normal(h)),
                lambda x, scale, offset: F.layer_norm(x, (h,), scale, offset),
                3 * b * h,
            )
        if op == "rmsnorm":
            return lambda: (normal(b, h), normal(h)), lambda x, scale: F.rms_norm(x, (h,), scale), 3 * b * h
        if op == "cross_entropy":
            return lambda: (normal(b, h), self._indices(b, h)), F.cross_entropy, 3 * b * h
        return lambda: (normal(b, h),), ACTIVATIONS[op], 3 * b * h

    def _of_images(
        self, op: str, dtype: torch.dtype, dims: Dims
    ) -> tuple[Callable[[], Tensors], Callable[..., Tensor], int]:
        batch, size, last, inputs = (dims[name] for name in ("b", "input_size", "channels_last", "input_channels"))
        shape = (batch, inputs, size, size)
        if op == "batchnorm":
            return (
                lambda: (
                    self._image(*shape, dtype=dtype, last=last),
                    *(self._random(inputs, dtype=torch.float32) for _ in range(2)),
                ),
                lambda x, scale, offset: F.batch_norm(x, None, None, scale, offset, training=True),
                3 * math.prod(shape),
            )
        outputs, window, stride = (dims[name] for name in ("output_channels", "kernel_size", "stride"))
        return (
            lambda: (
                self._image(*shape, dtype=dtype, last=last),
                self._image(outputs, inputs, window, window, dtype=dtype, last=last),
            ),
            lambda x, weight: F.conv2d(x, weight, stride=stride, padding=dims["padding"]),
            math.prod(shape) + batch * outputs * (size // stride) ** 2,
        )

    def _optimizer(self, op: str, dtype: torch.dtype, size: int, tensors: int) -> Timed:
        weights = [torch.nn.Parameter(self._random(size, dtype=dtype).detach()) for _ in range(tensors)]
        for each in weights:
            each.grad = torch.randn_like(each)
        form = {"foreach": True} if op.endswith("foreach") else {"fused": self.gpu}
        optimizer: torch.optim.Optimizer
        if op.startswith("adamw"):
            optimizer = torch.optim.AdamW(weights, capturable=self.gpu, **form)
        else:
            optimizer = torch.optim.SGD(weights, lr=1e-3, momentum=0.9, **form)
        optimizer.step()  # makes the moments
        return self.timed(lambda _: optimizer.step(), 1)


def _between_events(run: Callable[[], object], rounds: int) -> float:
    """Seconds of one of some rounds, between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / rounds


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a Parquet file")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no kernel after that")
    parser.add_argument("--small", action="store_true", help="a small kernel of every operator")
    chosen = parser.parse_args(arguments)
    if not (chosen.small or torch.cuda.is_available()):
        parser.error("torch finds no GPU; add --small to try this on the CPU")
    bench = Bench("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if bench.gpu else "CPU"
    began, rows, failed = time.monotonic(), [], 0
    everything = small_cases() if chosen.small else cases()
    for op, dtype, dims in everything:
        if time.monotonic() - began > chosen.seconds:
            break
        try:
            found = bench.measure(op, dtype, dims)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            failed += 1
            print(f"{op} {dtype} {dims}: {str(error).splitlines()[0][:200]}")
            continue
        finally:
            gc.collect()
            if bench.gpu:
                torch.cuda.empty_cache()
        rows.append({"device": name, "op": op, "dtype": dtype, **dims, **found})
    frame = pd.DataFrame(rows)
    sizes = [name for name in frame if name not in ("device", "op", "dtype") and not name.endswith(("_s", "_spread"))]
    frame.astype(dict.fromkeys(sizes, "Int64")).to_parquet(chosen.output, index=False)
    print(f"{len(rows)} of {len(everything)} kernels, {failed} failed, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
