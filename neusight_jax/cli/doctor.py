"""`neusight-jax doctor`: versions, devices, the folder of compiled programs, extras and memory of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from neusight_jax.cli.console import show, show_json
from neusight_jax.cli.options import AsJson
from neusight_jax.errors import InputError

EXTRAS: dict[str, tuple[str, str]] = {
    "report": ("plotly", "pages of --report and --plot"),
    "explore": ("plotly", "the page of explore"),
    "torch": ("torch", "models in PyTorch"),
    "serving": ("dynamo", "serve --method engine"),
    "profile": ("pynvml", "clocks and power of profile"),
    "aiconfigurator": ("aiconfigurator_core", "import aiconfigurator"),
    "chakra": ("google.protobuf", "predict --chakra"),
    "gbt": ("lightgbm", "train --recipe gbt"),
}
"""Extra -> a module that it brings, and what needs it."""
VERSIONS: tuple[str, ...] = ("jax", "jaxlib", "flax", "optax", "numpy", "pandas", "pyarrow")
MISCOMPILES = "0.10.2"
"""Release of JAX with wrong code on CPUs: jax-ml/jax issue 39103."""
LEAST_FREE_BYTES = 2 << 30
"""Memory that a forecast of a large model may take, with what compiles it."""


def doctor(as_json: AsJson = False) -> None:
    """Say what this installation is made of and whether all is well. Exit code 2 where something is to be mended."""
    from neusight_jax.records import schema

    checks = [_packages(), _devices(), _cache(), _checkpoints(), _memory()]
    faults = [fault for _, _, fault in checks if fault]
    extras = {name: _installed(module) for name, (module, _) in EXTRAS.items()}
    if as_json:
        entries = [{"name": name, "value": value, "fault": fault or None} for name, value, fault in checks]
        show_json({"schema": schema("doctor"), "checks": entries, "extras": extras, "notes": faults})
    else:
        _show(checks, extras)
    if faults:
        raise InputError("; ".join(faults))


Check = tuple[str, str, str]
"""Name, what there is, and what to mend ("" = all is well)."""


def _packages() -> Check:
    from neusight_jax import __version__

    versions = {name: _version(name) for name in VERSIONS}
    lacking = [name for name, version in versions.items() if not version]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    fault = f"{', '.join(lacking)} not installed; pip install . again" if lacking else ""
    if versions["jax"] == MISCOMPILES:
        fault = f"jax {MISCOMPILES} computes wrong numbers on CPUs; pip install 'jax!={MISCOMPILES}'"
    return "versions", f"neusight-jax {__version__}, Python {platform.python_version()}, {text}", fault


def _devices() -> Check:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return "devices", "none", f"JAX finds no device ({str(error).splitlines()[0]}); set JAX_PLATFORMS=cpu"
    kinds = ", ".join(dict.fromkeys(f"{device.device_kind} ({device.platform})" for device in devices))
    return "devices", f"{len(devices)}: {kinds}; forecasts run on the CPU unless JAX_PLATFORMS says otherwise", ""


def _cache() -> Check:
    import jax

    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder:
        off = os.environ.get("NEUSIGHT_JAX_CACHE") == "0"
        fault = "" if off else "compiled programs are not kept; make ~/.cache writable, or set XDG_CACHE_HOME"
        return "compile cache", "off (NEUSIGHT_JAX_CACHE=0)" if off else "none", fault
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    return "compile cache", f"{folder}: {size:,.0f} MB in {len(files):,} files; may be removed at any time", ""


def _checkpoints() -> Check:
    from neusight_jax.model.checkpoint import list_checkpoints, load_card

    names = list_checkpoints()
    try:
        for name in names:
            load_card(name)
    except InputError as error:
        return "checkpoints", ", ".join(names), str(error)
    return "checkpoints", ", ".join(names) or "none", "" if names else "no checkpoint is installed; pip install . again"


def _memory() -> Check:
    free = _free_bytes()
    if free is None:
        return "free memory", "not known on this system", ""
    few = f"{free / 1e9:.1f} GB of memory are free, expected {LEAST_FREE_BYTES / 1e9:.1f}; end other programs"
    disk = shutil.disk_usage(Path.home()).free
    return "free memory", f"{free / 1e9:,.1f} GB, disk {disk / 1e9:,.0f} GB", few if free < LEAST_FREE_BYTES else ""


def _free_bytes() -> float | None:
    from neusight_jax.profiling.machine import available_bytes

    return available_bytes()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _show(checks: list[Check], extras: dict[str, bool]) -> None:
    from neusight_jax.reports.text import table

    rows = [[name, value, fault or "well"] for name, value, fault in checks]
    for name, there in extras.items():
        how = "installed" if there else f"pip install '.[{name}]'"
        rows.append([f"extra {name}", EXTRAS[name][1], how])
    show(table("", ["part", "what there is", "state"], rows, text_columns=3))
