"""A script's call whose output its tool host gives to the script at once, and what only the agent may answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw

from goondan.schemas.transport.link import Done
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import PASSED_ON, Frame, ToolError, ToolResult
from goondan.schemas.worker.worker_frames import Answer, Ask
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.results import error_result
from goondan.toolhost.serving.answers import MAX_PASSED_ON, Answers, Asking
from tests.unit.toolhost.test_calls import call

OK = to_raw(ToolResult(status="ok", output=to_raw({"count": 3}), receipt=to_raw({"jail": "of operators"})))


class Bus:
    """The link, as far as questions need it. Who asks a caller is asked again under this frame's id."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def ask_caller(self, frame: Frame, done: Done) -> None:
        frame.id = "h.9"

    def forget(self, frame_id: str) -> None:
        self.forgotten.append(frame_id)

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        raise AssertionError("nothing else is asked")

    ask = post


class Host:
    """A tool host's answers, with a script that has asked for a call."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.heard: list[Answer] = []
        self.bus = Bus()
        asking = Asking(asyncio.get_running_loop(), self.bus, lambda line: None, {})
        send: Any = self.sent.append
        self.answers = Answers(asyncio.get_running_loop(), send, asking, lambda *_: None, lambda _: None, lambda: None)
        self.script = call("t/c1")
        self.script.worker_call_id = "w1"
        self.answers.calls.open(self.script)
        ask = Ask(call_id="w1", ask_id=4, op="tool", value=to_raw({"name": "x"}))
        asking.ask(self.script, ask, self.heard.append)

    def finish(self, payload: Raw, made: Call | None = None, *, question: str = "h.9", within: str = "t/c1") -> Frame:
        """Finish the script's call; the `tool.result` that leaves."""
        made = made or call("t/c1>1")
        made.within, made.question = within, question
        self.answers.calls.open(made)
        self.answers.finish(made, payload)
        return self.sent[-1]


async def test_an_output_is_given_to_the_script_without_its_receipt_and_to_the_agent_whole() -> None:
    host = Host()
    result = host.finish(OK)
    assert (result.type, result.stage, bytes(result.payload)) == ("tool.result", PASSED_ON, bytes(OK))
    (answer,) = host.heard
    assert (answer.call_id, answer.ask_id, answer.error) == ("w1", 4, None)
    assert answer.value is not None and from_raw(answer.value, dict) == {"status": "ok", "output": {"count": 3}}
    assert host.bus.forgotten == ["h.9"], "the question is sent no more"
    again = call("t/c1>2")
    assert host.finish(OK, again).stage is None and len(host.heard) == 1, "a question has one answer"
    kept: Any = host.answers.calls.get("t/c1>1")
    host.answers.send_stored(kept)
    assert host.sent[-1].stage is None, "whether a lost result was passed on is not said again"


async def test_an_output_of_nothing_is_passed_on_too() -> None:
    host = Host()
    host.finish(to_raw({"status": "ok", "output": None}))
    (answer,) = host.heard
    assert answer.value is not None and from_raw(answer.value, dict) == {"status": "ok", "output": None}


@pytest.mark.parametrize(
    ("payload", "changes"),
    [
        (error_result(ToolError(message="no", name="Error", code="E_TOOL"), 100), {}),
        (to_raw(ToolResult(status="pending", handle="t/7")), {}),
        (to_raw(ToolResult(status="ok", output=to_raw("x" * MAX_PASSED_ON))), {}),
        (OK, {"question": "h.8"}),
        (OK, {"within": "t/c2"}),
        (OK, {"within": "t/c0"}),
        (OK, {"made": call("t/c1>1", agent="b")}),
    ],
    ids=["failed", "goes on", "by reference", "another question", "no script", "an ended script", "another's script"],
)
async def test_what_only_the_agent_may_answer(payload: Raw, changes: dict[str, Any]) -> None:
    host = Host()
    host.answers.calls.open(ended := call("t/c0"))
    host.answers.finish(ended, OK)
    assert host.finish(payload, **changes).stage is None
    assert host.heard == [] and host.bus.forgotten == []
