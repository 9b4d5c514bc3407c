"""Writes the tables of numbers in the pages and the README, from the checkpoints' cards and `docs/scores`.

    python docs/tools/tables.py                     # after a checkpoint was trained again
    python docs/tools/tables.py --measurements DIR  # scores whole models first, some minutes, and writes docs/scores
    python docs/tools/tables.py --check             # exit code 1 where a page would change

A table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function here. A block after `<!-- run -->`
shows as many of the first lines that its command prints as it showed before, and "...".
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from support import support, support_models

import neusight_jax as nj
from neusight_jax.cli import run

ROOT = Path(__file__).resolve().parents[2]
SCORES = ROOT / "docs" / "scores"
sys.path.append(str(ROOT))  # the last place, so that an installed package stays
MARK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
RUN = re.compile(r"(<!-- run -->\n```console\n)(.*?)```", re.DOTALL)
SHORT = {"NVIDIA ": "", "Tesla ": "", "AMD Instinct ": "", "GeForce ": "", "-PCIE-40GB": "-40", "-PCIE-32GB": ""}
SHORT |= {"-PCIE-16GB": "", "-SXM4-80GB": "-80", " 80GB HBM3": "", " SXM6 AC": "", " Blackwell Server Edition": ""}
PRODUCTS, VECTORS = ("linear", "bmm", "conv"), ("elementwise", "softmax", "norm")
FP32 = (*PRODUCTS, *VECTORS)
TENSOR = ("gemm", "gemm_fp8", "gemm_fp4", "grouped_gemm", "prefill", "decode", "stream", "reduction")
SYSTEMS = {
    "roofline3": "roofline of three fitted numbers",
    "gbt": "gradient-boosted trees",
    "habitat-mlp": "networks as in Habitat",
    "roofline": "textbook roofline",
    "neusight": "the paper's form",
}
GPUS = ("Tesla P4", "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB")
H100 = "NVIDIA H100 80GB HBM3"
WEIGHTS = {"fp32": "`fp32`, what you get: H100's products in its fit", "fp32-heldout": "`fp32-heldout`, the five alone"}
"""fp32 checkpoints on whole models, and their names in the README's table."""

STEPS = r"^\| (dense|MoE) \| (\d+) \|.*\| ([\d.]+) / ([\d.]+) \|$"
"""Rows of the page of clusters: kind, steps, mean and median of the error."""


def short(device: str) -> str:
    """A GPU's name for the head of a table."""
    for part, text in SHORT.items():
        device = device.replace(part, text)
    return device


@cache
def card(name: str) -> dict[str, Any]:
    """The card of a checkpoint."""
    return dict(nj.load_card(name))


@cache
def scores() -> pd.DataFrame:
    """Whole models by system and GPU (`measure`)."""
    return pd.read_csv(SCORES / "models.csv")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, names left and numbers right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def number(value: float | None) -> str:
    """One decimal, or nothing."""
    return "" if value is None or value != value else f"{value:.1f}"


def unseen() -> str:
    """Kernels of a GPU left out, systems by families; GPUs count equally."""
    ours = card("fp32-heldout")["left_out_errors_percent"]
    board = pd.read_csv(ROOT / "docs" / "leaderboard.csv").query("split == 'logo'")
    means = board.groupby(["system", "family"])["mean"].mean().unstack()
    rows = [["**neusight_jax**", *(f"**{mean(ours[family].values()):.1f}**" for family in FP32)]]
    rows += [[text, *(number(means.loc[system, family]) for family in FP32)] for system, text in SYSTEMS.items()]
    return table(["mean error, %", *FP32], rows)


def _by_gpu(errors: dict[str, dict[str, float]], families: tuple[str, ...]) -> str:
    devices = sorted({name for each in families for name in errors[each]}, key=_order)
    head = ["family", *map(short, devices), "mean"]
    rows = [
        [each, *(number(errors[each].get(name)) for name in devices), number(mean(errors[each].values()))]
        for each in families
    ]
    return table(head, rows)


def _order(device: str) -> tuple[int, str]:
    return (GPUS.index(device) if device in GPUS else len(GPUS), device)


def unseen_gpus() -> str:
    """The same of ours, GPU by GPU."""
    return _by_gpu(card("fp32-heldout")["left_out_errors_percent"], FP32)


def unseen_tensor() -> str:
    """Kernels on tensor cores, each GPU's architecture left out."""
    errors = card("tensorcore")["left_out_errors_percent"]
    devices = sorted({name for family in TENSOR for name in errors[family]})
    rows = [[short(name), *(number(errors[family].get(name)) for family in TENSOR)] for name in devices]
    rows.append(["mean", *(number(mean(errors[family].values())) for family in TENSOR)])
    return table(["GPU", *TENSOR], rows)


