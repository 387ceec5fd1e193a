"""Messages, their events and the invariant that every vendor enforces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.messages import (
    Append,
    AssistantData,
    Message,
    MessageEvent,
    MessageSource,
    Presented,
    Remove,
    Replace,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    Truncate,
    UserData,
    decode_message,
    encode_message,
    fold,
    is_presentable,
    presentable,
)
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.turns import failed

AT = "2026-01-01T00:00:00.000Z"


def user(message_id: str, text: str = "hi") -> Message:
    return Message(message_id, UserData(text), AT, MessageSource("user"))


def asks(message_id: str, *ids: str) -> Message:
    parts: list[TextPart | ToolCallPart] = [TextPart("so"), *(ToolCallPart(i, "x__y", {"n": 1}) for i in ids)]
    return Message(message_id, AssistantData(parts), AT, MessageSource("assistant"))


def result(message_id: str, *ids: str, value: object = 1) -> Message:
    parts = [ToolResultPart(i, "x__y", ToolResult(status="ok", output=to_raw(value))) for i in ids]
    return Message(message_id, ToolData(parts), AT, MessageSource("tool", "x__y"))


@pytest.mark.requirement("CONTEXT-10")
def test_a_message_keeps_its_five_fields_through_storage() -> None:
    message = Message("m", UserData("hé"), AT, MessageSource("extension", "memo"), {"a": [1, None]})
    assert decode_message(encode_message(message)) == message
    with pytest.raises(AttributeError):
        message.id = "other"  # type: ignore[misc]
    message.metadata["b"] = 2
    assert decode_message(encode_message(asks("m", "a"))) == asks("m", "a")


def test_events_are_folded_in_order() -> None:
    base = [user("1"), user("2"), user("3")]
    events: list[MessageEvent] = [
        Remove("2"),
        Append(user("4")),
        Replace("1", user("1b", "new")),
        Remove("none"),
        Replace("none", user("9")),
    ]
    assert [m.id for m in fold(base, events)] == ["1b", "3", "4"]
    assert fold(base, [Truncate(), Append(user("5"))]) == [user("5")]
    assert fold(base, []) == base


def test_a_repeated_append_changes_nothing() -> None:
    assert fold([user("1")], [Append(user("2")), Append(user("2"))]) == [user("1"), user("2")]


def test_valid_histories() -> None:
    assert is_presentable([])
    assert is_presentable([user("1"), asks("2", "a", "b"), result("3", "a"), result("4", "b"), user("5")])
    assert is_presentable([asks("2", "a", "b"), result("3", "a", "b")])


@pytest.mark.parametrize(
    "messages",
    [
        [asks("1", "a")],
        [asks("1", "a"), user("2"), result("3", "a")],
        [asks("1", "a", "b"), result("2", "b"), result("3", "a")],
        [result("1", "a")],
        [asks("1", "a"), result("2", "a"), result("3", "a")],
    ],
)
def test_broken_histories_are_seen_and_mended(messages: list[Message]) -> None:
    assert not is_presentable(messages)
    mended = presentable(messages)
    assert is_presentable(mended)
    assert [m for m in mended if not isinstance(m.data, ToolData)] == [
        m for m in messages if not isinstance(m.data, ToolData)
    ]


def test_a_lost_result_is_said_to_be_lost_and_a_kept_one_is_kept() -> None:
    mended = presentable([asks("1", "a", "b"), user("2"), result("3", "b", value="kept")])
    statuses = [
        part.result for message in mended if isinstance(message.data, ToolData) for part in message.data.content
    ]
    assert [r.status for r in statuses] == ["error", "ok"]
    failed(statuses[0], "E_CANCELLED")


def test_a_result_goes_to_the_nearest_call_before_it_when_ids_repeat_between_turns() -> None:
    mended = presentable([asks("1", "a"), user("2"), asks("3", "a"), result("4", "a", value="second")])
    statuses = [part.result.status for m in mended if isinstance(m.data, ToolData) for part in m.data.content]
    assert statuses == ["error", "ok"]


_messages = st.lists(
    st.one_of(
        st.builds(user, st.uuids().map(str)),
        st.builds(lambda i, ids: asks(i, *ids), st.uuids().map(str), st.lists(st.sampled_from("abc"), unique=True)),
        st.builds(lambda i, ids: result(i, *ids), st.uuids().map(str), st.lists(st.sampled_from("abc"), min_size=1)),
    ),
    max_size=8,
)


@given(_messages)
def test_anything_can_be_mended_and_mending_twice_changes_nothing(messages: list[Message]) -> None:
    mended = presentable(messages)
    assert is_presentable(mended)
    assert presentable(mended) == mended
    if is_presentable(messages):
        assert mended == messages


@given(st.lists(st.tuples(st.integers(0, 12), _messages), max_size=6))
def test_what_grows_is_presented_as_if_all_of_it_were_walked(changes: list[tuple[int, list[Message]]]) -> None:
    presented, messages = Presented(), list[Message]()
    for kept, more in changes:
        messages = [*messages[:kept], *more]
        assert presented.of(messages) == presentable(messages)


def test_only_what_is_new_of_a_long_conversation_is_walked() -> None:
    class Counted(list[Message]):
        walked = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Counted.walked += len(found) if isinstance(index, slice) else 1
            return found

    presented, messages = Presented(), [user("0")]
    for number in range(100):
        messages = Counted([*messages, asks(f"{number}a", "x"), result(f"{number}r", "x")])
        assert presented.of(messages) == messages
    assert 0 < Counted.walked <= 2 * 100
