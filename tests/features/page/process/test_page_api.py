"""What the page's scripts ask of a real kernel: what happens, runs, logs, grants; of the caller's agents alone."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.features.serve.doors import LINES, LOOK, OPERATE
from tests.features.serve.process.test_gdn_serve import door
from tests.features.serve.streams import events
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

TWO = BUNDLE.replace("agents: [{ref: Agent/main}]", "agents: [{ref: Agent/main}, {ref: Agent/other}]").replace(
    "---\napiVersion: goondan.ai/v1\nkind: Swarm",
    """---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec: {modelConfig: {modelRef: Model/console}}
---
apiVersion: goondan.ai/v1
kind: Swarm""",
)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox(TWO) as made:
        (made.home / "tokens").write_text(LINES)
        (made.home / "tokens").chmod(0o600)
        made.detach()
        yield made


@pytest.fixture(scope="module")
def port(kernel: Sandbox) -> Iterator[int]:
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
        yield told["port"]


@contextmanager
def asked(port: int, path: str, token: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=40)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def ask(port: int, path: str, token: str = OPERATE, body: Any = None) -> tuple[int, Any]:
    with asked(port, path, token, body) as answer:
        return answer.status, json.loads(answer.read())


def send(port: int, agent: str, text: str) -> dict[str, Any]:
    status, told = ask(port, "/api/v1/messages", OPERATE, {"text": text, "agent": agent, "instance": "page"})
    assert status == 200, told
    found: dict[str, Any] = told
    return found


@contextmanager
def listening(port: int, token: str) -> Iterator[list[Any]]:
    """What a reader has heard: events, and the word gap."""
    heard: list[Any] = []
    with asked(port, "/page/api/live", token) as answer:
        sock = socket.socket(fileno=os.dup(answer.fileno()))
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")

        def read() -> None:
            with suppress(OSError, http.client.HTTPException):  # it is over
                for event in events(answer):
                    heard.extend(event.data if event.kind == "batch" else [event.kind])

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        yield heard
        with sock:
            sock.shutdown(socket.SHUT_RDWR)
        reading.join(20)


def until(heard: list[Any], wanted: Callable[[Any], bool]) -> None:
    wait_until(lambda: any(map(wanted, [*heard])), what="it is heard")


def is_over(event_id: str) -> Callable[[Any], bool]:
    return lambda one: one != "gap" and one["eventId"] == event_id and one["kind"] == "event.ended"


def test_live_is_of_the_callers_agents_and_goes_on_over_a_restart(kernel: Sandbox, port: int) -> None:
    with listening(port, LOOK) as mine, listening(port, OPERATE) as every:
        hidden, shown = send(port, "other", "a secret"), send(port, "main", "hello")
        until(mine, is_over(shown["eventId"]))
        until(every, is_over(hidden["eventId"]))
        assert {one["agent"] for one in mine} == {"main"} and "gap" not in every
        assert {one["agent"] for one in every} == {"main", "other"}
        kinds = [one["kind"] for one in mine]
        assert kinds[0] == "event.accepted" and kinds[-1] == "event.ended"
        said = next(one for one in mine if one["kind"] == "turn.started")
        assert (said["instance"], said["traceId"]) == ("page", shown["traceId"]) and said["at"] > 1e12
        numbers = [one["n"] for one in every]
        assert numbers == sorted(numbers)

        assert kernel.gdn("restart").status == 0
        until(mine, lambda one: one == "gap")
        again = send(port, "main", "again")
        until(mine, is_over(again["eventId"]))
        gaps = mine.count("gap")
        kernel.gdn("stop")
        wait_until(lambda: mine.count("gap") == gaps + 1, what="the end is a gap")
        kernel.detach()
        wait_until(lambda: mine.count("gap") == gaps + 2, what="the next kernel is one")
        later = send(port, "main", "later")
        until(mine, is_over(later["eventId"]))


def test_runs_and_their_details(port: int) -> None:
    hidden, shown = send(port, "other", "hidden"), send(port, "main", "run")
    status, page = ask(port, "/page/api/runs?limit=1", LOOK)
    assert status == 200 and page["rows"][0][2:] == [
        shown["traceId"], shown["turnId"], shown["eventId"], "main", "page",
    ]  # fmt: skip
    assert page["before"] == page["rows"][0][0] and page["total"] >= 1
    found = ask(port, "/page/api/runs", OPERATE)[1]["rows"]
    assert [row[5] for row in found[:2]] == ["main", "other"]
    turns = [hidden["turnId"], shown["turnId"]]
    status, told = ask(port, "/page/api/runs/details", LOOK, {"turns": turns})
    (turn,) = told["turns"]
    assert status == 200 and turn["turnId"] == shown["turnId"] and "total" in turn and not turn.get("steps")
    assert len(ask(port, "/page/api/runs/details", OPERATE, {"turns": turns})[1]["turns"]) == 2
    assert ask(port, "/page/api/runs/details", LOOK, {"turns": ["t"] * 101})[0] == 400
    assert ask(port, "/page/api/runs?limit=5001", LOOK)[0] == 400


def test_lines_of_logs_of_an_agent_that_the_token_leads_to(port: int) -> None:
    where = "agent=main&instance=page"
    assert ask(port, f"/page/api/logs?{where}&from=0&to=9e15", LOOK)[0] == 200
    assert ask(port, "/page/api/logs?agent=other&instance=page&from=0&to=9e15", LOOK)[0] == 403


def test_a_grant_needs_a_token_that_operates_for_all_agents(kernel: Sandbox, port: int) -> None:
    (kernel.home / "tokens").write_text(LINES + "some operate some-operate-0123456789 main\n")
    wait_until(lambda: ask(port, "/page/api/grants", "some-operate-0123456789", {"tool": "x"})[0] != 401, what="it")
    status, told = ask(port, "/page/api/grants", "some-operate-0123456789", {"tool": "@a/b/c"})
    assert status == 403 and "for all agents" in told["detail"]
    assert ask(port, "/page/api/grants", LOOK, {"tool": "@a/b/c"})[0] == 403
    status, told = ask(port, "/page/api/grants", OPERATE, {"tool": "@a/b/c"})
    assert status == 400 and "no packaged tool" in told["detail"]
