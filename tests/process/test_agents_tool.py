"""The bundled tool `agents` through the real kernel: agents that ask each other, and what goes wrong between them."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernel_fixture import wait_until
from tests.process.agent_swarm import Swarm, all_requests, asking_swarm, code_of, pid_of, request, told, waits


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """One for all: each test has words and instances of its own."""
    with asking_swarm() as made:
        yield made


@pytest.mark.requirement("AGENTS-01", "AGENTS-08", "AGENTS-14", "IPC-04", "IPC-05", "IPC-06")
def test_an_agent_asks_another_and_gets_its_answer(swarm: Swarm) -> None:
    swarm.script("ask beta", request("beta", "what is it"), "beta says it")
    swarm.script("what is it", "a thing")
    sent = swarm.send("ask beta", "one")
    assert sent["response"] == "beta says it"
    result = swarm.result("ask beta")
    assert result == {
        "target": "beta",
        "eventId": result["eventId"],
        "correlationId": f"corr:{result['eventId']}",
        "accepted": True,
        "async": False,
        "response": "a thing",
    }
    assert result["eventId"].startswith(f"{sent['turnId']}/c1~"), "the turn that asks can be found from the question"


@pytest.mark.requirement("AGENTS-04", "HANDOFF-04")
def test_one_trace_goes_through_all_that_is_asked_sent_and_handed_over(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.model, "otherwise", "heard it")  # says the turn that the answer to the handoff begins
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    handed = ("c3", "handoff__request", {"target": "delta", "payload": "traced handoff"})
    sends = ("c2", "agents__send", {"target": "gamma", "input": "traced news"})
    swarm.script("trace this", [*request("beta", "traced part"), sends, handed], "done")
    swarm.script("traced part", request("gamma", "traced deep", instanceKey="deep"), "part")
    for said in ("traced deep", "traced news"):
        swarm.script(said, "yes")
    go = waits(swarm, "traced handoff", "traced", agent="delta", answer="yes")  # until the turn that asked has ended
    words = ("alpha", "trace this", "--instance", "traced", "--trace-id", trace)
    sent = swarm.kernel.gdn("send", *words, "--json").json
    assert (sent["response"], sent["traceId"]) == ("done", trace)
    go().touch()

    def told() -> Any:
        shown = swarm.kernel.gdn("trace", trace, "--json").json
        return shown if shown.get("status") == "completed" and len(turns_of(shown["turns"])) >= 6 else None

    tree = wait_until(told, what="the turns that nobody waited for")
    (alpha,) = tree["turns"]
    calls = {call["toolCallId"]: call for call in alpha["steps"][0]["tools"]}
    (beta,) = calls["c1"]["turns"]
    (gamma,) = beta["steps"][0]["tools"][0]["turns"]
    (news,) = calls["c2"]["turns"]
    assert [(turn["agent"], turn["instanceKey"]) for turn in (alpha, beta, gamma, news)] == [
        *(("alpha", "traced"), ("beta", "traced"), ("gamma", "deep"), ("gamma", "traced"))
    ]
    # the answer to the handoff has a turn of its own below the call: the turn that asked had ended
    assert [turn["agent"] for turn in calls["c3"]["turns"]] == ["delta", "alpha"]
    assert {turn["traceId"] for turn in turns_of(tree["turns"])} == {trace}
    assert beta["parentSpanId"] == calls["c1"]["spanId"]
    assert alpha["waits"]["agentsMs"] >= gamma["durationMs"] > 0
    assert alpha["workMs"] < alpha["durationMs"]
    found = swarm.kernel.gdn("trace", f"corr:{beta['eventId']}", "--json").json
    assert (found["turnId"], found["traceId"]) == (beta["turnId"], trace)
    assert swarm.kernel.gdn("trace", trace).out.count("turn t") == len(turns_of(tree["turns"]))


def turns_of(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All turns of a tree."""
    found = list(turns)
    for turn in found:
        found += turn.get("turns", [])
        found += [asked for step in turn["steps"] for call in step.get("tools", []) for asked in call.get("turns", [])]
    return found


