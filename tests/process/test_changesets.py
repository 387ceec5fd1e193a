"""Changesets through the real kernel: from an extension's tool to the next step, under kills, and for operators."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel_fixture import Sandbox, sandbox
from tests.process.changeset_bundles import git

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

    api.pipelines.mutate("step.blocks", seen)
    api.events.on("workspace.worktreeMounted", lambda payload: note(f"mounted {sorted(payload)} {payload['path']}"))
    api.tools.register({"name": "myExt.open", "description": "Opens one.", "handler": left_open})
"""
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: prompts}
spec: {entry: ./ext/prompts.py}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/console}
  prompt: {systemRef: prompts/system.md}
  extensions: [Extension/prompts]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""


class Changing:
    """A kernel with a bundle in a repository."""

    def __init__(self, kernel: Sandbox) -> None:
        self.kernel = kernel
        self.root = kernel.bundle.parent
        for name, text in (("ext/prompts.py", UPDATE_PROMPT), ("prompts/system.md", "OLD\n")):
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text)
        git(self.root, "init", "--quiet", "--initial-branch", "main")
        git(self.root, "add", "goondan.yaml", "ext", "prompts")
        git(self.root, "commit", "--quiet", "--message", "The bundle")

    @property
    def state(self) -> Path:
        (found,) = (Path(self.kernel.env["GOONDAN_STATE_ROOT"]) / "workspaces").iterdir()
        return found

    @property
    def notes(self) -> list[str]:
        path = self.state / "extensions/prompts/notes"
        return path.read_text().splitlines() if path.exists() else []

    def update(self, text: str, instance: str = "k", **more: str) -> dict[str, object]:
        """The tool's result."""
        line = "/myExt__updatePrompt " + json.dumps({"newPrompt": text, **more})
        answer = self.kernel.gdn("send", line, "--instance", instance, timeout=60)
        assert answer.status == 0, answer.err
        found: dict[str, object] = json.loads(answer.out[answer.out.index("{") : answer.out.rindex("}") + 1])
        return found

    @property
    def worktrees(self) -> list[str]:
        folder = self.state / "changesets/worktrees"
        return os.listdir(folder) if folder.exists() else []

    @property
    def log(self) -> list[str]:
        return git(self.root, "log", "--format=%s").splitlines()


@pytest.fixture(scope="module")
def changing() -> Iterator[Changing]:
    with sandbox(BUNDLE) as kernel:
        made = Changing(kernel)
        kernel.detach()
        yield made


@pytest.mark.requirement("BUNDLE-01", "BUNDLE-08", "BUNDLE-09", "BUNDLE-10", "EVENTS-08")
def test_the_documented_example(changing: Changing) -> None:
    answer = changing.update("NEW")

    assert answer["success"] is True
    assert answer["newRef"] == "git:" + git(changing.root, "rev-parse", "main").strip()
    assert changing.notes[0] == "0 OLD"
    assert changing.notes[1].startswith("mounted ['changesetId', 'path', 'type'] /")
    assert changing.notes[2] == "1 NEW"  # the next step of the same turn
    assert (changing.root / "prompts/system.md").read_text() == "NEW"
    assert git(changing.root, "status", "--porcelain", "-uno") == ""
    assert changing.worktrees == []
