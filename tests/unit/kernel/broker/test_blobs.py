"""Whose files the broker keeps, and when it lets go of them. That none goes too early, test_simulation.py shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.blobs import MAX_CALL_BYTES, MAX_SENT_BYTES, HeldBlobs, check
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, MAX_REQUEST_BYTES
from goondan.schemas.wire.codec import decode, encode, from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Blob, ErrorPayload, Frame, ReplyTo
from tests.unit.kernel.broker.world import working


def blob(number: int, size: int = 1 << 20) -> Blob:
    return Blob(f"{number:032x}", "0" * 64, size)


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "sent", "arrived"]), st.integers(0, 3))))
def test_a_file_goes_exactly_when_its_last_holder_lets_go(actions: list[tuple[str, int]]) -> None:
    held, holders, sent = HeldBlobs(), [0] * 4, [False] * 4
    for action, number in actions:
        before = holders[number] + sent[number]
        held.removable.clear()
        if action == "hold":
            held.hold(blob(number))
            holders[number] += 1
        elif action == "release" and holders[number]:
            held.release(blob(number))
            holders[number] -= 1
        elif action == "sent":
            held.sent(str(number), blob(number), to="client")
            sent[number] = True
        elif action == "arrived":
            held.arrived(str(number), at="client")
            sent[number] = False
        gone = action in ("release", "arrived") and bool(before) and not holders[number] + sent[number]
        assert held.removable == ([blob(number).file] if gone else [])


def test_an_answer_that_nobody_acknowledges_is_given_up_after_two_sweeps_but_an_agents_is_not() -> None:
    held = HeldBlobs()
    held.sent("a", blob(1), to="client")
    held.sent("b", blob(2), to="agent")
    assert held.referenced() == {blob(1).file, blob(2).file}
    held.sent("c", blob(3), to="client")
    assert held.referenced() == {blob(2).file, blob(3).file}
    assert held.removable == [], "the journal may still keep it"
    assert held.referenced() == {blob(2).file}
    held.arrived("b", at="client")  # a client's word about another's answer
    assert held.referenced() == {blob(2).file}
    held.arrived("b", at="agent")
    assert held.referenced() == frozenset()


def test_a_tool_host_does_not_take_a_clients_answer_away() -> None:
    """It knows the id: every call that it runs names the event that all began with."""
    held = HeldBlobs()
    held.sent("a", blob(1), to="client")
    assert not held.arrived("a", at="toolhost")
    assert held.referenced() == {blob(1).file}
    assert held.removable == []
    assert held.arrived("a", at="client")
    assert held.removable == [blob(1).file]


def test_answers_that_wait_for_their_acknowledgement_have_a_bound() -> None:
    held, each = HeldBlobs(), MAX_SENT_BYTES // 4
    for number in range(6):
        held.sent(str(number), blob(number, each), to="client")
    assert held.referenced() == {blob(number).file for number in range(2, 6)}


@pytest.mark.parametrize(
    ("kind", "from_host", "asks", "limit"),
    [
        ("event", False, False, MAX_REQUEST_BYTES),
        ("event", True, True, MAX_REQUEST_BYTES),
        ("event", True, False, MAX_BLOB_BYTES),
        ("tool.call", False, False, MAX_REQUEST_BYTES),
        ("tool.result", True, False, MAX_BLOB_BYTES),
        ("ack", False, False, MAX_BLOB_BYTES),
    ],
)
def test_requests_may_be_smaller_than_results(kind: str, from_host: bool, asks: bool, limit: int) -> None:
    reply_to = ReplyTo("client", "q") if asks else None
    check(Frame(kind, reply_to=reply_to, blob=blob(1, limit)), from_host=from_host)
    with pytest.raises(GoondanError) as caught:
        check(Frame(kind, reply_to=reply_to, blob=blob(1, limit + 1)), from_host=from_host)
    assert caught.value.info.code == "E_FRAME_TOO_LARGE"


def answers(router: Router, bus: Bus, cls: int, frame: Frame, now: float) -> list[Frame]:
    connection = next(iter(bus.presence.connections[cls].values()))
    router.receive(connection, encode(frame), now)
    out = [decode(data) for _, _, data in bus.out]
    bus.out.clear()
    return out


def test_arguments_by_reference_have_a_bound_of_which_one_root_gets_half() -> None:
    world = working()
    router, bus = world.router, world.router.bus
    (agent,) = world.agents.values()
    assert agent.held is not None
    size = MAX_CALL_BYTES // 8
    codes = []
    for number in range(6):
        frame = Frame("tool.call", id=f"x{number}", call_id=f"t/{number}", tool="bash__exec")
        frame.event_id, frame.epoch = agent.held.event_id, agent.held.epoch
        frame.blob = blob(number, size)
        (out,) = answers(router, bus, AGENTS, frame, world.now)
        codes.append(out.type if out.type != "error" else from_raw(out.payload, ErrorPayload).code)
    assert codes == ["tool.call"] * 4 + ["E_OVERLOADED"] * 2
    assert bus.calls.large.may_take("another", "another", 3 * size, operator=False), "there is room for others"
    held = bus.mailbox.events["c0e0"]
    bus.calls.remove(bus.calls.open["t/0"])
    assert bus.calls.large.held == 3 * size
    assert held.work.open_calls == 4  # the first call of the turn among them


def test_the_mailbox_counts_what_lies_in_files() -> None:
    world = working()
    router, bus = world.router, world.router.bus
    before = bus.mailbox.held.held
    frame = Frame("event", id="x", event_id="large", to="coder", instance_key="k", blob=blob(9, 5 << 20))
    answers(router, bus, CLIENTS, frame, world.now)
    assert bus.mailbox.held.held - before >= 5 << 20
