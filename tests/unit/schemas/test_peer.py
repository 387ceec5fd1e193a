"""The link's state machine: what is kept, what is sent again, in which order, and when it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.wire.codec import FrameError, decode, from_raw, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Credit, Frame, Hello, ReplyTo, Welcome
from goondan.schemas.wire.peer import (
    BUSY_PATIENCE_S,
    HELLO_RETRY_S,
    MAX_OVERDUE,
    Deliver,
    Greet,
    LinkRefused,
    Peer,
    Reply,
    Settled,
    Welcomed,
)
from tests.checks import refuses, there

HELLO_REQUIRED = Frame("error", payload=to_raw(error_payload("E_HELLO_REQUIRED", "hello?")))


def welcome(peer: Peer, *, credit: int = 4, now: float = 0.0) -> list[Frame]:
    """Take a peer through the greeting; what it sends then."""
    assert isinstance(peer.receive(HELLO_REQUIRED, now), Greet)
    hello = decode(peer.hello(now))
    body = Welcome(version=1, principal="client/1", broker="b", credit=credit, max_frame=1 << 20)
    outcome = peer.receive(Frame("welcome", in_reply_to=hello.id, payload=to_raw(body)), now)
    assert isinstance(outcome, Welcomed)
    return flush(peer, now)


@pytest.fixture
def peer() -> Peer:
    """One that was welcomed."""
    made = Peer("token", "inc")
    welcome(made)
    return made


def flush(peer: Peer, now: float = 0.0) -> list[Frame]:
    sent = []
    while (entry := peer.sendable(now)) is not None:
        sent.append(decode(entry.data))
    return sent


def event(event_id: str, to: str = "coder", **more: object) -> Frame:
    return Frame("event", to=to, instance_key="k", event_id=event_id, **more)  # type: ignore[arg-type]


def ask(peer: Peer, event_id: str, to: str = "coder", now: float = 0.0) -> bytes | None:
    return peer.submit("ask", event(event_id, to, reply_to=ReplyTo("client", "c" + event_id)), event_id, now)


def refuse(frame: Frame, code: str, **more: object) -> Frame:
    return Frame("error", in_reply_to=frame.id, payload=to_raw(error_payload(code, "no", **more)))  # type: ignore[arg-type]


def test_nothing_is_sent_before_the_welcome_and_everything_after_it() -> None:
    peer = Peer("token", "inc")
    assert ask(peer, "e1") is None
    assert ask(peer, "e2") is None
    assert [frame.event_id for frame in welcome(peer)] == ["e1", "e2"]


def test_hello_names_what_is_awaited_and_carries_the_token() -> None:
    peer = Peer("token", "inc", pid=7, started_ms=9)
    ask(peer, "e1")
    body = from_raw(decode(peer.hello(0.0, calls=["t/1"])).payload, Hello)
    assert (body.token, body.incarnation, body.awaiting, body.calls, body.pid, body.started_ms) == (
        "token",
        "inc",
        ["ce1"],
        ["t/1"],
        7,
        9,
    )


def test_a_new_broker_gets_everything_unanswered_again_with_the_same_ids() -> None:
    peer = Peer("token", "inc")
    first = welcome(peer)
    assert first == []
    ask(peer, "e1")
    data = there(peer.submit("post", Frame("ack", stage="done", event_id="x"), "w", 0.0))
    sent = decode(data)
    assert isinstance(peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted"), 0.0), Settled)
    again = welcome(peer)
    assert [frame.event_id for frame in again] == ["e1"], "the answered one is not repeated, the other is"


def test_a_repeat_says_what_is_left_of_the_deadline() -> None:
    """A deadline runs from the first sending, whatever is sent again, for a new broker or after a refusal."""
    peer = Peer("token", "inc")
    asked = event("e1", reply_to=ReplyTo("client", "ce1"), deadline_ms=10_000, payload=to_raw({"input": "hi"}))
    peer.submit("ask", asked, "e1", 0.0)
    (first,) = welcome(peer, now=1.0)
    peer.receive(refuse(first, "E_OVERLOADED", retry_after_ms=500), 2.0)
    (second,) = flush(peer, 3.0)
    (third,) = welcome(peer, now=20.0)
    assert [frame.deadline_ms for frame in (first, second, third)] == [9_000, 7_000, 1]
    assert {(frame.id, frame.event_id, bytes(frame.payload)) for frame in (first, second, third)} == {
        (first.id, "e1", bytes(asked.payload))
    }


def test_accepted_is_not_answered(peer: Peer) -> None:
    data = there(ask(peer, "e1"))
    assert peer.receive(Frame("ack", in_reply_to=decode(data).id, stage="accepted"), 0.0) is None
    assert [frame.event_id for frame in welcome(peer)] == ["e1"], "a broker without memory must hear it again"


def test_an_answer_settles_once_and_is_acknowledged_every_time(peer: Peer) -> None:
    ask(peer, "e1")
    answer = Frame("event", id="b.1", event_id="e1:answer", in_reply_to="ce1")
    settled = peer.receive(answer, 0.0)
    assert isinstance(settled, Settled)
    assert settled.entry.waiter == "e1"
    assert decode(there(settled.reply)).stage == "done"
    repeated = peer.receive(answer, 0.0)
    assert isinstance(repeated, Reply)
    assert decode(repeated.data).event_id == "e1:answer"


def test_a_result_settles_its_call_by_call_id(peer: Peer) -> None:
    peer.submit("call", Frame("tool.call", call_id="t/1", tool="a__b"), "w", 0.0)
    settled = peer.receive(Frame("tool.result", call_id="t/1"), 0.0)
    assert isinstance(settled, Settled)
    assert peer.receive(Frame("tool.result", call_id="t/1"), 0.0) is None, "a second result is nobody's"
    assert peer.in_use == 0


def test_credit_bounds_new_work_but_not_acks() -> None:
    peer = Peer("token", "inc")
    welcome(peer, credit=2)
    sent = [ask(peer, f"e{n}") for n in range(4)]
    assert [data is not None for data in sent] == [True, True, False, False]
    # acks wait behind nothing but the queue itself: they cost no credit
    peer.submit("post", Frame("ack", stage="done"), "w", 0.0)
    first = decode(sent[0] or b"")
    peer.receive(Frame("ack", in_reply_to=first.id, stage="accepted"), 0.0)
    assert [frame.event_id for frame in flush(peer)][:1] == ["e2"]


def test_a_credit_frame_moves_the_window() -> None:
    peer = Peer("token", "inc")
    welcome(peer, credit=1)
    ask(peer, "e1")
    assert ask(peer, "e2") is None
    peer.receive(Frame("credit", payload=to_raw(Credit(8))), 0.0)
    assert [frame.event_id for frame in flush(peer)] == ["e2"]


def test_overload_holds_the_target_in_order_and_no_other() -> None:
    peer = Peer("token", "inc")
    welcome(peer, credit=10)
    frames = [decode(ask(peer, f"e{n}") or b"") for n in range(3)]
    for frame in frames[1:]:
        peer.receive(refuse(frame, "E_OVERLOADED", retry_after_ms=500), 1.0)
    ask(peer, "e3", now=1.0)
    ask(peer, "other", to="reviewer", now=1.0)
    assert [frame.event_id for frame in flush(peer, 1.2)] == ["other"]
    assert [frame.event_id for frame in flush(peer, 1.6)] == ["e1", "e2", "e3"]


def test_a_deadline_ends_an_entry_after_its_grace(peer: Peer) -> None:
    peer.submit("call", Frame("tool.call", call_id="t/1", deadline_ms=1000), "w", 10.0)
    assert peer.tick(11.5) == ([], False)
    settled, _ = peer.tick(12.1)
    assert [item.error.code for item in settled if item.error] == ["E_TOOL_TIMEOUT"]
    assert peer.in_use == 0


def test_an_answer_after_its_time_is_told_once_and_acknowledged_every_time(peer: Peer) -> None:
    event = Frame("event", to="coder", event_id="e1", reply_to=ReplyTo("me", "ce1"), deadline_ms=1000)
    peer.submit("ask", event, "w", 10.0)
    settled, _ = peer.tick(30.0)
    assert [item.error.code for item in settled if item.error] == ["E_AGENT_TIMEOUT"]
    answer = Frame("event", id="b.1", event_id="e1:answer", in_reply_to="ce1")
    late = peer.receive(answer, 31.0)
    assert isinstance(late, Reply)
    assert late.late is not None
    assert (decode(late.data).stage, decode(late.data).event_id) == ("done", "e1:answer")
    repeat = peer.receive(answer, 32.0)
    assert isinstance(repeat, Reply)
    assert repeat.late is None, "a repeat is no news"
    for number in range(2 * MAX_OVERDUE):
        other = Frame("event", to="coder", event_id=f"x{number}", reply_to=ReplyTo("me", f"c{number}"), deadline_ms=1)
        peer.submit("ask", other, "w", 40.0)
        peer.tick(50.0)
    forgotten = peer.receive(Frame("event", in_reply_to="c0"), 51.0)
    assert isinstance(forgotten, Reply)
    assert forgotten.late is None, "the oldest are forgotten"
    late = peer.receive(Frame("event", in_reply_to=f"c{number}"), 51.0)
    assert isinstance(late, Reply)
    assert late.late is not None


def test_hello_is_repeated_until_answered_and_a_busy_principal_waited_for() -> None:
    peer = Peer("token", "inc")
    peer.receive(HELLO_REQUIRED, 0.0)
    hello = decode(peer.hello(0.0))
    assert peer.receive(refuse(hello, "E_PRINCIPAL_BUSY"), 0.0) is None
    assert peer.tick(HELLO_RETRY_S)[1]
    hello = decode(peer.hello(BUSY_PATIENCE_S))
    refused = peer.receive(refuse(hello, "E_PRINCIPAL_BUSY"), BUSY_PATIENCE_S)
    assert isinstance(refused, LinkRefused)


def test_a_refused_token_ends_the_link() -> None:
    peer = Peer("token", "inc")
    peer.receive(HELLO_REQUIRED, 0.0)
    refused = peer.receive(refuse(decode(peer.hello(0.0)), "E_TOKEN_INVALID"), 0.0)
    assert isinstance(refused, LinkRefused)
    assert refused.error.code == "E_TOKEN_INVALID"
    with refuses("E_LINK_CLOSED"):
        ask(peer, "e1")


def test_a_frame_that_is_too_large_is_refused_before_it_is_kept(peer: Peer) -> None:
    with pytest.raises(FrameError) as error:
        peer.submit("ask", event("e1", reply_to=ReplyTo("c", "c"), payload=to_raw("x" * (1 << 20))), "w", 0.0)
    assert error.value.info.code == "E_FRAME_TOO_LARGE"
    assert not peer.waiting


def test_hello_required_for_an_early_frame_starts_no_second_greeting(peer: Peer) -> None:
    sent = decode(ask(peer, "e1") or b"")
    assert peer.receive(refuse(sent, "E_HELLO_REQUIRED"), 0.0) is None
    assert peer.phase == "ready"


def test_pushed_frames_are_delivered_and_pings_answered(peer: Peer) -> None:
    assert isinstance(peer.receive(event("e9"), 0.0), Deliver)
    pong = peer.receive(Frame("ping", id="b.7"), 0.0)
    assert isinstance(pong, Reply)
    assert decode(pong.data).in_reply_to == "b.7"


STEPS = st.lists(
    st.sampled_from(["ask", "ask_other", "call", "post", "answer", "accept", "overload", "lose", "tick"]),
    max_size=60,
)


@given(STEPS, st.integers(1, 5))
def test_credit_and_outbox_always_add_up(steps: list[str], credit: int) -> None:
    """Whatever happens: the window is never exceeded, and what is unanswered is sent again after a loss."""
    peer = Peer("token", "inc")
    sent = {frame.id: frame for frame in welcome(peer, credit=credit)}
    now, open_ids = 0.0, {}

    def track(data: bytes | None, frame: Frame) -> None:
        open_ids[frame.id] = frame
        if data is not None:
            sent[frame.id] = frame

    for count, step in enumerate(steps):
        now += 0.05
        if step in ("ask", "ask_other"):
            frame = event(f"e{count}", "coder" if step == "ask" else "other", reply_to=ReplyTo("c", f"c{count}"))
            track(peer.submit("ask", frame, frame.event_id, now), frame)
        elif step == "call":
            frame = Frame("tool.call", call_id=f"t/{count}")
            track(peer.submit("call", frame, frame.call_id, now), frame)
        elif step == "post":
            frame = Frame("ack", stage="done")
            track(peer.submit("post", frame, "p", now), frame)
        elif step == "lose":
            sent = {frame.id: frame for frame in welcome(peer, credit=credit, now=now)}
        elif step == "tick":
            peer.tick(now)
        elif sent:
            frame = sent[min(sent)]
            if step == "accept" and frame.type == "event":
                peer.receive(Frame("ack", in_reply_to=frame.id, stage="accepted"), now)
            elif step == "overload":
                peer.receive(refuse(frame, "E_OVERLOADED", retry_after_ms=100), now)
                del sent[frame.id]
            elif step == "answer":
                reply = {
                    "event": Frame("event", in_reply_to=frame.reply_to.correlation_id if frame.reply_to else None),
                    "tool.call": Frame("tool.result", call_id=frame.call_id),
                    "ack": Frame("ack", in_reply_to=frame.id),
                }[frame.type]
                assert isinstance(peer.receive(reply, now), Settled)
                del sent[frame.id], open_ids[frame.id]
        for frame in flush(peer, now):
            sent[frame.id] = frame
        assert 0 <= peer.in_use <= credit
    again = welcome(peer, credit=10_000, now=now + 10)
    assert [frame.id for frame in again] == list(open_ids), "all that is open, oldest first"


@pytest.mark.parametrize("kind", ["call", "ask"])
def test_time_that_stands_still_ends_nothing_and_then_goes_on(peer: Peer, kind: str) -> None:
    if kind == "call":
        frame = Frame("tool.call", call_id="t/1", deadline_ms=1000)
        held, runs = (Frame("clock", event_id="e1", epoch=7, stage=stage) for stage in ("held", "runs"))
    else:
        frame = Frame("event", to="coder", event_id="e1", reply_to=ReplyTo("me", "ce1"), deadline_ms=1000)
        held, runs = (Frame("clock", event_id="e1", in_reply_to="ce1", stage=stage) for stage in ("held", "runs"))
    peer.submit("call" if kind == "call" else "ask", frame, "w", 10.0)
    assert isinstance(peer.receive(held, 10.5), Deliver)
    peer.receive(held, 20.0)  # said anew, after a reconnect
    assert peer.tick(1000.0)[0] == []
    peer.receive(runs, 1000.0)
    assert peer.tick(1001.0)[0] == []
    assert len(peer.tick(1001.6)[0]) == 1, "half a second was left, and the grace"


def test_a_welcome_starts_every_clock(peer: Peer) -> None:
    """The broker says anew what stands still; what it does not know of would else wait for ever."""
    frame = Frame("event", to="coder", event_id="e1", reply_to=ReplyTo("me", "ce1"), deadline_ms=1000)
    peer.submit("ask", frame, "w", 10.0)
    peer.receive(Frame("clock", event_id="e1", in_reply_to="ce1", stage="held"), 10.0)
    welcome(peer, now=50.0)
    assert peer.tick(51.5)[0] == []
    assert len(peer.tick(52.1)[0]) == 1


def test_the_clock_of_one_request_is_no_other_ones(peer: Peer) -> None:
    for name in ("e1", "e2"):
        frame = Frame("event", to="coder", event_id=name, reply_to=ReplyTo("me", f"c{name}"), deadline_ms=1000)
        peer.submit("ask", frame, name, 10.0)
    peer.receive(Frame("clock", event_id="e1", in_reply_to="ce1", stage="held"), 10.0)
    assert [settled.entry.waiter for settled in peer.tick(100.0)[0]] == ["e2"]


# --- questions to the caller


def test_a_tool_ask_is_answered_for_its_own_call_only_and_sent_again_until_then(peer: Peer) -> None:
    frame = Frame("tool.ask", call_id="t/c1")
    assert peer.submit("tool ask", frame, "w", 0.0) is not None
    assert peer.in_use == 0, "it costs no credit"
    peer.submit("post", Frame("agents.spawn", id="p1", call_id="t/c1"), "p", 0.0)
    guessed = Frame("tool.answer", call_id="t/c2", in_reply_to=frame.id)
    assert peer.awaits(guessed) is False
    assert peer.receive(guessed, 0.0) is None, "another call's answer"
    assert peer.receive(Frame("tool.answer", call_id="t/c1", in_reply_to="p1"), 0.0) is None, "no question"
    again = welcome(peer)
    assert [sent.id for sent in again] == [frame.id, "p1"]
    answer = Frame("tool.answer", call_id="t/c1", in_reply_to=frame.id)
    settled = peer.receive(answer, 0.0)
    assert isinstance(settled, Settled)
    assert (settled.entry.waiter, settled.frame) == ("w", answer)
    assert peer.receive(answer, 0.0) is None, "a repeat"


def test_a_tool_ask_takes_no_result_of_its_call_and_waits_while_its_agent_is_away(peer: Peer) -> None:
    frame = Frame("tool.ask", call_id="t/c1")
    peer.submit("tool ask", frame, "w", 0.0)
    assert peer.receive(Frame("tool.result", call_id="t/c1"), 0.0) is None
    peer.receive(refuse(frame, "E_OVERLOADED", retry_after_ms=100), 0.0)
    assert flush(peer, 0.05) == []
    assert [sent.id for sent in flush(peer, 0.2)] == [frame.id]
    assert peer.forget(frame.id) is not None
    assert peer.receive(Frame("tool.answer", call_id="t/c1", in_reply_to=frame.id), 0.2) is None


def impatient(peer: Peer, now: float = 0.0) -> Frame:
    """A request whose asker waits 5 s, while its turn has 60."""
    asked = event("e1", reply_to=ReplyTo("alpha", "corr"), deadline_ms=60_000)
    data = there(peer.submit("ask", asked, "e1", now, 5.0))
    return decode(data)


def test_who_waits_no_more_asks_once_for_an_event_and_is_told_by_the_ack(peer: Peer) -> None:
    sent = impatient(peer)
    assert peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted"), 1.0) is None
    assert (peer.tick(4.9)[0], flush(peer, 4.9)) == ([], [])
    assert peer.tick(5.0)[0] == []
    (again,) = flush(peer, 5.0)
    assert (again.id, again.event_id, again.asynchronous, sent.asynchronous) == (sent.id, "e1", True, False)
    peer.tick(9.0)
    assert flush(peer, 9.0) == [], "once"
    (anew,) = welcome(peer, now=9.0)
    assert anew.asynchronous, "and to the next broker"
    told = peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted", asynchronous=True), 9.0)
    assert isinstance(told, Settled)
    assert (there(told.frame).type, peer.rests) == ("ack", True)


def test_an_answer_that_crosses_is_the_answer(peer: Peer) -> None:
    sent = impatient(peer)
    peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted"), 0.0)
    peer.tick(5.0)
    flush(peer, 5.0)
    assert peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted"), 5.1) is None, "it has ended already"
    told = peer.receive(Frame("event", event_id="e1:answer", in_reply_to="corr"), 5.2)
    assert isinstance(told, Settled)
    assert there(told.frame).event_id == "e1:answer"


def test_what_was_refused_for_want_of_room_just_ends_and_what_is_unknown_waits_for_the_broker(peer: Peer) -> None:
    sent = impatient(peer)
    assert peer.tick(6.0)[0] == [], "the broker may have it"
    peer.receive(refuse(sent, "E_OVERLOADED", retry_after_ms=10_000), 6.0)
    ((ended,), _) = peer.tick(6.1)
    assert (ended.entry.id, there(ended.error).code) == (sent.id, "E_AGENT_TIMEOUT")


def test_patience_stands_still_with_the_clock(peer: Peer) -> None:
    sent = impatient(peer)
    peer.receive(Frame("ack", in_reply_to=sent.id, stage="accepted"), 0.0)
    peer.receive(Frame("clock", in_reply_to="corr", stage="held"), 4.0)
    peer.tick(50.0)
    assert flush(peer, 50.0) == []
    peer.receive(Frame("clock", in_reply_to="corr", stage="runs"), 50.0)
    peer.tick(50.9)
    assert flush(peer, 50.9) == []
    peer.tick(51.0)
    assert [frame.asynchronous for frame in flush(peer, 51.0)] == [True]


def test_silence_counts_from_what_is_unanswered_and_ends_with_the_link() -> None:
    peer = Peer("token", "inc")
    assert [peer.silence(0.0, now) for now in (100.0, 104.9, 105.0, 109.9, 110.0)] == [
        None,
        None,
        "ping",
        None,
        "connect",
    ]
    welcome(peer, now=111.0)
    assert peer.silence(111.0, 500.0) is None
    ask(peer, "e1")
    assert [peer.silence(111.0, now) for now in (501.0, 505.9, 506.0)] == [None, None, "ping"]
    assert [peer.silence(507.0, now) for now in (507.0, 511.9, 512.0)] == [None, None, "ping"]
    peer.close()
    assert peer.silence(507.0, 900.0) is None


def test_a_clock_that_runs_again_says_what_is_left(peer: Peer) -> None:
    peer.submit("ask", event("e1", reply_to=ReplyTo("client", "c1"), deadline_ms=60_000), "e1", 0.0)
    peer.receive(Frame("clock", stage="held", in_reply_to="c1"), 1.0)
    peer.receive(Frame("clock", stage="runs", in_reply_to="c1", deadline_ms=500), 100.0)
    assert [len(peer.tick(now)[0]) for now in (101.4, 101.5)] == [0, 1]
