"""Pages made while the site is built: the Python reference, the command line, and the notebooks as they were run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File

from neusight_jax import _HOMES
from neusight_jax.cli.app import app

GROUPS: dict[str, tuple[str, ...]] = {
    "Machines": ("GPU", "load_gpu", "list_gpus", "stack_", "Cluster", "Topology", "load_cluster", "list_servers"),
    "Workloads": ("graph_from_", "Graph", "KernelTable", "TraceOptions", "list_models", "workload", "read_kernels"),
    "Jobs on many GPUs": ("Job", "job_f", "Lora", "Paral", "paral", "Layouts", "Space", "Softw", "calibrate_s"),
    "Forecasts": ("predict", "latency", "energy", "kernel_latency", "Forecast"),
    "Which GPU": (
        "compare",
        "Comparison",
        "Prices",
        "read_prices",
        "serve",
        "Serving",
        "Engine",
        "scale_t",
        "ScaledR",
        "power_curve",
    ),
    "Which chip": ("sensitivity", "Sensitivity", "sweep", "Sweep", "Grid", "Range", "Samples", "design", "Design"),
    "Predictors": (
        "load_p",
        "list_c",
        "load_card",
        "save_p",
        "train",
        "calibrate",
        "identify",
        "Identification",
        "suggest",
        "evaluate",
        "read_measurements",
    ),
    "Everything else": ("",),
}
"""Heading -> names, or their beginnings; the first that fits takes a name."""
BEHIND: dict[str, tuple[str, ...]] = {
    "comparison": ("Comparison",),
    "datasets.measurements": ("read_measurements",),
    "designs.answers": ("Design",),
    "forecast": ("Forecast",),
    "graph.graph": ("Graph",),
    "hardware.cluster": ("stack_clusters",),
    "hardware.prices": ("Prices",),
    "job.job": ("Job",),
    "kernels.table": ("KernelTable",),
    "layouts.answers": ("Layouts",),
    "model.latency": ("kernel_latency",),
    "model.programs": ("use_compile_cache",),
    "power_curves": ("PowerCurve",),
    "scaling.rules": ("ScaledRun",),
    "sensitivities": ("Sensitivity",),
    "serving.choices": ("Serving",),
    "sweeps.run": ("Sweep",),
    "training.identification": ("Identification",),
    "workloads": ("workload",),
}
"""Module -> names that are no public ones but stand beside them: what public functions return, and finer tools."""
OWN_FOLDERS = ("training", "datasets")
"""Folders that lie beside the package in a checkout."""
WIDTH = 84
NOTEBOOKS = ("forecast", "serving", "clusters", "design", "codesign", "retrain")


def homes() -> dict[str, str]:
    """Name -> dotted path as it lies on disk."""
    out = {}
    for home, names in (*_HOMES.items(), *BEHIND.items()):
        prefix = "" if home.split(".")[0] in OWN_FOLDERS else "neusight_jax."
        out |= {name: f"{prefix}{home}.{name}" for name in names}
    return out


def python_pages() -> dict[str, tuple[str, str]]:
    """Path -> title and text of the pages of the Python names, each by its docstring."""
    paths, pages = homes(), {}
    left = sorted(paths, key=lambda name: (name[0].islower(), name))
    for title, starts in GROUPS.items():
        names = [name for name in left if name in starts]
        names += [name for name in left if name.startswith(starts) and name not in names]
        left = [name for name in left if name not in names]
        if names:
            text = "".join(f"\n::: {paths[name]}\n" for name in names)
            pages[f"api/{title.lower().replace(' ', '-')}.md"] = (title, f"# {title}\n{text}")
    return pages


def command_pages(command: Any = None, path: str = "neusight-jax") -> dict[str, tuple[str, str]]:
    """Path -> title and text of the pages of commands, each as its `--help`."""
    command = command or typer.main.get_command(app)
    context = type(command).context_class(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    title = path.removeprefix("neusight-jax ")
    pages = {f"cli/{title.replace(' ', '-')}.md": (title, f"# {path}\n\n```text\n{command.get_help(context)}\n```\n")}
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        pages |= command_pages(sub, f"{path} {name}")
    return pages


def notebook_pages() -> dict[str, tuple[str, str]]:
    """Path -> title and text of the notebooks, their outputs below the cells."""
    pages = {}
    for path in (Path(__file__).resolve().parents[1] / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS):
        lines = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                lines += [source, ""]
                continue
            lines += ["```python", source, "```", ""]
            for output in cell["outputs"]:
                lines += [_shown(output), ""]
        pages[f"notebooks/{path.stem}.md"] = (lines[0].splitlines()[0].removeprefix("# "), "\n".join(lines))
    return pages


def _shown(output: dict[str, Any]) -> str:
    """What a cell printed or returned."""
    data = output.get("data", {})
    if "text/html" in data:
        return re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
    if "image/svg+xml" in data:
        return "".join(data["image/svg+xml"])
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"


PAGES: dict[str, dict[str, tuple[str, str]]] = {
    "api": python_pages(),
    "cli": command_pages(),
    "notebooks": notebook_pages(),
}


def on_config(config: Any) -> Any:
    """Called by mkdocs: entries of the navigation that are keys of `PAGES` become lists of pages."""
    for section in config["nav"]:
        for entry in [section, *next(iter(section.values()))]:
            if isinstance(entry, dict):
                title, target = next(iter(entry.items()))
                if isinstance(target, str) and target in PAGES:
                    entry[title] = [{name: path} for path, (name, _) in PAGES[target].items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds the pages."""
    for pages in PAGES.values():
        for path, (_, text) in pages.items():
            files.append(File.generated(config, path, content=text))
    return files
