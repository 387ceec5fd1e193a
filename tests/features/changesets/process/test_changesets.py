"""Changesets through the real kernel: from an extension's tool to the next step, and for operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.changesets.process.changeset_bundles import DOCUMENTS, Changing
from tests.kernel_fixture import sandbox, wait_until

#: The example of the specification (v0.9, 8.3), line by line.
UPDATE_PROMPT = """\
import os
from pathlib import Path

NOTES = Path(os.environ["GOONDAN_STATE_ROOT"], "extensions", "prompts", "notes")


async def register(api):
    async def update_prompt(ctx, input):
        # 1. open a changeset
        opened = await api.swarm_bundle.open_changeset({"reason": "Update system prompt via myExt"})
        changeset_id, workdir = opened["changesetId"], opened["workdir"]

        # 2. change files
        prompt_path = Path(workdir, "prompts", input.get("file", "system.md"))
        prompt_path.parent.mkdir(exist_ok=True)
        prompt_path.write_text(str(input["newPrompt"]))

        # 3. commit the changeset
        result = await api.swarm_bundle.commit_changeset(
            {"changesetId": changeset_id, "message": "chore: update system prompt"}
        )

        if result["status"] == "ok":
            return {
                "success": True,
                "newRef": result["newRef"],
                "message": "Prompt updated. Changes will apply from next Step.",
            }
        else:
            return {"success": False, "error": result["error"]}

    api.tools.register(
        {
            "name": "myExt.updatePrompt",
            "description": "Update agent system prompt",
            "parameters": {
                "type": "object",
                "properties": {"newPrompt": {"type": "string"}, "file": {"type": "string"}},
                "required": ["newPrompt"],
            },
            "handler": update_prompt,
        }
    )

    # What is looked at besides: the prompt that each step runs with, and events.
    def note(text):
        with open(NOTES, "a") as notes:
            notes.write(text + "\\n")

    def seen(ctx):
        note(f"{ctx.step.index} {ctx.effective_config['prompt']['system'].strip()}")
        return ctx

    async def left_open(ctx, input):
        opened = await api.swarm_bundle.open_changeset()
        return opened["workdir"]

    async def memory(ctx, input):
        state = api.ext_state()
        state["calls"] = state.get("calls", 0) + 1
        return {"success": True, "pid": os.getpid(), "calls": state["calls"]}

    api.tools.register({"name": "myExt.memory", "description": "What it remembers.", "handler": memory})
    api.pipelines.mutate("step.blocks", seen)
    api.events.on("workspace.worktreeMounted", lambda payload: note(f"mounted {sorted(payload)} {payload['path']}"))
    api.tools.register({"name": "myExt.open", "description": "Opens one.", "handler": left_open})
"""


@pytest.fixture(scope="module")
def changing() -> Iterator[Changing]:
    with sandbox(DOCUMENTS) as kernel:
        made = Changing(kernel, UPDATE_PROMPT)
        kernel.detach()
        yield made


@pytest.mark.requirement("BUNDLE-01", "BUNDLE-08", "BUNDLE-09", "BUNDLE-10", "EVENTS-08")
def test_the_documented_example(changing: Changing) -> None:
    answer = changing.update("NEW")

    assert answer["success"] is True
    assert answer["newRef"] == "git:" + changing.head
    assert changing.notes[0] == "0 OLD"
    assert changing.notes[1].startswith("mounted ['changesetId', 'path', 'type'] /")
    assert changing.notes[2] == "1 NEW"  # the next step of the same turn
    assert (changing.root / "prompts/system.md").read_text() == "NEW"
    assert changing.status == ""
    assert changing.worktrees == []


@pytest.mark.requirement("BUNDLE-10")
def test_a_commit_reaches_every_agent_in_its_process_and_its_extensions_keep_what_they_have(changing: Changing) -> None:
    before = {key: changing.call("memory", key) for key in ("k", "other")}
    assert changing.update("NEWER")["success"] is True
    for key, one in before.items():
        assert changing.call("memory", key) == {**one, "calls": 2}
        assert changing.notes[-2:] == ["0 NEWER", "1 NEWER"]


def test_operators_list_show_and_take_back(changing: Changing) -> None:
    before = (changing.root / "prompts/system.md").read_text()
    assert changing.update("TO BE TAKEN BACK")["success"] is True
    listed = changing.kernel.gdn("changeset", "list", "--json").json["changesets"]
    newest = listed[0]
    assert (newest["state"], newest["agent"], newest["filesChanged"]) == (
        "committed",
        "assistant",
        ["prompts/system.md"],
    )
    assert newest["reason"] == "Update system prompt via myExt"
    shown = changing.kernel.gdn("changeset", "diff", newest["changesetId"])
    assert "+TO BE TAKEN BACK" in shown.out

    reverted = changing.kernel.gdn("changeset", "revert", newest["changesetId"], "--json")

    assert reverted.status == 0, reverted.err
    assert reverted.json["status"] == "ok"
    assert (changing.root / "prompts/system.md").read_text() == before
    assert changing.kernel.gdn("send", "hello", "--instance", "k").status == 0
    assert changing.notes[-1] == f"0 {before.strip()}"  # in force, without a restart of the kernel
    again = changing.kernel.gdn("changeset", "revert", newest["changesetId"], "--json")
    assert (again.status, again.json["error"]["code"]) == (1, "E_CHANGESET_CONFLICT")
    assert changing.kernel.gdn("changeset", "diff", "none", "--json").json["error"]["code"] == "E_USAGE"


@pytest.mark.requirement("BUNDLE-08")
def test_a_worktree_goes_with_its_event(changing: Changing) -> None:
    answer = changing.kernel.gdn("send", "/myExt__open {}", "--instance", "left")
    assert answer.status == 0, answer.err
    wait_until(lambda: changing.worktrees == [] and changing.remains == [])
