"""The messages of a turn, read while it runs and afterwards, and those of a conversation page by page."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

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
from goondan.kernel.traces import conversations
from goondan.kernel.traces.conversations import page, turn_messages
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


def test_a_page_has_so_many_messages_or_bytes_and_no_more_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page(str(tmp_path), "main", "k", 0, None, 5) == ([], None)
    store = ConversationStore(instance_dir(str(tmp_path), "main", "k"), durability="process")
    store.adopt(1)
    with store.write():
        store.begin_turn("e", "t", 1, AT)
        for number in range(30):
            store.append("t", number + 1, Append(said(number, f"{number:<{1 << 18}}")))
    with store.write(final=True):
        store.finish_turn("e", "t", "completed", AT, steps=1, answer=b"")
    store.close()

    def read(before: int | None, number: int) -> tuple[list[int], int | None]:
        found, first = page(str(tmp_path), "main", "k", 0, before, number)
        return [int(message["data"]["content"][0]["text"]) for message in found], first

    seen, before = read(None, 12)
    assert seen == [*range(18, 30)]
    seen, before = read(before, 12)
    assert seen == [*range(6, 18)]
    assert read(before, 12) == ([*range(6)], None)
    assert read(before, 6) == ([*range(6)], None)
    monkeypatch.setattr(conversations, "MAX_PAGE_BYTES", 600_000)
    tracemalloc.start()
    try:
        seen, before = read(None, 30)
        assert seen == [28, 29]
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(conversations, "MAX_PAGE_BYTES", 1)
    assert read(before, 30)[0] == [27]
    assert page(str(tmp_path), "main", "k", 1, None, 5) == ([], None), "of an earlier generation"
