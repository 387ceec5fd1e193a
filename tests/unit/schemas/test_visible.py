"""What steers a terminal is shown by its number, in lines and in JSON; everything else stays."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.visible import CONTROLS, SEPARATORS, TURNING, UNSEEN, visible_json, visible_line

STEERING = {chr(code) for code in (*CONTROLS, *SEPARATORS, *TURNING, *UNSEEN)} - {"\t"}
#: Half of the letters are such as steer a terminal.
TEXT = st.text(st.one_of(st.sampled_from(sorted(STEERING)), st.characters()))


@given(TEXT)
def test_a_line_is_one_line_and_steers_nothing(text: str) -> None:
    shown = visible_line(text)
    assert not STEERING & set(shown)
    shown.encode()
    assert len(shown.splitlines()) <= 1


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=sorted(STEERING))))
def test_what_is_harmless_stays(text: str) -> None:
    assert visible_line(text) == text


@given(st.recursive(st.none() | st.integers(0, 9) | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
def test_json_means_the_same(value: object) -> None:
    try:
        written = msgspec.json.encode(value)
    except UnicodeEncodeError:
        return  # lone surrogates have no form in JSON; kernel.cli.output replaces them
    shown = visible_json(written)
    assert json.loads(shown) == value
    assert not STEERING & set(shown.decode())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;pwned\x07", r"\x1b]0;pwned\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2066", r"a\u202eb\u2066"),
        ("a\r\nb", r"a\x0d\x0ab"),
        ("a\u200eb\u061cc\u200b\ufeff", r"a\u200eb\u061cc\u200b\ufeff"),
        ("ok\U000e0072\U000e006d", r"ok\U000e0072\U000e006d"),
        ("می\u200cخواهم 👩\u200d💻", "می\u200cخواهم 👩\u200d💻"),
        ("\udc9b", r"\udc9b"),
        ("군단\t\u3000\u00a0é", "군단\t\u3000\u00a0é"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert visible_line(text) == shown
