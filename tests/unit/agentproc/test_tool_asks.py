"""Questions of running calls to their agent: each is handled once and answered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec import Raw

from goondan.agentproc.calls.asks import KEPT, KEPT_BYTES, Asked, ToolAsks, unsent_answer
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk

CALL = "t1/c1"


class Wire:
    """The sending side of a link."""

    def __init__(self, full: bool = False) -> None:
        self.sent: list[Frame] = []
        self.full = full

    def send(self, frame: Frame) -> bool:
        if self.full and len(memoryview(frame.payload)) > 1000:
            raise fail("E_FRAME_TOO_LARGE", "too large")
        self.sent.append(frame)
        return True

    @property
    def answers(self) -> list[Any]:
        """Of each answer: the value, or the code of the error."""
        told = [from_raw(frame.payload, ToolAnswer) for frame in self.sent]
        return [from_raw(one.value or Raw(b"\xc0"), object) if one.error is None else one.error.code for one in told]


def asked(number: int = 1, kind: str = "elicit", value: Any = None, call_id: str = CALL) -> Frame:
    payload = to_raw(ToolAsk(number, kind, to_raw(value)))
    return Frame("tool.ask", id=f"h.{number}", call_id=call_id, payload=payload)


def made(handler: Callable[[Asked], None] | None = None, wire: Wire | None = None) -> tuple[ToolAsks, Wire]:
    wire = wire or Wire()
    asks = ToolAsks(cast(Any, wire), {CALL}.__contains__)
    if handler is not None:
        asks.handle("elicit", handler)
    return asks, wire


def test_a_question_is_answered_by_the_handler_of_its_kind() -> None:
    asks, wire = made(lambda one: one.answer({"you said": one.read(str), "number": one.number}))
    asks.take(asked(value="hi"))
    (frame,) = wire.sent
    assert (frame.type, frame.call_id, frame.in_reply_to) == ("tool.answer", CALL, "h.1")
    assert wire.answers == [{"you said": "hi", "number": 1}]


def test_a_handler_may_answer_later_and_once() -> None:
    open_: list[Asked] = []
    asks, wire = made(open_.append)
    asks.take(asked())
    assert wire.sent == []
    assert open_[0].open
    open_[0].answer(1)
    open_[0].answer(2)
    open_[0].refuse(error_payload("E_INTERNAL", "x"))
    assert wire.answers == [1]
    assert not open_[0].open


def test_a_repeat_is_not_handled_again() -> None:
    handled: list[Asked] = []
    asks, wire = made(handled.append)
    asks.take(asked())
    asks.take(asked())
    assert (len(handled), wire.sent) == (1, [])
    handled[0].answer("done")
    asks.take(asked())
    assert (len(handled), wire.answers) == (1, ["done", "done"])


def test_an_answer_that_is_not_kept_any_more_is_unknown_and_its_question_not_handled_again() -> None:
    handled: list[Asked] = []
    asks, wire = made(handled.append)
    for number in range(KEPT + 1):
        asks.take(asked(number))
        handled[-1].answer(number)
    asks.take(asked(0))
    asks.take(asked(1))
    assert wire.answers[-2:] == ["E_TOOL_OUTCOME_UNKNOWN", 1]
    for number in range(1000, 1000 + 4):
        asks.take(asked(number))
        handled[-1].answer("x" * (KEPT_BYTES // 3))
    asks.take(asked(1000))
    assert (wire.answers[-1], len(handled)) == ("E_TOOL_OUTCOME_UNKNOWN", KEPT + 1 + 4), "large ones go sooner"


def test_a_question_of_no_open_call_and_of_no_kind_is_refused() -> None:
    asks, wire = made(lambda one: one.answer(1))
    asks.take(asked(call_id="t1/c2"))
    asks.take(asked(2, kind="rob the bank"))
    assert wire.answers == ["E_CALL_ENDED", "E_FORBIDDEN"]


@pytest.mark.parametrize("error", [fail("E_FORBIDDEN", "no"), ValueError("a bug")])
def test_what_a_handler_raises_is_the_answer(error: Exception) -> None:
    def handler(one: Asked) -> None:
        raise error

    asks, wire = made(handler)
    asks.take(asked())
    assert wire.answers == ["E_FORBIDDEN" if isinstance(error, GoondanError) else "E_INTERNAL"]


def test_with_its_call_a_question_ends() -> None:
    handled: list[Asked] = []
    asks, wire = made(handled.append)
    asks.take(asked())
    assert asks.drop(CALL) == handled
    handled[0].answer(1)
    assert wire.sent == []
    assert asks.drop(CALL) == []
    asks.take(asked(2))
    asks.close()
    assert not handled[1].open


def test_an_answer_that_cannot_be_sent_is_an_error() -> None:
    asks, wire = made(lambda one: one.answer("x" * 2000), Wire(full=True))
    asks.take(asked())
    assert wire.answers == ["E_FRAME_TOO_LARGE"]
    large = Frame("tool.answer", call_id=CALL, in_reply_to="h.1", payload=to_raw(ToolAnswer(1, to_raw("x"))))
    told = unsent_answer(large, fail("E_DISK_FULL", "full"))
    assert (told.call_id, told.in_reply_to) == (CALL, "h.1")
    assert from_raw(told.payload, ToolAnswer).error == error_payload("E_DISK_FULL", "full")


def test_a_frame_that_is_no_question_is_refused_as_a_frame() -> None:
    asks, wire = made()
    with pytest.raises(GoondanError):
        asks.take(Frame("tool.ask", id="h.1", call_id=CALL, payload=to_raw({"askId": "one"})))
    with pytest.raises(GoondanError):
        asks.take(asked(value="x" * (1 << 20)))
    assert wire.sent == []
