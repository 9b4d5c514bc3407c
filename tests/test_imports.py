"""Imports go one way: no two modules need each other, by whatever detour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import neusight_jax

ROOT = Path(neusight_jax.__file__).parent
FOLDERS = [ROOT, *(Path(path) / name for path in list(neusight_jax.__path__) for name in ("training", "datasets"))]
KNOWN: set[frozenset[str]] = {
    frozenset({"neusight_jax.checkpoint", "neusight_jax.digest"}),
    frozenset({"neusight_jax.design.answers", "neusight_jax.design.report"}),
    frozenset({"neusight_jax.sensitivity", "neusight_jax.sensitivity_report"}),
}
"""Circles there are for now."""


def sources() -> dict[str, ast.Module]:
    """Every module of the package by name, `training` and `datasets` below it as they are installed."""
    found: dict[str, ast.Module] = {}
    for folder in FOLDERS:
        parent = "neusight_jax" if folder == ROOT else f"neusight_jax.{folder.name}"
        for path in sorted(folder.rglob("*.py")):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            found[".".join((parent, *parts))] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Names a module imports when it runs, at its top or inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
            yield node.module
        yield from imported(node)


def circles(needs: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules each of which needs all others of its set."""
    reached: dict[str, set[str]] = {}
    for start in needs:
        seen: set[str] = set()
        todo = list(needs[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += needs[name]
        reached[start] = seen
    return {
        frozenset(other for other in reached[name] if name in reached[other]) for name in needs if name in reached[name]
    }


def test_no_module_needs_itself() -> None:
    trees = sources()
    assert "neusight_jax.training.fit" in trees
    needs = {name: {other for other in imported(tree) if other in trees} - {name} for name, tree in trees.items()}
    needs = {name: {other for other in found if not name.startswith(f"{other}.")} for name, found in needs.items()}
    assert circles(needs) <= KNOWN


def test_rooms_of_graphs_go_one_way() -> None:
    """Graphs, then quantization, then configs; traced programs beside those two."""
    below = {"quantization": {"graph"}, "configs": {"graph", "quantization"}, "traced": {"graph"}, "graph": set[str]()}
    prefix = "neusight_jax.graph."
    for name, tree in sources().items():
        if not name.startswith(prefix):
            continue
        room, *inner = name.removeprefix(prefix).split(".")
        own = room if inner or room in below else "graph"
        used = {other.removeprefix(prefix).split(".")[0] for other in imported(tree) if other.startswith(prefix)}
        assert {other if other in below else "graph" for other in used} <= {own, *below[own]}, name


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset("bc")}
