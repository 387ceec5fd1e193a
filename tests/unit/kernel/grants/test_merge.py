"""Merging sandboxes: narrowing never widens, in any order and any number of steps; widening never narrows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.grants.granting import (
    DEFAULTS,
    Part,
    as_part,
    beyond,
    join_paths,
    meet_paths,
    narrow,
    requested,
    widen,
    without_grants,
)
from goondan.schemas.bundle import resources
from goondan.schemas.bundle.launch import Filesystem, Limits, PythonSpec, SandboxSpec
from goondan.schemas.worker.hosts import network, parse_rule, write_network

_NAMES = ["A", "B", "C"]
_PATHS = ["/", "/data", "/data/a", "/data/a/b", "/srv/x", "/database"]
_RULES = ["a.example.org:443", "b.example.org:443", "*.example.org:443", "10.0.0.1:22"]
_LIMITS = list(Limits.__struct_fields__)


def some(names: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(names), unique=True, max_size=3).map(sorted)


_networks = st.builds(
    lambda rules, public: write_network(network(map(parse_rule, rules), public=public)), some(_RULES), st.booleans()
)
_limits = st.builds(Limits, **{name: st.integers(1, 2000) for name in _LIMITS})
_sandboxes = st.builds(
    SandboxSpec,
    isolation=st.sampled_from(["shared", "instance", "call"]),
    network=_networks,
    filesystem=st.builds(Filesystem, read=some(_PATHS), write=some(_PATHS)),
    env=some(_NAMES),
    permissions=some(["agents", "restart"]),
    python=st.builds(PythonSpec, venv=st.sampled_from([None, "/v", "/w"])),
    limits=_limits,
    min_tier=st.sampled_from(["full", "reduced"]),
)
_parts = st.builds(
    Part,
    isolation=st.sampled_from([None, "instance", "call"]),
    network=st.none() | _networks,
    read=st.none() | some(_PATHS),
    write=st.none() | some(_PATHS),
    env=st.none() | some(_NAMES),
    permissions=st.none() | some(["agents", "restart"]),
    says_venv=st.booleans(),
    venv=st.sampled_from([None, "/v", "/w"]),
    limits=st.dictionaries(st.sampled_from(_LIMITS), st.integers(1, 2000)),
    min_tier=st.sampled_from([None, "full", "reduced"]),
)


def excess(less: SandboxSpec, more: SandboxSpec) -> list[Any]:
    """What `less` has that `more` has not."""
    return beyond(as_part(less), more)


@given(_sandboxes, _parts)
def test_narrowing_never_widens(base: SandboxSpec, part: Part) -> None:
    assert excess(narrow(base, part), base) == []


@given(_sandboxes, _parts)
def test_narrowing_leaves_no_more_than_was_said(base: SandboxSpec, part: Part) -> None:
    left = narrow(base, part)
    if part.env is not None:
        assert set(left.env) <= set(part.env)
    if part.write is not None:
        assert meet_paths(left.filesystem.write, part.write) == left.filesystem.write
    for name, value in part.limits.items():
        assert getattr(left.limits, name) <= value
    assert part.min_tier != "full" or left.min_tier == "full"


@given(_sandboxes, _parts)
def test_narrowing_twice_is_narrowing_once(base: SandboxSpec, part: Part) -> None:
    once = narrow(base, part)
    assert narrow(once, part) == once


@given(_sandboxes, _parts, _parts)
def test_the_order_of_two_that_say_the_same_fields_plays_no_part(base: SandboxSpec, one: Part, two: Part) -> None:
    full = Part(read=two.read or [], write=two.write or [], env=two.env, network=two.network, limits=two.limits)
    other = Part(read=one.read or [], write=one.write or [], env=one.env, network=one.network, limits=one.limits)
    assert narrow(narrow(base, full), other) == narrow(narrow(base, other), full)


@given(_sandboxes, _parts)
def test_widening_never_narrows(base: SandboxSpec, part: Part) -> None:
    wide = widen(base, part)
    assert excess(base, wide) == []
    assert widen(wide, part) == wide


@given(_sandboxes, _parts, _parts)
def test_the_order_of_widenings_plays_no_part(base: SandboxSpec, one: Part, two: Part) -> None:
    two = msgspec.structs.replace(two, venv=one.venv)  # of two environments the first stays
    assert widen(widen(base, one), two) == widen(widen(base, two), one)


@given(_sandboxes)
def test_a_sandbox_is_within_itself_and_narrowing_by_itself_changes_nothing_in_what_it_allows(
    base: SandboxSpec,
) -> None:
    assert excess(base, base) == []
    assert excess(base, narrow(base, as_part(base))) == []


@given(_sandboxes)
def test_what_nobody_has_accepted_is_no_more_than_the_defaults(request_: SandboxSpec) -> None:
    left = without_grants(request_)
    assert excess(left, DEFAULTS) == []
    assert excess(left, request_) == []
    assert requested(left) == []
    assert left.isolation == request_.isolation


@given(st.lists(st.sampled_from(_PATHS)), st.lists(st.sampled_from(_PATHS)), st.lists(st.sampled_from(_PATHS)))
def test_paths_merge_in_any_order(a: list[str], b: list[str], c: list[str]) -> None:
    assert meet_paths(a, b) == meet_paths(b, a)
    assert meet_paths(meet_paths(a, b), c) == meet_paths(a, meet_paths(b, c))
    assert meet_paths(a, a) == join_paths(a)
    assert join_paths([*join_paths([*a, *b]), *c]) == join_paths([*a, *b, *c])


def test_a_part_inside_a_folder_is_what_is_left_of_it() -> None:
    base = SandboxSpec(filesystem=Filesystem(read=["/data"], write=["/out"]))
    left = narrow(base, Part(read=["/data/a", "/secret"], write=["/out/x"]))
    assert left.filesystem == Filesystem(read=["/data/a"], write=["/out/x"])
    assert [item.what for item in beyond(Part(read=["/data/a", "/database"], write=["/data"]), base)] == [
        "/database",
        "/data",
    ]


@pytest.mark.parametrize(("one", "other"), [("shared", "call"), ("instance", "shared"), ("shared", "instance")])
def test_a_shared_jail_is_neither_more_nor_less(one: Any, other: Any) -> None:
    assert beyond(Part(isolation=one), SandboxSpec(isolation=other)) != []
    assert narrow(SandboxSpec(isolation=other), Part(isolation=one)).isolation == other


def test_a_shared_jail_gets_no_variables() -> None:
    wide = widen(SandboxSpec(isolation="shared"), Part(env=["A"], permissions=["agents"], network="public"))
    assert (wide.env, wide.permissions, wide.network) == ([], [], "public")


def test_a_request_in_words() -> None:
    asked = SandboxSpec(
        network={"allow": ["a.example:1"]},
        filesystem=Filesystem(read=["/"], write=["/out"]),
        env=["API_KEY"],
        permissions=["agents"],
        python=PythonSpec(venv="/v"),
        limits=Limits(memory_mb=1024, processes=8),
        min_tier="reduced",
    )
    assert requested(asked) == [
        "network: a.example:1", "read: /", "write: /out", "env: API_KEY", "permission: agents", "python.venv: /v",
        "limits.memoryMb: 1024", "minTier: reduced",
    ]  # fmt: skip


def test_what_asks_for_nothing_gets_these_defaults() -> None:
    """As docs/grants.md writes them, for the manifest and for the tool host."""
    assert resources.Sandbox().javascript is None  # the manifest's alone: the kernel finds the runtime
    wanted = {
        "isolation": "instance", "network": "none", "filesystem": {"read": [], "write": []}, "env": [],
        "permissions": [], "python": {"venv": None}, "minTier": "full",
        "limits": {
            "memoryMb": 512, "processes": 64, "openFiles": 256, "fileMb": 256, "diskMb": 1024, "files": 20000,
            "cpuSeconds": 60, "wallSeconds": 120, "outputMb": 4,
        },
    }  # fmt: skip
    for spec in (SandboxSpec(), resources.Sandbox()):
        said = _said(spec)
        assert isinstance(said, dict)
        said.pop("javascript", None)
        assert said == wanted


def _said(value: object) -> object:
    if not isinstance(value, msgspec.Struct):
        return value
    return {
        key: _said(getattr(value, name))
        for name, key in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
    }
