"""Networks as flax modules: the standard one is the forecast's own function, and a user may bring another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from own_networks import Gated, Narrow, Remembering, Taken
from refusals import Fails
from safetensors.numpy import load_file

import neusight_jax as nj
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import CARD, KEY, TRUST, WEIGHTS
from neusight_jax.model.network import apply_network, init_network, network_card
from neusight_jax.model.programs import _of_this_package
from neusight_jax.training.fit import Perceptron, Settings, as_modules
from neusight_jax.training.recipes import RECIPES, Recipe, train
from synthetic import write_softmax_alone

GATED = {"module": "own_networks:Gated", "arguments": {"width": 6}}
KERNELS = [
    Kernel("softmax", "softmax", {"rows": 512.0 * 4**place, "cols": 1024.0, "reads": 1.0, "writes": 1.0})
    for place in range(4)
]


class Nowhere(linen.Module):
    """As the class of a notebook: nothing imports it."""


Nowhere.__module__ = "__main__"


@pytest.fixture(autouse=True, scope="module")
def _quick_recipe() -> Iterator[None]:
    """Promotion is not strict here: optax raises a float to an integer step count."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        quick = Settings(steps=200, batch_size=64)
        patch.setenv(TRUST, "1")
        patch.setitem(RECIPES, "quick", Recipe("mixture", 2, (8,), quick, Settings(steps=5, batch_size=32)))
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_softmax_alone(tmp_path_factory.mktemp("measured"), rows=48)


