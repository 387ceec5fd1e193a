"""The header of W3C trace context, in and out."""

from __future__ import annotations

import pytest

from goondan.schemas.wire.spans import read_traceparent, traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_what_is_written_is_read() -> None:
    assert read_traceparent(traceparent(TRACE, SPAN)) == (TRACE, SPAN)
    assert read_traceparent(f" 00-{TRACE}-{SPAN}-00 ") == (TRACE, SPAN)
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-01-more") == (TRACE, SPAN)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        "00-" + "a" * 100_000,
    ],
)
def test_what_is_no_such_header_names_nothing(header: str) -> None:
    assert read_traceparent(header) is None
