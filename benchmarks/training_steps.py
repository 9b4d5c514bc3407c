"""Whole steps of models, in training and inference, with torch: phase by phase, and kernel by kernel.

    python benchmarks/training_steps.py FOLDER [--seconds 480]
    python benchmarks/training_steps.py FOLDER --others     # other models first
    python benchmarks/training_steps.py FOLDER --small      # two tiny models, on the CPU too

Needs `transformers` and `torchvision`. Weights and inputs are random. Writes `training_steps.csv`, one row a step, and
`training_step_kernels.parquet`, its kernels by name. `step_s` is the median of eight steps by the host's clock, from
one wait for the device to the next, after two that are not counted; `forward_s`, `backward_s` and `optimizer_s` come
from a step that waits after each phase as well, the second fastest of three. `gpu_busy_s` and `launches` are sums over
the kernels of one further step under the profiler; where kernels of several streams overlap it exceeds the step.

`precision`: fp32, tf32 (products may use it), bf16 and fp16 (weights too), amp-bf16 and amp-fp16 (autocast).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from step_models import IMAGE_BATCHES, MODELS, OTHER_IMAGE_BATCHES


@dataclasses.dataclass(frozen=True)
class Step:
    """One configuration; `size` is a sequence length or, of an image model, the height of an image."""

    model: str
    batch_size: int
    size: int
    precision: str
    attention: str
    mode: str
    optimizer: str = ""
    channels_last: int = 0
    compiled: int = 0


def steps() -> list[Step]:
    """Every configuration, the most telling first."""
    found = []
    for name, batch, length in (
        *(("gpt2", 8, 1024), ("gpt2-large", 4, 1024), ("bert-large", 16, 512)),
        *(("llama-1b", 2, 2048), ("opt-1.3b", 2, 2048)),
    ):
        for precision, attention, mode, optimizer in (
            ("bf16", "sdpa", "training", "adamw_fused"),
            ("amp-bf16", "sdpa", "training", "adamw_fused"),
            ("fp32", "eager", "training", ""),
            ("bf16", "sdpa", "inference", ""),
            ("tf32", "eager", "training", "adamw_foreach"),
            ("amp-fp16", "eager", "training", ""),
            ("fp32", "eager", "inference", ""),
        ):
            found.append(Step(name, batch, length, precision, attention, mode, optimizer))
    for name, batch in IMAGE_BATCHES.items():
        for precision, mode, optimizer, last in (
            ("amp-bf16", "training", "sgd_foreach", 1),
            ("amp-bf16", "training", "sgd_foreach", 0),
            ("fp32", "training", "", 0),
            ("tf32", "training", "sgd_foreach", 0),
            ("bf16", "inference", "", 1),
            ("fp32", "inference", "", 0),
            ("fp16", "inference", "", 0),
        ):
            found.append(Step(name, batch, 224, precision, "", mode, optimizer, last))
    found.append(Step("resnet50", 16, 224, "fp32", "", "inference"))
    found.append(Step("resnet50", 16, 224, "bf16", "", "inference", "", 1))
    found.append(Step("resnet50", 512, 224, "amp-bf16", "", "training", "sgd_foreach", 1))
    for name, batch, length in (("llama-3b", 1, 4096), ("gpt2-xl", 2, 1024), ("gpt3-xl", 2, 2048)):
        found.append(Step(name, batch, length, "bf16", "sdpa", "training", "adamw_fused"))
        found.append(Step(name, batch, length, "fp32", "eager", "training"))
        found.append(Step(name, batch, length, "bf16", "sdpa", "inference"))
    for name, batch, length in (("gpt2", 8, 1024), ("bert-large", 16, 512)):
        found.append(Step(name, batch, length, "bf16", "sdpa", "training", "adamw_fused", 0, 1))
    found.append(Step("resnet50", 128, 224, "amp-bf16", "", "training", "sgd_foreach", 1, 1))
    return found


def other_steps() -> list[Step]:
    """Models that `steps` has not, and then some that it has: for what was chosen with those in view."""
    found = []
    for mode, precision, attention, optimizer in (
        ("training", "bf16", "sdpa", "adamw_fused"),
        ("inference", "bf16", "sdpa", ""),
        ("training", "amp-bf16", "sdpa", "adamw_fused"),
        ("training", "tf32", "eager", ""),
        ("training", "amp-fp16", "eager", ""),
    ):
        for name, batch, length in (
            *(("gpt2-medium", 8, 1024), ("bert-base", 32, 512)),
            *(("pythia-1b", 2, 2048), ("qwen2.5-0.5b", 2, 2048)),
        ):
            found.append(Step(name, batch, length, precision, attention, mode, optimizer))
    for mode, precision, optimizer, last in (
        ("training", "amp-bf16", "sgd_foreach", 1),
        ("inference", "bf16", "", 1),
        ("training", "amp-bf16", "sgd_foreach", 0),
        ("inference", "fp16", "", 0),
        ("training", "tf32", "", 0),
    ):
        for name, batch in OTHER_IMAGE_BATCHES.items():
            found.append(Step(name, batch, 224, precision, "", mode, optimizer, last))
    return found + [step for step in steps() if step.precision in ("bf16", "fp32") and not step.compiled]


def small_steps() -> list[Step]:
    """Two tiny models."""
    return [
        Step("gpt2-tiny", 1, 16, "amp-bf16", "eager", "training", "adamw_foreach"),
        Step("resnet18", 1, 32, "fp32", "", "inference", "", 1),
    ]


class Running:
    """A model ready to step.

    Attributes:
      net: the model; parameters, tensors: how many it has.
    """

    def __init__(self, step: Step, device: str) -> None:
        model = MODELS[step.model]
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = step.precision == "tf32"
        torch.manual_seed(0)
        with torch.device(device):
            net = model.make(step.attention, step.size)
        weights = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(step.precision, torch.float32)
        form = torch.channels_last if step.channels_last else torch.contiguous_format
        self.training = step.mode == "training"
        self.net = net.to(dtype=weights)
        if step.channels_last:
            self.net = self.net.to(memory_format=form)  # type: ignore[call-overload]
        self.net.train(self.training)
        sizes = [each.numel() for each in self.net.parameters()]
        self.parameters, self.tensors = sum(sizes), len(sizes)
        self._step, self._device = step, device
        self._called: Any = torch.compile(self.net) if step.compiled else self.net
        self._optimizer = self._make_optimizer()
        if model.layers is not None:
            self._input = torch.randint(0, model.classes, (step.batch_size, step.size), device=device)
        else:
            images = torch.randn(step.batch_size, 3, step.size, step.size, device=device, dtype=weights)
            self._input = images.contiguous(memory_format=form)
            self._labels = torch.randint(0, model.classes, (step.batch_size,), device=device)
        self._words = model.layers is not None

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        if not self._step.optimizer:
            return None
        name, how = self._step.optimizer.split("_")
        form = {"foreach": True} if how == "foreach" else {"fused": self._device == "cuda"}
        if name == "adamw":
            return torch.optim.AdamW(self.net.parameters(), lr=1e-5, **form)
        return torch.optim.SGD(self.net.parameters(), lr=1e-5, momentum=0.9, **form)

    def _forward(self) -> Any:
        if not self._words:
            output = self._called(self._input)
            return F.cross_entropy(output, self._labels) if self.training else output
        if self.training:
            return self._called(input_ids=self._input, labels=self._input).loss
        return self._called(input_ids=self._input).logits

    def wait(self) -> float:
        """The host's clock, once the device is done."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, *, phases: bool = False) -> tuple[float, ...]:
        """Seconds of one step, or of its forward pass, backward pass and optimizer with a wait after each."""
        reduced = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(self._step.precision)
        autocast = torch.autocast(self._device, dtype=reduced) if reduced else contextlib.nullcontext()
        times = [self.wait()]
        with autocast, torch.set_grad_enabled(self.training):
            output = self._forward()
        if phases:
            times.append(self.wait())
        if self.training:
            output.backward()
        if phases:
            times.append(self.wait())
        if self._optimizer is not None:
            self._optimizer.step()
        if self.training:
            self.net.zero_grad(set_to_none=True)
        del output
        times.append(self.wait())
        return tuple(after - before for before, after in itertools.pairwise(times))


