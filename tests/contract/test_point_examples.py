"""docs/old-spellings.md has an example for every point, docs/extension-points.md for every place that middleware has;
each runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from goondan.agentproc.extensions.points.pipeline import POINTS
from goondan.agentproc.machine.messages import encode_message
from goondan.agentproc.providers.base import ModelRequest
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec
from goondan.schemas.wire.errors import fail
from tests.unit.agentproc.fakes import BASH, NOTE, FakeLink, FakeModel, event_frame, make_spec, says, wants
from tests.unit.agentproc.turns import runner_of

DOCS = Path(__file__).parents[2] / "docs"
#: The sections of docs/extension-points.md, by the points of the old spelling that stand at the same place.
MIDDLEWARE = {
    "Before a turn": "turn.pre",
    "After a turn": "turn.post",
    "Before a step": "step.pre",
    "The catalog of a step": "step.tools",
    "A message for one step": "step.blocks",
    "A failed step": "step.llmError",
    "After a step": "step.post",
    "Before a call": "toolCall.pre",
    "A call that is prevented": "toolCall.exec",
    "After a call": "toolCall.post",
    "A repository is there": "workspace.repoAvailable",
    "A changeset has a worktree": "workspace.worktreeMounted",
}


def sections(page: str, heads: str) -> dict[str, list[str]]:
    """The programs of each section."""
    parts = re.split(rf"^{heads} (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    programs = [re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL) for section in parts[2::2]]
    return dict(zip(parts[1::2], programs, strict=True))


def examples() -> dict[str, list[str]]:
    """The programs of each point."""
    found = {point: [*programs] for point, programs in sections("old-spellings.md", "###").items() if point in POINTS}
    for head, (program,) in sections("extension-points.md", "##").items():
        found[MIDDLEWARE[head]].append(program)
    return found


EXAMPLES = examples()


def test_every_point_has_its_examples() -> None:
    assert sorted(EXAMPLES) == sorted(POINTS) == sorted(EFFECTS)
    assert {name for name, programs in EXAMPLES.items() if len(programs) == 1} == {"step.config", "step.llmCall"}


WATCH = """
def register(api):
    def look(ctx):
        api.instance.shared["turn"] = dict(ctx.turn.metadata)
        return ctx

    api.pipelines.mutate("toolCall.pre", look)
"""


class Ran(Struct):
    """What is left of a turn that an example took part in: two steps, the first with two calls of `notes__add`."""

    runner: TurnRunner
    model: FakeModel
    calls: list[bytes]
    response: str | None
    log: str
    repository: str

    @property
    def last(self) -> ModelRequest:
        """What the model was asked last."""
        return self.model.requests[-1]

    @property
    def told(self) -> bytes:
        """The conversation as the model was shown it last."""
        return b"".join(encode_message(message) for message in self.last.messages)


#: What the page says of each point, as it can be seen afterwards.
EFFECTS: dict[str, Callable[[Ran], bool]] = {
    "turn.pre": lambda ran: ran.runner.instance.extensions._shared["turn"].get("began") == "2026-01-01T00:00:00.000Z",
    "turn.post": lambda ran: ran.response == "done (signed)",
    "step.pre": lambda ran: ran.runner.instance.extensions._loaded["example"].state.get("steps") == 2,
    "step.config": lambda ran: ran.last.system == "Be brief.",
    "step.tools": lambda ran: [item.name for item in ran.last.tools] == ["bash__exec", "notes__add"],
    "step.blocks": lambda ran: "euros" in repr((ran.last.blocks, ran.last.messages)),
    "step.llmCall": lambda ran: len(re.findall(r"the model took [\d.]+ s", ran.log)) == 2,
    "step.llmError": lambda ran: len(ran.model.requests) == 3,
    "toolCall.pre": lambda ran: all(b"polite" in call for call in ran.calls),
    "toolCall.exec": lambda ran: len(ran.calls) == 1 and b"not by force" in ran.told,
    "toolCall.post": lambda ran: ran.told.count(b"answer") == 2,
    "step.post": lambda ran: "step 0 goes on: True" in ran.log and "step 1 goes on: False" in ran.log,
    "workspace.repoAvailable": lambda ran: f"a repository in {ran.repository}" in ran.log,
    "workspace.worktreeMounted": lambda ran: "a worktree in /tree" in ran.log,
}


@pytest.mark.parametrize(
    ("name", "spelling"), [(name, number) for name, programs in EXAMPLES.items() for number in range(len(programs))]
)
async def test_the_example_does_what_the_page_says_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, spelling: int
) -> None:
    caplog.set_level(logging.INFO)
    extensions = []
    for extension, source in (("example", EXAMPLES[name][spelling]), ("watch", WATCH)):
        (tmp_path / f"{extension}.py").write_text(source)
        resource = {"metadata": {"name": extension}}
        extensions.append(ExtensionSpec(name=extension, entry=str(tmp_path / f"{extension}.py"), resource=resource))
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    (repository / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    failing = [fail("E_MODEL_FAILED", "busy")] if name == "step.llmError" else []
    wanted = wants(("a", "notes__add", {}), ("b", "notes__add", {"force": True}))
    model = FakeModel(*failing, wanted, says("done"))
    write = CatalogItem(name="files__write")
    catalog = ["bash__exec", "notes__add", "files__write"]
    spec = make_spec(str(tmp_path / "state"), extensions=extensions, registry=[BASH, NOTE, write], catalog=catalog)
    link: Any = FakeLink()
    runner = runner_of(spec, link, model)
    try:
        await runner.load_extensions()
        await runner.run(event_frame("e1", "go", workdir=str(repository)))
        await runner.instance.workspaces.mounted("/tree", {"changesetId": "c1"})
        (answer,) = link.answers()
        assert answer.error is None, answer.error
        calls = [bytes(call.payload) for call in link.calls]
        ran = Ran(runner, model, calls, answer.response, caplog.text, str(repository))
        assert [point for point, is_there in EFFECTS.items() if is_there(ran)] == [name]
        assert runner.instance.extensions.names == ["example", "watch"]
    finally:
        await runner.close()
