"""Which servers a tool host asks by the handshake first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ServerSpec, ToolSpec
from goondan.toolhost.jails import server_jail
from goondan.toolhost.jails.server_jail import Eras


def _server(name: str, digest: str = "d") -> ToolSpec:
    server = ServerSpec(extension=name, transport="stdio", command=["x"], digest=digest)
    return ToolSpec(name=name, entry="", root="/x", exports=[], server=server)


def test_a_server_that_ended_at_the_first_question_is_asked_otherwise_until_that_fails_too() -> None:
    known, server = Eras(), _server("a")
    assert not known.handshake_first(server)
    known.ended_early(server)
    assert known.handshake_first(server)
    known.ended_early(server)
    assert not known.handshake_first(server)


def test_another_command_under_the_same_name_is_another_server() -> None:
    known = Eras()
    known.ended_early(_server("a"))
    assert not known.handshake_first(_server("a", "e"))
    assert not known.handshake_first(replace(_server("b"), name="b"))


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_jail, "MAX_KNOWN", 2)
    known = Eras()
    for name in "abc":
        known.ended_early(_server(name))
    assert [known.handshake_first(_server(name)) for name in "abc"] == [False, True, True]