def measure(step: Step, device: str, *, repeats: int = 8) -> tuple[dict[str, Any], list[tuple[str, int, float]]]:
    """Times of a step, and its kernels: name, launches, seconds; most time first."""
    running, gpu = Running(step, device), device == "cuda"
    for _ in range(2):
        running.run()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    whole = sorted(running.run()[0] for _ in range(repeats))
    forward_s, backward_s, optimizer_s = sorted(running.run(phases=True) for _ in range(min(3, repeats)))[-2:][0]
    peak = torch.cuda.max_memory_allocated() if gpu else None
    kernels = _kernels(running) if gpu else []
    middle, quarter = whole[len(whole) // 2], len(whole) // 4
    found = {
        "parameters": running.parameters,
        "tensors": running.tensors,
        "layers": MODELS[step.model].layers,
        "step_s": middle,
        "step_min_s": whole[0],
        "spread": (whole[-1 - quarter] - whole[quarter]) / middle,
        "forward_s": forward_s,
        "backward_s": backward_s if running.training else None,
        "optimizer_s": optimizer_s if step.optimizer else None,
        "gpu_busy_s": sum(seconds for _, _, seconds in kernels) if gpu else None,
        "launches": sum(count for _, count, _ in kernels) if gpu else None,
        "peak_bytes": peak,
    }
    return found, kernels


def _kernels(running: Running) -> list[tuple[str, int, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        running.run()
    counts: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = collections.defaultdict(float)
    for event in profile.events():
        if str(event.device_type).endswith("CUDA") and not event.name.startswith("Memcpy HtoD"):
            counts[event.name] += 1
            seconds[event.name] += 1e-6 * event.time_range.elapsed_us()
    return sorted(((name, counts[name], seconds[name]) for name in counts), key=lambda each: -each[2])


def _facts(step: Step, device_name: str) -> dict[str, Any]:
    """The columns that say what was run."""
    facts = dataclasses.asdict(step)
    size = facts.pop("size")
    words = MODELS[step.model].layers is not None
    head = {"device": device_name, "model": facts.pop("model"), "batch_size": facts.pop("batch_size")}
    lengths = {"image_size": None if words else size, "sequence_length": size if words else None}
    return head | lengths | {name: None if value == "" else value for name, value in facts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write both tables, after every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no step after that")
    parser.add_argument("--small", action="store_true", help="two tiny models")
    parser.add_argument("--others", action="store_true", help="other models")
    chosen = parser.parse_args(arguments)
    if not (chosen.small or torch.cuda.is_available()):
        parser.error("torch finds no GPU; add --small to try this on the CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    chosen.folder.mkdir(parents=True, exist_ok=True)
    began, rows, kernel_rows = time.monotonic(), [], []
    everything = small_steps() if chosen.small else other_steps() if chosen.others else steps()
    for step in everything:
        if time.monotonic() - began > chosen.seconds:
            break
        facts = _facts(step, name)
        try:
            found, kernels = measure(step, device, repeats=1 if chosen.small else 8)
        except RuntimeError as error:  # out of memory is one
            print(f"{step}: {str(error).splitlines()[0][:200]}", flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            continue
        rows.append(facts | found)
        kernel_rows += [
            facts | {"kernel": kernel[:160], "count": count, "total_s": seconds}
            for kernel, count, seconds in kernels[:120]
        ]
        for file, table in (("training_steps.csv", rows), ("training_step_kernels.parquet", kernel_rows)):
            frame = pd.DataFrame(table)
            whole = ("image_size", "sequence_length", "parameters", "tensors", "layers", "launches", "peak_bytes")
            frame = frame.astype({column: "Int64" for column in whole if column in frame})
            if file.endswith(".csv"):
                frame.to_csv(chosen.folder / file, index=False, float_format="%.6g")
            else:
                frame.to_parquet(chosen.folder / file, index=False)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"{len(rows)} of {len(everything)} steps, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