@pytest.fixture(scope="module")
def gated(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose network is `Gated`."""
    out = tmp_path_factory.mktemp("gated") / "out"
    train([measured], "quick", out, network=Gated(width=6))
    return out


def test_the_flax_module_is_the_function_of_the_forecast() -> None:
    features = jax.random.normal(jax.random.key(1), (16, 5))
    plain = jax.tree.map(lambda leaf: leaf + 0.1, init_network(jax.random.key(0), features, (8, 4), 3, members=2))
    module = as_modules(plain)
    assert module.module == Perceptron((8, 4), 3)
    np.testing.assert_allclose(apply_network(plain, features), apply_network(module, features), rtol=1e-6)
    own = init_network(jax.random.key(0), features, (), 3, members=2, module=Perceptron((8, 4)))
    assert jax.tree.structure(own) == jax.tree.structure(module)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, module)


def test_a_network_of_ones_own_is_trained_saved_and_loaded(gated: Path) -> None:
    card = nj.load_card(gated)
    assert card["architecture"]["network"] == GATED
    assert "--network own_networks:Gated" in card["made_by"]
    assert {"families/softmax/network/center", "families/softmax/network/Dense_0/kernel"} <= set(
        load_file(gated / WEIGHTS)
    )
    assert card["errors_percent"]["softmax"]["training"]["Tesla T4"] < 20
    predictor: Any = nj.load_predictor(gated)
    network = predictor.families["softmax"].network
    assert isinstance(network.module, Gated)
    assert network.module.width == 6
    assert network.members == 2
    assert float(jnp.max(jnp.abs(network.parameters["Dense_2"]["kernel"]))) > 0  # it was trained
    assert not _of_this_package(jax.tree.structure(predictor))  # its traces are not kept: the module may change


def test_its_forecast_has_gradients_and_is_one_function(gated: Path) -> None:
    predictor, gpu, kernels = nj.load_predictor(gated), nj.load_gpu("T4"), table_from_kernels(KERNELS)
    seconds = nj.predict_kernels(predictor, gpu, kernels)
    assert np.all(np.diff(seconds) > 0)
    weights, machine = jax.grad(nj.latency, argnums=(0, 1))(predictor, gpu, kernels)
    slopes = weights.families["softmax"].network.parameters
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(slopes["Dense_0"]))
    assert machine.mem_bytes_per_s < 0
    two = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), gpu)
    many = jax.vmap(nj.latency, in_axes=(None, 0, None))(predictor, two, kernels)
    np.testing.assert_allclose(many, nj.latency(predictor, gpu, kernels), rtol=1e-5)


def test_it_is_saved_again(gated: Path, tmp_path: Path) -> None:
    predictor = nj.load_predictor(gated)
    nj.save_predictor(tmp_path / "again", predictor)
    assert nj.load_card(tmp_path / "again")["architecture"]["network"] == GATED
    assert jax.tree.structure(nj.load_predictor(tmp_path / "again")) == jax.tree.structure(predictor)


@pytest.mark.parametrize(
    ("network", "line"),
    [
        (Narrow(), r"own_networks:Narrow gives \(2, 3\) for 2 kernels, expected \(2, \d+\); give it a field `outputs"),
        (Taken(), "own_networks:Taken calls a parameter scale, the name of its normalisation"),
        (Remembering(), "own_networks:Remembering has variables batch_stats beside its parameters"),
        (Gated, "is no flax.linen.Module; expected an instance of one"),
        (Nowhere(), "network __main__:Nowhere cannot be imported again"),
        (Gated(width=np.float32), r"own_networks:Gated: .* a card holds numbers, text and lists"),  # type: ignore[arg-type]
        (Gated(width="wide"), "own_networks:Gated fails on 5 features"),  # type: ignore[arg-type]
    ],
)
def test_a_network_that_does_not_fit_is_refused_in_one_line(
    network: Any, line: str, measured: Path, tmp_path: Path
) -> None:
    with pytest.raises(nj.InputError, match=line) as caught:
        train([measured], "quick", tmp_path / "out", network=network)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_list_among_its_arguments_is_kept() -> None:
    card = network_card(Perceptron([16, 8]))  # type: ignore[arg-type]
    assert card == {"module": "neusight_jax.training.fit:Perceptron", "arguments": {"hidden": [16, 8]}}


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ("neusight_jax.training.fit:Perceptrn", "cannot be imported"),
        ("no_such_package:Gated", "network no_such_package:Gated cannot be imported"),
        ("own_networks:Gatd", "network own_networks:Gatd cannot be imported"),
        ("subprocess:Popen", "network subprocess:Popen is not a class of flax.linen.Module"),
        ("own_networks:Needing", "network own_networks:Needing cannot be made of"),
    ],
)
def test_a_card_whose_network_is_not_there_is_refused(gated: Path, tmp_path: Path, named: str, line: str) -> None:
    card = {key: value for key, value in nj.load_card(gated).items() if key != KEY}
    card["architecture"] = {**card["architecture"], "network": {"module": named, "arguments": {}}}
    (tmp_path / CARD).write_text(json.dumps(card))
    (tmp_path / WEIGHTS).write_bytes((gated / WEIGHTS).read_bytes())
    with pytest.raises(nj.InputError, match=line):
        nj.load_predictor(tmp_path, trust_modules=True)


def test_a_module_is_imported_only_if_it_is_trusted(
    gated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predict_fails: Fails
) -> None:
    """An import runs code: of a checkpoint from elsewhere, none runs."""
    (tmp_path / "spy.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(TRUST)
    card = {key: value for key, value in nj.load_card(gated).items() if key != KEY}
    card["architecture"] = {**card["architecture"], "network": {"module": "spy:Net", "arguments": {}}}
    (tmp_path / CARD).write_text(json.dumps(card))
    (tmp_path / WEIGHTS).write_bytes((gated / WEIGHTS).read_bytes())
    assert "its network is 'spy:Net', whose import would run code" in predict_fails(checkpoint=str(tmp_path))
    with pytest.raises(nj.InputError, match=f"trust_modules=True.*{TRUST}=1"):
        nj.load_predictor(tmp_path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(nj.InputError, match="spy:Net cannot be imported"):
        nj.load_predictor(tmp_path, trust_modules=True)
    assert (tmp_path / "ran").exists()
    with pytest.raises(nj.InputError, match="its network is 'own_networks:Gated'"):
        nj.load_predictor(gated)
    nj.load_predictor(gated, trust_modules=True)


def test_the_command_takes_one(measured: Path, tmp_path: Path, fails: Callable[..., str]) -> None:
    asked = ("train", "--measurements", str(measured), "--output", str(tmp_path / "out"), "--network")
    assert "network nowhere cannot be imported" in fails(*asked, "nowhere", "--recipe", "quick")
    assert "--network is not for gbt, which has no network" in fails(*asked, "own_networks:Gated", "--recipe", "gbt")
    assert "expected (2, " in fails(*asked, "own_networks:Narrow", "--recipe", "quick")


def test_a_forecast_imports_no_flax(tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint(tmp_path / "plain")
    code = "import sys, neusight_jax as nj; nj.load_predictor(sys.argv[1]); print('flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
