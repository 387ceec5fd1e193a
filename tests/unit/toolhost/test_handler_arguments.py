"""What the bundled tools ask of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.base.goondan_base import arguments


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda a: arguments.non_empty(a, "x"), "", "'x' must be a non-empty string"),
        (lambda a: arguments.non_empty(a, "x"), None, "'x' must be a non-empty string"),
        (lambda a: arguments.string(a, "x", "d"), None, "'x' must be a string"),
        (lambda a: arguments.strings(a, "x"), "ab", "'x' must be an array of strings"),
        (lambda a: arguments.strings(a, "x"), ["a", 1], "'x' must contain only strings"),
        (lambda a: arguments.flag(a, "x", False), 1, "'x' must be a boolean"),
        (lambda a: arguments.number(a, "x"), "1", "'x' must be a valid number"),
        (lambda a: arguments.number(a, "x"), True, "'x' must be a valid number"),
        (lambda a: arguments.number(a, "x"), math.nan, "'x' must be a valid number"),
        (lambda a: arguments.number(a, "x"), -math.inf, "'x' must be a valid number"),
        (lambda a: arguments.path(a, "x", "/w"), "", "'x' must be a non-empty string"),
        (lambda a: arguments.path(a, "x", "/w"), "a\0", "'x' must not contain null bytes"),
        (lambda a: arguments.path(a, "x", "/w", "."), 5, "'x' must be a string"),
    ],
)
def test_values_that_cannot_be_used(read: Callable[[dict[str, Any]], Any], value: Any, message: str) -> None:
    with pytest.raises(arguments.InvalidInput) as caught:
        read({"x": value})
    assert str(caught.value) == message


def test_what_may_be_left_out() -> None:
    assert arguments.string({}, "x", "d") == "d"
    assert arguments.flag({}, "x", True) is True
    assert arguments.number({}, "x", 7) == 7
    assert arguments.path({}, "x", "/w", ".") == "/w"
    for read in (arguments.non_empty, arguments.strings, arguments.number):
        with pytest.raises(arguments.InvalidInput):
            read({}, "x")


@pytest.mark.requirement("FS-05", "BASH-03")
@pytest.mark.parametrize(
    ("path", "expected"),
    [("a", "/w/a"), ("", "/w"), (".", "/w"), ("./a/../b", "/w/b"), ("..", "/"), ("a/", "/w/a/"), ("/x/../y", "/x/../y"),
     ("../../..", "/"), ("a//b", "/w/a/b"), ("~/a", "/w/~/a")],
)  # fmt: skip
def test_relative_paths_are_joined_and_normalised_absolute_ones_stay(path: str, expected: str) -> None:
    assert arguments.absolute("/w", path) == expected


@given(st.lists(st.sampled_from(["a", "b", ".", "..", "", "…"]), max_size=8).map("/".join))
def test_a_normalised_path_stays_as_it_is(path: str) -> None:
    once = arguments.normalised("/" + path)
    assert once.startswith("/")
    assert not {"", ".", ".."} & set(once.strip("/").split("/")) - {""}
    assert arguments.normalised(once) == once


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_printed_with_all_their_digits(value: float) -> None:
    text = arguments.as_text(value)
    assert float(text) == value
    assert not text.endswith(".0")


@pytest.mark.requirement("TEXT-08", "BASH-05")
@pytest.mark.parametrize(
    ("value", "text"),
    [("as is", "as is"), (True, "true"), (False, "false"), (42, "42"), (-7, "-7"), (1.0, "1"), (1.5, "1.5"),
     (-0.0, "0"), (0.1, "0.1"), (1e21, "1e+21"), (1e20, "100000000000000000000"), (100, "100"),
     (123456789012345680000, "123456789012345680000"), (1e-6, "0.000001"), (1e-7, "1e-7"), (1.25e-9, "1.25e-9"),
     (-1.5e300, "-1.5e+300"), (2**53 + 1, "9007199254740992"), (5e-324, "5e-324"), (0.00012, "0.00012")],
)  # fmt: skip
def test_values_are_printed_as_javascript_does(value: Any, text: str) -> None:
    assert arguments.as_text(value) == text