def seen() -> str:
    """Kernels of GPUs in training, from the card."""
    errors = card("fp32-heldout")["errors_percent"]
    return _by_gpu({family: errors[family]["training"] for family in FP32}, FP32)


def models() -> str:
    """Whole models by GPU: ours, its interval, and the roofline."""
    frame = scores().set_index(["system", "device"])
    rows = []
    for name in (H100, *GPUS, "in training"):
        ours, bound = frame.loc[("fp32-heldout", name)], frame.loc[("roofline", name)]
        what = {H100: "**H100, in no fit**", "in training": "the five in training"}.get(name, short(name))
        cells = [number(ours[column]) for column in ("mean", "median", "p90", "coverage", "interval_score")]
        rows.append([what, f"{ours['labels']:.0f}", *cells, number(bound["mean"])])
    head = ["GPU", "models", "mean", "median", "90 % below", "in their interval, %", "interval score", "roofline, mean"]
    return table(head, rows)


def models_short() -> str:
    """The README's: whole models on H100 and on the five."""
    frame = scores()
    rows = []
    for system, text in {**WEIGHTS, "roofline": "roofline"}.items():
        part = frame[frame["system"] == system].set_index("device")
        cells = [number(part.loc[name, column]) for name in (H100, "in training") for column in ("mean", "median")]
        rows.append([text, *cells])
    return table(["error, %", "H100: mean", "median", "five GPUs in training: mean", "median"], rows)


def models_left_out() -> str:
    """Whole models of a GPU left out of everything, from the cards."""
    errors = {f"`{name}`": card(name)["left_out_errors_percent"]["models"] for name in ("fp32-heldout", "fp32")}
    return _by_gpu(errors, tuple(errors)).replace("family", "checkpoint", 1)


def models_folds() -> str:
    """Whole models of a GPU, or an architecture, left out of everything, by the protocols of `evaluate`."""
    frame = pd.read_csv(SCORES / "left_out.csv").set_index(["protocol", "system", "device"])
    names = {("logo-models", "mixture"): "**the GPU**", ("architecture-models", "mixture"): "**its architecture**"}
    names[("architecture-models", "mixture, 50 kernels")] = "its architecture, but 50 kernels of each family"
    names[("logo-models", "roofline")] = "roofline"
    rows = []
    for key, text in names.items():
        errors = [number(frame.loc[(*key, device), "mean"]) for device in (*GPUS, H100, "all")]
        rows.append([text, *errors, number(frame.loc[(*key, "all"), "median"])])
    return table(["left out", *map(short, (*GPUS, H100)), "all models", "median"], rows)


def intervals() -> str:
    """80 % intervals of a GPU nobody measured, and how many rows of each GPU left out they hold."""
    rows = []
    for family, item in card("fp32-heldout")["intervals"]["left out"].items():
        low, high = (100.0 * (pow(2.718281828459045, item[side]) - 1.0) for side in ("log_low", "log_high"))
        held = [f"{100 * item['coverage'][name]:.0f}" if name in item["coverage"] else "" for name in GPUS]
        rows.append([family, f"{low:.0f} to +{high:.0f}", *held, f"{100 * item['mean_coverage']:.0f}"])
    return table(["family", "interval, %", *(f"{short(name)}: inside, %" for name in GPUS), "mean"], rows)


def fused() -> str:
    """Whole models with merged kernels (`torch.compile`), by GPU."""
    frame = scores().query("system == 'fp32-heldout'").set_index("device")
    names = [name for name in frame.index if name.startswith("fused, ")]
    rows = [
        [short(name.removeprefix("fused, ")), f"{frame.loc[name, 'labels']:.0f}", number(frame.loc[name, "mean"])]
        for name in names
    ]
    return table(["GPU", "models", "mean error, %"], rows)


def scaled() -> str:
    """Runs measured on one GPU, forecast for another."""
    names = {"scale_trace": "**scale-trace**", "scale_trace plain": "`--plain`"}
    names |= {"habitat-wave": "wave scaling (Habitat)", "habitat-wave-simplified": "the same, simplified form"}
    frame = pd.read_csv(SCORES / "cross_gpu.csv").set_index("system")
    rows = [
        [text, *(number(frame.loc[name, key]) for key in ("mean", "median", "p90"))] for name, text in names.items()
    ]
    return table([f"error, %, of {frame['rows'].iloc[0]} pairs", "mean", "median", "90 % below"], rows)


