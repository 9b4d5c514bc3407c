"""Imports go one way: no module needs, at its top or inside a function, one that needs it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import neusight_jax

HOME = Path(neusight_jax.__file__).resolve().parent
ROOMS = {
    "neusight_jax": HOME,
    "neusight_jax.training": HOME.parent / "training",
    "neusight_jax.datasets": HOME.parent / "datasets",
}
FLOORS = (
    *("ground", "checkpoints", "records", "hardware", "kernels", "model", "datasets"),
    *("graph", "graph.quantization", "graph.configs", "graph.traced", "job"),
    *("profiling", "scaling", "answers", "sweeps", "training", "training.evaluation", "layouts", "serving", "designs"),
    *("reports", "explorer", "cli"),
)
"""Rooms from the ground up: what a forecast is made of, forecasts, answers that take many, and the faces."""
TOP = {
    **dict.fromkeys(("errors", "units", "arithmetic"), "ground"),
    **dict.fromkeys(("files", "tables", "progress", "records", "markup"), "records"),
    **dict.fromkeys(("workloads", "forecast", "prediction", "runs", "unmeasured"), "answers"),
    **dict.fromkeys(("sensitivities", "comparison", "power_curves"), "answers"),
    "__main__": "cli",
}


def _modules() -> dict[str, Path]:
    return {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for package, folder in ROOMS.items()
        for path in folder.rglob("*.py")
    }


def _imported(tree: ast.AST, modules: Collection[str]) -> Iterator[str]:
    """What a module imports when it runs: what is for type checkers alone is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{each.name}" for each in node.names}
            yield from parts & set(modules) or {node.module}
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        yield from _imported(node, modules)


def _in_circles(needs: dict[str, set[str]]) -> set[str]:
    """Modules that need themselves by way of others."""

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            new = needs[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    return {name for name in needs if name in reached(name)}


def test_no_import_goes_in_a_circle() -> None:
    modules = _modules()
    needs = {name: set(_imported(ast.parse(path.read_text()), modules)) for name, path in modules.items()}
    needs = {name: of & set(modules) - {name, "neusight_jax"} for name, of in needs.items()}
    assert _in_circles(needs) == set()


def test_a_circle_is_found() -> None:
    assert _in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


def _room(name: str) -> str:
    """The folder of a module, or at the top of the package the floor that lists it."""
    name = name.removeprefix("neusight_jax.")
    folder = name if name in FLOORS else name.rpartition(".")[0]
    return TOP.get(name, folder)


def test_rooms_stand_on_floors() -> None:
    """A module imports from its own room and from those below, so that no two rooms need each other."""
    modules = _modules()
    above: list[tuple[str, str]] = []
    for name, path in modules.items():
        if name == "neusight_jax":  # it names what stands in all of them
            continue
        floor = FLOORS.index(_room(name))
        imports = {*_imported(ast.parse(path.read_text()), modules)} & {*modules} - {"neusight_jax"}
        above += [(name, other) for other in imports if FLOORS.index(_room(other)) > floor]
    assert above == []


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("neusight_jax.model", ("graph", "job", "layouts", "serving", "scaling", "reports", "training", "cli")),
        (
            "neusight_jax.hardware",
            ("model", "graph", "job", "layouts", "serving", "scaling", "reports", "training", "cli"),
        ),
        ("neusight_jax", ("cli",)),
    ],
)
def test_what_a_room_never_imports(room: str, never: tuple[str, ...]) -> None:
    modules = _modules()
    for name, path in modules.items():
        if not name.startswith(f"{room}.") or name.startswith(("neusight_jax.cli", "neusight_jax.__main__")):
            continue
        imports = _imported(ast.parse(path.read_text()), modules)
        rooms = {other.split(".")[1] for other in imports if other.startswith("neusight_jax.")}
        assert rooms.isdisjoint(never), (name, rooms & {*never})


def test_shape_checks_are_hooked_into_modules_there_are() -> None:
    """The hook says nothing of a module that does not exist, so a renamed one would go unchecked."""
    from conftest import CHECKED

    for name in CHECKED:
        module = importlib.import_module(f"neusight_jax.{name}")
        functions = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
        assert any(hasattr(each, "__wrapped__") for each in functions), name


def test_shape_checks_catch_a_wrong_shape() -> None:
    from neusight_jax.model.intervals import outside

    assert outside(jnp.ones(2), jnp.zeros(2), jnp.ones(2)).shape == (2,)
    with pytest.raises(TypeCheckError):
        outside(jnp.ones(3), jnp.zeros(2), jnp.ones(2))
