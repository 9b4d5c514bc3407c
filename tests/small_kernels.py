"""Kernels to measure: a small one of every operator, and one whose times are known."""

from __future__ import annotations

from neusight_jax.profiling.case import Case, make_case

SMALL: dict[str, dict[str, int]] = {
    "linear": {"m": 6, "n": 10, "k": 4},
    "bmm": {"b": 3, "m": 5, "n": 7, "k": 2},
    "softmax": {"b": 4, "h": 9},
    "ln": {"b": 4, "h": 9},
    "conv": {
        "b": 2,
        "input_channels": 3,
        "output_channels": 5,
        "kernel_size": 3,
        "input_size": 8,
        "stride": 2,
        "padding": 1,
    },
    "prefill": {
        "batch_size": 2,
        "query_length": 6,
        "kv_length": 6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "causal": 1,
    },
    "decode": {
        "batch_size": 2,
        "query_length": 1,
        "kv_length": 6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "causal": 0,
    },
}


def small(op: str, dtype: str = "fp32") -> Case:
    return make_case(op, SMALL.get(op, {"b": 4, "h": 9}), dtype)


class Fake:
    """A kernel of 10 us in a loop that costs 100 us, 50 us more if it runs, and 4 us a round; 60 us a call."""

    sets = 4

    def __init__(self) -> None:
        self.ran = 0

    def call(self) -> float:
        return 60e-6

    def loop(self, rounds: int) -> float:
        self.ran += rounds
        return 100e-6 + (50e-6 if rounds else 0.0) + rounds * (self.sets * 10e-6 + 4e-6)

    def idle(self, rounds: int) -> float:
        return 30e-6 + rounds * 4e-6
