"""The embedded corpus as a source: what its settings may be."""

from collections.abc import Callable
from typing import Any

import pytest

from cramming.config import UserError, build
from data_prep.sources.embedded import EmbeddedConfig


@pytest.mark.parametrize("size", [0, -5])
def test_a_size_that_gives_no_text_is_named(compose: Callable[..., dict[str, Any]], size: int) -> None:
    with pytest.raises(UserError, match=rf"^data: size={size} must be at least 1"):
        build(EmbeddedConfig, compose(f"data.size={size}")["data"], "data")
