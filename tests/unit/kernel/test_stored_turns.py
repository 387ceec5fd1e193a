"""What is stored of a turn is read in steps, while it runs and afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import (
    Append,
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
)
from goondan.kernel.traces.stored_turns import read_turn
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, ToolResult

AT = "2026-01-01T00:00:00.000Z"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    """The file of an instance with a turn whose first step asked for two tools, and whose second step runs."""
    made = ConversationStore(instance_dir(str(tmp_path), "main", "k"), durability="process")
    made.adopt(1)
    with made.write():
        made.begin_turn("e", "t", 1, AT)
        made.note("t", "step.started", AT, "1")
        made.note("t", "model.answered", AT, "{}")
        calls = [ToolCallPart("c1", "a", {"x": 1}), ToolCallPart("c2", "b", {})]
        say(made, 1, AssistantData([TextPart("one "), TextPart("two"), *calls]))
        say(made, 2, ToolData([ToolResultPart("c1", "a", result(status="ok"))]))
        made.note("t", "step.started", AT, "2")
    yield made
    made.close()


def result(**given: Any) -> ToolResult:
    return from_raw(to_raw(given), ToolResult)


def say(store: ConversationStore, number: int, data: Any) -> None:
    store.append("t", number, Append(Message(f"t.{number}", data, AT, MessageSource("assistant"))))


def test_a_turn_has_the_steps_whose_message_is_stored(store: ConversationStore, tmp_path: Path) -> None:
    def read() -> Any:
        return read_turn(str(tmp_path), "main", "k", "e")

    found = read()
    assert found.answer is None
    assert found.steps.keys() == {1} and found.steps[1][0] == "one two"
    assert [(call.tool_call_id, call.end) for call in found.steps[1][1]] == [("c1", "completed"), ("c2", "")]
    assert found.steps[1][1][1].arguments is None and "1" in (found.steps[1][1][0].arguments or "")
    with store.write():
        failed = result(status="error", error={"code": "E_TOOL", "message": "no"})
        say(store, 3, ToolData([ToolResultPart("c2", "b", failed)]))
        for _ in range(2):  # an extension has asked as well
            store.note("t", "model.answered", AT, "{}")
    assert read().steps == {}, "its message is not stored"
    with store.write(final=True):
        say(store, 4, AssistantData([TextPart("end")]))
        answer = Answer(turn_id="t", status="completed", response="end")
        said = msgspec.msgpack.encode(AgentEvent(id="a", type="agent.response", created_at=AT, answer=answer))
        store.finish_turn("e", "t", "completed", AT, steps=2, answer=said)
    found = read()
    assert found.steps.keys() == {1, 2} and found.steps[2] == ("end", [])
    assert [(call.end, call.code) for call in found.steps[1][1]] == [("completed", None), ("failed", "E_TOOL")]
    assert found.answer.response == "end"
    assert read_turn(str(tmp_path), "main", "k", "another") is None
    assert read_turn(str(tmp_path), "main", "nobody", "e") is None


@pytest.mark.parametrize(
    "data",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "tool-call", "toolCallId": "c"}]},
        {"role": "assistant", "content": [{"type": "text", "text": 7}]},
        {"role": "tool", "content": [{"toolCallId": "c", "result": {"status": "error", "error": "late"}}]},
        {"role": "tool", "content": [{"toolCallId": ["c"], "result": {"status": "ok"}}]},
        [],
    ],
)
def test_messages_of_another_form_are_skipped(store: ConversationStore, tmp_path: Path, data: Any) -> None:
    db = sqlite3.connect(f"{instance_dir(str(tmp_path), 'main', 'k')}/conversation.db")
    message = msgspec.msgpack.encode({"id": "t.9", "data": data})
    db.execute("INSERT INTO events VALUES ('t', 99, 'append', NULL, ?, 0, NULL)", (message,))
    db.commit()
    db.close()
    found = read_turn(str(tmp_path), "main", "k", "e")
    assert found is not None and found.steps.keys() == {1}
