"""One tool, or one client, against everybody else: what was found to stop a whole kernel, in a real one.

Turns of the agent `slow` do not end: its model is asked and says nothing. So whoever gets a place for one keeps it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.bundles import documents
from tests.kernel_fixture import PATIENCE_S, Sandbox, sandbox
from tests.process.model_servers import server

#: What another's flood may add to the time in which a new instance answers (seconds): the figure that is promised, of
#: a machine with nothing else to do. A busy one takes more, and does so without a flood, too.
DELAY_S = 1.0
#: Without a flood a new instance answers in at most this there (seconds; measured: 0.02).
QUIET_S = 0.025

BUNDLE = documents(
    "Model console {provider: embedded}",
    "Model silent {provider: openai, model: silent, endpoint: BASE/v1}",
    "Tool many {entry: tools/many.py, sandbox: {permissions: [agents]}, exports: [{name: send}]}",
    "Agent main {modelConfig: {modelRef: Model/console}, tools: [Tool/many]}",
    "Agent slow {modelConfig: {modelRef: Model/silent}}",
    "Agent quick {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}",
    "Swarm crowd {entryAgent: Agent/main, agents: [Agent/main, Agent/slow, Agent/quick], policy: {mailboxMb: 32, "
    "maxLiveAgents: 64}}",
)
CODE = """\
def send(ctx, input):
    for number in range(input["count"]):
        ctx.runtime.send("slow", "x" * input.get("size", 1), instance_key=f"{input['name']}{number}")
    return "sent"

handlers = {"send": send}
"""
_NAMES = count()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with server("misbehaving_llm") as base, sandbox(BUNDLE.replace("BASE", base)) as made:
        (made.home / "tools").mkdir()
        (made.home / "tools" / "many.py").write_text(CODE)
        made.detach()
        yield made


@asynccontextmanager
async def session(kernel: Sandbox) -> AsyncIterator[Link]:
    """A client of its own."""
    (run_dir,) = kernel.run_dirs
    token = Path(run_dir, "client.token").read_text().strip()
    link = Link(f"ipc://{run_dir}/clients.sock", token, on_frame=lambda frame: None)
    await link.start()
    try:
        yield link
    finally:
        await link.close(0)


def message(agent: str, text: str, *, key: str | None = None) -> Frame:
    """To a new instance, if no key is given."""
    name = f"n{next(_NAMES)}"
    event = AgentEvent(id=f"e-{name}", type="user.message", created_at="2026-01-01T00:00:00Z", input=text)
    return Frame("event", to=agent, instance_key=key or name, event_id=event.id, payload=to_raw(event))


async def answer(link: Link, agent: str, text: str, seconds: float = 30.0) -> Any:
    """What a new instance answers."""
    frame = message(agent, text)
    frame.reply_to = ReplyTo("client", f"c-{frame.event_id}")
    heard = from_raw((await asyncio.wait_for(link.ask(frame), seconds)).payload, AgentEvent).answer
    assert heard is not None
    assert heard.status == "completed", heard.error
    return heard.response


async def stats(link: Link) -> Any:
    """What the broker counts."""
    return from_raw((await link.post(Frame("admin", payload=to_raw({"op": "stats"})))).payload, dict)


async def times(link: Link, number: int) -> list[float]:
    """How long new instances take to answer, one after the other."""
    taken = []
    for _ in range(number):
        began = time.monotonic()
        assert await answer(link, "quick", "hello")
        taken.append(time.monotonic() - began)
    return taken


async def until(link: Link, condition: Any) -> Any:
    """Wait for a state of the broker."""
    end = time.monotonic() + PATIENCE_S
    while not condition(seen := await stats(link)):
        assert time.monotonic() < end, f"not so: {seen}"
        await asyncio.sleep(0.05)
    return seen


async def test_neither_a_tool_that_asks_four_hundred_nor_1500_new_instances_hold_up_another_session(
    kernel: Sandbox,
) -> None:
    async with session(kernel) as mallory, session(kernel) as script, session(kernel) as person:
        before = median(await times(person, 5))
        # One message, whose tool has four hundred others asked.
        asking = asyncio.ensure_future(
            answer(mallory, "main", "/many__send " + json.dumps({"name": "m", "count": 400}))
        )
        at_once = await times(person, 6)
        assert await asking == "sent"
        seen = await until(person, lambda seen: seen["openEvents"] >= 400 and seen["places"]["held"] >= 25)
        assert seen["places"]["held"] <= 64 // 2 + 2, "one root has half"
        assert seen["places"]["waiting"] >= 400 - 64 // 2
        later = await times(person, 4)
        # A client that has 1,500 more.
        posted = [script.post(message("slow", "x")) for _ in range(1500)]
        flooded = await times(person, 10)
        await asyncio.wait_for(asyncio.gather(*posted), 20)
        flooded += await times(person, 4)
        worst = max(*at_once, *later, *flooded)
        print(f"before {before:.3f} s; worst {max(at_once):.3f}, {max(later):.3f}, {max(flooded):.3f} s")
        assert worst <= before + DELAY_S * max(1.0, before / QUIET_S), (before, at_once, later, flooded)
        seen = await stats(person)
        assert seen["places"]["held"] < seen["places"]["all"], "there is always one for who comes next"
        # What a person does from a shell, while all this waits.
        result = kernel.gdn("call", "bash__exec", '{"command": "echo through"}', "--json")
        assert result.json["output"]["stdout"] == "through\n"


async def test_one_message_whose_tool_fills_the_mailbox_leaves_room_for_others(kernel: Sandbox) -> None:
    """A call may say 16 MiB, and a message may have many calls: here three fill 32 MiB, as seventeen do 256."""
    async with session(kernel) as mallory, session(kernel) as person:
        calls = [{"name": f"fill{number}.", "count": 62, "size": 250_000} for number in range(3)]
        asked = message("main", "\n".join("/many__send " + json.dumps(call) for call in calls))
        asked.reply_to = ReplyTo("client", "c-fill")
        heard = mallory.ask(asked)
        seen = await until(person, lambda seen: seen["counters"].get("overloaded", 0) > 10)
        assert 14 << 20 < seen["mailboxBytes"] < 20 << 20, "half of it"
        began = time.monotonic()
        assert await answer(person, "quick", "y" * (4 << 20))
        assert time.monotonic() - began < 5.0
        said = f"E_OVERLOADED: root '{asked.event_id}' was refused bytes of messages"
        assert said in kernel.log("broker")
        # Nothing of it is lost: what was refused waits where it came from, and ends with who sent it.
        cancelled = await person.post(Frame("admin", payload=to_raw({"op": "cancel", "eventId": asked.event_id})))
        assert from_raw(cancelled.payload, dict)["state"] == "cancelled"
        await asyncio.wait_for(heard, 20)
