"""Key-value caches of transformers as trees of tensors, so that a module that takes or returns one can be exported."""

from __future__ import annotations

import copy
import sys
from typing import Any


def register_caches() -> None:
    """Tell torch how the caches of transformers are made of tensors; nothing where transformers is not in use."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return
    from torch.utils import _pytree

    wanted = tuple(vars(library)[name] for name in ("Cache", "EncoderDecoderCache") if hasattr(library, name))
    for kind in vars(library).values():
        if isinstance(kind, type) and issubclass(kind, wanted) and kind not in _pytree.SUPPORTED_NODES:
            _pytree.register_pytree_node(kind, _flat, _rebuilt, flatten_with_keys_fn=_flat_with_keys)


def _places(cache: Any) -> list[tuple[int, str]]:
    """Where a cache has tensors, or caches: (layer, attribute), layer -1 for its own attributes."""
    import torch

    owners = [(-1, cache), *enumerate(getattr(cache, "layers", ()))]
    return [
        (at, name)
        for at, owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor) or name.endswith("_attention_cache")
    ]


def _flat(cache: Any) -> tuple[list[Any], tuple[Any, list[tuple[int, str]]]]:
    places = _places(cache)
    return [getattr(cache if at < 0 else cache.layers[at], name) for at, name in places], (cache, places)


def _flat_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, list[tuple[int, str]]]]:
    from torch.utils._pytree import MappingKey

    values, context = _flat(cache)
    return [(MappingKey(place), value) for place, value in zip(context[1], values, strict=True)], context


def _rebuilt(values: Any, context: tuple[Any, list[tuple[int, str]]]) -> Any:
    """A copy of the cache with these tensors; the one it was made from stays as it is."""
    cache, places = context
    made = copy.copy(cache)
    if hasattr(cache, "layers"):
        made.layers = [copy.copy(layer) for layer in cache.layers]
    for (at, name), value in zip(places, values, strict=True):
        setattr(made if at < 0 else made.layers[at], name, value)
    return made
