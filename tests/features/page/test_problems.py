"""The one line of the page when something is wrong: which one, in which order, and what it says to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from tests.node_fixture import node

FILES: Final = Path(__file__).parents[3] / "features" / "page" / "door" / "files"
MINUTE: Final = 60_000
AT: Final = 1_000 * MINUTE
TURN: Final = {"agent": "main", "instanceKey": "k", "eventId": "e/1"}
SCRIPT: Final = """
const { problems } = await import(process.argv[1]);
console.log(JSON.stringify(JSON.parse(process.argv[2]).map(problems)));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node")


def told(*seen: dict[str, Any]) -> list[list[dict[str, str]]]:
    """What is wrong with each of what was seen at AT."""
    given = json.dumps([{"at": AT} | one for one in seen])
    modules = ("--experimental-default-type=module", "--no-warnings", "--input-type=module")
    ended = node(*modules, "-e", SCRIPT, FILES / "problems.js", given)
    assert ended.returncode == 0, ended.stderr
    found: list[list[dict[str, str]]] = json.loads(ended.stdout)
    return found


def waits(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"waits": [TURN | row for row in rows], "turns": [TURN], "cycles": [], "stuck": [], "more": 0} | more


def process(**more: Any) -> dict[str, Any]:
    row = {"role": "agent", "name": "main", "instanceKey": "k", "pid": 7, "status": "running", "restarts": 0}
    return row | {"since": "1970-01-01T16:39:00Z", "lastExit": None} | more


def budget(spent: float, ended_ms: int | None = None) -> dict[str, Any]:
    account = {"agent": "lead", "limits": {"calls": 20, "tokens": 900}, "spent": {"calls": spent, "tokens": 3}}
    return {"trees": [{"rootEvent": "r1", "endedMs": ended_ms, "budgets": [account]}]}


LETTER: Final = {**TURN, "cause": "E_AGENT_FAILED: exit 3", "endedMs": AT}
GATE: Final = {"about": "gates", "text": "the server of Model/m: at most 2 at once", "refusingMs": 0}


def test_when_nothing_is_wrong_nothing_is_said() -> None:
    busy = waits(
        {"kind": "tool", "tools": ["bash__exec"], "host": True, "forMs": 9 * MINUTE},
        {"kind": "answer", "target": "b", "targetKey": "k", "targetEventId": "e2", "forMs": 9 * MINUTE},
        {"kind": "approval", "text": "waits for a person", "forMs": 9 * MINUTE},
        {"kind": "model", "model": "m", "attempt": 1, "forMs": MINUTE - 1},
    )
    seen = {
        "waits": busy,
        "processes": [process(), process(role="broker", restarts=0)],
        "dead": {"events": [], "more": 0},
        "budgets": budget(19),
        "learned": [GATE],
        "servers": [{"server": "files", "state": "connected"}],
    }
    assert told({}, seen) == [[], []]


def test_what_is_wrong_is_said_with_what_to_do() -> None:
    cases: list[tuple[dict[str, Any], str, str, str]] = [
        ({"error": {"code": "E_KERNEL_NOT_RUNNING", "message": "x"}}, "No kernel runs", "gdn run", "#/now"),
        ({"error": {"code": "gone", "message": "It is gone", "suggestion": "do it"}}, "It is gone", "do it", "#/now"),
        (
            {"processes": [process(status="crash-loop", lastExit="exit 3", restarts=4)]},
            "main ends again and again, the last time by exit 3",
            "gdn logs --role agent-main",
            "#/now",
        ),
        (
            {"processes": [process(role="broker", name="broker", status="crash-loop")]},
            "broker",
            "--role broker",
            "#/now",
        ),
        ({"waits": waits({"kind": "disk", "agent": "", "forMs": 1})}, "waits for its disk", "make room", "#/now"),
        ({"waits": waits(cycles=[["a/k", "b/k"]])}, "a/k → b/k → a/k", "stop one", "#/now"),
        ({"waits": waits(stuck=[TURN | {"forMs": MINUTE}])}, "main/k has said nothing for 1 m 0 s", "restart", "#/now"),
        (
            {"waits": waits({"kind": "tool", "tools": ["bash__exec"], "host": False, "forMs": 1000})},
            "main/k has waited 1.00 s for a tool host that runs bash__exec",
            "gdn logs --role toolhost",
            "#/run/e%2F1",
        ),
        (
            {"waits": waits({"kind": "model", "model": "openai/m", "message": "503", "attempt": 2, "forMs": MINUTE})},
            "main/k has waited 1 m 0 s for its model openai/m, which said: 503",
            "look at its run",
            "#/run/e%2F1",
        ),
        (
            {"learned": [GATE | {"refusingMs": 2 * MINUTE}], "servers": []},
            "has refused everything for 2 m 0 s",
            "wait",
            "#/now",
        ),
        (
            {"learned": [], "servers": [{"server": "mail", "state": "login"}]},
            "mail wants a login",
            "gdn auth login mcp:mail",
            "#/now",
        ),
        (
            {"learned": [], "servers": [{"server": "f", "state": "ended", "lastError": "E_X"}]},
            "f has failed: E_X",
            "gdn mcp inspect",
            "#/now",
        ),
        (
            {"dead": {"events": [LETTER], "more": 0}},
            "A message to main/k was given up: E_AGENT_FAILED: exit 3",
            "send",
            "#/now",
        ),
        ({"dead": {"events": [LETTER], "more": 2}}, "3 messages were given up", "send them again", "#/now"),
        ({"budgets": budget(20)}, "The budget of lead is spent: 20 calls", "raise it", "#/run/r1"),
        ({"budgets": budget(20, AT - MINUTE)}, "The budget of lead is spent", "raise it", "#/run/r1"),
        ({"processes": [process(restarts=1, lastExit="killed")]}, "main was started again: killed", "nothing", "#/now"),
    ]
    for (seen, text, todo, href), [found] in zip(cases, told(*(case[0] for case in cases)), strict=True):
        assert text in found["text"], seen
        assert todo in found["todo"], seen
        assert found["href"] == href, seen


def test_what_is_over_for_long_is_not_said_any_more() -> None:
    old = process(restarts=1, since="1970-01-01T16:33:00Z")
    assert told({"budgets": budget(20, AT - 6 * MINUTE)}, {"processes": [old]}) == [[], []]


def test_what_stops_more_is_said_first() -> None:
    seen = {
        "processes": [process(restarts=1), process(role="broker", name="broker", status="crash-loop", restarts=3)],
        "dead": {"events": [LETTER], "more": 0},
        "budgets": budget(20),
        "waits": waits({"kind": "disk", "agent": "", "forMs": 1}, cycles=[["a/k"]]),
        "learned": [],
        "servers": [{"server": "mail", "state": "login"}],
    }
    [found] = told(seen)
    order = ["broker ends", "its disk", "for each other", "wants a login", "given up", "is spent", "started again"]
    assert len(found) == len(order)
    assert all(word in one["text"] for word, one in zip(order, found, strict=True))
