"""Optional opaque fields: absent is None, present (nil too) is the bytes as they came."""

from __future__ import annotations

from msgspec import Raw

from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, ToolCallPayload, ToolResult
from goondan.schemas.worker.worker_frames import Result
from tests.checks import there


def test_output_is_absent_nil_or_a_value() -> None:
    for value in ({"a": [1, 2]}, 0, None, "text"):
        back = from_raw(to_raw(ToolResult(status="ok", output=to_raw(value))), ToolResult)
        assert from_raw(there(back.output), object) == value
        worker = from_raw(to_raw(Result(call_id="c", status="ok", output=to_raw(value))), Result)
        assert bytes(there(worker.output)) == bytes(to_raw(value))
    assert from_raw(to_raw(ToolResult(status="pending", handle="h")), ToolResult).output is None
    assert from_raw(to_raw(Result(call_id="c", status="error")), Result).output is None


def test_other_opaque_fields_come_back_as_they_went() -> None:
    message = to_raw({"role": "assistant"})
    payload = ToolCallPayload(args=to_raw({}), turn_id="t", tool_call_id="c", message_id="m", message=message)
    assert bytes(from_raw(to_raw(payload), ToolCallPayload).message or b"") == bytes(message)
    answer = Answer(turn_id="t", status="completed", output=to_raw({"status": "ok"}))
    event = AgentEvent(id="e", type="agent.response", created_at="", answer=answer)
    back = there(from_raw(to_raw(event), AgentEvent).answer)
    assert from_raw(back.output or Raw(), dict) == {"status": "ok"}
    assert bytes(decode(encode(Frame("event", auth=to_raw([1])))).auth or b"") == bytes(to_raw([1]))
    assert decode(encode(Frame("event"))).auth is None
