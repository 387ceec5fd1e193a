"""Commands that look at a swarm from outside, with a kernel and without: trace, logs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest

from tests.kernel_fixture import Sandbox, sandbox


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel that the tests of this module share: none of them ends it. Each uses instances of its own."""
    with sandbox() as made:
        made.detach()
        yield made


# --- trace


def test_a_turn_is_shown_while_its_agent_lives(running: Sandbox) -> None:
    lines = '/bash__exec {"command":"sleep 0.1"}\n/no__such {}'
    sent = running.gdn("send", "main", lines, "--instance", "traced", "--json").json
    trace = running.gdn("trace", "--instance", "traced", "--json").json
    assert (trace["turnId"], trace["eventId"], trace["agent"]) == (sent["turnId"], sent["eventId"], "main")
    assert (trace["status"], trace["instanceKey"]) == ("completed", "traced")
    good, bad = trace["steps"][0]["tools"]
    assert (good["toolName"], good["status"]) == ("bash__exec", "ok")
    assert 100 <= good["durationMs"] <= trace["durationMs"]
    assert (bad["status"], bad["code"]) == ("error", "E_TOOL_NOT_IN_CATALOG")
    for name in (sent["turnId"], sent["eventId"]):
        shown = running.gdn("trace", name)
        assert (shown.status, shown.err) == (0, "")
        assert "bash__exec  ok" in shown.out
        assert "\x1b" not in shown.out
    assert json.loads(good["args"]) == {"command": "sleep 0.1"}
    assert good["output"].startswith('{"command":"sleep 0.1"')
    assert 'with {"command":"sleep 0.1"}' in running.gdn("trace", sent["turnId"]).out
    running.call("true")
    assert running.gdn("trace", "--json").json["agent"] == "_operator"
    assert running.gdn("trace", "--last", "--json").json["turnId"] == sent["turnId"]
    (row,) = running.gdn("turns", "-n", "1", "--json").json
    assert (row["turnId"], row["status"], row["total"]["agents"]) == (sent["turnId"], "completed", ["main"])
    assert row["message"] == lines
    assert running.gdn("turns").out.splitlines()[1].endswith('/bash__exec {"command":"sleep 0.1"} /no__such {}')
    assert running.gdn("trace", "--agent", "main/traced", "--json").json["turnId"] == sent["turnId"]
    twice = running.gdn("trace", "--agent", "main/traced", "--instance", "other", "--json")
    assert (twice.status, twice.json["error"]["code"]) == (2, "E_USAGE")
    unknown = running.gdn("trace", "t0", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_TURN_NOT_FOUND")
    both = running.gdn("trace", "t0", "--last")
    assert (both.status, "E_USAGE" in both.err) == (2, True)


def test_the_way_of_a_call_is_told_by_agent_broker_and_tool_host(running: Sandbox) -> None:
    running.gdn("send", "main", '/bash__exec {"command": "sleep 0.1"}', "--instance", "way")
    trace = running.gdn("trace", "--instance", "way", "--json").json
    (call,) = trace["steps"][0]["tools"]
    way, seen = call["way"], call["receipt"]["call"]
    there, back = way["passedUs"]
    ended = seen["beganUs"] + seen["wallMs"] * 1000
    times = [way["sentUs"], there, seen["cameUs"], seen["beganUs"], ended, back, way["gotUs"]]
    # In the order of the way. The broker notes when its round began, which may be a little before a frame of the round.
    assert all(before <= after + 50_000 for before, after in itertools.pairwise(times)), times
    assert way["sentUs"] <= seen["cameUs"] <= seen["beganUs"] <= ended <= way["gotUs"]
    assert way["gotUs"] - way["sentUs"] >= 100_000
    assert 100 <= seen["handlerMs"] <= seen["wallMs"]
    lines = running.gdn("trace", "--instance", "way", "--waterfall").out.splitlines()
    names = [line.strip().partition("  ")[0] for line in lines]
    assert names == [
        "bash__exec",
        "agent to broker",
        "broker to tool host",
        "tool host, until the jail has it",
        "jail",
        "its handler, as it says",
        "tool host to broker",
        "broker to agent",
    ]


def test_an_operator_call_can_be_traced(running: Sandbox) -> None:
    running.call("exit 3", "--instance", "op")
    trace = running.gdn("trace", "--instance", "op", "--json").json
    assert [call["toolName"] for call in trace["steps"][0]["tools"]] == ["bash__exec"]


# --- logs


def test_logs_are_merged_labelled_and_steer_no_terminal(running: Sandbox) -> None:
    running.call("printf 'evil \\033]0;x\\007\\n' >&2; kill -9 $PPID", "--instance", "logs")
    shown = running.gdn("logs", "--lines", "1000")
    assert (shown.status, shown.err) == (0, "")
    assert {"supervisor"} <= {line.split()[2] for line in shown.out.splitlines()}
    assert " ready" in shown.out
    assert all(line.replace("\t", " ").isprintable() for line in shown.out.splitlines())
    assert len(running.gdn("logs", "--lines", "1").out.splitlines()) == 1
    only = running.gdn("logs", "--role", "agent").out
    assert "supervisor" not in only
    assert running.gdn("logs", "--role", "nobody").status == 2


def test_logs_follow_what_is_written_and_logs_that_come_later() -> None:
    with sandbox() as made:
        empty = made.gdn("logs")
        assert (empty.status, empty.out) == (0, "")
        assert "nothing in" in empty.err
        process = made.popen("logs", "-f")
        assert process.stdout is not None
        made.detach()
        seen = b""
        while b"supervisor   ready" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        assert made.gdn("stop").status == 0
        while b"stopping" not in seen:
            seen += process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=30) == 141  # its reader has gone, though nothing more is written
