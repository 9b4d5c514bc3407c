"""Results as JSON: the version of their layout, and text that every reader of JSON takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def schema(kind: str, version: int = 1) -> str:
    """Name and version of a result's layout, its first key: a reader that knows the version knows the keys."""
    return f"neusight_jax.{kind}/{version}"


def json_text(content: Any) -> str:
    """JSON text of plain values. Numbers that are not finite become null, and the notes of the result say which."""
    lost: dict[str, None] = {}
    plain = _finite(content, "", lost)
    if lost and isinstance(plain, dict):
        plain["notes"] = [*plain.get("notes", ()), f"null where there is no finite number: {', '.join(lost)}"]
    return json.dumps(plain, indent=1, allow_nan=False)


def _finite(value: Any, path: str, lost: dict[str, None]) -> Any:
    """Plain values with None for NaN and infinity; `lost` collects their paths, entries of one list as one."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each, f"{path}.{key}" if path else str(key), lost) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, f"{path}[]", lost) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        lost[path] = None
        return None
    return value
