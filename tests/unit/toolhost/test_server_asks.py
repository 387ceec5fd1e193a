"""What workers of servers ask in the name of no call: what goes to the bus and comes back, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from goondan.schemas.transport.link import Done
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.questions import MAX_OPEN
from goondan.schemas.worker.worker_frames import Answer, Ask
from goondan.toolhost.calls.asks import MAX_SERVER_ASK
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.serving.answers import Asking


class Bus:
    """The side of the link that questions need: keeps what was sent, and answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Frame, asyncio.Future[Frame]]] = []
        self.forgotten: list[str] = []

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        frame.id = f"h.{len(self.sent)}"
        self.sent.append((frame, asyncio.get_running_loop().create_future()))
        return self.sent[-1][1]

    ask = post

    def ask_caller(self, frame: Frame, done: Done) -> None:
        raise AssertionError("the worker of a server asks no caller")

    def forget(self, frame_id: str) -> None:
        self.forgotten.append(frame_id)
        self.sent[int(frame_id[2:])][1].cancel()


def about_login(server: str, agent: str | None, asked: Raw) -> Frame:
    if from_raw(asked, str) == "nonsense":
        raise fail("E_FRAME_INVALID", "nonsense")
    return Frame("a.question", payload=to_raw([server, agent, from_raw(asked, str)]))


def asking(bus: Bus | None, **asks: Any) -> Asking:
    return Asking(asyncio.get_running_loop(), bus, lambda line: None, asks or {"login": about_login})


def ask(number: int = 1, value: Any = "load", op: Any = "login") -> Ask:
    return Ask(call_id="", ask_id=number, op=op, value=to_raw(value))


async def answer_of(made: Asking, bus: Bus | None, asked: Ask, outcome: Frame | Exception | None = None) -> Answer:
    """The one answer that a worker gets, when the bus answers with `outcome`."""
    told: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    made.ask_for_server(7, "tracker", "coder", asked, told.set_result)
    if bus is not None and outcome is not None:
        sent = bus.sent[-1][1]
        if isinstance(outcome, Exception):
            sent.set_exception(outcome)
        else:
            sent.set_result(outcome)
    return await told


async def test_a_question_goes_out_in_the_name_of_its_server_and_its_answer_comes_back_unopened() -> None:
    bus = Bus()
    told = await answer_of(asking(bus), bus, ask(3), Frame("reply", payload=to_raw({"kept": 1})))
    assert (bus.sent[0][0].type, from_raw(bus.sent[0][0].payload, list)) == ("a.question", ["tracker", "coder", "load"])
    assert (told.call_id, told.ask_id, told.error) == ("", 3, None)
    assert told.value is not None and from_raw(told.value, dict) == {"kept": 1}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("refused", "E_FORBIDDEN"),
        ("nonsense", "E_FRAME_INVALID"),
        ("no bus", "E_KERNEL_NOT_RUNNING"),
        ("no feature", "E_FEATURE_MISSING"),
    ],
)
async def test_a_question_without_a_good_answer_has_an_error(fault: str, code: str) -> None:
    bus = None if fault == "no bus" else Bus()
    made = asking(bus, other=about_login) if fault == "no feature" else asking(bus)
    outcome = GoondanError(error_payload("E_FORBIDDEN", "nobody agreed")) if fault == "refused" else None
    told = await answer_of(made, bus, ask(value=fault), outcome)
    assert told.value is None
    assert told.error is not None and told.error.code == code


@pytest.mark.parametrize(
    "asks",
    [
        [ask(1), ask(1)],
        [ask(1, "x" * (MAX_SERVER_ASK + 1))],
        [Ask(call_id="", ask_id=1, op="login")],
        [Ask(call_id="", ask_id=1, op="login", value=Raw(b"\xc4\x01x"))],
    ],
    ids=["one number twice", "too large", "nothing", "no JSON"],
)
async def test_what_a_worker_may_not_ask(asks: list[Ask]) -> None:
    bus = Bus()
    made = asking(bus)
    for one in asks[:-1]:
        made.ask_for_server(7, "tracker", None, one, lambda told: None)
    made.ask_for_server(8, "other", None, ask(1), lambda told: None)  # another worker has its own numbers
    with pytest.raises(Violation):
        made.ask_for_server(7, "tracker", None, asks[-1], lambda told: None)
    assert len(bus.sent) == len(asks)


async def test_a_worker_has_so_many_questions_open_and_no_more() -> None:
    bus = Bus()
    made = asking(bus)
    for number in range(MAX_OPEN):
        made.ask_for_server(7, "tracker", None, ask(number), lambda told: None)
    told = await answer_of(made, None, ask(MAX_OPEN))
    assert told.error is not None and told.error.code == "E_TOOL_LIMIT"
    assert len(bus.sent) == MAX_OPEN


async def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    bus = Bus()
    made = asking(bus)
    told: list[Answer] = []
    made.ask_for_server(7, "tracker", None, ask(1), told.append)
    made.ask_for_server(8, "tracker", None, ask(1), told.append)
    made.drop_server(7)
    assert bus.forgotten == ["h.0"]
    await asyncio.sleep(0)
    assert [one.error and one.error.code for one in told] == ["E_CALL_ENDED"]
    made.ask_for_server(7, "tracker", None, ask(1), told.append)  # its numbers are free again
