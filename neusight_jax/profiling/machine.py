"""The device that is measured, by name and figures, and the host around it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.hardware.files import gpu_from_fields, load_named_gpu
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.profiling.clock import Backend
from neusight_jax.profiling.processor import processor_figures

# What a GPU says of itself while it works: clocks, power, temperature, throttling. Absent where nothing can say.

THROTTLES: dict[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a kernel down."""
WINDOW_S = 0.15
"""Watts of NVML and nvidia-smi are means of the last 0.1 s."""
_SENSORS: tuple[tuple[str, str, float, str, tuple[str, ...], float], ...] = (
    ("clock_hz", "clocks.sm", 1e6, "nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), 1e6),
    ("mem_clock_hz", "clocks.mem", 1e6, "nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",), 1e6),
    ("power_w", "power.draw", 1.0, "nvmlDeviceGetPowerUsage", (), 1e-3),
    ("power_limit_w", "power.limit", 1.0, "nvmlDeviceGetPowerManagementLimit", (), 1e-3),
    ("temperature_c", "temperature.gpu", 1.0, "nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), 1.0),
)
"""Field of a reading; nvidia-smi's query and its unit in SI; NVML's call, constants it is given, and its unit in SI."""
_THROTTLED = "clocks_throttle_reasons.active"
_QUERY: tuple[str, ...] = (*(query for _, query, *_ in _SENSORS), _THROTTLED, "driver_version")


@dataclass(frozen=True)
class Reading:
    """One look at the sensors; None where there is none.

    Attributes:
      clock_hz, mem_clock_hz: Hz; power_w, power_limit_w: of the board, W; temperature_c: degrees Celsius.
      throttled: reasons, joined by a comma; empty when none is in force.
    """

    clock_hz: float | None = None
    mem_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None

    def to_row(self) -> dict[str, Any]:
        """The reading as columns."""
        return asdict(self)


class Sensors:
    """The first NVIDIA GPU through NVML (`pip install '.[profile]'`), else through nvidia-smi.

    Args:
      wanted: False for a device that is no GPU: nothing is read then.
    """

    def __init__(self, wanted: bool) -> None:
        opened: tuple[Any, Any] = _open_nvml() if wanted else (None, None)
        self._nvml, self._handle = opened
        self._smi = shutil.which("nvidia-smi") if wanted and self._nvml is None else None
        self.source = "NVML" if self._nvml else "nvidia-smi" if self._smi else "none"
        self.window_s = 0.0 if self.source == "none" else WINDOW_S

    def read(self) -> Reading:
        """Look now."""
        return _read_nvml(self._nvml, self._handle) if self._nvml is not None else parse_smi(self._ask())

    def facts(self) -> dict[str, str]:
        """Driver and power limit, for the card."""
        if self._nvml is not None:
            driver = self._nvml.nvmlSystemGetDriverVersion()
            limit = _tried(lambda: self._nvml.nvmlDeviceGetPowerManagementLimit(self._handle))
            text = driver.decode() if isinstance(driver, bytes) else str(driver)
            return {"driver": text, "power_limit_w": "" if limit is None else f"{limit / 1e3:.0f}"}
        if self._smi is None:
            return {}
        answer = self._ask()
        return {"driver": answer.get("driver_version", ""), "power_limit_w": answer.get("power.limit", "")}

    def _ask(self) -> dict[str, str]:
        if self._smi is None:
            return {}
        command = [self._smi, "-i", str(_first_visible()), f"--query-gpu={','.join(_QUERY)}"]
        try:
            done = subprocess.run(
                [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        return dict(zip(_QUERY, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def parse_smi(answer: Mapping[str, str]) -> Reading:
    """A reading from nvidia-smi's words: MHz, W, °C and a hexadecimal mask; what is no number is absent."""
    values = {field: _tried(lambda q=query, u=unit: float(answer[q]) * u) for field, query, unit, *_ in _SENSORS}
    return Reading(**values, throttled=_tried(lambda: throttle_names(int(answer[_THROTTLED], 16))))


def _read_nvml(nvml: Any, handle: Any) -> Reading:
    values = {
        field: _tried(
            lambda c=call, g=arguments, u=unit: float(getattr(nvml, c)(handle, *(getattr(nvml, n) for n in g)) * u)
        )
        for field, *_, call, arguments, unit in _SENSORS
    }
    ask_mask: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )
    return Reading(**values, throttled=_tried(lambda: throttle_names(ask_mask(handle))))


def throttle_names(mask: int) -> str:
    """Reasons in NVML's bit mask that slow kernels down, joined by a comma."""
    return ", ".join(name for bit, name in THROTTLES.items() if mask & bit)


def _tried(ask: Any) -> Any:
    """Answer of a query, None where the driver does not answer it; NVML and parsing raise many kinds."""
    try:
        return ask()
    except Exception:
        return None


def _first_visible() -> int:
    """Position of the process's first GPU among all of the machine."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _open_nvml() -> tuple[Any, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(_first_visible())
    except Exception:  # no package, no driver, no device: NVML's own errors share no other base
        return None, None


BACKENDS: tuple[str, ...] = ("jax", "torch")


def make_backend(name: str) -> Backend:
    """A backend on the first device of this machine; `InputError` for an unknown name or a missing package."""
    if name == "jax":
        from neusight_jax.profiling.jax_backend import JaxBackend

        return JaxBackend()
    if name != "torch":
        raise unknown_name("backend", name, BACKENDS)
    try:
        from neusight_jax.profiling.torch_backend import TorchBackend
    except ImportError as error:
        raise InputError(f"torch cannot be imported ({error}); `pip install '.[torch]'`") from None
    return TorchBackend()


@dataclass(frozen=True)
class Machine:
    """The device that is measured.

    Attributes:
      name: for the column `device`; gpu: its figures.
      file: the content of a GPU file that makes it known where the catalog does not have it, else None.
      estimated: whether the figures are raised to what is measured (a processor nobody gave figures of).
      provenance: what the rows are, in words.
    """

    name: str
    gpu: GPU
    file: dict[str, Any] | None
    estimated: bool
    provenance: str

    def settled(self, rates: Iterable[tuple[float, float, float]]) -> Machine:
        """The machine once everything is measured; `rates` as for `processor.processor_figures`."""
        if not self.estimated:
            return self
        content = processor_figures(rates)
        return Machine(self.name, gpu_from_fields(content, Path("gpu.json"))[1], content, True, self.provenance)


def find_machine(backend: Backend, request: str | None) -> Machine:
    """The machine a backend measures.

    Args:
      backend: says which device it is; request: name or file of the GPU if its figures are not in the catalog.
    Raises: `InputError` when the catalog does not know the device and nothing is given, or another GPU is given.
    """
    provenance = (
        f"measured with {backend.name} on a CPU that stands in for a GPU"
        if backend.is_cpu
        else f"measured with {backend.name} on this GPU"
    )
    catalog_name = None if backend.is_cpu else canonical_name(backend.device)
    if request is None:
        if backend.is_cpu:
            content = processor_figures()
            name, gpu = gpu_from_fields(content, Path("gpu.json"))
            return Machine(name, gpu, content, True, provenance)
        if catalog_name is None:
            raise InputError(
                f"{backend.device} is not in the catalog; write its figures into a file (`base` and what differs is "
                "enough) and give it with --gpu FILE"
            )
        return Machine(catalog_name, catalog_gpu(catalog_name), None, False, provenance)
    name, gpu = load_named_gpu(request)
    # The rows would bear the name of a GPU that never ran them.
    if canonical_name(name) is not None and (backend.is_cpu or canonical_name(name) != catalog_name):
        raise InputError(f"--gpu is {name}, but {backend.name} runs on {backend.device} here; leave --gpu out")
    figures = {field: float(np.asarray(getattr(gpu, field))) for field in FIELDS}
    fields = None if canonical_name(name) is not None else {"name": name, **figures}
    return Machine(name, gpu, fields, False, provenance)


def host_facts() -> dict[str, Any]:
    """Facts of the host: system, Python, cores, and how busy it is (a busy host makes rows noisy)."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else (float("nan"),)
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(load[0], 2),
    }
