"""Parameters of configs beside the modules that transformers builds from them: equal, every one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_configs import DECODERS, ENCODERS

import neusight_jax as nj
from neusight_jax.graph.configs.decoder import MODEL_TYPES
from neusight_jax.graph.memory import footprint

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers_counts import parameter_total  # noqa: E402

transformers.logging.set_verbosity_error()


def built(values: dict[str, object], training: bool = False) -> int:
    """Parameters of the module; a skip where this transformers has no such class."""
    try:
        return parameter_total(values, training)
    except (KeyError, AttributeError):
        pytest.skip(f"this transformers has no {values['model_type']}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_encoders_count_all_their_parameters(name: str, mode: str) -> None:
    values = ENCODERS[name]
    graph = nj.graph_from_config(values, 2, 17 if name == "vit" else 32, mode)
    total = built(values, mode == "training")
    assert graph.parameters == total
    assert footprint(graph).weights == 4 * total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_count_all_their_parameters(kind: str) -> None:
    graph = nj.graph_from_config(DECODERS[kind], 2, 512, "decode", "bf16")
    assert graph.parameters == built(DECODERS[kind])
    assert footprint(graph).weights == 2 * graph.parameters


def test_most_types_are_here() -> None:
    assert set(DECODERS) <= set(MODEL_TYPES)
    assert len(DECODERS) > 0.5 * len(MODEL_TYPES)


@pytest.mark.filterwarnings("ignore")
def test_bundled_configs_have_the_published_parameters() -> None:
    """One file of each type; benchmarks/configs.py does all of them."""
    pytest.importorskip("aiconfigurator_core")
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        import configs
    finally:
        sys.path.pop(0)
    of_type = {json.loads(path.read_text(encoding="utf-8"))["model_type"]: path for path in configs.bundled()}
    rows = [configs.row(path, None, None) for path in of_type.values()]
    assert len(rows) > 20
    assert [line for line, same in rows if not same] == []
