"""Checks that many tests make: what has to be there, and what has to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from goondan.schemas.wire.errors import GoondanError

T = TypeVar("T")


def there(value: T | None) -> T:
    """The value, which must not be None."""
    assert value is not None
    return value


@contextmanager
def refuses(code: str, *, match: str | None = None) -> Iterator[pytest.ExceptionInfo[GoondanError]]:
    """What is done inside is refused under this code; `match`: a regular expression that its message has."""
    with pytest.raises(GoondanError, match=match) as caught:
        yield caught
    assert caught.value.info.code == code
