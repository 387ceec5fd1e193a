"""What users of other agent teams report, and what must not happen here: one test for each report.

1. A message was "sent", and dropped.
2. A message arrived without its body.
3. A message to an agent that had ended was lost, and nobody was told.
4. Agents that had finished never ended.
5. A team that could not be had was quietly played by a single agent.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel_fixture import wait_until
from tests.process.agent_swarm import Swarm, all_requests, asking_swarm, code_of, pid_of, request


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """One for all: each test has words and instances of its own."""
    with asking_swarm() as made:
        yield made


def send(target: str, said: str, call: str = "c1") -> tuple[str, str, dict[str, Any]]:
    """A call that sends without waiting."""
    return (call, "agents__send", {"target": target, "input": said})


@pytest.mark.requirement("AGENTS-09", "AGENTS-20")
def test_report_1_a_message_that_was_sent_is_not_dropped(swarm: Swarm) -> None:
    """Each `sent: true` gets its turn, though the broker is killed at once; and no more than one."""
    words = [f"news {number}" for number in range(12)]
    for said in words:
        swarm.script(said, "noted")
    swarm.script("tell it all", [send("beta", said, f"c{number}") for number, said in enumerate(words)], "told")
    assert swarm.send("tell it all", "dropped")["response"] == "told"
    (broker,) = [row["pid"] for row in swarm.kernel.ps() if row["role"] == "broker"]
    os.kill(broker, signal.SIGKILL)
    told = swarm.model.results("tell it all")
    for number in range(len(words)):
        result = told[f"c{number}"]
        assert result == {"target": "beta", "eventId": result["eventId"], "accepted": True, "sent": True}
    wait_until(lambda: set(words) <= swarm.model.requests.keys(), what="a turn for every message")
    swarm.script("and now", "done")
    swarm.send("and now", "dropped", agent="beta")  # it waits behind them
    assert {said: len(swarm.model.requests[said]) for said in words} == dict.fromkeys(words, 1)
    asked = [m["content"] for m in swarm.model.requests["and now"][0]["messages"] if m["role"] == "user"]
    assert asked == [*words, "and now"], "and in the order in which they were sent"


def test_report_2_a_message_arrives_with_its_body(swarm: Swarm) -> None:
    """As it was written: long, in several lines, in other scripts; also what is handed over, and the answer."""
    body = "한국어 \u202e and a tab\t, quotes \" ' and \\ and {braces}\n\n" + "line\n" * 60_000 + "the end"
    payload = {"list": [1, 2.5, None, True], "text": "two\nlines", "deep": {"a": {"b": "c"}}}
    handed = ("c2", "handoff__request", {"target": "gamma", "payload": payload})
    swarm.model.otherwise, swarm.model.by_first = "noted", True
    swarm.script("give it", [*request("beta", body), handed], "given")
    swarm.script(body, f"answer to: {body}")
    swarm.send("give it", "body")
    assert swarm.result("give it")["response"] == f"answer to: {body}"
    assert swarm.model.requests[body][0]["messages"][-1]["content"] == body
    gotten = wait_until(
        lambda: [r for r in all_requests(swarm) if '"deep": {"a"' in str(r["messages"][-1]["content"])], what="the work"
    )
    assert json.loads(gotten[0]["messages"][-1]["content"]) == payload


@pytest.mark.requirement("AGENTS-07", "AGENTS-21")
def test_report_3_a_message_to_an_agent_that_has_ended_is_not_lost(swarm: Swarm) -> None:
    swarm.script("hello", "hi")
    swarm.send("hello", "ended", agent="beta")
    wait_until(lambda: pid_of(swarm, "beta", "ended") is None, what="the end of an idle agent")
    swarm.script("tell beta", [send("beta", "something new")], "told")
    swarm.script("something new", "noted")
    assert swarm.send("tell beta", "ended")["response"] == "told"
    wait_until(lambda: "something new" in swarm.model.requests, what="the turn of the message")
    asked = swarm.model.requests["something new"][0]["messages"]
    assert [m["content"] for m in asked if m["role"] == "user"] == ["hello", "something new"], "with its history"


def test_report_4_an_agent_that_has_finished_ends(swarm: Swarm) -> None:
    """The one that asked, the one that was asked, and what ran in their jails."""
    swarm.script("work", request("beta", "work on"), "finished")
    swarm.script("work on", [("b1", "bash__exec", {"command": "sleep 600 >/dev/null 2>&1 & echo started"})], "done")
    assert swarm.send("work", "finished")["response"] == "finished"
    wait_until(lambda: pid_of(swarm, "beta", "finished") is None, what="the end of the one that was asked")
    wait_until(lambda: pid_of(swarm, "alpha", "finished") is None, what="the end of the one that asked")
    assert "sleep 600" not in " ".join(swarm.kernel.processes().values())
    why = swarm.kernel.gdn("ps", "--why", "--json").json
    assert "finished" not in json.dumps(why), "nothing waits for them"


@pytest.mark.requirement("AGENTS-05", "AGENTS-08", "AGENTS-14")
def test_report_5_nobody_stands_in_for_an_agent_that_cannot_be_had(swarm: Swarm) -> None:
    """What is asked of one is answered by that one, or is an error that says so; never by another in its name."""
    asks = [
        *request("beta", "who are you"),
        ("c2", "agents__request", {"target": "unfit", "input": "be there"}),
        ("c3", "agents__request", {"target": "ghost", "input": "be there"}),
    ]
    swarm.script("ask three", asks, "asked")
    swarm.script("who are you", "beta, of course")
    swarm.send("ask three", "alone")
    results = swarm.model.results("ask three")
    assert results["c1"]["response"] == "beta, of course"
    system = {m["content"] for m in swarm.model.requests["who are you"][0]["messages"] if m["role"] == "system"}
    assert system == {"You are beta."}
    assert (code_of(results["c2"]), code_of(results["c3"])) == ("E_AGENT_SPAWN_FAILED", "E_AGENT_NOT_FOUND")
    assert "agent 'unfit'" in results["c2"]["error"]["message"]
    assert "be there" not in swarm.model.requests, "nobody else was asked what they were to be asked"
