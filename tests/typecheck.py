"""The run-time type checker of the tests: beartype, an int taken where a float is asked for.

Records are not checked where they are built: transformations of pytrees rebuild them with leaves of any kind.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check: Callable[[Any], Any] = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Any) -> Any:
    """A function that checks its annotations when it is called."""
    return function if function.__qualname__.endswith("__init__") else _check(function)
