"""The older message form: every message is a frame and comes back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import AgentEvent, Frame, Shutdown
from tests.checks import refuses, there
from tests.legacy.messages import (
    LegacyMessage,
    failure,
    message_of,
    parse,
    request_frame,
    result_frame,
    shutdown_frame,
    unparse,
)

NAMES = st.sampled_from(["coder", "reviewer", "a", "x-1"])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
MESSAGES = st.builds(
    LegacyMessage,
    type=st.sampled_from(["delegate", "delegate_result", "event"]),
    from_=NAMES,
    to=NAMES,
    payload=VALUES,
    correlation_id=TEXTS.filter(bool),
)
AT = "2026-01-01T00:00:00.000Z"


def carried(message: LegacyMessage) -> Frame:
    """The frame as its receiver gets it: what the broker makes of it in between."""
    if message.type == "delegate_result":
        ack = result_frame(message, event_id="e1", epoch=3, created_at=AT)
        assert (ack.type, ack.event_id, ack.epoch) == ("ack", "e1", 3)
        return Frame("event", from_=message.from_, in_reply_to=message.correlation_id, payload=ack.payload)
    return request_frame(message, event_id="e1", created_at=AT, instance_key="k")


@pytest.mark.requirement("IPC-08")
@given(MESSAGES)
def test_a_message_comes_back_as_it_was(message: LegacyMessage) -> None:
    assert parse(unparse(message)) == message
    frame = decode(encode(carried(message)))
    assert message_of(frame, message.to) == message


@given(MESSAGES)
@pytest.mark.requirement("IPC-02", "IPC-04", "IPC-05")
def test_between_agents_there_are_only_events_and_a_request_is_one_with_reply_to(message: LegacyMessage) -> None:
    frame = carried(message)
    event = from_raw(frame.payload, AgentEvent)
    assert frame.type == "event"
    assert (frame.reply_to is not None) == (message.type == "delegate") == (event.reply_to is not None)
    if frame.reply_to is not None:
        assert (frame.reply_to.target, frame.reply_to.correlation_id) == (message.from_, message.correlation_id)
    if message.type == "delegate_result":
        assert event.type == "agent.response"
        assert event.metadata == {"inReplyTo": "e1"}


def test_the_form_is_the_one_of_the_specification() -> None:
    value = {"type": "delegate", "from": "a", "to": "b", "payload": {"x": 1}, "correlationId": "c"}
    assert unparse(parse(value)) == value
    del value["correlationId"]
    assert unparse(parse(value)) == value


def test_a_shutdown_is_the_kernels() -> None:
    frame = Frame("shutdown", id="b.1", payload=to_raw(Shutdown(600, "restart")))
    message = there(message_of(frame, "coder"))
    assert unparse(message) == {
        "type": "shutdown", "from": "orchestrator", "to": "coder",
        "payload": {"gracePeriodMs": 600, "reason": "restart"},
    }  # fmt: skip
    assert parse(unparse(message)) == message
    assert from_raw(shutdown_frame(message).payload, Shutdown) == Shutdown(600, "restart")


@pytest.mark.parametrize("payload", ["text", {"a": 1}, ["x"], 0, None])
def test_a_plain_client_can_read_every_result(payload: Any) -> None:
    message = LegacyMessage("delegate_result", "coder", "client/1", payload, "c")
    frame = result_frame(message, event_id="e1", epoch=1, created_at=AT)
    answer = there(from_raw(frame.payload, AgentEvent).answer)
    assert (frame.stage, answer.status) == ("done", "completed")
    assert answer.response == {"text": "text", "None": None}.get(
        str(payload), str(payload).replace("'", '"').replace(" ", "")
    )


def test_a_failure_is_an_error_in_both_directions() -> None:
    info = error_payload("E_AGENT_CYCLE", "round and round")
    asked = LegacyMessage("delegate", "coder", "reviewer", 1, "c")
    result = failure(asked, info)
    assert (result.from_, result.to, result.correlation_id) == ("reviewer", "coder", "c")
    assert result.payload["error"]["helpUrl"] == info.help_url
    frame = result_frame(result, event_id="e1", epoch=1, created_at=AT)
    answer = there(from_raw(frame.payload, AgentEvent).answer)
    assert (frame.stage, answer.status, answer.error) == ("failed", "failed", info)
    event = AgentEvent(id="a", type="agent.response", created_at=AT, answer=answer)
    told = message_of(Frame("event", from_="reviewer", in_reply_to="c", payload=to_raw(event)), "coder")
    assert told == result


GOOD: dict[str, Any] = {"type": "event", "from": "a", "to": "b", "payload": None}
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: Any = None
for _ in range(64):
    DEEP = [DEEP]
BAD: dict[str, Any] = {
    "a list": [],
    "nothing": None,
    "no payload": {key: value for key, value in GOOD.items() if key != "payload"},
    "an unknown type": GOOD | {"type": "shutdown_ack"},
    "a number as name": GOOD | {"to": 7},
    "a name of no agent": GOOD | {"from": "a/b"},
    "an empty name": GOOD | {"to": ""},
    "an empty correlation": GOOD | {"correlationId": ""},
    "a long correlation": GOOD | {"correlationId": "x" * 257},
    "bytes": GOOD | {"payload": b"x"},
    "nan": GOOD | {"payload": [float("nan")]},
    "a number as key": GOOD | {"payload": {1: 2}},
    "a huge integer": GOOD | {"payload": 2**64},
    "half a character": GOOD | {"payload": "\ud800"},
    "a circle": GOOD | {"payload": CIRCLE},
    "too deep": GOOD | {"payload": DEEP},
    "an object": GOOD | {"payload": object()},
}


@pytest.mark.requirement("IPC-08")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_message_is_one_error(name: str) -> None:
    with refuses("E_FRAME_INVALID") as refused:
        parse(BAD[name])
    assert refused.value.info.suggestion


@pytest.mark.parametrize("payload", [1, [], {"id": 1}, {"id": "e", "type": "t", "createdAt": "", "input": b"x"}])
def test_a_frame_with_another_payload_is_one_error(payload: Any) -> None:
    for frame in (Frame("event", payload=to_raw(payload)), Frame("shutdown", payload=to_raw(payload))):
        with refuses("E_FRAME_INVALID"):
            message_of(frame, "coder")
    assert message_of(Frame("credit", payload=to_raw(payload)), "coder") is None


def test_a_message_of_one_type_is_no_frame_of_another() -> None:
    event = LegacyMessage("event", "a", "b", {})
    shutdown = LegacyMessage("shutdown", "orchestrator", "b", {"gracePeriodMs": "soon"})
    delegate = LegacyMessage("delegate", "a", "b", {})
    calls: list[Callable[[], Frame]] = [
        lambda: result_frame(event, event_id="e", epoch=1, created_at=AT),
        lambda: shutdown_frame(event),
        lambda: shutdown_frame(shutdown),
        lambda: request_frame(shutdown, event_id="e", created_at=AT, instance_key="k"),
        lambda: request_frame(delegate, event_id="e", created_at=AT, instance_key="k"),
    ]
    for make in calls:
        with refuses("E_FRAME_INVALID"):
            make()
