"""What a call that is refused says."""

from collections.abc import Callable

import pytest

from neusight_jax.errors import InputError

Fails = Callable[..., str]
"""A command line that must fail; gives its line on stderr."""


def message(call, *args) -> str:
    with pytest.raises(InputError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text
