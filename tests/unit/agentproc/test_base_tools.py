"""The handlers of `agents` and `handoff`: what they ask when nothing but the necessary is given, over a fake link."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.base.agents import agents
from goondan.agentproc.calls.handlers import HANDLERS
from goondan.agentproc.calls.swarm import Swarm
from goondan.agentproc.extensions.events import EventBus
from goondan.agentproc.machine.questions import Asker
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import OPERATOR_AGENT, AgentEvent, AgentsList, AgentsSpawn, Answer, Frame, ToolResult
from tests.unit.agentproc.fakes import FakeLink

AGENTS = Path(agents.__file__).parent
AT = "2026-01-01T00:00:00.000Z"


def swarm(link: FakeLink, agent: str = "alpha") -> Swarm:
    return Swarm(link, Asker(agent, "k", "t1"), None, lambda: AT, EventBus())


@pytest.mark.requirement("AGENTS-12", "AGENTS-14")
async def test_a_request_has_the_defaults_of_the_specification_and_waits() -> None:
    link = FakeLink()
    asking = asyncio.ensure_future(HANDLERS["agents__request"](swarm(link), "c1", {"target": "beta", "input": "hi"}))
    await asyncio.sleep(0)
    ((frame, waiter),) = link.asked
    event = from_raw(frame.payload, AgentEvent)
    assert (event.type, event.input, event.metadata) == ("agent.request", "hi", None)
    assert (frame.instance_key, link.patience_s, frame.asynchronous) == ("k", 60.0, False)
    assert frame.deadline_ms is None, "the work may take as long as the turn that asks"
    await asyncio.sleep(0)
    assert not asking.done(), "it waits for the answer"
    told = AgentEvent(id="a", type="agent.response", created_at=AT, answer=Answer(turn_id="t2", status="completed"))
    waiter.set_result(Frame("event", payload=to_raw(told)))
    assert (await asking)["accepted"] is True


@pytest.mark.requirement("AGENTS-17")
async def test_who_waits_no_more_is_told_that_the_work_goes_on_and_what_can_be_done() -> None:
    link, given = FakeLink(), {"target": "beta", "input": "hi"}
    own = Swarm(link, Asker("alpha", "k", "t1"), asyncio.get_running_loop().time() + 600, lambda: AT, EventBus())
    own.patience_ms = 7000
    asking = asyncio.ensure_future(HANDLERS["agents__request"](own, "c1", given))
    await asyncio.sleep(0)
    ((frame, waiter),) = link.asked
    assert (link.patience_s, (frame.deadline_ms or 0) > 500_000) == (7.0, True)
    waiter.set_result(Frame("ack", asynchronous=True))
    with pytest.raises(GoondanError) as late:
        await asking
    told = late.value.info
    assert told.code == "E_AGENT_TIMEOUT"
    expected = f"within 7000 ms. It works on; its answer will come as a message about request {frame.event_id}"
    assert expected in told.message
    request = (AGENTS / "tool.yaml").read_text().partition("- name: send")[0]
    named = re.findall(r"timeoutMs|`\w+`", told.suggestion or "")
    assert named == ["timeoutMs", "`async`"]
    assert all(f"{name.strip('`')}:\n" in request for name in named), "what the advice names, the tool has"


async def test_an_operators_call_has_no_conversation_so_its_time_ends_both_sides() -> None:
    link = FakeLink()
    outside = HANDLERS["agents__request"](swarm(link, OPERATOR_AGENT), "c1", {"target": "beta", "input": "hi"})
    asking = asyncio.ensure_future(outside)
    await asyncio.sleep(0)
    ((frame, _),) = link.asked
    assert (link.patience_s, frame.deadline_ms) == (None, 60_000)
    asking.cancel()


@pytest.mark.requirement("AGENTS-12", "AGENTS-15")
async def test_what_is_given_is_taken_and_async_returns_at_once() -> None:
    link = FakeLink()
    args: dict[str, Any] = {"target": "beta", "input": "hi", "instanceKey": "l", "eventType": "x", "timeoutMs": 5.0}
    result = await HANDLERS["agents__request"](swarm(link), "c1", {**args, "metadata": {"a": 1}, "async": True})
    (frame,) = link.posted
    event = from_raw(frame.payload, AgentEvent)
    assert (event.type, event.metadata, frame.instance_key, frame.deadline_ms) == ("x", {"a": 1}, "l", 5)
    assert (result["accepted"], result["async"], result["response"]) == (True, True, None)
    link = FakeLink()
    await HANDLERS["agents__request"](swarm(link), "c1", {"target": "beta", "input": "hi", "async": True})
    assert link.posted[0].deadline_ms is None, "no deadline unless one is given"


@pytest.mark.requirement("AGENTS-19", "AGENTS-20")
async def test_a_send_has_the_defaults_of_the_specification() -> None:
    link = FakeLink()
    result = await HANDLERS["agents__send"](swarm(link), "c1", {"target": "beta", "input": "hi"})
    (frame,) = link.posted
    event = from_raw(frame.payload, AgentEvent)
    assert (event.type, frame.instance_key, frame.reply_to) == ("agent.send", "k", None)
    assert result == {"target": "beta", "eventId": frame.event_id, "accepted": True, "sent": True}


@pytest.mark.requirement("AGENTS-22", "AGENTS-25")
async def test_spawn_and_list_have_the_defaults_of_the_specification() -> None:
    link = FakeLink()
    for name, args in (("spawn", {"target": "beta"}), ("list", {}), ("list", {"includeAll": True})):
        asked = asyncio.ensure_future(HANDLERS[f"agents__{name}"](swarm(link), "c1", args))
        await asyncio.sleep(0)
        asked.cancel()
    spawn, mine, every = link.posted
    assert (spawn.to, spawn.instance_key, from_raw(spawn.payload, AgentsSpawn)) == ("beta", "k", AgentsSpawn(None))
    assert [from_raw(frame.payload, AgentsList).include_all for frame in (mine, every)] == [False, True]


@pytest.mark.requirement("HANDOFF-03", "HANDOFF-04")
async def test_a_handoff_is_pending_with_its_correlation_id_as_handle() -> None:
    link = FakeLink()
    result = await HANDLERS["handoff__request"](swarm(link), "c1", {"target": "beta", "payload": [1]})
    (frame,) = link.posted
    assert isinstance(result, ToolResult)
    assert frame.reply_to is not None
    assert (result.status, result.handle) == ("pending", frame.reply_to.correlation_id)
    assert (frame.asynchronous, from_raw(frame.payload, AgentEvent).input) == (True, [1])


async def test_a_call_from_outside_has_nowhere_for_a_late_answer() -> None:
    outside = swarm(FakeLink(), OPERATOR_AGENT)
    for name, args in (("agents__request", {"input": "x", "async": True}), ("handoff__request", {"payload": 1})):
        with pytest.raises(GoondanError, match="E_USAGE"):
            await HANDLERS[name](outside, "c1", {"target": "beta", **args})