def tiles() -> str:
    """How often the reported tile is the one that ran."""
    share = card("fp32-heldout")["tile_accuracy"]
    return table([*share], [[f"{value:.2f}" for value in share.values()]])


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def _page(name: str, pattern: str) -> list[tuple[str, ...]]:
    """Numbers in the tables of a page that another command makes."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [match.groups() for match in re.finditer(pattern, text, re.MULTILINE)]


def _whole_models() -> list[list[str]]:
    """Rows of `trust` of whole models on one GPU."""
    whole = scores().set_index(["system", "device"])
    folds = pd.read_csv(SCORES / "left_out.csv").set_index(["protocol", "system", "device"])
    h100, apart = whole.loc[("fp32-heldout", H100)], folds.loc[("architecture-models", "mixture", "all")]
    merged = whole[[name.startswith("fused, ") for _, name in whole.index]].loc["fp32-heldout"]
    seen, folded = f"{h100['labels']:.0f} on H100", f"{apart['labels']:.0f} on six GPUs"
    ((clocked,),) = _page("power.md", r"^\| board left out \| ([\d.]+) % \|")
    ((steps, launched),) = _page("power.md", r"^\| (\d+) whole models in bf16 and fp32 \| ([\d.]+) % \|")
    carried = pd.read_csv(SCORES / "cross_gpu.csv").set_index("system").loc["scale_trace"]
    pairs = f"{carried['rows']:.0f} pairs of runs"
    return [
        ["whole models in fp32, a GPU in no fit", seen, number(h100["mean"]), "fp16, fp8, fp4"],
        [
            "the same, its architecture in no fit",
            folded,
            number(apart["mean"]),
            "Intel, Apple",
        ],
        ["the same, chains merged", f"{merged['labels'].sum():.0f} on two GPUs", _span(merged["mean"]), "training"],
        ["the same and in bf16, at locked clocks", "12 on an A100", clocked, "other boards"],
        ["the same, inference and training", f"{steps} on an H200", launched, "optimizers there"],
        ["a run carried to another GPU", pairs, number(carried["mean"]), "runs in other formats"],
    ]


def _kernels_alone() -> list[list[str]]:
    """Rows of `trust` of single kernels."""
    errors = {name: card(name)["left_out_errors_percent"] for name in ("fp32-heldout", "tensorcore")}
    fp32 = [mean(errors["fp32-heldout"][family].values()) for family in FP32]
    tensor = [mean(errors["tensorcore"][family].values()) for family in TENSOR]
    vendor = card("tensorcore")["vendor"]["errors_percent"]["left out"].values()
    amd = [value for family in vendor for value in family.values()]
    inside = [list(item["coverage"].values()) for item in card("fp32-heldout")["intervals"]["left out"].values()]
    span = _span([100 * value for part in inside for value in part])
    share = f"{100 * mean(map(mean, inside)):.0f} inside; by GPU {span}"
    rest = "norms in bf16; tf32, int8; packed weights"
    return [
        ["one kernel in fp32, its GPU in no fit", "five GPUs, six families", _span(fp32), "fp64, FFTs, solvers"],
        ["the same in 16, 8 or 4 bits, its architecture in no fit", "nine GPUs, eight families", _span(tensor), rest],
        ["a product of AMD's, its GPU in no fit", "MI300X, MI308X", _span(amd), "attention, experts, fp4 there"],
        ["kernels in their 80 % interval, their GPU in no fit", "five GPUs", share, "-"],
    ]


def trust() -> str:
    """What was measured, how far forecasts are off on what no fit saw, and what never was measured."""
    steps = {kind: (count, error) for kind, count, error, _ in _page("clusters.md", STEPS)}
    (dense, dense_error), (routed, routed_error) = steps["dense"], steps["MoE"]
    ((loads, token, first),) = _page("serving.md", r"^\| Blackwell, all \| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) % \|")
    watts = [float(value) for _, value in _page("power.md", r"^\| [^|]+ \| (\d+) % \| (\d+) % \|$")]
    rows = [
        *_whole_models(),
        *_kernels_alone(),
        [
            "a training step of many GPUs, its source in no fit",
            f"{dense} of dense models",
            dense_error,
            "on AMD's GPUs",
        ],
        ["the same", f"{routed} of mixtures of experts", routed_error, "the same"],
        [
            "serving: a token; the first",
            f"{loads} loads on Blackwell (medians)",
            f"{token}; {first}",
            "a step by itself",
        ],
        ["watts, the board in no fit", f"{len(watts)} boards", _span(watts), "links, heat, clocks above the sheet's"],
    ]
    head = ["what", "measured", "off by, % (mean)", "never measured"]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---", "---", "---:", "---"], *rows))


def json_results() -> str:
    """What commands print with --json: schema, command, top-level keys (`docs/tools/json_keys.py`)."""
    rows = []
    for (name, command), part in pd.read_csv(ROOT / "docs" / "json.csv").groupby(["schema", "command"]):
        keys = ", ".join(f"`{key}`" for key in part["key"] if key != "schema")
        rows.append(f"| `{command}` | `{str(name).removeprefix('neusight_jax.')}` | {keys} |\n")
    return "| command | schema | keys |\n| --- | --- | --- |\n" + "".join(sorted(rows))


_KERNELS = (unseen, unseen_gpus, unseen_tensor, seen, intervals, tiles)
_WHOLE = (models, models_short, models_left_out, models_folds, fused, scaled)
TABLES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (*_KERNELS, *_WHOLE, trust, json_results, support, support_models)
}


def pages() -> list[Path]:
    """Files that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return MARK.sub(lambda found: found.group(1) + TABLES[found.group(2)]() + found.group(3), text)


