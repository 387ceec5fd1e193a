"""Calls that ask the agent that made them, in the broker: whose call it is, and where question and answer go."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from goondan.kernel.broker.routing.calls import ToolCalls
from goondan.kernel.broker.state.entities import AGENTS, TOOLS
from goondan.schemas.wire.codec import encode, from_raw, to_raw
from goondan.schemas.wire.frames import PASSED_ON, Frame, Source
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk
from tests.unit.kernel.broker.world import CALL, World, code, host, outgoing, part_of, run, tell
from tests.unit.kernel.broker.world import working as plain


def working() -> World:
    """An agent in the middle of a call whose tool may ask."""
    world = plain()
    tools = world.router.bus.plan.toolhost.tools
    tools[0] = structs.replace(tools[0], sandbox=structs.replace(tools[0].sandbox, permissions=["agents", "tools"]))
    part_of(world.router, ToolCalls).revise(world.router.bus.plan)
    return world


def question(**more: Any) -> Frame:
    frame = Frame("tool.ask", id="h.1", call_id=CALL, payload=to_raw(ToolAsk(1, "tool", to_raw({"name": "x"}))))
    for name, value in more.items():
        setattr(frame, name, value)
    return frame


def answer(**more: Any) -> Frame:
    frame = Frame("tool.answer", id="a.1", call_id=CALL, in_reply_to="h.1", payload=to_raw(ToolAnswer(1, to_raw(7))))
    for name, value in more.items():
        setattr(frame, name, value)
    return frame


def agent(world: World, name: str = "coder") -> Any:
    return world.peer(name, "k")


def sent(world: World, cls: int, frame: Frame, by: Any) -> list[Frame]:
    """What leaves the broker for a class when this peer sends a frame."""
    world.router.bus.out.clear()
    return [left for kind, _, left in outgoing(world, by, frame) if kind == cls]


LIES: dict[str, Any] = {
    "from_": "boss",
    "to": "reviewer",
    "instance_key": "other",
    "event_id": "e9",
    "epoch": 99,
    "tool": "shell__run",
    "source": Source("client", "operator"),
    "chain": ["a/b"],
    "auth": to_raw({"admin": True}),
    "workdir": "/etc",
}


def test_a_question_goes_to_the_holder_of_the_call_and_says_what_the_broker_knows() -> None:
    world = working()
    (told,) = sent(world, AGENTS, question(**LIES), host(world))
    instance = world.router.bus.mailbox.instances["coder", "k"]
    assert (told.type, told.id, told.call_id, told.payload) == ("tool.ask", "h.1", CALL, question().payload)
    assert (told.from_, told.to, told.instance_key) == (host(world).address, "coder", "k")
    assert (told.event_id, told.epoch) == ("c0e0", instance.epoch)
    assert told.tool == world.router.bus.calls.open[CALL].tool
    assert (told.source, told.chain, told.auth, told.workdir) == (None, None, None, None)


def test_a_question_for_a_call_that_is_not_here_is_asked_again_and_a_foreign_one_refused() -> None:
    world = working()
    assert code(tell(world, question(call_id="coder/k/other/0"))) == "E_OVERLOADED"
    assert code(tell(world, question(call_id=None))) == "E_OVERLOADED"
    call = world.router.bus.calls.open[CALL]
    held = call.host
    call.host = agent(world)
    assert code(tell(world, question())) == "E_FORBIDDEN"
    call.host = held
    world.router.bus.mailbox.instances["coder", "k"].conn = None
    assert code(tell(world, question())) == "E_OVERLOADED", "its agent is away"


def test_a_call_says_whose_question_its_tool_host_may_answer_with_its_output() -> None:
    world = working()
    connection = agent(world)
    tool, epoch = next(iter(connection.allowed)), connection.instance.epoch
    made = Frame("tool.call", id="a.2", event_id="c0e0", epoch=epoch, tool=tool, call_id=f"{CALL}>1", within=CALL)
    made.in_reply_to = "h.1"
    (left,) = sent(world, TOOLS, made, connection)
    assert (left.within, left.in_reply_to) == (CALL, "h.1")
    (left,) = sent(world, AGENTS, Frame("tool.result", call_id=f"{CALL}>1", stage=PASSED_ON), host(world))
    assert left.stage == PASSED_ON


def test_an_answer_goes_to_the_host_of_the_call_and_another_agents_goes_nowhere() -> None:
    world = working()
    world.clients[0].ask("c0e1", "reviewer")
    run(world)
    (told,) = sent(world, TOOLS, answer(**LIES), agent(world))
    assert (told.type, told.call_id, told.in_reply_to, told.from_) == ("tool.answer", CALL, "h.1", "coder")
    assert from_raw(told.payload, ToolAnswer).value is not None
    assert (told.source, told.chain, told.auth, told.workdir, told.event_id) == (None,) * 5
    stray = world.router.bus.counters["tool_answers_stray"]
    assert sent(world, TOOLS, answer(), agent(world, "reviewer")) == [], "an agent that has not made the call"
    assert sent(world, TOOLS, answer(call_id="coder/k/other/0"), agent(world)) == []
    world.router.bus.mailbox.instances["coder", "k"].leased = None
    assert sent(world, TOOLS, answer(), agent(world)) == [], "it does not hold the event any more"
    assert world.router.bus.counters["tool_answers_stray"] == stray + 3


def test_a_tool_that_was_not_granted_it_asks_nothing() -> None:
    assert code(tell(plain(), question())) == "E_FORBIDDEN"


def test_only_tool_hosts_ask_and_only_agents_answer() -> None:
    world = working()
    assert code(tell(world, answer())) == "E_FRAME_TYPE"
    assert code(sent(world, AGENTS, question(), agent(world))) == "E_FRAME_TYPE"
    assert world.router.bus.calls.get(CALL) is not None, "the call goes on"


@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=60), st.text(max_size=20), st.text(max_size=20))
def test_no_payload_is_opened_on_the_way(payload: bytes, call_id: str, frame_id: str) -> None:
    world = working()
    for frame, by in ((question(), host(world)), (answer(), agent(world))):
        frame.id, frame.payload = frame_id, to_raw(payload.hex())
        frame.call_id = call_id or CALL
        world.router.receive(by, encode(frame), world.now)
    assert not world.router.bus.faults
