"""GPU-hours that model cards report for pretraining, beside the forecast of the layout that `parallelize` ranks first.

    python -m benchmarks.model_cards

Sources: the cards of Llama 2 (2T tokens, A100-80GB) and Llama 3.1 (more than 15T tokens, H100-80GB). Tokens a step are
those of the papers: 4M, 8M, and 16M of 405B. Layouts and numbers of GPUs are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import neusight_jax as nj

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


class Reported(NamedTuple):
    """A run: the model, its GPU, a layout, sequences of a step and their tokens, all tokens, GPU-hours of the card."""

    model: str
    gpu: str
    layout: nj.Parallelism
    batch: int
    sequence: int
    tokens: float
    gpu_hours: float


def split(tensor: int, pipeline: int, data: int, context: int, chunks: int = 1, zero: int = 1) -> nj.Parallelism:
    """A layout; norms are split where layers are."""
    return nj.Parallelism(tensor, pipeline, data, context, chunks=chunks, zero=zero, sequence_parallel=tensor > 1)


REPORTED = (
    Reported("llama-2-7b", A100, split(1, 1, 1024, 1), 1024, 4096, 2e12, 184_320),
    Reported("llama-2-13b", A100, split(1, 1, 1024, 1, zero=2), 1024, 4096, 2e12, 368_640),
    Reported("llama-2-70b", A100, split(2, 4, 32, 4, chunks=4), 1024, 4096, 2e12, 1_720_320),
    Reported("llama-3.1-8b", H100, split(1, 1, 1024, 1, zero=2), 1024, 8192, 15e12, 1_460_000),
    Reported("llama-3.1-70b", H100, split(4, 4, 32, 2, chunks=4), 1024, 8192, 15e12, 7_000_000),
    Reported("llama-3.1-405b", H100, split(4, 32, 16, 8), 2048, 8192, 15e12, 30_840_000),
)


def main() -> None:
    print("| model | TP, PP, DP, CP, chunks, ZeRO | GPU-hours | model card | ratio | MFU | MFU of the card's hours |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in REPORTED:
        layout = row.layout
        job = nj.job_from_config(row.model, layout, global_batch_size=row.batch, sequence_length=row.sequence)
        predictor, cluster = nj.load_predictor("tensorcore", row.gpu), nj.load_cluster(f"{layout.gpus}x {row.gpu}")
        step = nj.Run(tokens=row.tokens).of(nj.predict(predictor, cluster, job))
        assert step.run is not None
        assert step.mfu is not None
        ways = (layout.tensor, layout.pipeline, layout.data, layout.context, layout.chunks, layout.zero)
        ratio = step.run.gpu_hours / row.gpu_hours
        cells = [row.model, ", ".join(map(str, ways)), f"{step.run.gpu_hours:,.0f}", f"{row.gpu_hours:,.0f}"]
        cells += [f"{ratio:.2f}", f"{step.mfu:.0%}", f"{step.mfu * ratio:.0%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