def printed(text: str) -> str:
    """A page with what its commands print made anew."""

    def block(found: re.Match[str]) -> str:
        lines = found.group(2).splitlines()
        last = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
        command = "\n".join(lines[: last + 1])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run(shlex.split(command.removeprefix("$ ").replace("\\\n", " "))[1:])
        lines = [command, *out.getvalue().splitlines()[: len(lines) - last - 2], "..."]
        return found.group(1) + "".join(f"{line.rstrip()}\n" for line in lines) + "```"

    return RUN.sub(block, text)


def weights(name: str) -> Callable[[str], Any]:
    """From a GPU to a checkpoint's predictor: with the GPU's own correction where it is in training."""
    plain = nj.load_predictor(name)
    tuned = {device: nj.load_predictor(name, device) for device in card(name)["device_effects"]}
    return lambda device: tuned.get(device, plain)


def measure(folder: Path) -> None:
    """Scores `WEIGHTS` and the roofline on whole models of `folder` and writes `docs/scores/models.csv`."""
    from benchmarks.cross_gpu import cross_gpu, cross_gpu_errors
    from neusight_jax.datasets.measurements import read_measurements
    from neusight_jax.model.predictor import BASELINES
    from neusight_jax.training.evaluation.scores import scores as percentiles
    from neusight_jax.training.whole_models import model_scores

    data = read_measurements([folder], devices=[*GPUS, H100])
    systems = {**{name: weights(name) for name in WEIGHTS}, "roofline": lambda device: BASELINES["roofline"]}
    rows, _ = model_scores(data.end_to_end, systems, data.gpu)
    eager, fused = rows[rows["option"] == "eager"], rows[rows["option"] != "eager"]
    trained = eager[eager["device"].isin(GPUS)].assign(device="in training")
    fused = fused.assign(device="fused, " + fused["device"])
    frame = percentiles(pd.concat([eager, trained, fused]), ("system", "device"), "labels")
    pairs = cross_gpu([folder], "fp32-heldout", GPUS)
    for name, part in (("models", frame), ("cross_gpu", cross_gpu_errors(pairs))):
        part.round(2).to_csv(SCORES / f"{name}.csv", index=False)


def fold_scores(folders: Sequence[Path]) -> None:
    """Writes `docs/scores/left_out.csv` from folders of `evaluate --protocol ... --output`, eager models alone."""
    parts = []
    for folder in folders:
        content = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        frame = pd.DataFrame(content["scores"]).query("option == 'eager'").drop(columns=["option", "draws", "sd"])
        parts.append(frame.assign(protocol=content["protocol"]))
    pd.concat(parts).round(2).to_csv(SCORES / "left_out.csv", index=False)


def main() -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measurements", type=Path, help="the fp32 measurements, to score whole models again")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page would change")
    parser.add_argument("--folds", type=Path, nargs="+", help="folders of evaluate --output, whole models left out")
    options = parser.parse_args()
    if options.measurements:
        measure(options.measurements)
    if options.folds:
        fold_scores(options.folds)
    changed = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before) if options.check else printed(filled(before))
        if after != before:
            changed.append(page.name)
            if not options.check:
                page.write_text(after, encoding="utf-8")
    print(json.dumps({"changed": changed}))
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
