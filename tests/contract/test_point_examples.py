"""docs/extension-points.md has an example for every point, in both spellings where there are two, and each runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentproc.conversation import encode_message
from agentproc.extensions.pipeline import POINTS
from agentproc.loop import TurnRunner
from agentproc.store import ConversationStore
from schemas.address import instance_dir
from schemas.errors import fail
from schemas.launch import ExtensionSpec
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, says, wants

DOCS = Path(__file__).parents[2] / "docs"
#: Points that middleware cannot stand at.
ONE_SPELLING = {"step.config", "step.llmCall"}


def examples(language: str) -> dict[str, list[str]]:
    """The programs of each section."""
    text = (DOCS / f"extension-points{language}.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    return {name: re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL) for name, section in sections}


EXAMPLES = examples("")


def test_every_point_has_its_examples_in_both_languages() -> None:
    assert sorted(EXAMPLES) == sorted(POINTS)
    assert examples(".ko") == EXAMPLES
    assert {name for name, programs in EXAMPLES.items() if len(programs) == 1} == ONE_SPELLING


@pytest.mark.parametrize(
    ("name", "spelling"), [(name, number) for name, programs in EXAMPLES.items() for number in range(len(programs))]
)
async def test_the_example_runs(tmp_path: Path, name: str, spelling: int) -> None:
    module = tmp_path / "example.py"
    module.write_text(EXAMPLES[name][spelling])
    failing = [fail("E_MODEL_FAILED", "busy")] if name == "step.llmError" else []
    model = FakeModel(*failing, wants(("a", "notes__add", {})), says("done"))
    extension = ExtensionSpec(name="example", entry=str(module), resource={"metadata": {"name": "example"}})
    spec = make_spec(str(tmp_path / "state"), extensions=[extension])
    link: Any = FakeLink()
    store = ConversationStore(instance_dir(spec.state_dir, spec.name, "k"), durability="process")
    runner = TurnRunner(spec, "k", link, store, provider=model)
    try:
        await runner.load_extensions()
        assert not (spelling == 0 and not runner.pipeline.uses_points)
        await runner.run(event_frame("e1", "go"))
        (answer,) = link.answers()
        assert answer.error is None, answer.error
        assert answer.response == ("done (signed)" if name == "turn.post" else "done")
        (call,) = link.calls
        assert (b"polite" in bytes(call.payload)) == (name == "toolCall.pre")
        shown = model.requests[-1]
        assert (shown.system == "Be brief.") == (name == "step.config")
        assert ("euros" in repr((shown.blocks, shown.messages))) == (name == "step.blocks")
        assert any(b"answer" in encode_message(m) for m in shown.messages) == (name == "toolCall.post")
        assert runner.extensions.names == ["example"]
    finally:
        await runner.close()
