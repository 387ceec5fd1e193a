"""The messages of a turn, read while it runs and afterwards."""

from __future__ import annotations

from pathlib import Path

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import (
    Append,
    AssistantData,
    Message,
    MessageSource,
    Replace,
    TextPart,
    UserData,
)
from goondan.kernel.traces.conversations import turn_messages
from goondan.schemas.bundle.address import instance_dir

AT = "2026-01-01T00:00:00.000Z"


def said(number: int, text: str) -> Message:
    return Message(f"t.{number}", AssistantData([TextPart(text)]), AT, MessageSource("assistant"))


def texts(state: Path, event: str = "e") -> list[str]:
    found = turn_messages(str(state), "main", "k", event)
    return [message["data"]["content"][0]["text"] for message in found if message["data"]["role"] == "assistant"]


def test_a_turn_is_read_at_any_time(tmp_path: Path) -> None:
    assert texts(tmp_path) == []
    store = ConversationStore(instance_dir(str(tmp_path), "main", "k"), durability="process")
    store.adopt(1)
    with store.write():
        store.begin_turn("e", "t", 1, AT)
        store.append("t", 1, Append(Message("t.0", UserData("?"), AT, MessageSource("user"))))
        for number in range(1, 12):  # the ids are no numbers
            store.append("t", number + 1, Append(said(number, f"{number}")))
        store.append("t", 20, Replace("t.3", said(3, "three")))
    expected = ["1", "2", "three", *(str(number) for number in range(4, 12))]
    assert texts(tmp_path) == expected
    assert texts(tmp_path, "another") == []
    with store.write(final=True):
        store.finish_turn("e", "t", "completed", AT, steps=1, answer=b"")
    assert texts(tmp_path) == expected
    store.close()
    assert texts(tmp_path) == expected
