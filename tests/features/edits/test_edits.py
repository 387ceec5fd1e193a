"""An operator takes turns of a conversation back, or all of it: over a fake link and a real conversation file."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.agentproc.conversation.file import EARLIER_FILE
from goondan.agentproc.machine.messages import Append, Message, MessageSource, UserData
from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.edits.agent import Edit, changes
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR, ConversationEdited, Frame, Source, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of


def edit_frame(kind: str, event_id: str, asked: object = None, source: Source | None = OPERATOR) -> Frame:
    frame = event_frame(event_id, asked, kind=kind)
    frame.source = source
    return frame


def edited(link: FakeLink) -> ConversationEdited:
    """What the last answer says."""
    answer = link.answers()[-1]
    assert answer.status == "completed", answer.error
    return from_raw(from_raw(answer.output or b"", ToolResult).output or b"", ConversationEdited)


def stored(runner: TurnRunner) -> list[Message]:
    return runner.instance.store.load_messages()


async def test_the_last_turn_is_taken_back_whole_and_the_model_never_sees_it_again(make: Make) -> None:
    link = FakeLink(lambda tool, _: ok("done"))
    model = FakeModel(says("one"), wants(("a", "bash__exec", {"command": "x"})), says("two"), says("three"))
    runner = make(link, model)
    await runner.run(event_frame("e1", "first"))
    before = stored(runner)
    await runner.run(event_frame("e2", "second"))
    last = link.answers()[-1].turn_id
    await runner.run(edit_frame("operator.undo", "e3", {"turnId": last}))
    assert edited(link) == ConversationEdited(4, 2, last, "second")
    assert stored(runner) == before
    await runner.run(edit_frame("operator.undo", "e3", {"turnId": last}))  # delivered again: answered, not repeated
    assert edited(link) == ConversationEdited(4, 2, last, "second")
    assert stored(runner) == before
    await runner.run(event_frame("e4", "third"))
    said = [message.data.content for message in model.requests[-1].messages if isinstance(message.data, UserData)]
    assert said == ["first", "third"]


async def test_a_turn_that_the_operator_did_not_see_is_not_taken_back(make: Make) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("one"), says("two")))
    await runner.run(event_frame("e1", "first"))
    seen = link.answers()[-1].turn_id
    await runner.run(event_frame("e2", "second"))
    await runner.run(edit_frame("operator.undo", "e3", {"turnId": seen}))
    assert code_of(link.answers()[-1]) == "E_UNDO_REFUSED"
    assert len(stored(runner)) == 4


async def test_a_reset_removes_every_message_and_what_was_put_aside(make: Make, tmp_path: Path) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("one"), says("two")))
    await runner.run(event_frame("e1", "first"))
    earlier = runner.instance.store.path.parent / EARLIER_FILE
    earlier.write_bytes(b"")
    await runner.run(edit_frame("operator.reset", "e2"))
    assert edited(link) == ConversationEdited(2, 0)
    assert stored(runner) == []
    assert not earlier.exists()
    await runner.run(edit_frame("operator.undo", "e3"))
    assert code_of(link.answers()[-1]) == "E_UNDO_REFUSED"


async def test_a_turn_that_was_given_up_is_part_of_what_is_taken_back(make: Make) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("one")))
    await runner.run(event_frame("e1", "first"))
    seen = link.answers()[-1].turn_id
    store = runner.instance.store
    with store.write():
        store.begin_turn("lost", "tlost", 1, "2026-01-01T00:00:00.000Z")
        message = Message("tlost.0", UserData("lost"), "2026-01-01T00:00:00.000Z", MessageSource("user"))
        store.append("tlost", 0, Append(message))
    await runner.run(edit_frame("operator.undo", "e2", {"turnId": seen}))
    assert edited(link) == ConversationEdited(1, 2, "tlost", "lost")
    assert store.running_turns() == []


async def test_what_fails_before_the_commit_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("one")))
    await runner.run(event_frame("e1", "first"))
    store = runner.instance.store

    def broken(*_: object, **__: object) -> None:
        raise fail("E_STATE", "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store, "finish_turn", broken)
        await runner.run(edit_frame("operator.reset", "e2"))
    assert code_of(link.answers()[-1]) == "E_STATE"
    assert len(stored(runner)) == 2
    await runner.run(edit_frame("operator.reset", "e2"))
    assert edited(link) == ConversationEdited(2, 0)


@pytest.mark.parametrize("kind", ["operator.undo", "operator.reset"])
@pytest.mark.parametrize("source", [None, Source("client", "client"), Source("agent", "other", "k")])
async def test_nobody_but_an_operator_may(make: Make, kind: str, source: Source | None) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("one")))
    await runner.run(event_frame("e1", "first"))
    await runner.run(edit_frame(kind, "e2", None, source))
    assert code_of(link.answers()[-1]) == "E_FORBIDDEN"
    assert len(stored(runner)) == 2


@pytest.mark.parametrize("asked", [7, [], {}, {"turnId": 7}])
async def test_what_is_no_question_is_refused(make: Make, asked: object) -> None:
    link = FakeLink()
    await make(link, FakeModel()).run(edit_frame("operator.undo", "e1", asked))
    assert code_of(link.answers()[-1]) == "E_FRAME_INVALID"


def test_a_conversation_of_which_only_a_summary_is_left_has_no_turn_to_take_back() -> None:
    summary = Message("t1.ext:1", UserData("so far …"), "2026-01-01T00:00:00.000Z", MessageSource("extension", "x"))
    with pytest.raises(GoondanError, match="E_UNDO_REFUSED"):
        changes([summary], Edit("undo"))
    assert to_raw(changes([summary], Edit("reset"))[1]) == to_raw(ConversationEdited(1, 0))
