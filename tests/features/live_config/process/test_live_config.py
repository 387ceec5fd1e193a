"""Live configuration through the real kernel: proposed by an extension, kept over kills and restarts; `gdn config`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox

EXTENSIONS = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: patcher}
spec: {entry: ext/patcher.py}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: target}
spec: {entry: ext/target.py, config: {level: 1}}
---
"""
USES_THEM = EXTENSIONS + BUNDLE.replace(
    "  tools: [Tool/bash]",
    "  prompt: {system: The bundle's.}\n  tools: [Tool/bash]\n  extensions: [Extension/patcher, Extension/target]\n"
    "  policy: {toolCalls: {extensionsMayAdd: ['json-query__*']}}",
)
#: Does what it is told, and answers with what came of it and what it saw.
PATCHER = """\
import json

def register(api):
    seen = []

    async def patch(ctx):
        text = str(ctx.turn.input_event.input)
        if ctx.step.index == 0 and text.startswith("propose "):
            given = json.loads(text.removeprefix("propose "))
            ctx.turn.metadata["outcomes"] = [await api.live_config.propose_patch(each) for each in given]
        return ctx

    def look(ctx):
        config = ctx.effective_config["extensions"][1]["config"]
        halves = [{key[1:] for key in config if key[0] == letter} for letter in "ab"]
        if halves[0] != halves[1]:
            seen.append(sorted(halves[0] ^ halves[1]))
        return ctx

    async def turn(ctx):
        result = await ctx.next()
        if outcomes := ctx.metadata.get("outcomes"):
            result.response = json.dumps({"outcomes": outcomes, "halves": seen})
        return result

    api.pipelines.mutate("step.pre", patch)
    api.pipelines.mutate("step.blocks", look)
    api.pipeline.register("turn", turn)
"""
#: Fails when it is registered with half of a patch.
TARGET = """\
def register(api, config):
    halves = [sorted(key[1:] for key in config if key[0] == letter) for letter in "ab"]
    if halves[0] != halves[1]:
        raise ValueError(f"half of a patch: {halves}")
    api.tools.register({"name": "target.level", "description": "x", "handler": lambda ctx, given: config["level"]})
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    """A running swarm; each test has instances of its own."""
    with sandbox(USES_THEM) as made:
        (made.home / "ext").mkdir()
        (made.home / "ext" / "patcher.py").write_text(PATCHER)
        (made.home / "ext" / "target.py").write_text(TARGET)
        made.detach()
        yield made


def said(kernel: Sandbox, text: str, key: str) -> str:
    """What the instance answers."""
    ended = kernel.gdn("send", text, "--instance", key)
    assert ended.status == 0, ended.err
    return ended.out.strip()


def proposed(kernel: Sandbox, key: str, *operations: dict[str, Any], **more: Any) -> Any:
    """The outcome of a proposal of the instance's extension."""
    answer = said(kernel, "propose " + json.dumps([{"patches": operations, **more}]), key)
    (outcome,) = json.loads(answer)["outcomes"]
    return outcome


def listed(kernel: Sandbox, *options: str) -> Any:
    return kernel.gdn("config", "list", "--json", *options).json["patches"]


@pytest.mark.requirement("CONFIG-01", "CONFIG-02")
def test_what_an_extension_proposes_is_there_in_the_next_step(kernel: Sandbox) -> None:
    tool = {"op": "add", "path": "/tools/-", "value": "Tool/json-query"}
    outcome = proposed(kernel, "a", tool, {"op": "replace", "path": "/extensions/1/config/level", "value": 2})
    assert (outcome["status"], outcome["effectiveFrom"]) == ("accepted", "next-step"), outcome
    called = '/json-query__query {"data": "[1, 2]", "path": "$[1]"}\n/target__level'
    assert "2" in said(kernel, called, "a").splitlines()[-1]
    assert "E_TOOL_NOT_IN_CATALOG" in kernel.gdn("send", called, "--instance", "b").out, "another instance"
    # bash is there for the agent; http-fetch is beyond what its extensions may add.
    refused = proposed(kernel, "a", {"op": "add", "path": "/tools/-", "value": "Tool/http-fetch"})
    assert refused["error"]["code"] == "E_CHANGESET_DENIED"
    assert [patch["status"] for patch in listed(kernel, "--instance", "a")] == ["accepted", "rejected"]
    assert "json-query__query" in said(kernel, "/tools", "a")
    assert "json-query__query" not in said(kernel, "/tools", "b")