@pytest.mark.requirement("AGENTS-16", "AGENTS-17")
@pytest.mark.parametrize("killed", ["nobody", "asker", "asked", "broker"])
def test_work_that_takes_longer_goes_on_and_its_answer_comes_as_a_message_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    key, work, said = f"slow-{killed}", f"be slow {killed}", f"ask slow {killed}"
    go = waits(swarm, work, key, answer=f"late {killed}")
    command = "touch went-on; while [ ! -e go ]; do sleep 0.02; done"
    swarm.script(said, request("beta", work, timeoutMs=300), [("c2", "bash__exec", {"command": command})], "went on")
    monkeypatch.setattr(swarm.model, "by_first", True)
    monkeypatch.setattr(swarm.model, "otherwise", "heard it")
    sending = swarm.kernel.popen("send", "alpha", said, "--instance", key, "--json")
    pattern = f"state/workspaces/*/instances/alpha/{key}/workspace/went-on"
    went_on = wait_until(lambda: next(swarm.kernel.home.glob(pattern), None), what="the asker's next step")
    gate, result = go(), swarm.result(said)
    assert code_of(result) == "E_AGENT_TIMEOUT"
    assert "did not answer within 300 ms. It works on; its answer will come as a message" in result["error"]["message"]
    if killed != "nobody":
        rows = {(row["name"], row["instanceKey"]): row["pid"] for row in swarm.kernel.ps()}
        agents = {"asker": "alpha", "asked": "beta"}
        os.kill(rows[agents[killed], key] if killed in agents else swarm.kernel.pid("broker"), signal.SIGKILL)
    gate.touch()
    wait_until(lambda: len(swarm.model.requests[work]) >= 2, what="the end of the work")
    (went_on.parent / "go").touch()
    assert json.loads(sending.communicate(timeout=30)[0])["status"] == "completed"
    answers = rf"The answer of agent beta to your request \S+ is here:\nlate {killed}"
    wait_until(lambda: any(re.fullmatch(answers, text) for text in told(swarm, said)), what=answers)
    swarm.send("once more", key)
    assert len([text for text in told(swarm, said) if re.fullmatch(answers, text)]) == 1, "told, and once"


@pytest.mark.parametrize("mib", [10, 20])
def test_much_too_large_input_is_one_clear_error(swarm: Swarm, mib: int) -> None:
    call = {"id": "1", "tool": "agents__request", "args": {"target": "beta", "input": "x" * (mib << 20)}}
    called = swarm.kernel.gdn("call", "--batch", "-", input=json.dumps(call) + "\n")
    result = json.loads(called.out)["result"]
    assert (result["status"], result["error"]["code"]) == ("error", "E_FRAME_TOO_LARGE")
    assert "Write the content to a file" in result["error"]["suggestion"]
    assert len(result["error"]["message"]) < 1500


def test_a_caller_that_is_killed_gets_the_stored_answer(swarm: Swarm) -> None:
    go = waits(swarm, "take your time", "killed", answer="it took a while")
    swarm.script("ask and die", request("beta", "take your time"), "alive")
    sending = swarm.kernel.popen("send", "ask and die", "--instance", "killed", "--json")
    gate = go()
    pid = pid_of(swarm, "alpha", "killed")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    gate.touch()
    out, err = sending.communicate(timeout=30)
    assert json.loads(out)["response"] == "alive", err
    assert swarm.result("ask and die")["response"] == "it took a while"
    assert len(swarm.model.requests["take your time"]) == 2, "the agent that was asked worked once, in two steps"


def test_turn_and_step_middleware_ask_also_after_a_kill(swarm: Swarm) -> None:
    go = waits(swarm, "middleware asks", "w-mw", answer="an opinion")
    swarm.script("an opinion", [("c1", "agents__catalog", {})], "heard it")
    swarm.script("step 0 ended", "noted")
    swarm.script("step 1 ended", "noted")
    sending = swarm.kernel.popen("send", "wrapped", "be careful", "--instance", "w", "--json")
    gate = go()
    pid = pid_of(swarm, "wrapped", "w")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid_of(swarm, "wrapped", "w") not in (None, pid), what="the process that resumes the turn")
    gate.touch()
    out, err = sending.communicate(timeout=30)
    assert json.loads(out)["response"] == "heard it", err
    assert len(swarm.model.requests["middleware asks"]) == 2, "the agent that was asked worked once, in two steps"
    wait_until(lambda: "step 1 ended" in swarm.model.requests, what="what step middleware has sent")
    assert len(swarm.model.requests["step 0 ended"]) == 1


