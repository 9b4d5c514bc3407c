"""What a call that is refused says."""

import pytest

from neusight_jax.errors import InputError


def message(call, *args) -> str:
    with pytest.raises(InputError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text
