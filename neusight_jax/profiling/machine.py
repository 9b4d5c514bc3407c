"""The device that is measured, by name and figures, and the host around it."""

from __future__ import annotations

import itertools
import math
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.hardware.files import gpu_from_fields, load_named_gpu
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.profiling.clock import Backend
from neusight_jax.units import GIGA, MIB

# What a GPU says of itself while it works: clocks, power, temperature, throttling. Absent where nothing can say.

THROTTLES: dict[int, str] = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a kernel down."""
WINDOW_S = 0.4
"""So long something runs without a pause for its watts: boards count joules every 0.02 to 0.1 s, and clocks settle."""
MOST_WINDOWS, SETTLED = 4, 1.01
"""So often it runs, and so many times its limit a board draws at most once its clock has settled."""
LOOK_EVERY_S = 0.002
"""Between two looks at the joules a board has counted."""
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

    def while_running(self, run: Callable[[], object]) -> Reading:
        """What the sensors say while something runs again and again, in this thread.

        Watts are of the joules that the board counts, from its first count after a fifth of a run to its last; where it
        counts none, as the driver averages them. A board draws more than its limit until its controller has settled:
        it runs again until it does not.
        """
        for _ in range(MOST_WINDOWS):
            reading = self._while_running(run)
            if reading.power_w is None or reading.power_w <= SETTLED * (reading.power_limit_w or math.inf):
                break
        return reading

    def _while_running(self, run: Callable[[], object]) -> Reading:
        counts: list[tuple[float, float]] = []
        readings: list[Reading] = []
        ended = threading.Event()

        def look() -> None:
            begun = time.perf_counter()
            while not ended.wait(LOOK_EVERY_S):
                joules = self._joules()
                if joules is not None:
                    counts.append((time.perf_counter(), joules))
                if not readings and time.perf_counter() - begun > 0.5 * self.window_s:
                    readings.append(self.read())

        beside = threading.Thread(target=look)
        begun = time.perf_counter()
        beside.start()
        try:
            run()
        finally:
            ended.set()
            beside.join()
        # Clocks settle in the first fifth of a run: joules of before would be of another clock.
        settled = begun + 0.2 * (time.perf_counter() - begun)
        reading = readings[0] if readings else self.read()
        watts = mean_watts([(at, joules) for at, joules in counts if at >= settled])
        return reading if watts is None else replace(reading, power_w=watts)

    def _joules(self) -> float | None:
        """What the board has drawn since its driver was loaded, J."""
        if self._nvml is None:
            return None
        millijoules = _tried(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None if millijoules is None else 1e-3 * float(millijoules)

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


def mean_watts(counts: Sequence[tuple[float, float]]) -> float | None:
    """Mean watts between the first and the last change of a count of joules; None for fewer than two changes.

    Args:
      counts: seconds and joules, in order of time.
    """
    changes = [later for before, later in itertools.pairwise(counts) if later[1] != before[1]]
    if len(changes) < 2:
        return None
    (begun, first), (ended, last) = changes[0], changes[-1]
    return (last - first) / (ended - begun)


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


# The device by name and figures.


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


# The processor of this machine, as if it were a GPU: its name, memory and the figures a forecast needs.

PLACEHOLDERS: dict[str, float] = {"tdp_w": 15.0, "link_bytes_per_s": 1e10, "process_nm": 7.0}
"""Figures nobody can read off a processor: watts are per core."""
LEAST_MEM_BYTES_PER_S = 1e10
MARGIN = 1.05
"""A measured rate may be this much faster next time."""
_FMA_PER_CYCLE: tuple[tuple[str, int], ...] = (("avx512f", 32), ("avx2", 16), ("asimd", 8))
"""fp32 multiply-adds per cycle and core, by instruction set: two vector units."""


def _fields() -> dict[str, str]:
    """Fields of the first core in /proc/cpuinfo; nothing where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """A name that no GPU has: `CPU <model>, <n> cores`."""
    model = _fields().get("model name") or platform.processor() or platform.machine()
    return f"CPU {' '.join(model.split())}, {cores()} cores"


def clock_hz() -> float:
    """Highest clock the system admits to, Hz."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        pass
    try:
        return float(_fields()["cpu MHz"]) * 1e6
    except (KeyError, ValueError):
        return 2.5 * GIGA


def cache_bytes() -> float:
    """Largest cache one core sees, bytes."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1024.0, "M": MIB}.get(text[-1:], 1.0)
        sizes.append(float(text.rstrip("KM")) * factor)
    return max(sizes, default=32.0 * MIB)


def memory_bytes() -> float:
    """Memory of the machine, bytes."""
    return float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))


def available_bytes() -> float | None:
    """Memory that can be had without swapping, bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def free_bytes() -> float:
    """Memory that can be had without swapping, bytes; half of all where the system does not say."""
    available = available_bytes()
    return 0.5 * memory_bytes() if available is None else available


def processor_figures(rates: Iterable[tuple[float, float, float]] = ()) -> dict[str, Any]:
    """A GPU file (`files.load_gpu`) for the processor.

    Peaks are cores × vector lanes × clock, bandwidth the least a GPU may have; both are raised to what was measured,
    since boost clocks and memory channels are not to be seen from inside. The rest are placeholders, and marked.

    Args:
      rates: (FLOP, bytes, seconds) of measured kernels; bytes that fit the cache must be given as 0.
    """
    flags = _fields().get("flags", _fields().get("Features", "")).split()
    per_cycle = next((count for name, count in _FMA_PER_CYCLE if name in flags), 4)
    peak, bandwidth = 2.0 * per_cycle * cores() * clock_hz(), LEAST_MEM_BYTES_PER_S
    for flop, moved, seconds in rates:
        peak, bandwidth = max(peak, MARGIN * flop / seconds), max(bandwidth, MARGIN * moved / seconds)
    peak = max(peak, 1.1e10)
    sixteen = 2.0 * peak if {"avx512_bf16", "amx_bf16"} & set(flags) else peak
    return {
        "name": processor_name(),
        "note": "a processor described as a GPU by neusight-jax profile: SMs are cores, L2 is the last-level cache",
        "estimates": sorted(
            ["fp32_flop_per_s", "bf16_flop_per_s", "fp16_flop_per_s", "mem_bytes_per_s", *PLACEHOLDERS]
        ),
        "num_sms": float(cores()),
        "clock_hz": clock_hz(),
        "mem_bytes_per_s": bandwidth,
        "mem_bytes": max(memory_bytes(), 1e9),
        "l2_bytes": max(cache_bytes(), 1e5),
        **PLACEHOLDERS,
        "tdp_w": PLACEHOLDERS["tdp_w"] * cores(),
        "fp32_flop_per_s": peak,
        "bf16_flop_per_s": sixteen,
        "fp16_flop_per_s": peak,
    }
