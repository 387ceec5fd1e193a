"""The pure parts of the bundled tool `file-system`: the order of lists, and what errors say."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.base.file_system import file_system


def ordered(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: file_system.collation_key(f"/w/{name}"))


@pytest.mark.requirement("FS-11")
@pytest.mark.parametrize(
    "names",
    [
        ["a", "A", "ab", "aB", "Ab", "b", "B", "c"],
        ["_a", "-a", ".a", "(a)", "@a", "#a", "+a", "~a", "$a", "1a", "a", "a b", "a_b", "a/b", "ab"],
        ["1", "10", "2", "a1", "a10", "a2"],
        ["cote", "coté", "côte", "côté", "cotf"],
        ["e", "é", "É", "f"],
        ["a", "z", "α", "б", "가", "나", "あ", "漢"],
        ["👍", "1", "a"],
        ["strasse", "straße", "strassf"],
        ["１", "2", "３"],  # digits are digits in any width
        ["file", "file\u0301", "filf"],
    ],
)
def test_the_order_of_lists(names: list[str]) -> None:
    shuffled = names[:]
    random.Random(7).shuffle(shuffled)
    assert ordered(shuffled) == names


@given(st.lists(st.text(min_size=1, max_size=6), max_size=6))
def test_the_order_is_one_order(names: list[str]) -> None:
    assert ordered(names) == ordered(names[::-1])
    assert len({file_system.collation_key(name) for name in names}) == len(set(names))


@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=5))
def test_any_name_has_a_place(name: str) -> None:
    """Also half a surrogate pair, which is how a name that is no UTF-8 is read."""
    assert file_system.collation_key(name) >= file_system.collation_key("")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/a/b", "/a"), ("/a", "/"), ("/", "/"), ("/a/b/", "/a"), ("/a//b", "/a/"), ("//", "/")],
)
def test_the_folder_above(path: str, expected: str) -> None:
    assert file_system.parent(path) == expected


@pytest.mark.requirement("FS-04", "FS-15")
def test_errors_say_what_was_done_to_what() -> None:
    error = file_system.FileSystemError(errno.ENOENT, "open", "/w/a")
    assert (error.code, str(error)) == ("ENOENT", "ENOENT: no such file or directory, open '/w/a'")
    assert "file-system__list" in str(error.suggestion)
    error = file_system.FileSystemError(99999, "open", "/w/a")
    assert error.code == "errno 99999"
