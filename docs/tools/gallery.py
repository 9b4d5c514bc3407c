"""Writes `docs/gallery`: forecasts of models on GPUs in one page, and reports. `python docs/tools/gallery.py [PART]`

Every number of the table is `nj.compare`'s, so `nj.predict`'s, with the default checkpoints and from the figures of
each GPU alone; letters are those of the support matrix. It takes some four minutes on two CPU cores. The reports are
what their commands write, but that they share one file of plotly.js; with the argument `reports` they alone are made,
with `pictures` pictures of two of them for the home page, which takes Chromium.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import support

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.help import EXAMPLES
from neusight_jax.files import write_text_atomically
from neusight_jax.model.checkpoint import default_checkpoint
from neusight_jax.model.predictor import Predictor
from neusight_jax.reports.page import packed_plotly, script_json, text_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "gallery" / "index.html"
EAGER = (
    *("bert-base", "bert-large", "roberta-large", "gpt2", "gpt2-large", "gpt2-xl", "gpt3-xl", "gpt3-2.7b"),
    *("opt-1.3b", "opt-13b", "vit-base", "vit-large"),
)
DECODERS = (
    *("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b", "mistral-small-24b"),
    *("mixtral-8x7b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "gemma-2-9b", "phi-4"),
    *("deepseek-v2-lite", "gpt-oss-20b", "gpt-oss-120b"),
)
GPUS = (
    *("P100", "V100-SXM2-32GB", "T4", "A100-PCIE-40GB", "A100-SXM4-80GB", "A30", "A10", "A40", "RTX A6000", "RTX 3090"),
    *("RTX 4090", "RTX 6000 Ada", "L4", "L40S", "H100", "H100 PCIe", "H100 NVL", "H200", "H20", "GH200 480GB"),
    *("B200", "B300", "GB200", "RTX 5090", "RTX PRO 6000 Blackwell Server Edition"),
    *("MI210", "MI250", "MI300X", "MI325X", "MI355X"),
)
LOADS: dict[str, dict[str, Any]] = {
    "inference": {"batch_size": 8, "sequence_length": 512},
    "training": {"batch_size": 8, "sequence_length": 512},
    "prefill": {"batch_size": 1, "sequence_length": 2048},
    "decode": {"batch_size": 32, "sequence_length": 2048},
}
"""Mode -> the workload forecast in it; models of pictures have their own length."""
COLUMNS = ("model", "mode", "dtype", "GPU", "letter", "seconds", "low", "high", "joules a token", "GiB", "fits")
DIGITS = 5
"""Digits of numbers in the page."""


PLOTLY = "plotly.js"
"""File beside the reports that draws their pictures: in each of them it would be two megabytes."""
PRICES = ROOT / "docs" / "prices.yaml"
REPORTS: dict[str, tuple[str, str]] = {
    "predict": ("A training step", ""),
    "compare": ("The best GPU for a decode", f"--gpu L40S H200 MI300X --prices {PRICES.name}"),
    "serve": ("Servers for fifty users", f"--prices {PRICES.name}"),
    "parallelize": ("Layouts of a training job", ""),
    "design": ("A chip within an area", "--free num_sms=60:200 --pareto area_mm2=500:800:5"),
    "powercap": ("Caps of a board", ""),
}
"""Command -> what its report is of, and what is added to its example of `help.EXAMPLES`."""
PICTURED: tuple[str, ...] = ("predict", "serve")
"""Reports whose first screens the home page shows."""
SCREEN = (1100, 760)
"""Width and height of a picture, pixels."""


@cache
def _predictor(checkpoint: str) -> Predictor:
    return nj.load_predictor(checkpoint)


def modes_of(model: str) -> tuple[str, ...]:
    """Modes that a model is forecast in."""
    return ("prefill", "decode", "training") if model in DECODERS else ("inference", "training")


def rows_of(model: str, mode: str, gpus: Sequence[str]) -> list[list[Any]]:
    """Rows of `COLUMNS` of a model in a mode, one a GPU; of a GPU without the arithmetic no numbers."""
    dtype, load = "bf16" if model in DECODERS else "fp32", dict(LOADS[mode])
    if model.startswith("vit"):
        load["sequence_length"] = None
    graph = nj.graph_from_config(model, mode=mode, dtype=dtype, **load)
    comparison = nj.compare(_predictor(default_checkpoint(graph.kernels)), gpus, graph)
    kind = support.kind_of(model)
    rows = []
    for item in comparison.candidates:
        letter = support.LETTERS[support.status(kind, item.gpu, dtype)]
        memory = None if item.memory_bytes is None else item.memory_bytes / 2**30
        numbers = (item.latency_s, item.low_s, item.high_s, item.joules_per_token, memory)
        shown = [None if number is None else float(f"{number:.{DIGITS}g}") for number in numbers]
        rows.append([model, mode, dtype, item.gpu, letter, *shown, item.fits])
    return rows


def page(rows: Sequence[Sequence[Any]]) -> str:
    """The page of some rows."""
    loads: Mapping[str, str] = {
        mode: f"batch {load['batch_size']}, {load['sequence_length']:,} tokens" for mode, load in LOADS.items()
    }
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_suffix(".html.jinja").read_text(encoding="utf-8"))
    text: str = template.render(
        style=text_of("page.css"),
        rows=script_json({"columns": COLUMNS, "rows": rows}),
        loads=loads,
        letters={letter: name for name, letter in support.LETTERS.items()},
        version=nj.__version__,
        models=len({row[0] for row in rows}),
        gpus=len({row[3] for row in rows}),
        count=len(rows),
        reports={f"{command}.html": (title, command_of(command)) for command, (title, _) in REPORTS.items()},
    )
    return text


def command_of(name: str) -> str:
    """The command line of a report."""
    line, _, _ = EXAMPLES[name].partition(" --report ")
    return " ".join(part for part in (line, REPORTS[name][1], f"--report {name}.html") if part)


def report(name: str, folder: Path) -> str:
    """The report of a command, run in a folder, with its plotly.js in a file of its own."""
    shutil.copy(PRICES, folder)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        if run(shlex.split(command_of(name))):
            raise SystemExit(f"{command_of(name)} failed")
    text = (folder / f"{name}.html").read_text(encoding="utf-8")
    inside = f'<script type="text/plain" id="plotly">{packed_plotly()}</script>'
    assert text.count(inside) == 1
    return text.replace(inside, f'<script id="plotly" src="{PLOTLY}"></script>')


def write_reports(names: Sequence[str] = tuple(REPORTS)) -> None:
    """Write reports, and the script that they share."""
    write_text_atomically(FILE.with_name(PLOTLY), f'document.currentScript.textContent = "{packed_plotly()}";\n')
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            write_text_atomically(FILE.with_name(f"{name}.html"), report(name, Path(folder)))
            print(f"{name}.html", file=sys.stderr, flush=True)


def write_pictures() -> None:
    """Write the first screens of two reports."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import browser

    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        for name in PICTURED:
            address = FILE.with_name(f"{name}.html").as_uri()
            page.open(address, "document.querySelectorAll('.plot .main-svg, .js-plotly-plot').length", *SCREEN)
            page.picture(FILE.with_name(f"{name}.png"), whole=False)


def main() -> None:
    """Forecast and write."""
    FILE.parent.mkdir(exist_ok=True)
    if sys.argv[1:] == ["pictures"]:
        write_pictures()
        return
    write_reports()
    if sys.argv[1:] == ["reports"]:
        return
    rows: list[list[Any]] = []
    for model in (*EAGER, *DECODERS):
        for mode in modes_of(model):
            rows += rows_of(model, mode, GPUS)
            print(f"{len(rows):,} rows, {model} {mode}", file=sys.stderr, flush=True)
    write_text_atomically(FILE, page(rows))


if __name__ == "__main__":
    main()
