"""Extensions through the real kernel: loaded in the agent's process, around turns, steps and calls in real jails."""

from __future__ import annotations

import json

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, sandbox

EXTENSION = (
    documents(
        "Extension guard {entry: ext/guard.py, config: {deny: rm}}",
    )
    + "---\n"
)
USES_IT = EXTENSION + BUNDLE.replace(
    "  tools: [Tool/bash]", "  tools: [Tool/bash]\n  extensions: [{ref: Extension/guard, config: {deny: reboot}}]"
)
GUARD = '''\
"""A guard: denies one command, upper-cases what the others print, counts turns, offers the count as a tool.

It notes in its folder of the state what it hears, what it sees of the documents, and how it ends.
"""

import atexit
import os

NOTES = os.path.join(os.environ["GOONDAN_STATE_ROOT"], "extensions", "guard", "notes")

def note(text):
    with open(NOTES, "a") as notes:
        notes.write(text + "\\n")

def register(api, config):
    turns = 0
    atexit.register(note, "exit hook")

    async def cleanup(payload):
        note("cleanup")

    def count(ctx):
        api.state.set({"steps": api.state.get().get("steps", 0) + 1})
        if ctx.step.index == 0:
            note(f"step of {ctx.swarm.metadata.name}/{ctx.agent.metadata.name} {ctx.agent.spec.modelConfig.modelRef}")
        return ctx

    api.events.on("extension.cleanup", cleanup)
    api.events.on("workspace.*", lambda payload: note(f"{payload['type']} {payload['metadata']['branch']}"))
    api.pipelines.mutate("step.blocks", count)

    async def turn(ctx):
        nonlocal turns
        turns += 1
        result = await ctx.next()
        if result.response is not None:
            result.response += f" (turn {turns})"
        return result

    async def call(ctx):
        if config["deny"] in ctx.args.get("command", ""):
            api.deny(f"{config['deny']} is not allowed")
        result = await ctx.next()
        if result.status == "ok" and isinstance(result.output, dict) and "stdout" in result.output:
            result.output = {**result.output, "stdout": result.output["stdout"].upper()}
        api.logger.info("called", ctx.tool_name, result.status)
        return result

    api.pipeline.register("turn", turn)
    api.pipeline.register("toolCall", call)
    api.tools.register({"name": "guard.turns", "description": "How many turns.", "handler": lambda ctx, given: turns})
'''


@pytest.mark.requirement("EXT-04", "EXT-05", "PIPELINE-04", "DYNAMIC-07", "RECONCILE-06", "COMPAT-03", "STATE-07")
def test_an_extension_works_around_turns_and_calls_of_a_running_swarm() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "ext").mkdir()
        (kernel.home / "ext" / "guard.py").write_text(GUARD)
        lines = ['/bash__exec {"command":"echo hi"}', '/bash__exec {"command":"reboot now"}', "/guard__turns", "/tools"]
        lines.append('/json-query__query {"data":{}}')
        repository = kernel.home / "work"
        (repository / ".git").mkdir(parents=True)
        (repository / ".git" / "HEAD").write_text("ref: refs/heads/topic\n")
        ended = kernel.gdn("run", "--workdir", str(repository), input="\n".join(lines) + "\n")
        assert ended.status == 0, ended.err
        assert "HI" in ended.out
        assert "reboot is not allowed" in ended.out
        assert "[E_EXTENSION_DENIED]" in ended.out
        assert "Traceback" not in kernel.log("agent"), kernel.log("agent")
        assert "Extension/guard refused it: reboot is not allowed" in kernel.log("agent")
        assert "json-query__query was refused by catalog: Tool 'json-query__query' is not" in kernel.log("agent")
        (missing, refused) = kernel.gdn("denied", "--json").json
        assert (refused["agent"], refused["by"], refused["args"]) == ("main", "extension", '{"command":"reboot now"}')
        assert (missing["by"], missing["allow"]) == ("catalog", "Agent/main: spec.tools: [Tool/json-query]")
        shown = kernel.gdn("denied").out.splitlines()
        assert shown[3] == "    to allow it: Agent/main: spec.tools: [Tool/json-query]"
        broken = kernel.state_dirs[0] / "instances" / "main" / "broken"
        broken.mkdir()
        (broken / "conversation.db").write_bytes(b"no database" * 100)
        assert (kernel.gdn("denied").out.splitlines(), "not read: " in kernel.gdn("denied").err) == (shown, True)
        trace = kernel.gdn("trace", refused["turnId"]).out
        assert "refused by extension; to allow it: the config or the code of Extension/guard, which decides" in trace
        assert "(turn 1)" in ended.out
        assert "guard__turns" in ended.out
        assert "\n3 (turn 3)\n" in ended.out, "what its tool says"
        assert "(turn 4)" not in ended.out, "/tools is answered by the console"
        assert "guard: called bash__exec ok" in kernel.log("agent")
        state = (kernel.home / "state").resolve()
        (notes,) = state.glob("**/extensions/guard/notes")
        *heard, cleanup, hook = notes.read_text().splitlines()
        assert heard == ["workspace.repoAvailable topic", *["step of swarm/main Model/console"] * 5]
        assert (cleanup, hook) == ("cleanup", "exit hook")
        (stored,) = state.glob("**/instances/main/*/extensions/guard.json")
        assert json.loads(stored.read_text())["value"]["steps"] >= 4


def test_an_extension_that_cannot_be_loaded_is_said_to_every_message_and_the_kernel_serves_on() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "ext").mkdir()
        (kernel.home / "ext" / "guard.py").write_text("def register(api):\n    raise ValueError('no licence')\n")
        ended = kernel.gdn("run", "--json", input="one\ntwo\n")
        assert ended.status == 1
        errors = [answer["error"] for answer in json.loads(ended.out)["answers"]]
        assert [error["code"] for error in errors] == ["E_EXTENSION_FAILED", "E_EXTENSION_FAILED"]
        assert "ValueError: no licence" in errors[0]["message"]
        assert "Traceback" not in ended.out + ended.err
        called = kernel.gdn("call", "bash__exec", '{"command":"echo still here"}')
        assert "still here" in called.out


def test_a_module_without_register_does_not_start() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "ext").mkdir()
        (kernel.home / "ext" / "guard.py").write_text("def registrer(api): ...\n")
        ended = kernel.gdn("validate")
        assert ended.status == 2
        assert "E_CONFIG_ENTRY" in ended.out + ended.err
        assert "register" in ended.out + ended.err
