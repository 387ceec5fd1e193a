"""Changesets through the real kernel: from an extension's tool to the next step, under kills, and for operators."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until
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

    async def memory(ctx, input):
        state = api.ext_state()
        state["calls"] = state.get("calls", 0) + 1
        return {"success": True, "pid": os.getpid(), "calls": state["calls"]}

    api.tools.register({"name": "myExt.memory", "description": "What it remembers.", "handler": memory})
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


#: Proposals at the same time. Fifty take half a minute, which a chaos run has.
PROPOSALS = 50 if os.environ.get("GOONDAN_CHAOS_KILLS") else 12


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
        return self.call("updatePrompt", instance, newPrompt=text, **more)

    def call(self, tool: str, instance: str = "k", **given: str) -> dict[str, object]:
        line = f"/myExt__{tool} " + json.dumps(given)
        answer = self.kernel.gdn("send", line, "--instance", instance, timeout=60)
        assert answer.status == 0, answer.err
        assert "{" in answer.out, answer.out
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
    assert (newest["state"], newest["agent"], newest["filesChanged"]) == ("committed", "main", ["prompts/system.md"])
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
    wait_until(lambda: changing.worktrees == [] and not (changing.root / ".git/worktrees").exists())


def test_many_at_once_and_kills(changing: Changing) -> None:
    """Each proposes a file, and workers and the broker are killed: serial, nothing lost, no worktree left."""
    before = len(changing.log)
    done = threading.Event()
    killed: list[str] = []

    def kill() -> None:
        roles = itertools.cycle(["changesets", "changesets", "broker", "changesets"])
        while not done.wait(2.0):
            role = next(roles)
            for pid in _processes(changing.kernel, role):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(role)

    def propose(number: int) -> dict[str, object]:
        return changing.update(f"proposal {number}", instance=f"i{number % 10}", file=f"p{number}.md")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(propose, range(PROPOSALS)))
    finally:
        done.set()
        killer.join()

    refused = [answer for answer in answers if answer.get("success") is not True]
    assert refused == [], refused
    assert "changesets" in killed
    for number in range(PROPOSALS):
        assert (changing.root / f"prompts/p{number}.md").read_text() == f"proposal {number}"
    assert len(changing.log) == before + PROPOSALS
    # A chain of one commit after the other, each of which adds its own file and takes none away.
    names = git(changing.root, "log", f"-{PROPOSALS}", "--name-status", "--format=").split()
    assert sorted(names[1::2]) == sorted(f"prompts/p{number}.md" for number in range(PROPOSALS))
    assert set(names[::2]) == {"A"}
    assert git(changing.root, "status", "--porcelain", "-uno") == ""
    wait_until(lambda: changing.worktrees == [] and git(changing.root, "worktree", "list").count("\n") == 1)
    assert not [name for name in os.listdir(changing.root / ".git") if "lock" in name or "goondan" in name]


def _processes(kernel: Sandbox, role: str) -> list[int]:
    """The kernel's processes of a role, by their names and by who they belong to."""
    if role == "broker":
        return [row["pid"] for row in kernel.ps() if row["role"] == "broker" and row["pid"]]
    found = []
    root = kernel.env["GOONDAN_STATE_ROOT"]
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            named = Path(f"/proc/{pid}/comm").read_text().strip() == "gdn-changesets"
            if named and root.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found
