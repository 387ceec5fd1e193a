"""Commands that look at a swarm from outside, with a kernel and without: trace, logs, doctor."""

from __future__ import annotations

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
    unknown = running.gdn("trace", "t0", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_TURN_NOT_FOUND")
    both = running.gdn("trace", "t0", "--last")
    assert (both.status, "E_USAGE" in both.err) == (2, True)


def test_an_operator_call_can_be_traced(running: Sandbox) -> None:
    running.call("exit 3", "--instance", "op")
    trace = running.gdn("trace", "--instance", "op", "--json").json
    assert [call["toolName"] for call in trace["steps"][0]["tools"]] == ["bash__exec"]
