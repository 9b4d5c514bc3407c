"""Sizes of a model as numbers: the writer's kernels traced in them are those of the config, with slopes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_configs import DECODERS
from test_gradients import _double
from test_leaves import SMOOTH, walk

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import SIZES
from neusight_jax.kernels.table import KernelTable, distinct
from neusight_jax.model.latency import plain_sum
from neusight_jax.model.predictor import RooflinePredictor

STEPS: dict[str, dict[str, Any]] = {
    "decode": {"batch_size": 8, "sequence_length": 512, "mode": "decode"},
    "prefill": {"batch_size": 2, "sequence_length": 300, "mode": "prefill", "kv_length": 700},
    "training": {"batch_size": 2, "sequence_length": 512, "mode": "training"},
    "weight-only": {"batch_size": 4, "sequence_length": 128, "mode": "decode", "weight_dtype": "int4"},
}
MODELS = ("llama-3.1-8b", "mixtral-8x7b", "gemma-3-27b", "qwen1.5-moe-a2.7b")


def rows(table: KernelTable) -> dict[str, np.ndarray]:
    """Distinct kernels of every family, sorted: sizes and launches."""
    sizes = {
        name: np.stack([*(batch.dims[dim] for dim in sorted(batch.dims)), batch.count], 1).astype(np.float64)
        for name, batch in distinct(table).families.items()
    }
    return {name: columns[np.lexsort(columns.T)] for name, columns in sizes.items()}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_traced_kernels_are_those_of_the_config(model: str, step: str) -> None:
    if model not in nj.list_models():
        pytest.skip(f"{model} is not in the catalog")
    workload = {"dtype": "bf16", **STEPS[step]}
    shape = nj.ModelShape.from_config(model)
    graph = nj.graph_from_config(model, **workload)
    plain = rows(nj.kernels_of(shape, **workload))
    traced = rows(jax.jit(lambda sizes: nj.kernels_of(sizes, **workload))(shape))
    expected = rows(graph.kernels)
    assert set(plain) == set(traced) == set(expected)
    for family, sizes in expected.items():
        np.testing.assert_array_equal(plain[family], sizes)
        np.testing.assert_allclose(traced[family], sizes, rtol=1e-6)
    assert shape.graph(**workload).footprint == graph.footprint


def test_twice_the_layers_are_twice_the_launches_and_less_the_head() -> None:
    shape = nj.ModelShape.from_config("llama-3.2-1b")
    workload = {**STEPS["decode"], "dtype": "bf16"}
    one, two, three = (shape.replace(layers=layers).graph(**workload) for layers in (16, 32, 48))
    assert two.launches() - one.launches() == three.launches() - two.launches() > 0
    assert three.parameters - two.parameters == two.parameters - one.parameters  # type: ignore[operator]


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("mode", ["decode", "training"])
def test_slopes_by_every_size(model: str, mode: str) -> None:
    """Against central differences, between whole numbers, where nothing is rounded."""
    shape = nj.ModelShape.from_config(DECODERS[model])
    moved = {size: float(np.asarray(getattr(shape, size))) * (1.0 + 0.013 * at) for at, size in enumerate(SIZES, 1)}
    workload = {**STEPS[mode], "sequence_length": 64, "dtype": "bf16"}
    machine = nj.load_gpu("H100")

    def seconds(sizes: nj.ModelShape) -> Any:
        kernels = jax.tree.map(jnp.asarray, nj.kernels_of(sizes, **workload))
        return plain_sum(RooflinePredictor(), machine, kernels, 1.0, False).sum()

    with _double():
        errors = walk(seconds, shape.replace(**{name: np.float64(size) for name, size in moved.items()}))
    assert len(errors) == len(SIZES)
    assert max(errors.values()) < SMOOTH, errors


@pytest.mark.parametrize(
    ("model", "workload", "message"),
    [
        ("deepseek-v3", {}, "its layers are more than attention"),
        ("gpt2", {}, "model_type 'gpt2' is not supported"),
        ("llama-3.2-1b", {"dtype": "fp32"}, "traced sizes are of activations in 16 bits"),
        ("llama-3.2-1b", {"tensor_parallel": 2}, "traced sizes are of activations in 16 bits"),
    ],
)
def test_what_it_cannot_do_is_one_line(model: str, workload: dict[str, Any], message: str) -> None:
    def traced() -> Any:
        shape = nj.ModelShape.from_config(model)
        return jax.eval_shape(lambda sizes: nj.kernels_of(sizes, mode="decode", **workload), shape)

    with pytest.raises(InputError, match=message) as refusal:
        traced()
    assert len(str(refusal.value).splitlines()) == 1
