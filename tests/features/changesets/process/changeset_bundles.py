"""Bundles in repositories of their own, for tests of changesets: with the engine alone, and with a whole kernel."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from goondan.features.changesets.bundle.recovery import locked
from goondan.features.changesets.process.engine import Engine
from goondan.features.changesets.wire import ChangesetWish, CommittedChangeset, OpenedChangeset
from goondan.kernel.supervisor.options import Options
from tests.kernel_fixture import Sandbox

DOCUMENTS = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: words}
spec:
  entry: ./tools/words.py
  exports: [{name: count, description: Counts words.}]
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: prompts}
spec:
  entry: ./extensions/prompts.py
  config: {level: 1}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: assistant}
spec:
  modelConfig: {modelRef: Model/console}
  prompt: {systemRef: prompts/system.md}
  extensions: [Extension/prompts]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: demo}
spec:
  entryAgent: Agent/assistant
  agents: [{ref: Agent/assistant}]
"""


def git(folder: Path, *arguments: str) -> str:
    """One git command of the user's, with what it prints."""
    settings = ["-c", "user.name=A Person", "-c", "user.email=person@example.invalid", "-c", "commit.gpgSign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout


FILES = {
    "goondan.yaml": DOCUMENTS,
    "prompts/system.md": "line 1\nline 2\nline 3\nline 4\nline 5\n",
    "tools/words.py": "handlers = {'count': lambda ctx, input: 0}\n",
    "extensions/prompts.py": "def register(api):\n    pass\n",
    "README.txt": "A bundle.\n",
}


class Checkout:
    """A bundle's files below `root`, in a repository at `repository`, and one commit with all of them."""

    def __init__(self, repository: Path, root: Path, files: Mapping[str, str]) -> None:
        self.repository = repository
        self.root = root
        self.files = dict(files)
        for name, text in self.files.items():
            self.write(root, name, text)
        git(repository, "init", "--quiet", "--initial-branch", "main")
        git(root, "add", "--", *self.files)
        git(root, "commit", "--quiet", "--message", "The bundle")

    @staticmethod
    def write(folder: Path | str, name: str, text: str) -> Path:
        """A file, with the folders that it needs."""
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self, message: str) -> str:
        """Everything in the checkout becomes a commit of the user's."""
        git(self.repository, "add", "-A")
        git(self.repository, "commit", "--quiet", "--message", message)
        return self.head

    @property
    def head(self) -> str:
        """The commit of the branch."""
        return git(self.repository, "rev-parse", "main").strip()

    @property
    def status(self) -> str:
        """What git says of the tracked files; "" when they are as committed."""
        return git(self.repository, "status", "--porcelain", "-uno")

    @property
    def log(self) -> list[str]:
        """The subjects of the commits, the latest first."""
        return git(self.repository, "log", "--format=%s").splitlines()

    @property
    def remains(self) -> list[str]:
        """What is left in the repository of worktrees and of commits that were not finished."""
        own = self.repository / ".git"
        found = [f"worktree {path.name}" for path in own.glob("worktrees/*")]
        return found + [name for name in os.listdir(own) if "lock" in name or "goondan" in name]


class Changing(Checkout):
    """The bundle of a kernel whose extension `prompts` is this code, and its tools `myExt.*`."""

    def __init__(self, kernel: Sandbox, code: str, **more: str) -> None:
        files = {**FILES, "extensions/prompts.py": code, "prompts/system.md": "OLD\n", **more}
        super().__init__(kernel.bundle.parent, kernel.bundle.parent, files)
        self.kernel = kernel

    @property
    def state(self) -> Path:
        """The state of its workspace."""
        (found,) = self.kernel.state_dirs
        return found

    @property
    def notes(self) -> list[str]:
        """What the extension has written down, in its folder."""
        path = self.state / "extensions/prompts/notes"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def worktrees(self) -> list[str]:
        """Worktrees in the state."""
        folder = self.state / "changesets/worktrees"
        return os.listdir(folder) if folder.exists() else []

    def call(self, tool: str, instance: str = "k", **given: str) -> dict[str, object]:
        """The result of a tool of the extension."""
        answer = self.kernel.gdn("send", f"/myExt__{tool} " + json.dumps(given), "--instance", instance, timeout=60)
        assert answer.status == 0, answer.err
        assert "{" in answer.out, answer.out
        found: dict[str, object] = json.loads(answer.out[answer.out.index("{") : answer.out.rindex("}") + 1])
        return found

    def update(self, text: str, instance: str = "k", **more: str) -> dict[str, object]:
        """The result of the tool that changes the prompt."""
        return self.call("updatePrompt", instance, newPrompt=text, **more)


class Bundles(Checkout):
    """One bundle, its repository, and the engine of its changesets."""

    def __init__(self, place: Path, folder: str = "") -> None:
        super().__init__(place / "repository", place / "repository" / folder, FILES)
        self.state = place / "state" / "workspaces" / "0123456789abcdef"
        self.state.mkdir(mode=0o700, parents=True)
        (place / "state").chmod(0o700)
        self.options = Options(bundle=os.path.realpath(self.root / "goondan.yaml"), state_dir=str(self.state))
        self.engine = Engine(self.options, self.powers())

    def powers(self) -> list:  # type: ignore[type-arg]
        """What the bundle asks for as it is: all of it was agreed to."""
        from goondan.kernel.bundle.loader import inspect_bundle

        found = inspect_bundle(self.options.bundle, state_dir=self.options.state_dir, handlers=False)
        assert not found.errors, found.errors
        return found.judgement.powers

    @property
    def status(self) -> str:
        """As of every checkout, and files that are not tracked."""
        return git(self.repository, "status", "--porcelain")

    def open(self, request: str = "", agent: str = "assistant", key: str = "k", event: str = "e") -> OpenedChangeset:
        """A changeset of an agent's."""
        wish = ChangesetWish(request=request or os.urandom(4).hex(), agent=agent, instance_key=key, event_id=event)
        return self.engine.open(wish, "because")

    def end(self, opened: OpenedChangeset, message: str = "A change", look=lambda: None) -> CommittedChangeset:  # type: ignore[no-untyped-def]
        """Commit it, as the worker does."""
        with locked(self.engine.folder, wait=True):
            return self.engine.commit(opened.changeset_id, message, agent="assistant", instance_key="k", look=look)

    def refused(self, opened: OpenedChangeset) -> str:
        """The code with which it is refused; nothing may have changed by it."""
        before, head = self.checkout(), self.head
        answer = self.end(opened)
        assert answer.status in ("rejected", "failed"), answer
        assert answer.error is not None and answer.new_ref is None
        assert (self.checkout(), self.head) == (before, head)
        assert not os.path.exists(self.repository / ".git" / "index.lock")
        return answer.error.code

    def checkout(self) -> dict[str, bytes]:
        """Every file of the checkout."""
        return {
            str(path.relative_to(self.repository)): path.read_bytes()
            for path in sorted(self.repository.rglob("*"))
            if path.is_file() and ".git" not in path.parts
        }
