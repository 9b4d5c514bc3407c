"""Whole steps of JAX programs, compiled: GPT-2 and ResNet-50 in flax, as `tests/flax_models.py` has them.

    python benchmarks/jax_steps.py FILE.csv [--seconds 200]

Weights and inputs are random, both in fp32. `precision`: of products, tf32 (what JAX does by default) or fp32
(`jax_default_matmul_precision`). `step_s` is the median of ten calls by the host's clock, each waited for, after three
that are not counted; `compile_s` is what the first took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import flax_models as models

WORDS = 50257
MODELS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "gpt2": (lambda: models.Gpt2(WORDS, 1024, 768, 12, 12), 8, 1024),
    "gpt2-medium": (lambda: models.Gpt2(WORDS, 1024, 1024, 24, 16), 4, 1024),
    "resnet50": (lambda: models.ResNet50(), 64, 224),
}
"""Model, batch, and the length of a sequence or the height of an image."""
CASES = [
    (name, precision, mode) for precision in ("tf32", "fp32") for name in MODELS for mode in ("inference", "training")
]


def step(name: str, mode: str) -> tuple[Callable[..., Any], tuple[Any, Any, Any]]:
    """The program, a forward pass or the gradients of a loss, and the shapes of parameters, other state and input."""
    make, batch, size = MODELS[name]
    model, words = make(), name.startswith("gpt")
    x = jax.ShapeDtypeStruct((batch, size) if words else (batch, size, size, 3), jnp.int32 if words else jnp.float32)
    training = {} if words else {"train": mode == "training"}
    state = jax.eval_shape(lambda key: model.init(key, jnp.zeros(x.shape, x.dtype), **training), jax.random.key(0))
    rest = {key: value for key, value in state.items() if key != "params"}

    def forward(params: Any, rest: Any, x: jax.Array) -> Any:
        if training and mode == "training":
            return model.apply({**rest, "params": params}, x, mutable=["batch_stats"], **training)[0]
        return model.apply({**rest, "params": params}, x, **training)

    def loss(params: Any, rest: Any, x: jax.Array) -> jax.Array:
        out = forward(params, rest, x)
        return jnp.mean(jax.nn.logsumexp(out, -1) - out[..., 0])

    return jax.grad(loss) if mode == "training" else forward, (state["params"], rest, x)


def _random(shape: jax.ShapeDtypeStruct) -> jax.Array:
    key = jax.random.key(1)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)
    return jax.random.randint(key, shape.shape, 0, WORDS, shape.dtype)


def measure(name: str, precision: str, mode: str) -> dict[str, Any]:
    """One row."""
    function, shapes = step(name, mode)
    inputs = jax.tree.map(_random, shapes)
    with jax.default_matmul_precision("float32" if precision == "fp32" else "default"):
        began = time.perf_counter()
        program = jax.jit(function).lower(*inputs).compile()
        compile_s = time.perf_counter() - began
    times = []
    for _ in range(13):
        began = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        times.append(time.perf_counter() - began)
    whole = sorted(times[3:])
    _, batch, size = MODELS[name]
    facts = {"device": jax.devices()[0].device_kind, "model": name, "batch_size": batch, "size": size}
    times_s = {"step_s": whole[5], "min_s": whole[0], "compile_s": compile_s}
    return facts | {"precision": precision, "mode": mode} | times_s | {"jax": jax.__version__}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write, after every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no step after that")
    chosen = parser.parse_args(arguments)
    began, rows = time.monotonic(), []
    for case in CASES:
        if time.monotonic() - began > chosen.seconds:
            break
        rows.append(measure(*case))
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(chosen.file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
