"""Kernels measured in torch: CUDA events and a captured graph on a GPU, the host's clock on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.profiling.case import POINTWISE, POSITIVE, Case, operands, own_operator
from neusight_jax.profiling.machine import free_bytes, processor_name

TORCH_DTYPES: dict[str, Any] = {
    **dict.fromkeys(("fp32", "tf32"), torch.float32),
    **{"bf16": torch.bfloat16, "fp16": torch.float16},
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    **POINTWISE,
    **{"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "copy": torch.clone, "bmm": torch.bmm},
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "ln": lambda x, scale, bias: F.layer_norm(x, (x.shape[-1],), scale, bias),
    # The inputs hold the weight as (in, out); torch keeps it as (out, in), which is a view here.
    "linear": lambda x, weight, bias: F.linear(x, weight.t(), bias),
}


class TorchBackend:
    """Torch on its first CUDA (or ROCm) device, else on the CPU."""

    name = "torch"

    def __init__(self) -> None:
        self.is_cpu = not torch.cuda.is_available()
        self.device = processor_name() if self.is_cpu else torch.cuda.get_device_name(0)

    def supports(self, case: Case) -> str:
        """Empty, or why this kernel cannot run here."""
        if case.op in COLLECTIVE_OPS:
            return "collectives are measured with JAX: --backend jax"
        if case.dtype not in TORCH_DTYPES:
            return f"{case.dtype} is not measured with torch"
        if case.dtype == "tf32" and (self.is_cpu or case.op not in ("linear", "bmm", "conv")):
            return f"no {case.op} in tf32 here"
        return ""

    def free_bytes(self) -> float:
        """Memory that can be had on the device."""
        return free_bytes() if self.is_cpu else float(torch.cuda.mem_get_info()[0])

    def versions(self) -> dict[str, str]:
        """Versions of torch and what it runs on."""
        library: Any = torch.backends.cudnn
        cudnn = library.version() if library.is_available() else None
        return {
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda or ""),
            "cudnn": str(cudnn or ""),
            "threads": str(torch.get_num_threads()),
        }

    def release(self) -> None:
        """Give cached memory back."""
        if not self.is_cpu:
            torch.cuda.empty_cache()

    def prepare(self, case: Case, sets: int, seed: int) -> TorchPrepared:
        """Draw the inputs of a kernel."""
        # Products and convolutions have a switch each, and both hold for the whole process.
        torch.backends.cuda.matmul.allow_tf32 = case.dtype == "tf32"
        torch.backends.cudnn.allow_tf32 = case.dtype == "tf32"
        return TorchPrepared(case, sets, seed, "cpu" if self.is_cpu else "cuda")


class TorchPrepared:
    """A kernel and its input sets. Results are freed at once, so torch's allocator hands out the same memory again."""

    def __init__(self, case: Case, sets: int, seed: int, device: str) -> None:
        self.sets, self._turn, self._on_gpu = sets, 0, device == "cuda"
        self._kernel = torch_operator(case)
        generator = torch.Generator(device).manual_seed(seed)
        shapes, dtype = operands(case).inputs, TORCH_DTYPES[case.dtype]
        self._inputs = [tuple(_draw(generator, shape, dtype, case.op, device) for shape in shapes) for _ in range(sets)]
        if case.op == "conv":
            self._inputs = [
                (image.permute(0, 3, 1, 2), window.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last))
                for image, window in self._inputs
            ]
        self._graph: Any = None

    def call(self) -> float:
        """Seconds of one call: between two events on a GPU, else by the host's clock."""
        inputs = self._inputs[self._turn]
        self._turn = (self._turn + 1) % self.sets
        seconds: float = self._timed(lambda: self._kernel(*inputs))
        return seconds

    def loop(self, rounds: int) -> float:
        """Seconds of `rounds` passes over the sets; on a GPU one pass is a captured graph."""
        if self._on_gpu and self._graph is None:
            self._graph = self._captured()
        once = self._graph.replay if self._graph else self._pass

        def run() -> None:
            for _ in range(rounds):
                once()

        seconds: float = self._timed(run)
        return seconds

    def idle(self, rounds: int) -> float:
        """Seconds of as many rounds that do nothing: none are needed here, the host does not come between kernels."""
        return 0.0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _pass(self) -> None:
        for inputs in self._inputs:
            self._kernel(*inputs)

    def _captured(self) -> Any:
        """One pass over the sets as a CUDA graph; False where the kernel cannot be captured."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # CUDA wants a first run on another stream before it captures a graph.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pass()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._pass()
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        return graph

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _timed(self, run: Callable[[], object]) -> float:
        if not self._on_gpu:
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        # What was launched before must not run between the events.
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def _draw(generator: Any, shape: tuple[int, ...], dtype: Any, op: str, device: str) -> Any:
    drawn = torch.rand if op in POSITIVE else torch.randn
    values = drawn(shape, generator=generator, device=device)
    return (values + 0.5 if op in POSITIVE else values).to(dtype)


def torch_operator(case: Case) -> Callable[..., Any]:
    """A function of the case's inputs, in the layouts of `case.operands`."""
    if operator := own_operator(case, "torch"):
        return operator
    sizes = case.sizes
    if case.op == "conv":
        return lambda image, window: F.conv2d(image, window, stride=sizes["stride"], padding=sizes["padding"])
    if case.op in ("prefill", "decode"):
        options: dict[str, Any] = {
            "is_causal": bool(sizes["causal"]),
            "enable_gqa": sizes["heads"] != sizes["kv_heads"],
        }
        return lambda *inputs: F.scaled_dot_product_attention(
            *(operand.transpose(1, 2) for operand in inputs), **options
        )
    return _OPERATORS[case.op]
