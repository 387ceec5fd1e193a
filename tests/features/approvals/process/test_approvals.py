"""Calls that wait for a person, through a real kernel: over the death of everything, and through levels of agents."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.terminal import Terminal

_AGENT = """\
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: NAME}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash, Tool/agents]
  extensions:
    - ref: Extension/approval
      config: {rules: [{tools: [TOOLS], action: ask}]}
---
"""
BUNDLE = (
    """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
"""
    + "".join(
        _AGENT.replace("NAME", name).replace("TOOLS", tools)
        for name, tools in (("main", '"bash__script"'), ("mid", '"bash__script"'), ("leaf", '"bash__exec"'))
    )
    + """\
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: boss}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/agents]
  extensions:
    - ref: Extension/approval
      config: {rules: [{tools: ["agents__*"], action: ask, when: {args.target: {equals: leaf}}}]}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec:
  entryAgent: Agent/leaf
  agents: [{ref: Agent/main}, {ref: Agent/mid}, {ref: Agent/leaf}, {ref: Agent/boss}]
"""
)
#: What a request gives its agent (milliseconds): less than the test lets people take.
REQUEST_MS = 3000


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    with sandbox(BUNDLE) as made:
        yield made


@pytest.fixture
def kernel(place: Sandbox) -> Sandbox:
    """Its kernel: the one that the test before left, or a new one."""
    if not place.ps():
        place.detach()
    return place


def items(kernel: Sandbox, *more: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kernel.gdn("approve", "list", "--json", *more).json["items"]
    return found


def asked(kernel: Sandbox, number: int = 1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = wait_until(lambda: (now := items(kernel)) and len(now) >= number and now)
    return found


def kill_all(kernel: Sandbox) -> None:
    for row in kernel.ps():  # the supervisor first, and nothing that it could do about the others
        if row["pid"]:
            with suppress(ProcessLookupError):  # it has died with the supervisor
                os.kill(row["pid"], signal.SIGKILL)
    wait_until(lambda: not kernel.ps())


def request(target: str, key: str, text: str) -> str:
    fields = {"target": target, "instanceKey": key, "input": text, "timeoutMs": REQUEST_MS}
    return "/agents__request " + json.dumps(fields)


def test_run_without_a_terminal_says_what_waits_and_ends_when_nothing_else_does(place: Sandbox) -> None:
    lines = "/bash__exec command='echo late'\nhello\n"
    ended = place.gdn("run", "--json", input=lines)
    assert ended.status == 1
    first, second = ended.json["answers"]
    assert [first["error"]["code"], second["error"]["code"]] == ["E_APPROVAL_WAITS"] * 2
    assert '"command": "echo late"' in ended.err
    code = ended.err.split("gdn approve yes ")[1].split()[0]
    place.detach()
    assert [item["code"] for item in items(place)] == [code]
    place.gdn("approve", "yes", code)
    asked_again = ("leaf", "/bash__exec command='echo late'", "--event-id", first["eventId"])
    assert "late" in place.gdn("send", *asked_again).out


def test_what_was_asked_before_everything_died_is_answered_after_and_runs_once(kernel: Sandbox) -> None:
    message = "/bash__exec command='echo ran >> runs; cat runs'"
    kernel.popen("send", "leaf", message, "--instance", "dies", "--event-id", "dies")
    (item,) = asked(kernel)
    began = time.monotonic()
    kill_all(kernel)
    kernel.detach()
    (kept,) = items(kernel)
    assert (kept["id"], kept["args"]) == (item["id"], {"command": "echo ran >> runs; cat runs"})
    assert not any(row["role"] == "agent" for row in kernel.ps()), "it waits for a person, and not in a process"
    waited_ms = (time.monotonic() - began) * 1000
    assert kernel.gdn("approve", "yes", item["id"]).out == f"{item['code']} is approved\n"
    said = kernel.gdn("send", "leaf", message, "--instance", "dies", "--event-id", "dies").out
    assert said.count("ran") == 1
    assert kernel.gdn("trace", "dies", "--json").json["waits"]["personMs"] > 0.9 * waited_ms
    words = ("leaf", "/bash__exec command='true'", "--instance", "dies", "--event-id", "more", "--json")
    again = kernel.gdn("send", *words, "--timeout", "1")
    assert again.json["error"]["code"] == "E_AGENT_TIMEOUT", "the next call waits anew"
    runs = next(kernel.home.glob("state/workspaces/*/instances/leaf/dies/workspace/runs")).read_text()
    assert runs == "ran\n"
    (audit,) = [line for line in kernel.gdn("logs").out.split("\n") if f"approval {item['code']}" in line]
    assert f"approved by uid {os.getuid()}: leaf/dies bash__exec {item['id']}" in audit
    assert kernel.gdn("cancel", "more").status == 0
    assert items(kernel) == [], "withdrawn with its turn"
    answered = kernel.gdn("approve", "list", "--answered", "--json").json["answered"]
    (kept,) = [one for one in answered if one["id"] == item["id"]]
    assert (kept["how"], kept["uid"]) == ("approved", os.getuid())
    assert f"approved by uid {os.getuid()}" in kernel.gdn("approve", "list", "--answered").out


@pytest.mark.feature("waits")
def test_who_waits_for_a_person_is_shown_with_the_code_to_answer(kernel: Sandbox) -> None:
    kernel.popen("send", "leaf", "/bash__exec command='echo shown'", "--instance", "shown", "--event-id", "shown")
    (item,) = asked(kernel)
    why = kernel.gdn("ps", "--why").out
    assert f"leaf/shown waits for a person to approve 1 call of bash__exec (gdn approve: {item['code']})" in why
    assert kernel.gdn("cancel", "shown").status == 0


def test_nine_agents_ask_at_once_through_two_levels_and_none_is_lost(kernel: Sandbox) -> None:
    def mid(number: int) -> str:
        lines = [request("leaf", f"l{number}-{at}", f"/bash__exec command='echo {number}-{at}'") for at in range(3)]
        return "\n".join(lines)

    message = "\n".join(request("mid", f"m{number}", mid(number)) for number in range(3))
    sent = kernel.popen("send", "main", message, "--instance", "many", "--event-id", "many", "--json")
    found = asked(kernel, 9)
    assert {item["instanceKey"] for item in found} == {f"l{number}-{at}" for number in range(3) for at in range(3)}
    assert {tuple(item["waitedForBy"]) for item in found} == {("main/many", f"mid/m{n}") for n in range(3)}
    assert {item["rootEvent"] for item in found} == {"many"}
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1.1 * REQUEST_MS / 1000, what="longer than any request may take")
    assert len(items(kernel)) == 9
    for item in found:  # a jail for each would take longer than the requests have left
        allowed = item["instanceKey"].endswith("-0")
        words = ("yes", item["code"]) if allowed else ("no", item["code"], "--reason", "not today")
        assert kernel.gdn("approve", *words).status == 0
    out, _ = sent.communicate(timeout=30)
    said = json.loads(out)["response"]
    assert "TIMEOUT" not in said
    assert said.count("the call was not approved: not today") == 6
    assert [said.count(f"{number}-0") for number in range(3)] == [1] * 3
    assert items(kernel) == []


def test_a_yes_for_always_lasts_until_it_is_revoked_and_a_rule_that_denies_wins(kernel: Sandbox) -> None:
    def send(command: str, event: str) -> Any:
        words = ("leaf", f"/bash__exec command='{command}'", "--instance", "always", "--event-id", event, "--json")
        return kernel.popen("send", *words)

    def said(sent: Any) -> str:
        return str(json.loads(sent.communicate(timeout=30)[0])["response"])

    first = send("echo for always", "a1")
    (item,) = asked(kernel)
    assert "E_USAGE" in kernel.gdn("approve", "yes", item["code"], "--pattern", "command=ls").err
    assert kernel.gdn("approve", "yes", item["code"], "--always").out == f"{item['code']} is approved\n"
    assert "for always" in said(first)
    (yes,) = kernel.gdn("approve", "list", "--always", "--json").json["always"]
    assert kernel.gdn("approve", "list", "--always").out.startswith(f"{yes['code']}  ")
    assert "for always" in said(send("echo for always", "a2")), "nobody was asked"
    other = send("echo for  always", "a3")
    (item,) = asked(kernel)
    told = kernel.gdn("approve", "yes", item["code"], "--pattern", "command=echo for  ")
    assert "whatever follows" in told.err
    assert "for always" in said(other)
    kill_all(kernel)
    kernel.detach()
    assert "for always" in said(send("echo for always", "a4")), "the next kernel knows it"
    assert "for all" in said(send("echo for  all", "a5")), "a pattern"
    lines = [line for line in kernel.gdn("logs").out.split("\n") if f", always ({yes['code']}): leaf/always" in line]
    assert lines[-1].partition(", always")[0].endswith(f"approved by uid {os.getuid()}")
    bundle = kernel.bundle
    written = bundle.read_text()
    deny = '{tools: ["bash__exec"], action: deny, when: {args.command: {endsWith: always}}}, '
    bundle.write_text(
        written.replace('{tools: ["bash__exec"], action: ask}', deny + '{tools: ["bash__exec"], action: ask}')
    )
    try:
        kernel.gdn("restart")
        assert "E_APPROVAL_DENIED" in said(send("echo for always", "a6"))
        assert "for some" in said(send("echo for  some", "a7"))
    finally:
        bundle.write_text(written)
        kernel.gdn("restart")
    assert kernel.gdn("approve", "revoke", yes["code"]).out == f"{yes['code']} is revoked\n"
    last = send("echo for always", "a8")
    (item,) = asked(kernel)
    kernel.gdn("approve", "no", item["code"])
    assert "not approved" in said(last)


def test_a_call_that_runs_in_the_agent_waits_as_well(kernel: Sandbox) -> None:
    kernel.popen("send", "boss", "/agents__catalog", "--instance", "b").wait(timeout=30)
    assert items(kernel) == []
    ask = request("leaf", "own", "hello")
    sent = kernel.popen("send", "boss", ask, "--instance", "b", "--json")
    (item,) = asked(kernel)
    assert (item["agent"], item["tool"], item["args"]["input"]) == ("boss", "agents__request", "hello")
    kernel.gdn("approve", "no", item["code"], "--reason", "ask me instead")
    out, _ = sent.communicate(timeout=30)
    assert "ask me instead" in json.loads(out)["response"]
    (refused, *_) = kernel.gdn("denied", "--by", "person", "--agent", "boss/b", "--json").json
    assert (refused["toolName"], refused["code"], refused["by"]) == ("agents__request", "E_APPROVAL_DENIED", "person")
    assert '"input":"hello"' in refused["args"]
    assert "ask me instead" in refused["message"]
    sent = kernel.popen("send", "boss", ask, "--instance", "b", "--json")
    (item,) = asked(kernel)
    kernel.gdn("approve", "yes", item["code"])
    out, _ = sent.communicate(timeout=30)
    assert "embedded console" in json.loads(out)["response"], "what the leaf says to hello"


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_run_asks_on_a_terminal_and_no_text_looks_like_the_question(place: Sandbox, term: str) -> None:
    sly = "x\n1234567890: approve this call of leaf/default?\x1b[2J\nyes, no (and why), or later? yes"
    command = json.dumps({"command": f"echo asked for {sly}"})
    place.gdn("stop")
    with Terminal(place, "run", term=term) as terminal:
        terminal.read_until("> ")
        terminal.type("/agents__catalog\r" if term == "xterm" else "/agents__catalog\n")
        terminal.read_until("> ")
        end = "\r" if term == "xterm" else "\n"
        terminal.type(f"/bash__exec {command}{end}yes{end}")  # typed before the question: no answer to it
        shown = terminal.read_until("denied if not answered by") + terminal.read_until("or later?")
        question = shown[shown.index("│") :]
        assert [row for row in question.split("\n") if "approve this call" in row and not row.startswith("│")] == []
        assert "\\u001b[2J" in "".join(row.partition("┊ ")[2] for row in question.split("\n"))
        terminal.type(f"no not like this{end}")
        terminal.read_until("not like this [E_APPROVAL_DENIED]")
        terminal.read_until("This is the embedded console")  # what it says to `yes`
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
