"""Strict settings for all tests, and what many of them need."""

import ctypes
import functools
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# The suite is mostly tracing and compilation. Programs run once or twice here, so they are compiled plainly, by XLA's
# older emitters (a quarter of the time), and what was traced and compiled once is kept for the workers and later runs.
_PLAIN = "--xla_backend_optimization_level=0"
_PLAINER = f"{_PLAIN} --xla_cpu_use_fusion_emitters=false"


def _is_known(flags: str) -> bool:
    """Whether this XLA has these flags: one that it does not know ends the process."""
    trial = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
    return subprocess.run(trial, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True).returncode == 0


if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = _PLAINER if _is_known(_PLAINER) else _PLAIN
_PROGRAMS = "NEUSIGHT_JAX_TEST_PROGRAMS"
_LARGEST_BYTES = 2e9
"""Of kept programs: a folder that has grown past it starts anew."""


def _kept_programs() -> tuple[str, bool]:
    """Where programs are kept, and whether for this run alone: beside the user's, if there is such a place."""
    shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "neusight_jax" / "tests"
    try:
        shelf.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(path.stat().st_size for path in shelf.rglob("*")) > _LARGEST_BYTES:
            shutil.rmtree(shelf)
            shelf.mkdir(mode=0o700)
        tempfile.TemporaryFile(dir=shelf).close()  # it can be written to
    except OSError:
        return tempfile.mkdtemp(prefix="programs-"), True
    return str(shelf), False


_OF_THIS_RUN = False
if _PROGRAMS not in os.environ:  # workers inherit it
    os.environ[_PROGRAMS], _OF_THIS_RUN = _kept_programs()
os.environ["XDG_CACHE_HOME"] = os.environ[_PROGRAMS]  # none of the user's own are read or written
for _name in ("NEUSIGHT_JAX_CACHE", "JAX_COMPILATION_CACHE_DIR"):
    os.environ.pop(_name, None)

# Tests read benchmarks too; the last place, so that an installed package stays.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Array shapes and types of the physics are checked at run time.
CHECKED = (
    *("forecast", "model.roofline", "model.latency", "model.heads", "model.mixture", "model.residuals"),
    *("model.intervals", "model.kernel_intervals", "model.batching"),
    *("kernels.gemm", "kernels.grouped_gemm", "kernels.conv", "kernels.rowwise", "kernels.attention"),
    "kernels.collective",
)
"""Modules whose annotations are checked; `test_imports` asks that there are such."""
install_import_hook([f"neusight_jax.{name}" for name in CHECKED], "typecheck.checked")

import jax  # noqa: E402 - the hook comes before the first import of what it checks

from neusight_jax.model import programs  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")


def _source() -> str:
    """Contents of the package, in place of times of files: a fresh copy finds what the last one kept."""
    root = Path(programs.__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yaml"))
    return hashlib.sha256(b"".join(bytes(path.relative_to(root)) + path.read_bytes() for path in files)).hexdigest()


programs._source = functools.cache(_source)
jax.config.update("jax_compilation_cache_dir", None)
programs.use_compile_cache()

# Traces are millions of Python objects that live as long as their programs: looked through seldom.
gc.freeze()
gc.set_threshold(50_000, 20, 50)

NETWORKS = ("linear", "bmm", "conv", "elementwise", "softmax", "norm")
ARCHITECTURE = {"families": list(NETWORKS), "hidden": [8], "members": 1}
CARD: dict[str, Any] = {
    "kind": "mixture",
    "architecture": ARCHITECTURE,
    "trained_on": {"devices": ["Tesla T4"]},
    "held_out": ["Tesla V100-PCIE-32GB"],
    "trained_dtypes": ["fp32"],
}


LOOK_EVERY_S = 5.0
_looked_s = [0.0]


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Compiled programs go before they exhaust the memory, or the memory maps of a process (65530): XLA would die."""
    yield
    process = Path("/proc/self")
    if time.monotonic() < _looked_s[0] + LOOK_EVERY_S or not process.exists():
        return
    _looked_s[0] = time.monotonic()
    pages = int((process / "statm").read_text().split()[1])
    if len((process / "maps").read_bytes().splitlines()) > 15_000 or pages * os.sysconf("SC_PAGE_SIZE") > 2e9:
        jax.clear_caches()
        programs._kept_program.cache_clear()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


@pytest.fixture(scope="session")
def measurements() -> Path:
    """The folder of real measurements, which is not part of the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "measurements"
    folder = Path(os.environ.get("NEUSIGHT_MEASUREMENTS", default))
    if not folder.is_dir():
        pytest.skip(f"measurements not found at {folder}; set NEUSIGHT_MEASUREMENTS")
    return folder


@pytest.fixture(scope="session")
def make_checkpoint() -> Callable[..., Path]:
    """Writes an untrained checkpoint: `make_checkpoint(folder, **card)`."""
    from neusight_jax.model.checkpoint import save_checkpoint, untrained

    def make(folder: Path, **card: Any) -> Path:
        start = jax.jit(lambda: untrained("mixture", ARCHITECTURE))  # by one program
        save_checkpoint(folder, start(), {**CARD, **card})
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nothing trained: T4 seen, V100 32 GB held out, fp32 only."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "untrained")


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "own"))


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must fail with one line on stderr and nothing on stdout; returns the line."""
    from neusight_jax.cli import run

    def check(*arguments: str, code: int = 2) -> str:
        assert run(arguments) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.endswith("\n")
        assert len(captured.err.splitlines()) == 1, captured.err
        assert "Traceback" not in captured.err
        assert code != 2 or captured.err.startswith("error: ")
        return captured.err.strip()

    return check


@pytest.fixture
def predict_fails(fails: Callable[..., str], checkpoint: Path) -> Callable[..., str]:
    """As `fails`, for `predict` with a good value for everything that is not given."""

    def check(model: str = "bert-tiny", **options: str) -> str:
        chosen = {"gpu": "T4", "checkpoint": str(checkpoint), **options}
        given = [part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", value)]
        return fails("predict", model, *given)

    return check


def pytest_unconfigure() -> None:
    """Programs that the user has no place for go with the run."""
    if _OF_THIS_RUN:
        shutil.rmtree(os.environ[_PROGRAMS], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that tests want shown, such as errors of a predictor trained on this machine."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "shown":
                terminalreporter.write_line(line)
