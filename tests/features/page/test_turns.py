"""What a span shows of a conversation: the messages that are asked for, and files that are what they say."""

from __future__ import annotations

import os
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
    UserData,
)
from goondan.features.page.door import turns
from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.rules.callers import Caller
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.wire.frames import ToolResult
from tests.checks import refuses

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 30
NAME = "0f" * 16


class Place:
    """A swarm of which only the place is known."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = str(folder)


def message(name: str, data: Any, source: Any = "user") -> Message:
    return Message(id=name, data=data, created_at="2026-01-01T00:00:00Z", source=MessageSource(type=source))


def stored(folder: Path, output: str = "all of it") -> None:
    """A turn with two answers of its model and a call."""
    result = ToolResult(status="ok", output=msgspec.Raw(msgspec.msgpack.encode(output)))
    said = [
        message("t.0", UserData("read it")),
        message(
            "t.1", AssistantData([TextPart("I read"), ToolCallPart("c1", "files__read", {"path": "a"})]), "assistant"
        ),
        message("t.2", ToolData([ToolResultPart("c1", "files__read", result)]), "tool"),
        message("t.3", AssistantData([TextPart("It says")]), "assistant"),
    ]
    store = ConversationStore(instance_dir(str(folder), "main", "k"))
    store.adopt(1)
    with store.write():
        store.begin_turn("e", "t", 1, "2026-01-01T00:00:00Z")
        for number, one in enumerate(said):
            store.append("t", number, Append(one))
    store.close()


def asked(folder: Path, query: Any, agents: tuple[str, ...] = ("*",)) -> Any:
    place: Any = Place(folder)
    return Asked(Caller("test", "look", agents), place, {}, query, None)


@pytest.mark.parametrize(
    ("which", "found"),
    [
        ({}, ["t.0", "t.3"]),
        ({"answer": 0}, ["t.1"]),
        ({"answer": 2}, []),
        ({"call": "c1"}, ["t.1", "t.2"]),
        ({"call": "c2"}, []),
    ],
)
def test_the_messages_of_a_span(tmp_path: Path, which: Any, found: list[str]) -> None:
    stored(tmp_path)
    told = turns.messages(asked(tmp_path, turns.Said("main", "e", "k", **which)))
    assert [msgspec.json.decode(one)["id"] for one in told["messages"]] == found


def test_a_message_that_no_browser_can_take_is_left_out(tmp_path: Path) -> None:
    stored(tmp_path, "[" * (turns.MAX_SHOWN + 1))
    told = turns.messages(asked(tmp_path, turns.Said("main", "e", "k", call="c1")))
    assert [msgspec.json.decode(one)["id"] for one in told["messages"]] == ["t.1"]


def test_who_may_not_speak_to_an_agent_reads_nothing_of_it(tmp_path: Path) -> None:
    stored(tmp_path)
    for handler, query in ((turns.messages, turns.Said("main", "e", "k")), (turns.file, turns.Kept("main", NAME, "k"))):
        with refuses("E_FORBIDDEN"):
            handler(asked(tmp_path, query, ("other",)))


def test_messages_of_another_form_are_left_out() -> None:
    odd: list[Any] = [
        None,
        "text",
        {"id": "x"},
        {"data": []},
        {"data": {"role": "assistant", "content": [1, {"toolCallId": []}]}},
    ]
    assert turns.chosen(odd, "c1", None) == []
    assert turns.chosen(odd, None, 0) == [odd[-1]]


def test_a_picture_is_given_as_what_it_is(tmp_path: Path) -> None:
    folder = Path(instance_dir(str(tmp_path), "main", "k"), "files")
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(PNG)
    answer = turns.file(asked(tmp_path, turns.Kept("main", NAME, "k")))
    assert (answer.body, answer.media_type) == (PNG, "image/png")


@pytest.mark.parametrize("name", ["../conversation.db", "0" * 31, "0" * 32 + "/", "0" * 31 + "G", "0" * 32 + "\n"])
def test_a_name_leads_to_no_other_file(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"agent": "main", "file": name}, turns.Kept)


@pytest.mark.parametrize("kind", ["missing", "text", "link", "pipe", "folder"])
def test_what_is_no_picture_is_not_given(tmp_path: Path, kind: str) -> None:
    folder = Path(instance_dir(str(tmp_path), "main", "k"), "files")
    folder.mkdir(parents=True)
    place, other = folder / NAME, folder / "other"
    other.write_bytes(PNG)
    if kind == "text":
        place.write_text("<script>")
    elif kind == "link":
        place.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    with refuses("E_FILE_INVALID" if kind == "text" else "E_USAGE"):
        turns.file(asked(tmp_path, turns.Kept("main", NAME, "k")))
