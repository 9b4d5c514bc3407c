"""Which constants of the physics could be wrong unnoticed: each is made 20 % larger in a copy, and tests must fail.

    python benchmarks/mutants.py [--only NAME ...] [--list] [TEST ...]

Every number of a documented constant at module level of `MODULES` is a mutant (whole numbers are rounded up; 0 has no
larger one; positions and numbers of libraries are names, not amounts). The tests are those of the physics by hand and
the pinned forecasts, the quickest first; a mutant that none of them catches survives and is printed. Exit code 1 if any
does, 2 if they fail without one.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "arithmetic.py",
    "model/physics.py",
    "model/heads.py",
    "model/roofline.py",
    "model/mixture.py",
    "hardware/gpu.py",
    "model/network.py",
    "model/intervals.py",
    "kernels/*.py",
)
TESTS = (
    *("test_constants.py", "test_kernels.py", "test_collectives.py::test_bytes_and_steps_by_hand", "test_intervals.py"),
    # Pinned kernels take seconds, pinned models and answers minutes.
    "test_golden.py::test_the_plain_form_is_what_it_was",
    "test_golden.py::test_kernels_on_every_gpu_forecast_what_they_did",
    *("test_golden.py", "test_physical_times.py"),
)
FACTOR = 1.2
NAMES = frozenset(
    {
        *("DIRECTIONS", "FLASH2", "FLASH3"),
        *("LEVEL", "_RANGES", "_BANDWIDTH", "_PEAK", "MIN_BATCH", "FINE_BATCH", "WORTH_SAYING"),
        *("FLOOR_S", "TENSOR_FLOOR_S", "WINDOW_BYTES"),
    }
)
"""Constants that are no physics: positions, numbers of libraries, sizes of arrays, where a training starts, and what
is larger than any."""

TABLES: dict[str, tuple[str, ...]] = {
    "Head": ("tensor_bounds",),
    "field": ("default",),
    "len": (),
    "_ways": (),
    "Dtype": (),
}
"""Rows of tables of constants, and which of their named arguments hold some."""


@dataclass(frozen=True)
class Mutant:
    """One number of one constant, and where it stands in its file."""

    file: Path
    name: str
    node: ast.Constant

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.node.lineno} {self.name} {self.node.value!r} -> {self.value!r}"

    @property
    def value(self) -> float:
        """The larger number."""
        now = self.node.value
        assert isinstance(now, int | float)
        return math.ceil(FACTOR * now) if isinstance(now, int) else FACTOR * now


def mutants() -> Iterator[Mutant]:
    """Every number of every constant."""
    for pattern in MODULES:
        for path in sorted((ROOT / "neusight_jax").glob(pattern)):
            body = ast.parse(path.read_text()).body
            table = [
                item
                for record in body
                if isinstance(record, ast.ClassDef) and record.name == "Physics"
                for item in record.body
            ]
            for statement in (*body, *table):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                    names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
                    constant = statement in table or (all(map(str.isupper, names)) and not names & NAMES)
                    if constant and (statement in table or not _calls(statement.value)):
                        yield from (Mutant(path, ", ".join(sorted(names)), node) for node in _numbers(statement.value))


def _calls(value: ast.expr) -> bool:
    """Whether a value is a record or a function's, and no plain number or menu of numbers."""
    return any(isinstance(node, ast.Call | ast.comprehension) and _name(node) not in TABLES for node in ast.walk(value))


def _name(node: ast.AST) -> str:
    """Of the function that is called; none of anything else."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _numbers(value: ast.expr) -> Iterator[ast.Constant]:
    """Numbers of an expression that have a larger one; keys of dicts, exponents and indices are none."""
    if isinstance(value, ast.Constant):
        if isinstance(value.value, int | float) and not isinstance(value.value, bool) and value.value:
            yield value
    elif isinstance(value, ast.Call) and _name(value) in TABLES:
        for each in (*value.args, *(item.value for item in value.keywords if item.arg in TABLES[_name(value)])):
            yield from _numbers(each)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from _numbers(item)
    elif isinstance(value, ast.Tuple | ast.List):
        for item in value.elts:
            yield from _numbers(item)
    elif isinstance(value, ast.BinOp):
        yield from _numbers(value.left)
        if not isinstance(value.op, ast.Pow):
            yield from _numbers(value.right)
    elif isinstance(value, ast.UnaryOp | ast.Starred):
        yield from _numbers(value.operand if isinstance(value, ast.UnaryOp) else value.value)


def passes(copy: Path, tests: list[str], environment: dict[str, str]) -> bool:
    """Whether all tests pass on a copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode == 0


def survives(mutant: Mutant, copy: Path, tests: list[str], environment: dict[str, str]) -> bool:
    """Whether all tests pass on a copy with the mutant in it; the copy is as before afterwards."""
    path = copy / mutant.file.relative_to(ROOT)
    text = path.read_text()
    lines = text.encode().splitlines(keepends=True)
    node = mutant.node
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + repr(mutant.value).encode() + line[node.end_col_offset :]
    path.write_bytes(b"".join(lines))
    try:
        return passes(copy, tests, environment)
    finally:
        path.write_text(text)


def main() -> int:
    """Try all mutants, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="constants to try (default all)")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("tests", nargs="*", help="test files (default those of the physics)")
    given = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not given.only or {*given.only} & {*mutant.name.split(", ")}]
    if given.list:
        print("\n".join(map(str, chosen)))
        return 0
    tests = given.tests or [f"tests/{name}" for name in TESTS]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (Path(folder) / "programs").mkdir()
        environment = {**os.environ, "NEUSIGHT_JAX_TEST_PROGRAMS": f"{folder}/programs", "PYTHONDONTWRITEBYTECODE": "1"}
        if not passes(copy, tests, environment):
            print("the tests fail without a mutant: mend that first")
            return 2
        for count, mutant in enumerate(chosen, 1):
            survivor = survives(mutant, copy, tests, environment)
            alive += survivor
            print(f"{count:3d}/{len(chosen)} {'SURVIVES' if survivor else 'caught'} {mutant}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants caught, {alive} survive")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
