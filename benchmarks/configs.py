"""Configs that aiconfigurator-core bundles: does each give a forecast, and are its parameters the published ones?

python benchmarks/configs.py prints a Markdown table, one row a file: a decode of one request at 4,096 tokens in the
config's own dtype, the parameters counted, those of the module that transformers builds (or, where it has no such
class, those published), and their difference; or the line that says which layer is missing. Needs the extra
`aiconfigurator`, torch and transformers. --counts leaves the forecasts out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import neusight_jax as nj

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from transformers_counts import parameter_total

PUBLISHED: dict[str, tuple[float, str]] = {
    "nemotron-nas": (49.9e9, "model card: 49.9B"),
    "kimi_k3": (2.8e12, "its name in aiconfigurator: 2.8T"),
}
"""Parameters of types without a class in transformers, and who says so."""
WITHIN = 0.01
"""Difference that counts as the same."""


def bundled() -> list[Path]:
    """The config files, those of quantizers left out."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise nj.InputError("aiconfigurator_core is not installed; pip install '.[aiconfigurator]'")
    folder = Path(found.origin).parent / "model_configs"
    return sorted(path for path in folder.glob("*_config.json") if "hf_quant_config" not in path.name)


def reference(values: dict[str, Any]) -> tuple[float, str] | None:
    """Parameters somebody else says the language model of a config has, and who."""
    try:
        return float(parameter_total(values)), "transformers"
    except KeyError:
        return PUBLISHED.get(str(values.get("model_type")))


def row(path: Path, predictor: Any, gpu: Any) -> tuple[str, bool]:
    """A file's row, and whether it has a forecast with the right parameters."""
    name = path.name.removesuffix("_config.json").replace("--", "/")
    try:
        graph = nj.graph_from_config(path, 1, 4096, "decode")
    except nj.InputError as error:
        return f"| {name} | - | - | - | - | {error} |", False
    told = reference(json.loads(path.read_text(encoding="utf-8")))
    time = "" if predictor is None else f"{nj.predict(predictor, gpu, graph).total_s * 1e3:.2f}"
    counted = graph.parameters or 0.0
    if told is None:
        return f"| {name} | {time} | {counted / 1e9:.3f} | - | - | nobody to compare with |", False
    off = counted / told[0] - 1.0
    return (
        f"| {name} | {time} | {counted / 1e9:.3f} | {told[0] / 1e9:.3f} | {off:+.4%} | {told[1]} |",
        abs(off) <= WITHIN,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="B200")
    parser.add_argument("--counts", action="store_true", help="leave the forecasts out")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    gpu = nj.load_gpu(chosen.gpu)
    predictor = None if chosen.counts else nj.load_predictor("tensorcore")
    print(f"| config | ms on {chosen.gpu} | parameters, 1e9 | reference | difference | by |\n|---|---|---|---|---|---|")
    files = bundled()
    right = 0
    for path in files:
        line, same = row(path, predictor, gpu)
        right += same
        print(line, flush=True)
    print(f"\n{right} of {len(files)} with a forecast and parameters within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
