"""What comes out of a jail: framing, limits, and the walk over an output."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from goondan.schemas.wire.codec import is_small_json
from goondan.schemas.worker.worker_frames import (
    Log,
    LoginNeeded,
    News,
    Progress,
    Ready,
    Result,
    WorkerError,
    WorkerFrame,
)
from goondan.toolhost.calls import untrusted
from goondan.toolhost.calls.untrusted import (
    FRAME_SLACK,
    MAX_ELEMENTS,
    MAX_OUTPUT_DEPTH,
    NEWS_BURST,
    NEWS_BYTES_BURST,
    NEWS_PER_S,
    Channel,
    Violation,
    check_json,
)

encode = msgspec.msgpack.encode


def framed(*frames: WorkerFrame) -> bytes:
    bodies = [encode(frame) for frame in frames]
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def shown(frame: WorkerFrame) -> Any:
    """A frame as comparable values; its output as bytes."""
    return msgspec.msgpack.decode(encode(frame))


texts = st.text(max_size=20)
frames = st.one_of(
    st.builds(Ready, protocol=st.integers(0, 9), exports=st.lists(texts, max_size=3)),
    st.builds(Log, level=st.sampled_from(["debug", "info", "warn", "error"]), message=texts, call_id=st.none() | texts),
    st.builds(Progress, call_id=texts, done=st.floats(allow_nan=False), total=st.none(), message=st.none() | texts),
    st.builds(
        Result,
        call_id=texts,
        status=st.just("ok"),
        output=st.recursive(st.none() | texts | st.integers(-(2**63), 2**64 - 1), st.lists, max_leaves=9).map(
            lambda value: Raw(encode(value))
        ),
    ),
    st.builds(Result, call_id=texts, status=st.just("error"), error=st.builds(WorkerError, name=texts, message=texts)),
)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_frames_come_out_whole_however_the_bytes_are_cut(sent: list[WorkerFrame], cuts: list[int]) -> None:
    data = framed(*sent)
    channel = Channel(1 << 20, 0.0)
    got: list[WorkerFrame] = []
    at = turn = 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        got += channel.feed(data[at : at + step], 0.0)
        at += step
        turn += 1
    assert [shown(frame) for frame in got] == [shown(frame) for frame in sent]
    assert channel.kept == 0


@given(st.binary(max_size=200))
def test_garbage_is_a_violation_or_waits_for_more(data: bytes) -> None:
    channel = Channel(1000, 0.0)
    try:
        channel.feed(data, 0.0)
    except Violation:
        return
    assert channel.kept <= len(data)


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    channel = Channel(1000, 0.0)
    with pytest.raises(Violation) as caught:
        channel.feed((1001 + FRAME_SLACK).to_bytes(4, "little"), 0.0)
    assert caught.value.code == "E_TOOL_LIMIT"
    assert str(1001 + FRAME_SLACK) in str(caught.value)


def test_only_one_incomplete_frame_is_kept() -> None:
    channel = Channel(1000, 0.0)
    assert channel.feed(framed(Ready(1, [])) + b"\x00\x04\x00\x00abc", 0.0)
    assert channel.kept == 7


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc0", b"\x80", encode({"type": "call"}), encode({"type": "result"}), b"\x91" * 5000,
        b"\xa4\xff\xff\xff\xff", encode({"type": "result", "callId": 1, "status": "ok"}),
        encode({"type": "log", "level": "loud", "message": ""}),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_a_violation(body: bytes) -> None:
    with pytest.raises(Violation):
        Channel(10_000, 0.0).feed(len(body).to_bytes(4, "little") + body, 0.0)


def test_unknown_fields_are_skipped() -> None:
    body = encode({"type": "ready", "protocol": 1, "exports": [], "news": {"a": [1]}})
    assert Channel(1000, 0.0).feed(len(body).to_bytes(4, "little") + body, 0.0)


@pytest.mark.parametrize("frame", [Log(level="info", message="x"), News(kind="tools"), LoginNeeded()])
def test_what_nobody_asked_for_has_a_budget_that_refills(frame: WorkerFrame) -> None:
    channel = Channel(1000, 0.0)
    line = framed(frame)
    for _ in range(NEWS_BURST):
        channel.feed(line, 0.0)
    for _ in range(NEWS_PER_S):
        channel.feed(line, 1.0)
    channel.feed(framed(*[Result(call_id="1", status="ok")] * 100), 1.0)  # results are not news
    channel.feed(line * (NEWS_PER_S // 4), 1.25)
    with pytest.raises(Violation) as caught:
        channel.feed(line, 1.25)
    assert caught.value.code == "E_TOOL_LIMIT"


def test_large_log_lines_use_up_their_bytes() -> None:
    channel = Channel(1 << 20, 0.0)
    line = framed(Log(level="info", message="x" * 500_000))
    for _ in range(NEWS_BYTES_BURST // len(line)):
        channel.feed(line, 0.0)
    with pytest.raises(Violation):
        channel.feed(line, 0.0)


# --- outputs


def walk(data: bytes) -> None:
    """Check a value that may be small and nested little like any other."""
    with patch.object(untrusted, "is_small_json", return_value=False):
        check_json(data)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(json_values)
def test_json_passes(value: Any) -> None:
    check_json(encode(value))
    walk(encode(value))


@given(json_values, st.integers(0, 60), st.integers(0, 255))
def test_a_changed_byte_never_does_more_than_a_violation(value: Any, at: int, byte: int) -> None:
    data = bytearray(encode(value))
    data[at % len(data)] = byte
    try:
        walk(bytes(data))
    except Violation:
        with pytest.raises(Violation):
            check_json(bytes(data))
        return
    check_json(bytes(data))
    msgspec.msgpack.decode(bytes(data))  # what passes can be decoded by anyone


@given(json_values)
def test_every_prefix_and_every_suffix_is_refused(value: Any) -> None:
    data = encode(value)
    for end in range(min(len(data), 20)):
        with pytest.raises(Violation):
            check_json(data[:end])
    with pytest.raises(Violation):
        check_json(data + b"\xc0")


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1", b"\xc4\x01a", b"\xc7\x01\x05a", b"\xd4\x01a", encode(b"bytes"), encode(msgspec.msgpack.Ext(5, b"x")),
        b"\x81\x01\x01", b"\x81\xc0\x01", b"\x81\x90\x01", b"\x81\xcb" + bytes(8) + b"\x01",
        b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xf0" + bytes(6), b"\xca\x7f\xc0" + bytes(2), b"\xca\xff\x80" + bytes(2),
        b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
        b"\x91" * (MAX_OUTPUT_DEPTH + 1) + b"\xc0",
    ],
)  # fmt: skip
def test_what_is_not_json_is_refused(data: bytes) -> None:
    for check in (check_json, walk):
        for inner in (data, b"\x91" + data, b"\x81\xa1k" + data):
            with pytest.raises(Violation):
                check(inner)


@pytest.mark.parametrize("value", [None, "", 2**64 - 1, -1.5, [{"a": [{"b": "c"}]}], "x" * 65533])
def test_most_values_need_no_walk(value: Any) -> None:
    with patch.object(untrusted, "_walk"):
        assert is_small_json(encode(value))
        check_json(encode(value))


@pytest.mark.parametrize("value", [[[[[[]]]]], "x" * 65534])
def test_what_is_large_or_nested_is_walked(value: Any) -> None:
    assert not is_small_json(encode(value))
    check_json(encode(value))


def test_the_deepest_output() -> None:
    check_json(b"\x91" * MAX_OUTPUT_DEPTH + b"\xc0")
    with pytest.raises(Violation):
        check_json(b"\x91" * (MAX_OUTPUT_DEPTH + 1) + b"\xc0")


def test_the_number_of_values_is_bounded() -> None:
    check_json(encode([0] * (MAX_ELEMENTS - 1)))
    with pytest.raises(Violation) as caught:
        check_json(encode([0] * MAX_ELEMENTS))
    assert caught.value.code == "E_TOOL_LIMIT"
