"""What steers a terminal or is not seen is shown by its number, in lines and in JSON; what a language needs stays."""

from __future__ import annotations

import json
import re
import sys
import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.text.visible import (
    BLANKS,
    CONTROLS,
    IGNORABLE,
    SPACES,
    TURNING,
    is_needed,
    visible_json,
    visible_line,
    visible_names,
)

EVERY = "".join(map(chr, range(sys.maxunicode + 1)))


def members(inside: str) -> set[int]:
    """The characters of a class of a regular expression."""
    return set(map(ord, re.findall(f"[{inside}]", EVERY)))


UNSEEN = members(IGNORABLE + SPACES + BLANKS)
STEERING = {chr(code) for code in {*CONTROLS, *TURNING, *UNSEEN}} - {"\t"}
#: Half of the letters are such as steer a terminal.
TEXT = st.text(st.one_of(st.sampled_from(sorted(STEERING)), st.characters()))

# --- the tables, against Unicode's own rules ------------------------------------------------------------------------

#: Other_Default_Ignorable_Code_Point of PropList.txt, and the formats that its rule leaves out by number or property.
OTHER = {
    0x34F,
    0x115F,
    0x1160,
    0x17B4,
    0x17B5,
    0x2065,
    0x3164,
    0xFFA0,
    *range(0xFFF0, 0xFFF9),
    *range(0xE0000, 0xE1000),
}
SEEN_FORMATS = {
    *(*range(0xFFF9, 0xFFFC), *range(0x13430, 0x13440), *range(0x600, 0x606)),
    *(0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD),
}


def test_the_ignorable_ones_are_those_of_the_derivation_in_unicode() -> None:
    """DerivedCoreProperties.txt: Other_Default_Ignorable_Code_Point + Cf + Variation_Selector - White_Space - some."""
    every = range(sys.maxunicode + 1)
    formats = {code for code in every if unicodedata.category(chr(code)) == "Cf"} - SEEN_FORMATS
    selectors = {code for code in every if "VARIATION SELECTOR" in unicodedata.name(chr(code), "")}
    assert members(IGNORABLE) == OTHER | formats | selectors


def test_the_spaces_are_those_of_unicode() -> None:
    separators = {code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Zs", "Zl", "Zp")}
    assert members(SPACES) == separators - {0x20}


# --- lines and JSON -------------------------------------------------------------------------------------------------


def hidden_in(shown: str) -> list[str]:
    """What is there and is needed by no language where it stands."""
    found = re.finditer(f"[{IGNORABLE}{SPACES}{BLANKS}]", shown)
    return [match[0] for match in found if not is_needed(match)]


@given(TEXT)
def test_a_line_is_one_line_and_steers_and_hides_nothing(text: str) -> None:
    shown = visible_line(text)
    assert not {chr(code) for code in (*CONTROLS, *TURNING)} - {"\t"} & set(shown)
    assert hidden_in(shown) == []
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
        return  # lone surrogates have no form in JSON; goondan.kernel.cli.output replaces them
    shown = visible_json(written)
    assert json.loads(shown) == value
    assert not {chr(code) for code in (*CONTROLS, *TURNING)} & set(shown.decode())
    assert hidden_in(shown.decode()) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;pwned\x07", r"\x1b]0;pwned\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202eb\u2066", r"a\u202eb\u2066"),
        ("a\r\nb", r"a\x0d\x0ab"),
        ("a\u200eb\u061cc\u200b\ufeff", r"a\u200eb\u061cc\u200b\ufeff"),
        ("ok\U000e0072\U000e006d", r"ok\U000e0072\U000e006d"),
        ("ok\ufe0f\ufe00\U000e0100\U000e01ef", r"ok\ufe0f\ufe00\U000e0100\U000e01ef"),
        ("a\u034fb\u180bc\u17b4d\u2800e", r"a\u034fb\u180bc\u17b4d\u2800e"),
        ("rm\u00a0-rf\u2003/ a\u200db", r"rm\xa0-rf\u2003/ a\u200db"),
        ("\udc9b", r"\udc9b"),
        ("군단\t\u3000é", r"군단\t\u3000é".replace(r"\t", "\t")),
    ],
)
def test_what_hides_is_shown_by_its_number(text: str, shown: str) -> None:
    assert visible_line(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "می\u200cخواهم क्\u200dष",
        "👩\u200d💻 👩🏽\u200d💻 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3 ☀\ufe0f",
        "山田\u3000太郎",
        "Combien\u202f? 12\u00a0500\u00a0%, \u00ab\u00a0oui\u00a0\u00bb",
        "\u1820\u180b \u2801\u2800\u2803",
    ],
)
def test_what_a_language_needs_stays(text: str) -> None:
    assert visible_line(text) == text
    assert visible_json(msgspec.json.encode(text)) == msgspec.json.encode(text)


# --- letters that look like others ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://p\u0430ypal.com/x", r"https://p\u0430ypal.com/x"),
        ("/home/\u0441\u043e\u0440/x", r"/home/\u0441\u043e\u0440/x"),
        ("g\u03bfogle", r"g\u03bfogle"),
        ("\uff47it \U0001d420it", r"\uff47it \U0001d420it"),
        ("bash__\u0435xec", r"bash__\u0435xec"),
    ],
)
def test_letters_that_look_like_those_beside_them_are_shown_by_their_number(text: str, shown: str) -> None:
    assert visible_names(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "/home/привет/файл.txt",
        "он и она, а с git",
        "군단/파일.md",
        "größe.txt",
        "Δt = 3 µs",
        "μοντέλο.yaml",
    ],
)
def test_names_of_other_scripts_stay(text: str) -> None:
    assert visible_names(text) == text
