"""Lists of powers: what one covers of another, and that no order and no repetition changes that."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.grants.powers import (
    Command,
    Endpoint,
    Folder,
    Module,
    OpenKey,
    Owner,
    OwnModel,
    Permission,
    Power,
    Reach,
    ServerEndpoint,
    Setting,
    Variable,
    Writers,
    changed_modules,
    grown,
)

NAMES = st.sampled_from(["a", "b"])
POWERS: st.SearchStrategy[Power] = st.one_of(
    st.builds(Module, NAMES, NAMES, NAMES),
    st.builds(Variable, NAMES, st.sampled_from(["key", "tool a", "Agent"])),
    st.builds(Folder, NAMES, st.sampled_from(["read", "write"]), st.sampled_from(["/", "/a", "/a/b", "/ab"])),
    st.builds(Reach, NAMES, st.sampled_from(["public", "h:1", "*.h.io:1", "*.x.h.io:1", "x.h.io:1"])),
    st.builds(Command, NAMES, NAMES),
    st.builds(ServerEndpoint, NAMES, NAMES),
    st.builds(Endpoint, NAMES, st.sampled_from(["", "K"])),
    st.builds(OpenKey, NAMES, NAMES),
    st.builds(OwnModel, st.booleans()),
    st.builds(Permission, NAMES, NAMES),
    st.builds(Setting, NAMES, st.sampled_from(["minTier", "limits.memoryMb"]), st.sampled_from(["1", "20", "x"])),
    st.builds(Owner, st.integers(1, 3)),
    st.builds(Writers, st.sampled_from([None, 1, 2])),
)
LISTS = st.lists(POWERS, max_size=8)


@given(LISTS)
def test_nothing_grows_beyond_itself(powers: list[Power]) -> None:
    assert grown(powers, powers) == []
    assert grown([], powers) == powers
    assert grown(powers, []) == []


@given(LISTS, LISTS, LISTS)
def test_who_agrees_to_more_is_asked_no_more(one: list[Power], more: list[Power], wanted: list[Power]) -> None:
    assert set(grown([*one, *more], wanted)) <= set(grown(one, wanted))


@given(LISTS, LISTS)
def test_agreeing_to_what_has_grown_is_enough(agreed: list[Power], wanted: list[Power]) -> None:
    assert grown([*agreed, *grown(agreed, wanted)], wanted) == []


@given(LISTS)
def test_a_record_gives_back_what_it_was_given(powers: list[Power]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(powers), type=list[Power]) == powers


@pytest.mark.parametrize(
    ("agreed", "wanted"),
    [
        (Folder("t", "read", "/a"), Folder("t", "read", "/a/b")),
        (Folder("t", "write", "/a"), Folder("t", "read", "/a/b")),
        (Reach("t", "*.h.example:1"), Reach("t", "*.x.h.example:1")),
        (Reach("t", "public"), Reach("t", "*.h.example:1")),
        (Endpoint("https://h", "K"), Endpoint("https://h", "")),
        (OwnModel(asleep=True), OwnModel(asleep=False)),
        (Setting("Tool/t", "limits.memoryMb", "900"), Setting("Tool/t", "limits.memoryMb", "800")),
        (Module("e", "e.py", "old"), Module("e", "e.py", "new")),
    ],
)
def test_what_is_covered(agreed: Power, wanted: Power) -> None:
    assert grown([agreed], [wanted]) == []


@pytest.mark.parametrize(
    ("agreed", "wanted"),
    [
        (Folder("t", "read", "/a"), Folder("t", "write", "/a")),
        (Folder("t", "read", "/a"), Folder("t", "read", "/ab")),
        (Folder("t", "read", "/a"), Folder("u", "read", "/a")),
        (Reach("t", "public"), Reach("t", "10.0.0.1:1")),  # an exact rule reaches private addresses
        (Reach("t", "*.h.example:1"), Reach("t", "x.h.example:1")),
        (Reach("t", "h:1"), Reach("t", "h:2")),
        (Reach("t", "h:1"), Reach("t", "public")),
        (Reach("t", "h:1"), Reach("u", "h:1")),
        (Endpoint("https://h", ""), Endpoint("https://h", "K")),
        (Endpoint("https://h", "K"), Endpoint("https://h", "L")),
        (Endpoint("https://h", "K"), Endpoint("https://i", "K")),
        (Command("s", "node a.js"), Command("s", "node b.js")),
        (Command("s", "node a.js"), Command("t", "node a.js")),
        (ServerEndpoint("s", "https://h:443"), ServerEndpoint("s", "https://i:443")),
        (Endpoint("https://h:443", "K"), ServerEndpoint("s", "https://h:443")),
        (Variable("A", "tool t"), Variable("A", "Agent")),
        (Setting("Tool/t", "limits.memoryMb", "800"), Setting("Tool/t", "limits.memoryMb", "900")),
        (Module("e", "e.py", "same"), Module("e", "f.py", "same")),
        (Owner(1), Owner(2)),
        (Writers(5), Writers(None)),
    ],
)
def test_what_is_not_covered(agreed: Power, wanted: Power) -> None:
    assert grown([agreed], [wanted]) == [wanted]


def test_modules_change_by_their_bytes() -> None:
    was = [Module("e", "e.py", "1")]
    assert changed_modules(was, [Module("e", "e.py", "1")]) == []
    assert changed_modules(was, [Module("e", "e.py", "2")]) == [Module("e", "e.py", "2")]
    assert changed_modules([*was, Module("e", "e.py", "2")], [Module("e", "e.py", "2")]) == []
    assert changed_modules([], [Module("e", "e.py", "2")]) == []  # it is new, which is another question
