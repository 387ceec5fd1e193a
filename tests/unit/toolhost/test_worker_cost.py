"""What a call costs the Python worker and the reading of its frame costs the tool host, in Python calls."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.worker.worker_frames import Call, Result
from goondan.toolhost.calls.untrusted import Channel, check_json
from goondan.toolhost.inside import wire
from goondan.toolhost.inside.wire import framed
from goondan.toolhost.inside.worker import Worker
from tests.python_calls import python_calls

encode = msgspec.msgpack.encode
CALL = encode(
    Call(
        call_id="7",
        export="same",
        input=Raw(encode({"text": "x" * 100, "lines": 20})),
        agent_name="coder",
        instance_key="main",
        turn_id="t1",
        tool_call_id="c1",
        workdir="/home/somebody/.goondan/workspaces/1/instances/coder/main/workspace",
        message_id=None,
        deadline_ms=120_000,
        background=False,
    )
)


def calls_of(what: Callable[[], object]) -> int:
    """How many functions in Python are called until it returns, itself included."""
    with python_calls() as called:
        what()
    return len(called)


def test_a_quick_call_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_keys", {})  # other tests may have filled it with names that no frame has
    worker = Worker()
    written: list[bytes] = []
    worker.handlers = {"same": lambda ctx, given: given}
    worker._write = written.append  # type: ignore[assignment, method-assign]
    worker._reader = get_ident()

    def one() -> None:
        worker._inbox.extend(worker._frames.feed(framed(CALL)))
        worker._handle(worker._inbox.popleft())
        worker._flush()

    one()  # from now on its export is known to be quick
    assert min(calls_of(one) for _ in range(5)) <= 27  # on a busy machine a call is now and then a slow one
    data = written[-1]
    assert len(data) == int.from_bytes(data[:4], "little") + 4
    result = msgspec.msgpack.decode(data[4:], type=Result)
    assert (result.call_id, result.status) == ("7", "ok")
    assert result.output is not None and msgspec.msgpack.decode(result.output) == {"text": "x" * 100, "lines": 20}
    assert worker.running == {}


def test_the_result_of_a_worker_in_the_tool_host() -> None:
    output = encode([{"path": f"src/{number}.py", "line": number, "hit": True, "rank": 0.5} for number in range(100)])
    data = framed(encode(Result(call_id="7", status="ok", output=Raw(output), handler_ms=0.5)))
    channel = Channel(1 << 20, 0.0)
    assert calls_of(lambda: channel.feed(data, 0.0)) <= 2
    assert calls_of(lambda: check_json(output)) <= 3, "no value costs a call, and a small output not even a walk"
