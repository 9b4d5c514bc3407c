"""What a GPU says of itself while it works: clocks, power, temperature, throttling. Absent where nothing can say."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

THROTTLES: dict[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a kernel down."""
_SENSORS: tuple[tuple[str, str, float, str, tuple[str, ...], float], ...] = (
    ("clock_hz", "clocks.sm", 1e6, "nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), 1e6),
    ("mem_clock_hz", "clocks.mem", 1e6, "nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",), 1e6),
    ("power_w", "power.draw", 1.0, "nvmlDeviceGetPowerUsage", (), 1e-3),
    ("temperature_c", "temperature.gpu", 1.0, "nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), 1.0),
)
"""Field of a reading; nvidia-smi's query and its unit in SI; NVML's call, constants it is given, and its unit in SI."""
_THROTTLED = "clocks_throttle_reasons.active"
_QUERY: tuple[str, ...] = (*(query for _, query, *_ in _SENSORS), _THROTTLED, "driver_version", "power.limit")


@dataclass(frozen=True)
class Reading:
    """One look at the sensors; None where there is none.

    Attributes:
      clock_hz, mem_clock_hz: Hz; power_w: W; temperature_c: degrees Celsius.
      throttled: reasons, joined by a comma; empty when none is in force.
    """

    clock_hz: float | None = None
    mem_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None

    def to_row(self) -> dict[str, Any]:
        """As columns."""
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
            lambda c=call, g=given, u=unit: float(getattr(nvml, c)(handle, *(getattr(nvml, n) for n in g)) * u)
        )
        for field, *_, call, given, unit in _SENSORS
    }
    ask_mask: Any = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
        nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
    )
    return Reading(**values, throttled=_tried(lambda: throttle_names(ask_mask(handle))))


def throttle_names(mask: int) -> str:
    """Reasons in NVML's bit mask that slow kernels down, joined by a comma."""
    return ", ".join(name for bit, name in THROTTLES.items() if mask & bit)


def _tried(ask: Any) -> Any:
    """What a query says, None where the driver does not answer it; NVML and parsing raise many kinds."""
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
