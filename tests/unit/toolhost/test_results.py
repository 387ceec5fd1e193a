"""Results as the bus carries them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, MAX_OUTPUT_BYTES
from goondan.schemas.wire.errors import CODES, HELP_BASE, error_payload
from goondan.schemas.wire.frames import ToolError
from goondan.schemas.worker.worker_frames import Result, WorkerError
from goondan.toolhost.calls.call_inputs import (
    CACHE_BYTES,
    CACHED,
    WORKER_MESSAGES,
    MessageCache,
    SentMessages,
)
from goondan.toolhost.calls.results import MAX_HANDLE, error_result, refusal, shape
from goondan.toolhost.calls.untrusted import Violation, output_limit

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
RECEIPT = Raw(pack("told"))


def tool(limit: int) -> ToolSpec:
    return ToolSpec(name="t", entry="/t.py", root="/t.py", exports=[], error_message_limit=limit)


def shaped(result: Result, limit: int = 1000) -> dict[str, Any]:
    found: dict[str, Any] = unpack(shape(result, RECEIPT, tool(limit)))
    assert found.pop("receipt") == "told"
    return found


@pytest.mark.requirement("RESULT-01", "RESULT-02", "RESULT-03")
def test_ok_and_pending() -> None:
    assert shaped(Result(call_id="1", status="ok", output=Raw(pack({"a": 1})))) == {"status": "ok", "output": {"a": 1}}
    assert shaped(Result(call_id="1", status="ok")) == {"status": "ok", "output": None}
    assert shaped(Result(call_id="1", status="pending", handle="h")) == {"status": "pending", "handle": "t/h"}


def test_an_output_is_forwarded_as_it_came() -> None:
    """Not decoded: 4 MiB of empty arrays would take most of a second. These numbers and names are written long."""
    output = bytes.fromhex("df00000001db0000000161dd00000002cf0000000000000001d9026869")
    assert output in bytes(shape(Result(call_id="1", status="ok", output=Raw(output)), RECEIPT, tool(100)))
    assert shaped(Result(call_id="1", status="ok", output=Raw(output)))["output"] == {"a": [1, "hi"]}


@pytest.mark.parametrize(
    "result",
    [
        Result(call_id="1", status="error"),
        Result(call_id="1", status="pending"),
        Result(call_id="1", status="pending", handle="x" * (MAX_HANDLE + 1)),
        Result(call_id="1", status="pending", handle="a\nb"),
        Result(call_id="1", status="pending", handle="\x1b[2J"),
        Result(call_id="1", status="pending", handle="a\u202eb"),
        Result(call_id="1", status="ok", output=Raw(b"\xc4\x01x")),
    ],
)
def test_what_breaks_the_protocol(result: Result) -> None:
    with pytest.raises(Violation):
        shape(result, RECEIPT, tool(100))


@pytest.mark.requirement("ERROR-02", "ERROR-03", "ERROR-05", "ERROR-06", "ERROR-07")
def test_errors_are_completed_and_cut() -> None:
    plain = shaped(Result(call_id="1", status="error", error=WorkerError(name="ValueError", message="x" * 50)), 30)
    assert plain["error"] == {
        "name": "ValueError",
        "message": "x" * 15 + "... (truncated)",
        "code": "E_TOOL",
        "suggestion": CODES["E_TOOL"],
        "helpUrl": HELP_BASE + "E_TOOL",
    }
    own = WorkerError(name="N" * 999, message="m", code="C" * 999, suggestion="S" * 9999, help_url="H" * 9999)
    error = shaped(Result(call_id="1", status="error", error=own))["error"]
    assert [len(error[key]) for key in ("name", "code", "suggestion", "helpUrl")] == [200, 100, 2000, 1000]
    os_error = shaped(
        Result(call_id="1", status="error", error=WorkerError(name="OSError", message="m", code="ENOENT"))
    )
    assert os_error["error"]["helpUrl"] == HELP_BASE + "ENOENT"


def test_outputs_have_the_limit_of_their_tool_or_are_an_error() -> None:
    limit = 4 << 20
    largest = Raw(pack("x" * (limit - 5)))
    assert shaped(Result(call_id="1", status="ok", output=largest))["status"] == "ok"
    error = shaped(Result(call_id="1", status="ok", output=Raw(pack("x" * (limit - 4)))))["error"]
    assert error["code"] == "E_TOOL_LIMIT"
    assert error["message"] == f"the output has {limit + 1} bytes, limit {limit} (outputMb)"
    assert (output_limit(4), output_limit(0), output_limit(10_000)) == (limit, 0, MAX_OUTPUT_BYTES)


def test_the_largest_output_is_a_payload_and_an_answer() -> None:
    room = len(bytes(shape(Result(call_id="1", status="ok", output=None), RECEIPT, tool(1000))))
    assert MAX_OUTPUT_BYTES + room + (64 << 10) < MAX_BLOB_BYTES


def test_one_error_for_many_calls_is_not_changed_by_any() -> None:
    error = refusal(error_payload("E_TOOL_CRASHED", "x" * 100))
    assert len(unpack(error_result(error, 20))["error"]["message"]) == 20
    assert len(unpack(error_result(error, 200))["error"]["message"]) == 100
    assert isinstance(error, ToolError)


def test_messages_are_kept_within_their_bytes() -> None:
    cache = MessageCache(max_bytes=100)
    for number in range(5):
        cache.put(("a", f"k{number}", "m"), b"x" * 40)
    cache.put(("a", "k4", "m"), b"y" * 40)
    assert [cache.get(("a", f"k{number}", "m")) is not None for number in range(5)] == [False] * 3 + [True] * 2
    assert cache.get(("other", "k4", "m")) is None
    cache.put(("a", "k3", "big"), b"x" * 60)
    cache.put(("a", "k5", "m"), b"x" * 10)
    kept = [cache.get(name) for name in (("a", "k3", "big"), ("a", "k4", "m"), ("a", "k5", "m"))]
    assert kept == [None, b"y" * 40, b"x" * 10]  # the largest goes
    cache.put(("a", "k5", "larger than all"), b"x" * 1000)
    assert cache.get(("a", "k4", "m")) == b"y" * 40
    assert CACHE_BYTES > 1 << 20


def test_messages_of_so_many_instances_are_kept() -> None:
    cache = MessageCache()
    for number in range(CACHED + 1):
        cache.put(("a", f"k{number}", "m"), b"x")
    cache.put(("a", "k1", "m"), b"x")
    cache.put(("a", "new", "m"), b"x")
    assert [number for number in range(4) if cache.get(("a", f"k{number}", "m")) is None] == [0, 2]


def test_of_one_instance_only_the_last_message_is_kept() -> None:
    cache = MessageCache()
    cache.put(("a", "other", "0"), b"o")
    for number in range(10):
        cache.put(("a", "k", str(number)), b"x")
    kept = [number for number in range(10) if cache.get(("a", "k", str(number)))]
    assert kept == [9]
    assert cache.get(("a", "other", "0")) == b"o"


def test_each_worker_is_sent_a_message_once_until_it_drops_it() -> None:
    sent = SentMessages()
    assert sent.name(("a", "k", "m"), None) == (None, False)
    assert sent.name(("a", "k", "m"), b"x") == ("m1", True)
    assert sent.name(("a", "k", "m"), b"x") == ("m1", False)
    for number in range(WORKER_MESSAGES):
        assert sent.name(("a", "k", str(number)), b"x")[1]
    assert sent.name(("a", "k", "m"), b"x") == ("m10", True)
