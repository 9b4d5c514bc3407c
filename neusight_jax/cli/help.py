"""Layout of `--help`: commands and options in groups, an example below; and what a shell completes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from typer.core import TyperCommand, TyperGroup

GROUPS: dict[str, tuple[str, ...]] = {
    "Forecast": ("predict", "parallelize", "finetune", "serve", "explore"),
    "Choose and design": ("compare", "sensitivity", "powercap", "sweep", "design", "codesign", "scale-trace"),
    "Learn and judge": ("train", "evaluate", "calibrate", "leaderboard"),
    "Measure": ("check", "profile", "profile-model", "import"),
    "What there is": ("gpus", "models", "checkpoints", "schema", "doctor"),
}
"""Commands by what they are for, in the order of the help."""
EXAMPLES: dict[str, str] = {
    "predict": "predict gpt2-large --gpu H100 --batch-size 4 --mode training --report step.html",
    "parallelize": "parallelize llama-3.1-70b --gpu H100 --gpus 64 --global-batch-size 64 --sequence-length 4096",
    "finetune": "finetune llama-3.1-8b --gpu 4090 A100 H100 --method qlora --tokens 50M",
    "serve": "serve qwen3-32b --gpu H100 L40S --input-tokens 2000 --output-tokens 500 --users 50 --ttft 1s --tpot 50ms",
    "explore": "explore gpt2-large --gpu H100",
    "compare": "compare llama-3.1-8b --gpu H100 A100 L4 --mode decode --batch-size 8",
    "sensitivity": "sensitivity gpt2-large --gpu H100 --mode training",
    "powercap": "powercap llama-3.1-8b --gpu H100 --mode decode --batch-size 64 --slo 'tpot<=20ms'",
    "sweep": "sweep gpt2 --gpu H100 --grid mem_bytes_per_s=1TB/s:8TB/s:20 --output sweep.parquet",
    "design": "design gpt2 --base H100 --free mem_bytes_per_s=1TB/s:8TB/s --budget 'area_mm2<=800'",
    "codesign": "codesign llama-3.1-8b --base L4 --free hidden=2048:8192 d_ff=4096:32768 --weight-dtype int4",
    "scale-trace": "scale-trace trace.json.gz --from T4 --to L4 H100",
    "train": "train --measurements linear.parquet --recipe fp32 --output weights",
    "evaluate": "evaluate --measurements linear.parquet --checkpoint fp32 --json",
    "calibrate": "calibrate --measurements mine.parquet --checkpoint fp32 --output weights --gpu 'my GPU'",
    "check": "check linear.csv --gpu-file my-gpu.json",
    "leaderboard": "leaderboard scores --output leaderboard.md",
    "profile": "profile --output measured",
    "profile-model": "profile-model PATH.py:FUNCTION --output measured",
    "gpus": "gpus",
    "models": "models --json",
    "checkpoints": "checkpoints",
    "schema": "schema gpu",
    "doctor": "doctor",
    "neusight": "import neusight NeuSight --output measurements",
    "aiconfigurator": "import aiconfigurator --output measurements",
    "aiter": "import aiter aiter --output measurements",
}
"""One command line of every command."""

QUESTIONS: dict[str, str] = {
    "How long does a training step of GPT-2 large take on an H100?": "predict",
    "Which GPU runs this model best?": "compare",
    "How many GPUs serve so many users, and in time?": "serve",
    "How do I lay a job out on 64 GPUs?": "parallelize",
    "What would one percent more bandwidth buy?": "sensitivity",
    "How does it fit what I measured myself?": "evaluate",
}
"""What people ask first, and the command whose example answers it."""


def questions() -> str:
    """`QUESTIONS`, each with the command line that answers it, and where more is."""
    answers = [f"  {question}\n    neusight-jax {EXAMPLES[command]}" for question, command in QUESTIONS.items()]
    more = "neusight-jax --help lists all commands; neusight-jax doctor says whether all is well here."
    return "\n".join(["What do you want to know?", "", *answers, "", more])


class Command(TyperCommand):
    """A command with its options in the groups of `option(..., group=)`, and its example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options of no group, then each group."""
        records: list[tuple[str, tuple[str, str]]] = []
        for param in self.get_params(ctx):
            entry = param.get_help_record(ctx)
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            if entry is not None:
                records.append((getattr(param, "rich_help_panel", None) or kind, entry))
        order = list(dict.fromkeys(["Arguments", "Options", *(group for group, _ in records)]))
        _write(formatter, sorted(records, key=lambda record: order.index(record[0])))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The example, as it is typed."""
        if self.name in EXAMPLES:
            formatter.write(f"\nExample:\n  neusight-jax {EXAMPLES[self.name]}\n")


class Commands(TyperGroup):
    """Commands in `GROUPS`, those of no group last."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        _write(
            formatter, [(group, (name, self.commands[name].get_short_help_str(limit))) for group, name in self._order()]
        )

    def _order(self) -> Iterator[tuple[str, str]]:
        grouped = [(group, name) for group, names in GROUPS.items() for name in names if name in self.commands]
        members = {name for _, name in grouped}
        yield from grouped
        yield from (("Commands", name) for name in self.commands if name not in members)


def _write(formatter: Any, records: Iterable[tuple[str, tuple[str, str]]]) -> None:
    for group, rows in groupby(records, key=lambda record: record[0]):
        with formatter.section(group):
            formatter.write_dl([row for _, row in rows])


def model_names(incomplete: str) -> list[str]:
    """Models that begin so."""
    from neusight_jax.graph.configs.config import list_models

    return [name for name in list_models() if name.startswith(incomplete)]


def gpu_names(incomplete: str) -> list[str]:
    """GPUs that have this in their name, whatever its case; by the alias where it has one."""
    from neusight_jax.hardware.catalog import gpu_info, list_gpus

    names = [alias for name in list_gpus() for alias in (*gpu_info(name).aliases[:1], name)]
    return [name for name in names if incomplete.lower() in name.lower()]
