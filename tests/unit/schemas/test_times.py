"""Times as texts: the same as the standard library says, in one form."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.text.times import rfc3339, rfc3339_seconds

#: 2200-01-01, in milliseconds since 1970. Until then a float tells microseconds apart.
LAST = 7_258_118_400_000


@given(st.integers(0, LAST))
def test_every_millisecond_has_a_text_that_is_read_as_that(milliseconds: int) -> None:
    text = rfc3339(milliseconds / 1000)
    assert len(text) == len("2026-01-02T03:04:05.678Z")
    read = datetime.fromisoformat(text)
    assert (read - datetime(1970, 1, 1, tzinfo=UTC)) == timedelta(milliseconds=milliseconds)
    assert rfc3339_seconds(milliseconds / 1000) == f"{text[:19]}Z"


def test_a_time_is_never_rounded_into_the_next_second() -> None:
    assert rfc3339(1_767_323_045.9994) == "2026-01-02T03:04:05.999Z"
    assert rfc3339_seconds(1_767_323_045.9) == "2026-01-02T03:04:05Z"


def test_what_has_no_date_is_refused() -> None:
    with pytest.raises((OverflowError, ValueError, OSError)):
        rfc3339(1e18)
