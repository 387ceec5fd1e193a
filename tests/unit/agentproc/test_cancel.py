"""Cancelled turns over a fake link, a scripted model and a real conversation file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.agentproc.machine.messages import UserData, is_presentable
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.start.app import AgentApp
from goondan.agentproc.turn.run import CANCELLED, TurnRun
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of, last_results, settle, the_answer, until


def cancel_frame(event_id: str, epoch: int = 1) -> Frame:
    return Frame("tool.cancel", event_id=event_id, epoch=epoch)


async def test_a_cancelled_turn_ends_its_open_calls_and_the_next_one_finds_a_valid_history(make: Make) -> None:
    link = FakeLink(lambda tool, _: ok("quick") if tool == "bash__exec" else None)
    model = FakeModel(wants(("a", "notes__add", {}), ("b", "bash__exec", {"command": "x"})), says("next"))
    runner = make(link, model)
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await until(lambda: len(link.open_calls()) == 1)
    runner.cancel(cancel_frame("e1", epoch=2))  # not this delivery
    runner.cancel(cancel_frame("e2"))
    await settle()
    assert not task.done()
    runner.cancel(cancel_frame("e1"))
    async with asyncio.timeout(5):
        await task
    answer = the_answer(link)
    assert (answer.status, code_of(answer), answer.finish_reason) == ("failed", "E_CANCELLED", "cancelled")
    assert [frame.call_id for frame in link.sent if frame.type == "tool.cancel"] == [f"{answer.turn_id}/a"]
    assert link.open_calls() == []
    runner.cancel(cancel_frame("e1"))  # it is over
    await runner.run(event_frame("e2", "something else"))
    messages = model.requests[-1].messages
    assert is_presentable(messages)
    assert last_results(messages) == [("a", "error"), ("b", "ok")]
    told = [m.data.content for m in messages if isinstance(m.data, UserData)]
    assert told == ["go", CANCELLED.told, "something else"]


async def test_a_cancelled_turn_closes_its_model_call_and_its_trace_keeps_the_models_name(
    make: Make, tmp_path: Path
) -> None:
    closed: list[str] = []

    class Slow(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
            if len(self.script) == 1:
                return await super().complete(request, on_delta)
            self.script.pop(0)
            try:
                return await asyncio.Future[ModelAnswer]()
            finally:
                closed.append("closed")

    link, model = FakeLink(), Slow(says("never"), says("fine"))
    runner = make(link, model)
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await until(lambda: len(model.script) == 1)
    runner.cancel(cancel_frame("e1"))
    async with asyncio.timeout(5):
        await task
    await settle()
    assert closed == ["closed"]
    await runner.run(event_frame("e2", "again"))
    assert [code_of(answer) for answer in link.answers()] == ["E_CANCELLED", None]
    with closing(sqlite3.connect(next(tmp_path.rglob("conversation.db")))) as db:
        notes = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.failed'").fetchall()
    assert [json.loads(note) for (note,) in notes] == [{"step": 1, "model": "embedded", "code": "E_CANCELLED"}]


@pytest.mark.parametrize("operator", [False, True])
async def test_a_turn_that_is_cancelled_before_it_begins_asks_nobody(make: Make, operator: bool) -> None:
    link, model = FakeLink(lambda *_: None), FakeModel()
    runner = make(link, model, name="_operator" if operator else "coder")
    runner.cancel(cancel_frame("e1"))
    value = {"tool": "notes__add", "args": {}} if operator else "go"
    await runner.run(event_frame("e1", value, kind="operator.call" if operator else "client.message"))
    assert code_of(the_answer(link)) == "E_CANCELLED"
    assert (model.requests, link.open_calls()) == ([], [])


@pytest.mark.parametrize("waits", ["idle", "leaving"])
async def test_a_process_that_is_ended_in_the_moment_in_which_news_come_ends(waits: str) -> None:
    """`asyncio.wait_for` of Python 3.11 would return then, as if nobody had cancelled."""
    app: Any = AgentApp.__new__(AgentApp)
    app._wake, app._working, app._bye = asyncio.Event(), None, None
    loop = asyncio.get_running_loop()
    app._cut_at, app.link = loop.time() + 5, SimpleNamespace(closed=loop.create_future())
    wait = app._pause_until_news(None, 5.0) if waits == "idle" else app._until_released(loop.create_future())
    waiting = asyncio.ensure_future(wait)
    await asyncio.sleep(0)
    app._wake.set()
    waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=1)
    assert done and waiting.cancelled()


async def test_a_turn_that_could_not_begin_handles_no_cancellation_behind_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("never")))

    def refuses(self: TurnRun, in_force: object) -> None:
        raise fail("E_USAGE", "a part refuses")

    monkeypatch.setattr(TurnRun, "_follow", refuses)
    runner.cancel(cancel_frame("e1"))
    await runner.run(event_frame("e1", "go"))
    await settle()
    assert code_of(the_answer(link)) == "E_USAGE"
    row = runner.instance.store.find_turn("e1")
    assert row is not None and row.answer is not None and b"E_USAGE" in row.answer, "what was stored is what was said"
