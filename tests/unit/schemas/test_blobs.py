"""Which payloads go by reference, at every boundary. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES, MAX_BLOB_BYTES, REFERENCES, check_reference, describe
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, FrameError, decode, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, Frame, ReplyTo, Welcome
from goondan.schemas.wire.peer import Deliver, Greet, OutboxEntry, Peer, Settled
from tests.checks import refuses, there

from .test_peer import HELLO_REQUIRED

FILE = "0" * 32


def ready(*, by_reference: bool = True, blobs: str | None = "/state/blobs") -> Peer:
    peer = Peer("token", "inc", by_reference=by_reference)
    assert isinstance(peer.receive(HELLO_REQUIRED, 0.0), Greet)
    hello = decode(peer.hello(0.0))
    body = Welcome(version=1, principal="client/1", broker="b", credit=8, max_frame=1 << 20, blobs=blobs)
    peer.receive(Frame("welcome", in_reply_to=hello.id, payload=to_raw(body)), 0.0)
    return peer


def sized(size: int, type: str = "event", **fields: object) -> Frame:
    """A frame of exactly `size` bytes."""
    frame = Frame(type, id="f1", **fields)  # type: ignore[arg-type]
    frame.payload = to_raw(b"\0" * (size // 2))
    room = size - len(encode_value(frame))
    frame.payload = to_raw(b"\0" * (size // 2 + room))
    assert len(encode_value(frame)) == size
    return frame


around = st.sampled_from([INLINE_FRAME_BYTES, MAX_FRAME_BYTES]).flatmap(
    lambda limit: st.integers(min_value=limit - 3, max_value=limit + 3)
)


@given(around, st.sampled_from(["event", "tool.call", "tool.result", "ack", "hello", "admin"]), st.booleans())
@settings(max_examples=60)
def test_a_frame_goes_whole_or_by_reference_or_not_at_all(size: int, type: str, by_reference: bool) -> None:
    peer = ready(by_reference=by_reference)
    frame = sized(size, type)
    may = by_reference and type in REFERENCES
    if size > MAX_FRAME_BYTES and not may:
        with pytest.raises(FrameError) as caught:
            peer.goes_by_reference(frame, size)
        assert caught.value.info.code == "E_FRAME_TOO_LARGE"
    else:
        assert peer.goes_by_reference(frame, size) == (may and size > INLINE_FRAME_BYTES)


def test_a_header_alone_does_not_make_a_file() -> None:
    frame = Frame("ack", id="f", stage="result", calls=["c" * 256] * 2200)
    size = len(encode_value(frame))
    assert size > INLINE_FRAME_BYTES
    assert not ready().goes_by_reference(frame, size)


def test_a_payload_larger_than_any_is_refused_before_it_is_kept() -> None:
    peer = ready()
    frame = Frame("event", payload=Raw(bytes(MAX_BLOB_BYTES + 1)))
    with pytest.raises(FrameError) as caught:
        peer.submit("post", frame, None, 0.0)
    assert caught.value.info.code == "E_FRAME_TOO_LARGE"
    assert not peer.waiting


def test_what_waits_for_its_file_keeps_its_place() -> None:
    """Events for one target stay in order; others, and what is small, go ahead."""
    peer = ready()
    large = sized(INLINE_FRAME_BYTES + 1, to="a", instance_key="k")
    assert peer.submit("post", large, "w1", 0.0) is None
    for name, key in (("same", "k"), ("other", "l")):
        assert peer.submit("post", Frame("event", id=name, to="a", instance_key=key), name, 0.0) is None
    assert next_id(peer) == "other"
    assert next_id(peer) is None
    (entry,) = peer.take_unwritten()
    assert peer.take_unwritten() == []
    assert peer.written(entry, describe(bytes(large.payload), FILE))
    first = peer.sendable(0.0)
    assert first is entry
    sent = decode(entry.data)
    assert (sent.id, sent.blob, bytes(sent.payload)) == ("f1", describe(bytes(large.payload), FILE), b"\xc0")
    assert bytes(large.payload) != b"\xc0"  # the caller's own frame is as it was
    assert next_id(peer) == "same"
    peer.lost()
    assert [entry.id for entry in peer.waiting] == ["f1", "same", "other"]


def next_id(peer: Peer) -> str | None:
    entry: OutboxEntry | None = peer.sendable(0.0)
    return None if entry is None else entry.id


def test_a_payload_that_nobody_waits_for_any_more_is_told() -> None:
    peer = ready()
    peer.submit("post", sized(INLINE_FRAME_BYTES + 1), "w", 0.0)
    (entry,) = peer.take_unwritten()
    peer.forget(entry.id)
    assert not peer.written(entry, describe(b"x", FILE))


def test_who_waits_for_an_unreadable_payload_gets_the_error() -> None:
    peer, error = ready(), error_payload("E_BLOB_MISSING", "gone")
    peer.submit("call", Frame("tool.call", id="c", call_id="t/1"), "call", 0.0)
    peer.submit("ask", Frame("event", id="q", reply_to=ReplyTo("client", "q-1")), "ask", 0.0)
    blob = describe(b"x", FILE)
    result = Frame("tool.result", call_id="t/1", blob=blob)
    answer = Frame("event", id="b.1", event_id="e:answer", in_reply_to="q-1", blob=blob)
    assert peer.awaits(result)
    assert peer.awaits(answer)
    settled = peer.unreadable(result, error, 0.0)
    assert isinstance(settled, Settled)
    assert (settled.entry.waiter, settled.frame, settled.error) == ("call", None, error)
    settled = peer.unreadable(answer, error, 0.0)
    assert isinstance(settled, Settled)
    assert (settled.entry.waiter, settled.frame, settled.error) == ("ask", None, error)
    assert decode(there(settled.reply)).stage == "done"
    assert not peer.awaits(result)
    assert not peer.awaits(answer)
    delivered = peer.unreadable(Frame("event", id="e", event_id="e", epoch=1, blob=blob), error, 0.0)
    assert isinstance(delivered, Deliver)
    assert delivered.frame.blob == blob
    assert from_raw(delivered.frame.payload, ErrorPayload) == error
    with pytest.raises(GoondanError):
        from_raw(delivered.frame.payload, AgentEvent)  # a receiver that does not look at `blob` is safe, too


def test_a_reference_is_checked_by_its_frames_limit() -> None:
    frame = Frame("event", blob=describe(b"x" * 100, FILE))
    check_reference(frame, 100)
    with refuses("E_FRAME_TOO_LARGE"):
        check_reference(frame, 99)
