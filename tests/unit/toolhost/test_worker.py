"""The Python worker where a handler waits for an answer: it reads and serves meanwhile."""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.worker.worker_frames import Call, Result
from goondan.toolhost.inside import worker as worker_module
from goondan.toolhost.inside.wire import framed
from goondan.toolhost.inside.worker import Worker

encode = msgspec.msgpack.encode
CALL = Call(
    call_id="7",
    export="same",
    input=Raw(encode({})),
    agent_name="coder",
    instance_key="main",
    turn_id="t1",
    tool_call_id="c1",
    workdir="/",
    message_id=None,
    deadline_ms=120_000,
    background=False,
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker whose reader is this thread."""

    def left(*why: str) -> None:
        raise AssertionError(f"the process has ended {why}")

    monkeypatch.setattr(worker_module, "leave", left)
    made = Worker()
    made.handlers = {"same": lambda ctx, given: given}
    made._reader = get_ident()
    return made


def test_what_a_signal_of_the_handler_raises_while_it_waits_is_the_handlers(worker: Worker) -> None:
    def interrupted() -> None:
        raise TimeoutError("the handler's own")

    worker._poll = interrupted
    never = allocate_lock()
    never.acquire()
    with pytest.raises(TimeoutError, match="own"):
        worker.wait(never)


def test_a_call_for_which_no_thread_can_be_started_fails_alone(worker: Worker) -> None:
    def refused(job: Callable[[Any], None]) -> None:
        raise RuntimeError("can't start new thread")

    sent: list[bytes] = []
    worker._threads.run = refused  # type: ignore[method-assign]
    worker.send = sent.append  # type: ignore[method-assign, assignment]
    worker._asks = True  # a handler waits, so that other calls need a thread
    (frame,) = worker._frames.feed(framed(encode(CALL)))
    worker._handle(frame)
    result = msgspec.msgpack.decode(sent[-1], type=Result)  # behind what the log says of it
    assert (result.call_id, result.status) == ("7", "error")
    assert result.error is not None and "can't start new thread" in result.error.message
    assert worker.running == {}
