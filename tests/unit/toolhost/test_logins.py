"""What MCP workers ask while they log in: what goes to the bus, what comes back, and what is not let through."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerReply, ServerWish
from goondan.schemas.worker.worker_frames import LoginAnswer, LoginAsk
from goondan.toolhost.serving.answers import MAX_OPEN, MAX_URL, Logins
from goondan.toolhost.untrusted import Violation


class Bus:
    """The side of the link that questions need: keeps what was sent, and answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[Frame, asyncio.Future[Frame]]] = []
        self.forgotten: list[str] = []

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        frame.id = f"h.{len(self.sent)}"
        self.sent.append((frame, asyncio.get_running_loop().create_future()))
        return self.sent[-1][1]

    ask = ask_caller = post

    def forget(self, frame_id: str) -> None:
        self.forgotten.append(frame_id)
        self.sent[int(frame_id[2:])][1].cancel()


def test_a_question_goes_out_in_the_name_of_its_server_and_its_answer_comes_back() -> None:
    async def run() -> LoginAnswer:
        bus = Bus()
        waits = Logins(asyncio.get_running_loop(), bus).ask(7, "tracker", "coder", LoginAsk(login_id=3, op="load"))
        frame, answer = bus.sent[0]
        assert frame.type == "oauth.server"
        assert from_raw(frame.payload, ServerWish) == ServerWish(op="load", server="tracker", agent="coder")
        answer.set_result(Frame("reply", payload=to_raw(ServerReply(document="kept"))))
        return await waits

    told = asyncio.run(run())
    assert (told.login_id, told.reply and told.reply.document, told.error) == (3, "kept", None)


@pytest.mark.parametrize("fault", ["refused", "no reply", "no bus"])
def test_a_question_without_a_good_answer_has_an_error(fault: str) -> None:
    async def run() -> LoginAnswer:
        bus = Bus()
        logins = Logins(asyncio.get_running_loop(), None if fault == "no bus" else bus)
        waits = logins.ask(7, "tracker", None, LoginAsk(login_id=1, op="wait"))
        if fault == "refused":
            bus.sent[0][1].set_exception(GoondanError(error_payload("E_OAUTH_REFUSED", "nobody agreed")))
        elif fault == "no reply":
            bus.sent[0][1].set_result(Frame("reply", payload=to_raw({"code": 7})))
        return await waits

    told = asyncio.run(run())
    assert told.reply is None
    assert told.error is not None
    code = {"refused": "E_OAUTH_REFUSED", "no reply": "E_FRAME_INVALID", "no bus": "E_KERNEL_NOT_RUNNING"}[fault]
    assert told.error.code == code


@pytest.mark.parametrize(
    "asks",
    [
        [LoginAsk(login_id=1, op="load"), LoginAsk(login_id=1, op="load")],
        [LoginAsk(login_id=number, op="load") for number in range(MAX_OPEN + 1)],
        [LoginAsk(login_id=1, op="save", document="x" * (MAX_DOCUMENT + 1))],
        [LoginAsk(login_id=1, op="authorize", url="https://" + "x" * MAX_URL)],
    ],
    ids=["one number twice", "too many", "document", "url"],
)
def test_what_a_worker_may_not_ask(asks: list[LoginAsk]) -> None:
    async def run() -> Any:
        bus = Bus()
        logins = Logins(asyncio.get_running_loop(), bus)
        for ask in asks[:-1]:
            logins.ask(7, "tracker", None, ask)
        logins.ask(8, "other", None, LoginAsk(login_id=1, op="load"))  # another worker has its own numbers
        with pytest.raises(Violation):
            logins.ask(7, "tracker", None, asks[-1])
        return len(bus.sent)

    assert asyncio.run(run()) == len(asks)


def test_nobody_waits_for_a_worker_that_is_gone() -> None:
    async def run() -> None:
        bus = Bus()
        logins = Logins(asyncio.get_running_loop(), bus)
        waits = logins.ask(7, "tracker", None, LoginAsk(login_id=1, op="wait"))
        logins.ask(8, "tracker", None, LoginAsk(login_id=1, op="wait"))
        logins.drop(7)
        assert bus.forgotten == ["h.0"]
        told = await waits
        assert told.error is not None
        logins.ask(7, "tracker", None, LoginAsk(login_id=1, op="load"))  # its numbers are free again

    asyncio.run(run())