def test_an_operator_can_call_it(swarm: Swarm) -> None:
    swarm.script("from outside", "heard")
    args = json.dumps({"target": "beta", "input": "from outside"})
    called = swarm.kernel.gdn("call", "agents__request", args, "--json").json
    assert (called["status"], called["output"]["response"]) == ("ok", "heard")


def test_a_cancelled_caller_takes_its_request_with_it(swarm: Swarm) -> None:
    go = waits(swarm, "work for nobody", "cancelled")
    swarm.script("ask and be cancelled", request("beta", "work for nobody"), "never")
    sending = swarm.kernel.popen("send", "ask and be cancelled", "--instance", "cancelled", "--json")
    go()
    cancelled = swarm.kernel.gdn("cancel", "--agent", "alpha", "--instance", "cancelled", "--json")
    assert cancelled.status == 0, cancelled.err
    assert json.loads(sending.communicate(timeout=30)[0])["error"]["code"] == "E_CANCELLED"
    wait_until(lambda: pid_of(swarm, "beta", "cancelled") is None, what="the end of the agent that was asked")
    assert len(swarm.model.requests["work for nobody"]) == 1, "it was not asked for its next step"


# --- without waiting


@pytest.mark.requirement("AGENTS-15", "AGENTS-16")
def test_an_answer_that_comes_during_the_turn_is_in_its_next_model_call(swarm: Swarm) -> None:
    gate = "while [ ! -e go ]; do sleep 0.02; done; sleep 0.5"
    asks = [
        ("c1", "agents__request", {"target": "beta", "input": "quick one", "async": True}),
        ("c2", "agents__request", {"target": "gamma", "input": "quick two", "async": True}),
        ("c3", "bash__exec", {"command": gate}),
    ]
    swarm.model.by_first = True
    swarm.script("ask both", asks, "first words", "last words")
    swarm.script("quick one", "one is done")
    swarm.script("quick two", "two is done")
    sending = swarm.kernel.popen("send", "ask both", "--instance", "async", "--json")
    wait_until(lambda: {"quick one", "quick two"} <= swarm.model.requests.keys(), what="both turns")
    pattern = "state/workspaces/*/instances/alpha/async/workspace"
    (wait_until(lambda: next(swarm.kernel.home.glob(pattern), None), what=pattern) / "go").touch()
    out, err = sending.communicate(timeout=30)
    assert json.loads(out)["status"] == "completed", err
    result = swarm.result("ask both")
    assert (result["accepted"], result["async"], result["response"]) == (True, True, None)
    shown = told(swarm, "ask both")
    assert len(shown) == 3
    assert {text.splitlines()[-1] for text in shown[1:]} == {"one is done", "two is done"}


def test_an_answer_that_comes_later_starts_a_turn(swarm: Swarm) -> None:
    go = waits(swarm, "take long", "later", answer="at last")
    swarm.script("ask for later", request("beta", "take long", **{"async": True}), "asked")
    assert swarm.send("ask for later", "later")["response"] == "asked"
    gate = go()
    wait_until(lambda: pid_of(swarm, "alpha", "later") is None, what="the end of the asker")
    swarm.model.otherwise = "heard it"
    gate.touch()
    said = "The answer of agent beta to your request "

    def heard() -> list[Any]:
        last = [(body, str(body["messages"][-1]["content"])) for body in all_requests(swarm)]
        return [body for body, text in last if text.startswith(said) and text.endswith("\nat last")]

    found = wait_until(heard, what=said)
    assert found[0]["messages"][-2]["content"] == "asked", "the turn that asked had ended"


def test_a_tool_of_the_bundle_asks_without_waiting_and_its_agent_gets_the_answer(swarm: Swarm) -> None:
    go = waits(swarm, "a tool asks", "tool-later", answer="told at last")
    swarm.script("use the tool", [("c1", "asker__later", {"target": "beta", "input": "a tool asks"})], "asked")
    assert swarm.send("use the tool", "tool-later")["response"] == "asked"
    result = swarm.result("use the tool")
    assert (result["accepted"], result["async"], result["response"]) == (True, True, None)
    swarm.model.otherwise = "heard it"
    go().touch()
    said = f"The answer of agent beta to your request {result['eventId']} is here:\ntold at last"
    wait_until(lambda: [r for r in all_requests(swarm) if r["messages"][-1]["content"] == said], what=said)
    called = swarm.kernel.gdn("call", "asker__later", '{"target": "beta", "input": "x"}', "--json")
    assert called.json["error"]["code"] == "E_USAGE"


