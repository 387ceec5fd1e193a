"""Twists of agents that ask each other: 001 §11, 000 §9, 002 §12.6, 003 `agents`, `handoff` and `self-restart` (as in
tests/requirements.yaml), and docs/agents.md, docs/restart.md.

One kernel for all of them. What is refused is asked for in one step of one turn, so that forty refusals cost one turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel_fixture import has_feature, sandbox
from tests.process.agent_swarm import ASKER, ASKS, Swarm, bundle, code_of, request, told
from tests.process.scripted_model import scripted_model

#: What epsilon has besides.
RESTARTS = "Tool/self-restart, " if has_feature("restart") else ""
TOOLS = "  tools: [Tool/agents, Tool/handoff, Tool/bash, Tool/asker, Tool/tool-result]\n"


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """The swarm of tests/process/agent_swarm.py, in which epsilon may restart the kernel."""
    with scripted_model() as model:
        model.otherwise = "done"
        head, _, tail = bundle(model.base).partition("metadata: {name: epsilon}")
        text = head + "metadata: {name: epsilon}" + tail.replace("Tool/asker, ", f"Tool/asker, {RESTARTS}", 1)
        with sandbox(text, {"OPENAI_API_KEY": "k"}) as kernel:
            (kernel.home / "ext").mkdir()
            for name, source in (("broken", "def register(api): pass\n"), ("asks", ASKS), ("asker", ASKER)):
                (kernel.home / "ext" / f"{name}.py").write_text(source)
            kernel.detach()
            yield Swarm(kernel, model)


#: What is asked for, by tool, and the code that answers it.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "nobody": ("agents__request", {"target": "nobody", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "case": ("agents__request", {"target": "Beta", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "reference": ("agents__request", {"target": "Agent/beta", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "kernel": ("agents__request", {"target": "orchestrator", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "operator": ("agents__request", {"target": "operator", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "long": ("agents__request", {"target": "n" * 5000, "input": "x"}, ""),
    "no-target": ("agents__request", {"input": "x"}, "E_TOOL_INVALID_ARGS"),
    "empty-target": ("agents__request", {"target": "", "input": "x"}, "E_TOOL_INVALID_ARGS"),
    "no-input": ("agents__request", {"target": "beta"}, "E_TOOL_INVALID_ARGS"),
    "number-input": ("agents__request", {"target": "beta", "input": 5}, "E_TOOL_INVALID_ARGS"),
    "object-input": ("agents__request", {"target": "beta", "input": {"a": 1}}, "E_TOOL_INVALID_ARGS"),
    "no-time": ("agents__request", {"target": "beta", "input": "x", "timeoutMs": 0}, "E_TOOL_INVALID_ARGS"),
    "time-back": ("agents__request", {"target": "beta", "input": "x", "timeoutMs": -5}, "E_TOOL_INVALID_ARGS"),
    "much-time": ("agents__request", {"target": "beta", "input": "x", "timeoutMs": 1e12}, "E_TOOL_INVALID_ARGS"),
    "word-time": ("agents__request", {"target": "beta", "input": "x", "timeoutMs": "soon"}, "E_TOOL_INVALID_ARGS"),
    "word-async": ("agents__request", {"target": "beta", "input": "x", "async": "yes"}, "E_TOOL_INVALID_ARGS"),
    "list-metadata": ("agents__request", {"target": "beta", "input": "x", "metadata": []}, "E_TOOL_INVALID_ARGS"),
    "control-key": ("agents__request", {"target": "beta", "input": "x", "instanceKey": "a\nb"}, "E_TOOL_INVALID_ARGS"),
    "nul-key": ("agents__send", {"target": "beta", "input": "x", "instanceKey": "a\x00b"}, "E_TOOL_INVALID_ARGS"),
    "long-key": ("agents__send", {"target": "beta", "input": "x", "instanceKey": "k" * 257}, "E_TOOL_INVALID_ARGS"),
    "own-type": (
        "agents__request",
        {"target": "beta", "input": "x", "eventType": "tool.completed"},
        "E_TOOL_INVALID_ARGS",
    ),
    "own-type-sent": (
        "agents__send",
        {"target": "beta", "input": "x", "eventType": "operator.call"},
        "E_TOOL_INVALID_ARGS",
    ),
    "itself": ("agents__request", {"target": "alpha", "input": "x"}, "E_AGENT_CYCLE"),
    "itself-by-key": ("agents__request", {"target": "alpha", "input": "x", "instanceKey": "refused"}, "E_AGENT_CYCLE"),
    "send-nobody": ("agents__send", {"target": "nobody", "input": "x"}, "E_AGENT_NOT_FOUND"),
    "send-no-input": ("agents__send", {"target": "beta"}, "E_TOOL_INVALID_ARGS"),
    "async-nobody": ("agents__request", {"target": "nobody", "input": "x", "async": True}, "E_AGENT_NOT_FOUND"),
    "spawn-nobody": ("agents__spawn", {"target": "nobody"}, "E_AGENT_NOT_FOUND"),
    "spawn-nothing": ("agents__spawn", {}, "E_TOOL_INVALID_ARGS"),
    "spawn-above": ("agents__spawn", {"target": "beta", "instanceKey": "r1", "cwd": ".."}, "E_FORBIDDEN"),
    "spawn-etc": ("agents__spawn", {"target": "beta", "instanceKey": "r2", "cwd": "/etc"}, "E_FORBIDDEN"),
    "spawn-around": ("agents__spawn", {"target": "beta", "instanceKey": "r3", "cwd": "a/../../.."}, ""),
    "spawn-number": ("agents__spawn", {"target": "beta", "instanceKey": "r5", "cwd": 5}, "E_TOOL_INVALID_ARGS"),
    "list-word": ("agents__list", {"includeAll": "all"}, "E_TOOL_INVALID_ARGS"),
    "hand-nothing": ("handoff__request", {"target": "beta"}, "E_TOOL_INVALID_ARGS"),
    "hand-nobody": ("handoff__request", {"target": "nobody", "payload": 1}, "E_AGENT_NOT_FOUND"),
    "hand-no-target": ("handoff__request", {"payload": {"a": 1}}, "E_TOOL_INVALID_ARGS"),
    "not-granted": ("self-restart__request", {}, "E_TOOL_NOT_IN_CATALOG"),
    "with-a-dot": ("agents.request", {"target": "beta", "input": "x"}, "E_TOOL_NOT_IN_CATALOG"),
    "no-such": ("agents__delete", {"target": "beta"}, "E_TOOL_NOT_IN_CATALOG"),
}


@pytest.fixture(scope="module")
def refusals(swarm: Swarm) -> dict[str, Any]:
    """Everything of REFUSED in one step; the turn goes on and ends as ever."""
    swarm.script("refuse me", [(name, tool, args) for name, (tool, args, _) in REFUSED.items()], "went on")
    answer = swarm.send("refuse me", "refused")
    assert (answer["status"], answer["response"]) == ("completed", "went on")
    return swarm.model.results("refuse me")


@pytest.mark.requirement("AGENTS-24")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(refusals: dict[str, Any], name: str) -> None:
    """001 §11.3: a failure is an error result with a code and what to do, of 1500 characters at most."""
    result = refusals[name]
    code = code_of(result)
    assert code == (REFUSED[name][2] or code)
    assert len(result["error"]["message"]) <= 1500
    if code == "E_AGENT_NOT_FOUND" and name != "long":
        assert "beta" in result["error"]["message"] + result["error"]["suggestion"]
    if name == "spawn-etc":
        assert "workdirs" in result["error"]["message"] + result["error"]["suggestion"]


def test_nothing_that_was_refused_has_arrived(swarm: Swarm, refusals: dict[str, Any]) -> None:
    """001 §11: a refused message is told to nobody."""
    assert refusals
    assert "x" not in swarm.model.requests


@pytest.mark.requirement("AGENTS-28", "AGENTS-29", "AGENTS-30")
def test_the_catalog_as_two_agents_see_it(swarm: Swarm) -> None:
    """003 agents__catalog, asked by the entry agent and by another: what differs is who asks."""
    names = sorted(["alpha", "beta", "gamma", "delta", "epsilon", "unfit", "wrapped", "simple"])
    for agent in ("alpha", "gamma"):
        swarm.script(f"catalog of {agent}", [("c1", "agents__catalog", {})])
        swarm.send(f"catalog of {agent}", "catalog", agent=agent)
        found = swarm.result(f"catalog of {agent}")
        assert (found["swarmName"], found["entryAgent"], found["selfAgent"]) == ("five", "alpha", agent)
        assert sorted(found["availableAgents"]) == names
        assert sorted(found["callableAgents"]) == [name for name in names if name != agent]
        assert (found["availableCount"], found["callableCount"]) == (8, 7)


@pytest.mark.requirement("AGENTS-18")
def test_metadata_and_type_arrive_as_they_were_sent(swarm: Swarm) -> None:
    """003 agents__request with a type and metadata of its own, nested and not in ASCII, and with the default type."""
    metadata = {"deep": {"list": [1, None, True]}, "이름": "값"}
    steps = [
        ("own", "agents__request", {"target": "wrapped", "input": "m1", "eventType": "my.type", "metadata": metadata}),
        ("default", "agents__request", {"target": "wrapped", "input": "m2", "metadata": {"a": 1}}),
    ]
    swarm.script("with metadata", steps)
    swarm.send("with metadata", "meta")
    assert swarm.result("with metadata", "own")["response"] == f"my.type: {metadata}"
    assert swarm.result("with metadata", "default")["response"] == "agent.request: {'a': 1}"


def test_the_same_question_twice_in_one_step(swarm: Swarm) -> None:
    """003 agents__request twice, word by word the same: two calls, two ids, two answers, in the order of the calls."""
    swarm.script("ask twice", [("a", *request("beta", "twice")[0][1:]), ("b", *request("beta", "twice")[0][1:])])
    swarm.script("twice", "an answer")
    swarm.send("ask twice", "twice")
    one, two = swarm.result("ask twice", "a"), swarm.result("ask twice", "b")
    assert [one["response"], two["response"]] == ["an answer"] * 2
    assert one["eventId"] != two["eventId"]
    assert one["correlationId"] != two["correlationId"]
    assert set(one) == {"target", "eventId", "correlationId", "accepted", "async", "response"}
    assert (one["target"], one["accepted"], one["async"]) == ("beta", True, False)


def test_one_key_remembers_and_another_does_not(swarm: Swarm) -> None:
    """003 agents__request by default key and by another one: the same key is the same conversation."""
    steps = [request("beta", "remember blue")[0]]
    swarm.script("tell first", steps)
    swarm.send("tell first", "memory")
    again = [
        ("c1", *request("beta", "which colour")[0][1:]),
        ("c2", *request("beta", "any colour", instanceKey="new")[0][1:]),
    ]
    swarm.script("ask again", again)
    swarm.send("ask again", "memory")
    assert told(swarm, "which colour") == ["remember blue", "which colour"]
    assert told(swarm, "any colour") == ["any colour"]


def test_an_agent_that_asks_itself_under_another_key(swarm: Swarm) -> None:
    """docs/agents.md, "Instances": another key is another instance, of the same agent as well."""
    swarm.script("ask myself", request("alpha", "as another", instanceKey="other-self"))
    swarm.script("as another", "I am")
    swarm.send("ask myself", "self")
    assert swarm.result("ask myself")["response"] == "I am"


def test_a_circle_of_three_and_everybody_goes_on(swarm: Swarm) -> None:
    """docs/agents.md, "Circles": who closes it is refused with the chain; the others get their answers."""
    swarm.script("three one", request("beta", "three two"), "alpha ends")
    swarm.script("three two", request("gamma", "three three"), "beta ends")
    swarm.script("three three", request("alpha", "never said"), "gamma ends")
    answer = swarm.send("three one", "circle")
    assert answer["response"] == "alpha ends"
    refused = swarm.result("three three")
    assert code_of(refused) == "E_AGENT_CYCLE"
    assert all(name in refused["error"]["message"] for name in ("alpha", "beta", "gamma"))
    assert swarm.result("three two")["response"] == "gamma ends"
    assert "never said" not in swarm.model.requests


def test_a_circle_that_is_closed_without_waiting(swarm: Swarm) -> None:
    """docs/agents.md, "Circles": `send` and `async` cannot close one."""
    swarm.script("loose one", request("beta", "loose two"), "alpha ends")
    loose = [
        ("c1", "agents__send", {"target": "alpha", "input": "loose three"}),
        ("c2", "agents__request", {"target": "alpha", "input": "loose four", "async": True}),
    ]
    swarm.script("loose two", loose, "beta ends")
    swarm.script("loose three", "heard")
    swarm.script("loose four", "heard")
    assert swarm.send("loose one", "loose")["response"] == "alpha ends"
    sent, asked = swarm.result("loose two", "c1"), swarm.result("loose two", "c2")
    assert set(sent) == {"target", "eventId", "accepted", "sent"}
    assert (sent["accepted"], sent["sent"]) == (True, True)
    assert (asked["accepted"], asked["async"], asked["response"]) == (True, True, None)


def test_an_answer_that_does_not_come_in_time(swarm: Swarm) -> None:
    """003 timeoutMs: an error for who asks, who goes on and can ask again, behind the work that goes on."""
    swarm.script("hurry", request("delta", "slow work", timeoutMs=300), request("delta", "quick work"), "went on")
    swarm.script("slow work", [("s", "bash__exec", {"command": "sleep 1"})], "slow")
    swarm.script("quick work", "quick")
    swarm.model.by_first = True
    try:
        assert swarm.send("hurry", "hurry")["response"] == "went on"
    finally:
        swarm.model.by_first = False
    results = [m["content"] for m in swarm.model.requests["hurry"][-1]["messages"] if m["role"] == "tool"]
    assert json.loads(results[0])["error"]["code"] == "E_AGENT_TIMEOUT"
    assert json.loads(results[1])["response"] == "quick"


def test_two_asynchronous_answers_in_one_conversation(swarm: Swarm) -> None:
    """003 async twice, to two agents: acknowledged at once, and both answers are told before the turn ends."""
    steps = [
        ("a", *request("beta", "late one", **{"async": True})[0][1:]),
        ("b", *request("gamma", "late two", **{"async": True})[0][1:]),
    ]
    wait = [("w", "bash__exec", {"command": "sleep 0.6"})]
    swarm.script("two late", steps, wait, "all there", "all there")
    swarm.script("late one", "first answer")
    swarm.script("late two", "second answer")
    swarm.model.by_first = True
    try:
        answer = swarm.send("two late", "late")
    finally:
        swarm.model.by_first = False
    assert answer["status"] == "completed"
    said = " ".join(told(swarm, "two late"))
    assert "first answer" in said
    assert "second answer" in said


@pytest.mark.requirement("AGENTS-23", "AGENTS-26", "AGENTS-27")
def test_spawned_instances_and_who_sees_them(swarm: Swarm) -> None:
    """003 spawn and list: the default key, one of its own, a second time, a folder; own ones, and all of them."""
    swarm.script(
        "spawn them",
        [("mkdir", "bash__exec", {"command": "mkdir -p sub/dir"})],
        [
            ("default", "agents__spawn", {"target": "beta"}),
            ("keyed", "agents__spawn", {"target": "beta", "instanceKey": "task-42", "cwd": "sub/dir"}),
        ],
        [
            ("again", "agents__spawn", {"target": "beta", "instanceKey": "task-42"}),
            ("own", "agents__list", {}),
            ("all", "agents__list", {"includeAll": True}),
        ],
    )
    swarm.send("spawn them", "spawner")
    found = {name: swarm.result("spawn them", name) for name in ("default", "keyed", "again", "own", "all")}
    assert found["default"] == {"target": "beta", "instanceKey": "spawner", "spawned": True, "cwd": None}
    assert (found["keyed"]["instanceKey"], found["keyed"]["spawned"]) == ("task-42", True)
    assert found["keyed"]["cwd"].endswith("/sub/dir")
    assert found["again"]["spawned"] is False
    own = {one["instanceKey"]: one for one in found["own"]["agents"]}
    assert set(own) == {"spawner", "task-42"}
    assert found["own"]["count"] == 2
    for one in own.values():
        assert (one["target"], one["ownerAgent"], one["ownerInstanceKey"]) == ("beta", "alpha", "spawner")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["createdAt"])
        assert set(one) == {"target", "instanceKey", "ownerAgent", "ownerInstanceKey", "createdAt", "cwd"}
    assert found["all"]["count"] == len(found["all"]["agents"]) >= 3
    swarm.script("not mine", [("c1", "agents__list", {})])
    swarm.send("not mine", "someone-else", agent="gamma")
    assert swarm.result("not mine") == {"count": 0, "agents": []}


def test_a_folder_that_is_made_after_the_spawn(swarm: Swarm) -> None:
    """003 spawn with a `cwd` that is not there yet: calls there fail, with a code, until somebody has made it."""
    spawn = ("s", "agents__spawn", {"target": "delta", "instanceKey": "early", "cwd": "later/made"})
    ask = [(f"r{n}", *request("delta", f"work there {n}", instanceKey="early")[0][1:]) for n in range(2)]
    make = ("m", "bash__exec", {"command": "mkdir -p later/made"})
    swarm.script("spawn early", [spawn], [ask[0]], [make], [ask[1]])
    for n in range(2):
        swarm.script(f"work there {n}", [(f"b{n}", "bash__exec", {"command": "pwd"})], "tried")
    assert swarm.send("spawn early", "early")["status"] == "completed"
    assert swarm.result("spawn early", "s")["cwd"].endswith("/later/made")
    assert code_of(swarm.result("work there 0", "b0")) == "E_SANDBOX_DENIED"
    assert swarm.result("work there 1", "b1")["stdout"].endswith("/later/made\n")


@pytest.mark.parametrize("payload", ["a text", {"topic": "x", "n": [1]}, None, False, 0, ""])
def test_payloads_of_a_handoff(swarm: Swarm, payload: Any) -> None:
    """000 §9 with each kind of JSON value: pending with a handle at once, for an agent that knows no handoff."""
    said = f"hand over {payload!r}"
    swarm.script(said, [("c1", "handoff__request", {"target": "simple", "payload": payload})], "handed over")
    swarm.send(said, f"hand{abs(hash(str(payload)))}")
    result = swarm.result(said)
    assert result["status"] == "pending"
    assert result["handle"].startswith("handoff:")


def test_an_asynchronous_question_of_an_operator(swarm: Swarm) -> None:
    """docs/agents.md: `gdn call` has no conversation that an answer could come to."""
    args = json.dumps({"target": "beta", "input": "x", "async": True})
    done = swarm.kernel.gdn("call", "agents__request", args, "--json")
    assert done.status != 0
    assert "E_USAGE" in done.out + done.err


@pytest.mark.feature("restart")
def test_restarts_asked_for_in_every_way(swarm: Swarm) -> None:
    """003 self-restart: a reason that is no text is refused, a broken bundle changes nothing, the same wish twice in a
    step restarts once, and the turn goes on behind it.
    """
    swarm.script(
        "break it",
        [("number", "self-restart__request", {"reason": 5}), ("broken", "self-restart__request", {"reason": "r"})],
        "not restarted",
    )
    whole = swarm.kernel.bundle.read_text()
    began = swarm.kernel.times_ready("broker")
    swarm.kernel.bundle.write_text(whole + "---\nkind: Nonsense\n")
    assert swarm.send("break it", "restarts", agent="epsilon")["response"] == "not restarted"
    assert code_of(swarm.result("break it", "number")) == "E_TOOL_INVALID_ARGS"
    assert swarm.result("break it", "broken")["status"] == "error"
    assert swarm.kernel.times_ready("broker") == began
    swarm.kernel.bundle.write_text(whole)
    swarm.script(
        "do it",
        [("one", "self-restart__request", {}), ("two", "self-restart__request", {"reason": "설정 업데이트"})],
        "went on",
    )
    answer = swarm.send("do it", "restarts", agent="epsilon")
    assert answer["response"] == "went on"
    assert swarm.result("do it", "one") == {"ok": True, "restartRequested": True, "restartReason": "tool:self-restart"}
    assert swarm.result("do it", "two") == {"ok": True, "restartRequested": True, "restartReason": "설정 업데이트"}
    assert swarm.kernel.times_ready("broker") == began + 1