def test_an_operator_lists_proposes_and_reverts(kernel: Sandbox) -> None:
    operation = json.dumps([{"op": "add", "path": "/tools/-", "value": "Tool/http-fetch"}])
    ended = kernel.gdn("config", "propose", "main", operation, "--instance", "o", "--reason", "for now", "--json")
    assert (ended.status, ended.json["status"]) == (0, "accepted"), ended.err
    assert "http-fetch__get" in said(kernel, "/tools", "o")
    shown = kernel.gdn("config", "show", "main", "--instance", "o", "--json").json
    assert [tool["name"] for tool in shown["config"]["tools"]] == ["bash", "http-fetch"]
    assert shown["config"]["extensions"][1]["patched"] == {}, "what the bundle says is not shown"
    text = kernel.gdn("config", "list", "--instance", "o").out
    assert "by operator" in text
    assert "because: for now" in text
    steps = json.dumps([{"op": "replace", "path": "/policy/maxStepsPerTurn", "value": 3}])
    assert kernel.gdn("config", "propose", "main", steps, "--instance", "o").status == 0
    shown = kernel.gdn("config", "show", "main", "--instance", "o", "--json").json
    assert shown["config"]["policy"] == {"maxStepsPerTurn": 3}
    provider = json.dumps([{"op": "replace", "path": "/model/provider", "value": "openai"}])
    refused = kernel.gdn("config", "propose", "main", provider)
    assert refused.status == 1
    assert "E_CHANGESET_DENIED" in refused.err
    assert "gdn restart" in refused.err
    assert kernel.gdn("config", "propose", "main", "no json").status == 2
    assert kernel.gdn("config", "revert", "nothing").status == 1
    reverted = kernel.gdn("config", "revert", ended.json["patchId"])
    assert reverted.status == 0, reverted.err
    assert "http-fetch__get" not in said(kernel, "/tools", "o")


@asynccontextmanager
async def client(kernel: Sandbox) -> AsyncIterator[Link]:
    (run_dir,) = kernel.run_dirs
    token = (run_dir / "client.token").read_text().strip()
    link = Link(f"ipc://{run_dir}/clients.sock", token, on_frame=lambda _: None)
    await link.start()
    try:
        yield link
    finally:
        await link.close(0)


async def ask(link: Link, number: int, text: str) -> Any:
    event = AgentEvent(id=f"p{number}", type="user.message", created_at="2026-01-01T00:00:00Z", input=text)
    frame = Frame("event", to="main", instance_key=f"i{number % 6}", event_id=event.id, payload=to_raw(event))
    frame.reply_to = ReplyTo("client", f"c-{number}")
    answer = from_raw((await link.ask(frame)).payload, AgentEvent).answer
    assert answer is not None
    assert answer.status == "completed", answer.error
    return json.loads(answer.response or "")


async def test_thirty_proposals_at_once_and_kills(kernel: Sandbox) -> None:
    """Each patch sets two values of one extension for all instances, and each wants a prompt of its own as well."""

    def text(number: int) -> str:
        path = "/extensions/1/config"
        pair = [{"op": "add", "path": f"{path}/{letter}{number}", "value": number} for letter in "ab"]
        prompt = [{"op": "replace", "path": "/prompt/system", "value": f"prompt {number}"}]
        return "propose " + json.dumps([{"patches": each, "scope": "agent"} for each in (pair, prompt)])

    chance = random.Random(7)
    async with client(kernel) as link:
        asked = asyncio.gather(*(ask(link, number, text(number)) for number in range(30)))
        for role in ("agent", "broker", "agent", "agent", "forkserver", "broker", "agent"):
            await asyncio.sleep(chance.uniform(0.05, 0.25))
            pids = [int(row["pid"]) for row in kernel.ps() if row["role"] == role and row["pid"]]
            with suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(pids), signal.SIGKILL)
        answers = await asyncio.wait_for(asked, 50)
    assert [answer["halves"] for answer in answers] == [[]] * 30, "no step sees half a change"
    pairs = [answer["outcomes"][0] for answer in answers]
    assert [outcome["status"] for outcome in pairs] == ["accepted"] * 30
    assert len({outcome["revision"] for outcome in pairs}) == 30
    prompts = [answer["outcomes"][1] for answer in answers]
    assert {outcome["error"]["code"] for outcome in prompts if outcome["error"]} <= {"E_CONFIG_CONFLICT"}
    # What was told is what is kept, each once, in the order of the revisions.
    kept = {patch["patchId"]: patch for patch in listed(kernel) if patch["byInstance"] in {f"i{n}" for n in range(6)}}
    accepted = [outcome for outcome in (*pairs, *prompts) if outcome["status"] == "accepted"]
    assert {outcome["patchId"]: outcome["revision"] for outcome in accepted} == {
        patch_id: patch["revision"] for patch_id, patch in kept.items() if patch["status"] == "accepted"
    }
    last = max((outcome for outcome in prompts if outcome["status"] == "accepted"), key=lambda o: o["revision"])

    def in_force() -> tuple[Any, Any]:
        config = kernel.gdn("config", "show", "main", "--json").json["config"]
        return config["extensions"][1]["patched"], config["prompt"]["system"]

    told = {f"{letter}{number}": number for number in range(30) for letter in "ab"}
    assert in_force() == (told, f"prompt {prompts.index(last)}"), "no lost update"
    assert kernel.gdn("restart").status == 0
    assert in_force() == (told, f"prompt {prompts.index(last)}")
    assert [patch["status"] for patch in listed(kernel, "--instance", "a")][:2] == ["accepted", "rejected"]
    assert "json-query__query" in said(kernel, "/tools", "a")