def test_a_failure_is_told_as_well(swarm: Swarm) -> None:
    swarm.model.otherwise = "noted"
    swarm.script("ask the unfit", request("unfit", "x", **{"async": True}), "asked", "and heard")
    swarm.send("ask the unfit", "unfit-async")
    wait_until(lambda: any("did not answer your request" in json.dumps(r) for r in all_requests(swarm)), what="it")


@pytest.mark.requirement(
    "HANDOFF-01", "HANDOFF-02", "HANDOFF-03", "HANDOFF-04", "HANDOFF-05", "HANDOFF-07", "HANDOFF-08", "COMPAT-04"
)
def test_work_is_handed_over_and_its_end_arrives(swarm: Swarm) -> None:
    swarm.model.otherwise = "noted"
    handed = [
        ("h1", "handoff__request", {"target": "simple", "payload": {"do": "this"}}),
        ("h2", "handoff__request", {"target": "nobody", "payload": "x"}),
        ("h3", "handoff__request", {"target": "simple"}),
        ("h4", "handoff__request", {"payload": "x"}),
    ]
    swarm.script('{"do": "this"}', "done with it")
    swarm.script("hand over", handed, "handed", "and heard")
    swarm.send("hand over", "hands")
    results = swarm.model.results("hand over")
    handle = results["h1"]["handle"]
    assert (results["h1"]["status"], handle.startswith("handoff:t")) == ("pending", True)
    assert code_of(results["h2"]) == "E_AGENT_NOT_FOUND"
    assert code_of(results["h3"]) == "E_TOOL_INVALID_ARGS"
    assert code_of(results["h4"]) == "E_TOOL_INVALID_ARGS"
    ended = f"The pending result {handle} of handoff__request (call h1) is here:"
    found = wait_until(
        lambda: [m for r in all_requests(swarm) for m in r["messages"] if ended in str(m["content"])], what=ended
    )
    shown = json.loads(found[0]["content"].splitlines()[-1])
    assert (shown["status"], shown["output"]["response"]) == ("ok", "done with it")
    assert shown["output"]["correlationId"] == handle
    assert "tools" not in swarm.model.requests['{"do": "this"}'][0], "who gets the work knows nothing of handoffs"


def test_the_handle_of_handed_over_work_is_known_to_tool_result(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.model, "by_first", True)
    monkeypatch.setattr(swarm.model, "otherwise", "heard it")
    go = waits(swarm, "polled work", "polled", answer="worked")
    handed = [("h1", "handoff__request", {"target": "beta", "payload": "polled work"})]
    command = "touch ready; while [ ! -e go ]; do sleep 0.02; done"
    swarm.script("hand over and ask", handed, [("c2", "bash__exec", {"command": command})])
    sending = swarm.kernel.popen("send", "alpha", "hand over and ask", "--instance", "polled", "--json")
    pattern = "state/workspaces/*/instances/alpha/polled/workspace/ready"
    ready = wait_until(lambda: next(swarm.kernel.home.glob(pattern), None), what=pattern)
    handle = swarm.model.results("hand over and ask")["h1"]["handle"]
    polls = [("c3", handle, 0), ("c4", "handoff:t0/h1~ab", 0)]
    calls = [(call, "tool-result__get", {"handle": of, "waitMs": ms}) for call, of, ms in polls]
    last = [("c5", "tool-result__get", {"handle": handle, "waitMs": 30_000})]
    swarm.model.scripts["hand over and ask"] += [calls, last, "done"]
    (ready.parent / "go").touch()
    wait_until(lambda: len(swarm.model.requests["hand over and ask"]) >= 4, what="the poll that waits")
    go().touch()
    assert json.loads(sending.communicate(timeout=30)[0])["status"] == "completed"
    results = swarm.model.results("hand over and ask")
    assert results["c3"] == {"status": "pending", "handle": handle}
    assert code_of(results["c4"]) == "E_TOOL_OUTCOME_UNKNOWN"
    assert (results["c5"]["response"], results["c5"]["correlationId"]) == ("worked", handle)


# --- what users of other agent teams report, and what must not happen here: one test for each report


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
