"""`neusight-jax gpus | models | checkpoints`: what can be asked for by name."""

from __future__ import annotations

from typing import Any

from neusight_jax.cli.console import show, show_json
from neusight_jax.cli.options import AsJson


def gpus(as_json: AsJson = False) -> None:
    """List the GPUs of the catalog with their figures; ~ marks an estimate. --json has aliases and sources too."""
    from neusight_jax.hardware.catalog import list_gpus

    rows = [_gpu_row(name) for name in list_gpus()]
    if as_json:
        _show_rows("gpus", rows)
        return
    from neusight_jax.reports.text import table
    from neusight_jax.units import GB, GIB, GIGA, MIB, TERA

    columns = (
        *(("SMs", "num_sms", 1.0, "{:.0f}"), ("GHz", "clock_hz", GIGA, "{:.2f}")),
        *(("GB/s", "mem_bytes_per_s", GB, "{:.0f}"), ("GiB", "mem_bytes", GIB, "{:.0f}")),
        *(("L2 MiB", "l2_bytes", MIB, "{:.3g}"), ("W", "tdp_w", 1.0, "{:.0f}")),
        ("fp32 TFLOP/s", "fp32_flop_per_s", TERA, "{:.1f}"),
        *((dtype, f"{dtype}_flop_per_s", TERA, "{:.0f}") for dtype in ("bf16", "fp16", "fp8")),
    )

    def cell(row: dict[str, Any], field: str, unit: str, scale: float) -> str:
        value = row["figures"][field]
        return ("~" if field in row["estimates"] else "") + unit.format(value / scale) if value else "-"

    shown = [
        [row["name"], row["architecture"], *(cell(row, field, form, scale) for _, field, scale, form in columns)]
        for row in rows
    ]
    show(table("", ["GPU", "architecture", *(title for title, *_ in columns)], shown, text_columns=2))
    show("~ marks an estimate; all figures, aliases and sources: --json")


def _gpu_row(name: str) -> dict[str, Any]:
    from neusight_jax.hardware.catalog import catalog_gpu, gpu_info
    from neusight_jax.hardware.gpu import FIELDS

    info, gpu = gpu_info(name), catalog_gpu(name)
    return {
        "name": name,
        "vendor": info.vendor,
        "architecture": info.architecture,
        "aliases": list(info.aliases),
        "figures": {field: getattr(gpu, field) for field in FIELDS},
        "estimates": list(info.estimates),
        "sources": dict(info.sources),
    }


def _show_rows(kind: str, rows: list[dict[str, Any]]) -> None:
    """A list as JSON, under its name."""
    from neusight_jax.records import schema

    show_json({"schema": schema(kind), kind: rows})


def models(as_json: AsJson = False) -> None:
    """List the models of the catalog, with the format their weights are published in."""
    from neusight_jax.graph.configs.build import longest_sequence
    from neusight_jax.graph.configs.config import TORCH_DTYPES, list_models, load_model_config

    def weights(config: dict[str, Any]) -> str:
        quantization = config.get("quantization_config", {})
        return str(quantization.get("quant_method") or TORCH_DTYPES[config.get("torch_dtype", "float32")])

    configs = {name: load_model_config(name) for name in list_models()}
    rows = [
        {
            "name": name,
            "architecture": config["model_type"],
            "longest_sequence": longest_sequence(name),
            "weights": weights(config),
        }
        for name, config in configs.items()
    ]
    if as_json:
        _show_rows("models", rows)
        return
    from neusight_jax.reports.text import table

    shown = [[row["name"], row["architecture"], row["weights"], str(row["longest_sequence"] or "any")] for row in rows]
    show(table("", ["model", "architecture", "weights", "longest sequence"], shown, text_columns=3))


def checkpoints(as_json: AsJson = False) -> None:
    """List the checkpoints that ship with the package."""
    from neusight_jax.model.checkpoint import list_checkpoints, load_card

    cards = {name: load_card(name) for name in list_checkpoints()}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": card["kind"],
            "trained_dtypes": card.get("trained_dtypes", []),
            "trained_on": card.get("trained_on", {}).get("devices", []),
            "held_out": card.get("held_out", []),
        }
        for name, card in cards.items()
    ]
    if as_json:
        _show_rows("checkpoints", rows)
        return
    from neusight_jax.reports.text import table

    shown = [
        [
            row["name"],
            row["kind"],
            " ".join(row["trained_dtypes"]),
            *map(_counted, (row["trained_on"], row["held_out"])),
        ]
        for row in rows
    ]
    show(table("", ["checkpoint", "kind", "dtypes", "trained on", "held out"], shown, text_columns=5))
    show("GPUs by name: --json")


def _counted(names: list[str]) -> str:
    return f"{len(names)} GPUs" if names else "-"
