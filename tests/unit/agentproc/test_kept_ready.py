"""When the fork server forks an agent ahead of its request, before its warm-up is over."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from goondan.agentproc.start import forkserver
from goondan.agentproc.start.forkserver import SPARE_S, ForkServer, SpareTime
from goondan.schemas.wire.forkserver import MAX_PACKET, ForkRequest, encode_packet


class Busy(SpareTime):
    """A machine that has no processor to spare."""

    def found(self) -> bool:
        return False


class Scripted(ForkServer):
    """A fork server that is asked what a test says, and writes down how long it waits for that, and when it forks."""

    def __init__(self, server: socket.socket, *asked: str | None) -> None:
        super().__init__(server, look=lambda: Busy(idle=lambda: None))
        self._script = iter(asked)
        self._next: str | None = None
        self.told: list[Any] = []

    def _is_asked(self, within_s: float) -> bool:
        self._next = next(self._script)
        self.told.append(self._next or within_s)
        return self._next is not None

    def _answer_waiting(self) -> bool:
        if self._next == "kernel is ready":
            self._kernel_is_ready()
        return self._next != "end"

    def _prepare(self) -> None:
        self.told.append("fork")


def test_an_agent_is_kept_ready_before_the_first_request_and_not_while_a_first_turn_may_go_on() -> None:
    with socket.socket(socket.AF_UNIX) as unused:
        looks = [None] * 5
        server = Scripted(unused, "kernel is ready", "request", "request", *looks, "end")
        assert not server._answer_until_spare()
        waits = [SPARE_S * 2**number for number in range(5)]
        assert server.told == ["kernel is ready", "fork", "request", "request", *waits, "fork", "end"]


def test_who_asks_for_an_agent_of_a_broken_installation_is_told_what_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forkserver, "AGENTS", "goondan.agentproc.start.no_such_module")
    request = ForkRequest(seq=7, agent="main", instance_key="k", endpoint="ipc:///none", token="t", parent_pid=1)
    with socket.socket(socket.AF_UNIX) as unused:
        reply = ForkServer(unused).answer(encode_packet(request), ())
    message = "No module named 'goondan.agentproc.start.no_such_module'"
    assert (reply.seq, reply.error) == (7, f"agents cannot be imported: ModuleNotFoundError: {message}")
    assert message in capfd.readouterr().err

    def fails() -> None:
        raise ImportError(MAX_PACKET * "x")

    monkeypatch.setattr(forkserver, "import_agent", fails)
    with socket.socket(socket.AF_UNIX) as unused:
        assert len(encode_packet(ForkServer(unused).answer(encode_packet(request), ()))) < MAX_PACKET
