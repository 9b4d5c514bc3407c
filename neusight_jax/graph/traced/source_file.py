"""Models given as `path/to/file.py:function`: the function returns what to trace and its example arguments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.traced.operation import TraceOptions

WANTED = "expected (callable, arguments) or (callable, arguments, keyword arguments)"

ON_META = (
    "tensors on the meta device have no values: make the module outside `torch.device('meta')`, then move it by "
    "`module.to('meta')`"
)


def is_source(model: str) -> bool:
    """Whether a model is given as a function in a Python file."""
    path, _, function = model.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def graph_from_source(model: str, mode: str = "inference", options: TraceOptions | None = None) -> Graph:
    """The graph of what a function in a Python file returns.

    Args:
      model: `path/to/file.py:function`. The function takes nothing and returns (callable, arguments) or (callable,
        arguments, keyword arguments): a JAX function, or a torch module. The file is run.
      mode: of a torch module; a JAX function is traced as it is, and says itself whether it trains.
      options: how to trace.
    Raises: `InputError` when the file or function is missing, fails, or returns something else.
    """
    target, args, kwargs = call_from_source(model)
    chosen = options or TraceOptions()
    chosen = replace(chosen, name=chosen.name or model.rpartition(":")[2])
    if is_torch_module(target):
        from neusight_jax.graph.traced.torch_export import graph_from_torch

        return graph_from_torch(target, args, kwargs, mode, chosen)
    from neusight_jax.graph.traced.jax_program import graph_from_function

    if mode != "inference":
        raise InputError(f"{model} is a JAX function, which says itself whether it trains; leave --mode {mode} out")
    return graph_from_function(target, *args, trace_options=chosen, **kwargs)


def call_from_source(model: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a function in a Python file returns: a callable, its arguments and keyword arguments.

    Raises: `InputError` as `graph_from_source`.
    """
    path, _, function = model.rpartition(":")
    made = _call(Path(path), function)
    whole = (*made, {}) if isinstance(made, tuple) and len(made) == 2 else made
    match whole:
        case (target, tuple() | list() as args, Mapping() as kwargs) if isinstance(made, tuple) and callable(target):
            return target, tuple(args), dict(kwargs)
    raise InputError(f"{model} returned {_described(made)}, {WANTED}")


def is_torch_module(target: Any) -> bool:
    """Whether it is one, without an import of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def _call(path: Path, function: str) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected a Python file, given as path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"_neusight_jax_source_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The file may import its neighbours.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
        maker = getattr(module, function, None)
        if not callable(maker):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise unknown_name(f"function in {path}", function, names)
        return maker()
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        wanted = ON_META if "meta tensor" in reason else WANTED
        raise InputError(f"{path}:{function} failed ({type(error).__name__}: {reason}); {wanted}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
        sys.modules.pop(spec.name, None)


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return f"a {type(made).__name__}"
