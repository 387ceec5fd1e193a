"""`kill -9` of everything, the supervisor included, while eight agents ask each other in chains of three.

Every accepted request ends: with one finished turn or a dead letter, and whoever still waits gets one answer. After the
death of the supervisor the senders are gone, and what they had been promised is finished by the next kernel all the
same. `make chaos` runs it in full: GOONDAN_CHAOS_KILLS=200 and three deaths of the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from kernel import lock, rundir
from schemas.codec import from_raw, to_raw
from schemas.errors import GoondanError
from schemas.frames import AgentEvent, Frame, ReplyTo
from schemas.link import Link
from schemas.tokens import SOCKETS
from tests.kernel_fixture import Sandbox, sandbox, wait_until

KILLS: Final = int(os.environ.get("GOONDAN_CHAOS_KILLS", "24"))
ENDS: Final = 3 if KILLS >= 200 else 1
AGENTS: Final = [f"a{number}" for number in range(8)]
ROLES: Final = ("broker", "toolhost", "forkserver", "agent", "worker")
#: Requests that are under way at any time, each for an instance key of its own.
WINDOW: Final = 12
#: Every so many requests end in a command in a jail; the others in the last agent's answer.
JAIL_EVERY: Final = 3
#: What a command in a jail may end with when its process or its tool host was killed: it is not run twice.
HONEST: Final = {"E_TOOL_OUTCOME_UNKNOWN", "E_TOOL_CRASHED"}
#: How long everything may take to come to its end once nothing is killed any more (seconds).
DRAIN_S: Final = 90.0
BUNDLE: Final = "".join(
    [
        "apiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: console}\nspec: {provider: embedded}\n",
        *(
            f"---\napiVersion: goondan.ai/v1\nkind: Agent\nmetadata: {{name: {name}}}\n"
            "spec: {modelConfig: {modelRef: Model/console}, tools: [Tool/agents, Tool/bash]}\n"
            for name in AGENTS
        ),
        "---\napiVersion: goondan.ai/v1\nkind: Swarm\nmetadata: {name: chains}\n",
        f"spec: {{entryAgent: Agent/a0, agents: [{', '.join(f'Agent/{name}' for name in AGENTS)}]}}\n",
    ]
)


@dataclass
class Tally:
    """What was asked, and what became of it."""

    asked: int = 0
    #: Event id -> how often it was answered, and the texts.
    answers: dict[str, list[str]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    tool_errors: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    #: Requests that were finished by a kernel after the one that had accepted them.
    inherited: int = 0
    #: One of each of those, for the report.
    examples: dict[str, str] = field(default_factory=dict)
    #: Accepted by a kernel whose supervisor was killed, before they were answered: id -> the agent and key.
    left: dict[str, tuple[str, str]] = field(default_factory=dict)


@pytest.fixture
def kernel() -> Iterator[Sandbox]:
    """Eight agents; afterwards no process, no folder and no mount may be left."""
    with sandbox(BUNDLE) as made:
        yield made


@pytest.mark.timeout(120 + 2 * KILLS)
def test_every_accepted_request_ends_whatever_dies(kernel: Sandbox) -> None:
    tally, chance = Tally(), random.Random(KILLS)
    for number in range(ENDS + 1):
        kernel.detach()
        look_at_what_was_left(kernel, tally)
        asyncio.run(load(kernel, tally, chance, KILLS // (ENDS + 1) + 1, ends=number < ENDS))
    answered = sum(map(len, tally.answers.values()))
    print(
        f"\n{tally.asked} requests, {answered} answered, {tally.inherited} finished without their senders; "
        f"killed {dict(tally.killed)}; failed {dict(tally.failed)}; tool errors {dict(tally.tool_errors)}"
    )
    for code, example in tally.examples.items():
        print(f"{code}: {example}")
    assert all(len(texts) == 1 for texts in tally.answers.values())
    assert sum(tally.failed.values()) <= 0.01 * tally.asked, tally.failed
    assert set(tally.tool_errors) <= HONEST, tally.tool_errors
    least = 10 if KILLS >= 200 else 2
    assert all(tally.killed[role] >= least for role in ROLES), tally.killed
    assert tally.killed["supervisor"] == ENDS


def look_at_what_was_left(kernel: Sandbox, tally: Tally) -> None:
    """Nobody who sent them is there; each has one finished turn, or is a dead letter."""
    dead: list[str] = []

    def over() -> bool:
        dead[:] = (
            [line["eventId"] for line in kernel.gdn("dead", "list", "--json").json["events"]] if tally.left else []
        )
        return all(event_id in dead or ended_turns(kernel, event_id, *at) for event_id, at in tally.left.items())

    wait_until(over, DRAIN_S, "accepted events without an end")
    for event_id, at in tally.left.items():
        assert event_id in dead or ended_turns(kernel, event_id, *at) == 1, event_id
        tally.inherited += 1


def ended_turns(kernel: Sandbox, event_id: str, agent: str, key: str) -> int:
    """How many finished turns the instance has of this event."""
    for path in kernel.home.glob(f"state/workspaces/*/instances/{agent}/{key}/conversation.db"):
        with suppress(sqlite3.Error):
            db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            try:
                query = "SELECT count(*) FROM turns WHERE event_key = ? AND status IN ('completed', 'failed')"
                return int(db.execute(query, (event_id,)).fetchone()[0])
            finally:
                db.close()
    return 0


def chain(number: int) -> tuple[str, str, str]:
    """The agent that is asked, its input, and the text that comes out at the end."""
    first = number % len(AGENTS)
    names = [AGENTS[(first + step) % len(AGENTS)] for step in range(3)]
    word, text = "embedded console", "hello"
    if number % JAIL_EVERY == 0:
        word = f"word-{number}-end"
        text = f"/bash__exec command='echo {word}'"
    for name in reversed(names[1:]):
        text = f"/agents__request {json.dumps({'target': name, 'input': text})}"
    return names[0], text, word


async def load(kernel: Sandbox, tally: Tally, chance: random.Random, kills: int, *, ends: bool) -> None:
    """Ask all the time while things are killed; then wait for all answers, or kill the supervisor (`ends`)."""
    (state_dir,) = kernel.state_dirs
    record = lock.read_record(str(state_dir))
    assert record is not None
    with rundir.open_existing(record.run_dir) as folder:
        run_dir, token = folder.path, rundir.read_private(folder, rundir.CLIENT_TOKEN)
    link = Link(f"ipc://{run_dir}/{SOCKETS['client']}", token, on_frame=lambda frame: None)
    await link.start()
    open_: dict[str, tuple[str, str, Frame]] = {}
    more = True

    async def one(number: int, key: str) -> None:
        agent, text, word = chain(number)
        event_id = f"chaos-{number}"
        event = AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=text)
        frame = Frame("event", to=agent, instance_key=key, event_id=event_id, payload=to_raw(event))
        frame.reply_to = ReplyTo("client", event_id)
        waiter = link.ask(frame)
        open_[event_id] = (agent, key, frame)
        try:
            answer = from_raw((await waiter).payload, AgentEvent).answer
        except GoondanError as error:
            if more or not ends:
                tally.failed[error.info.code] += 1
            return
        open_.pop(event_id, None)
        assert answer is not None
        tally.answers.setdefault(event_id, []).append(answer.response or "")
        if answer.error is not None:
            tally.failed[answer.error.code] += 1
        elif word not in (answer.response or ""):
            codes = re.findall(r"\bE_[A-Z_]+", answer.response or "")
            tally.tool_errors[codes[0] if codes else "another text"] += 1
            tally.examples.setdefault(codes[0] if codes else "another text", f"{text!r} -> {answer.response!r}"[:600])

    async def ask(lane: int) -> None:
        while more:
            tally.asked += 1
            await one(tally.asked, f"k{lane}")

    lanes = [asyncio.create_task(ask(lane)) for lane in range(WINDOW)]
    await asyncio.sleep(1.0)
    for number in range(kills):
        await kill(kernel, ROLES[number % len(ROLES)], {key for _, key, _ in open_.values()}, tally, chance)
        await asyncio.sleep(chance.uniform(0.1, 0.5))
    more = False
    if ends:
        pid = kernel.pid("supervisor")
        accepted = link.accepted()
        tally.left = {event_id: (agent, key) for event_id, (agent, key, frame) in open_.items() if frame.id in accepted}
        os.kill(pid, signal.SIGKILL)
        tally.killed["supervisor"] += 1
        await link.close(0)
        await asyncio.gather(*lanes)
        await asyncio.to_thread(kernel.wait_for_nothing, 5.0)
        return
    tally.left = {}
    await asyncio.wait_for(asyncio.gather(*lanes), DRAIN_S)
    await link.close()


async def kill(kernel: Sandbox, role: str, keys: set[str], tally: Tally, chance: random.Random) -> None:
    """`kill -9` of a process of this role that has work, as soon as there is one."""
    until = time.monotonic() + 10.0
    while time.monotonic() < until:
        rows: list[dict[str, Any]] = await asyncio.to_thread(kernel.ps)
        pids = [row["pid"] for row in rows if row["role"] == role and row["pid"]]
        if role in ("agent", "worker"):
            pids = [row["pid"] for row in rows if row["role"] == role and row["pid"] and row["instanceKey"] in keys]
        if pids and keys:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
                tally.killed[role] += 1
            return
        await asyncio.sleep(0.05)
