"""The broker is killed again and again under each client.

No request stays unanswered, none is answered twice, none is run twice, and those of one instance are run in the order
in which they were asked. A client is driven by the line protocol of `gdn certify client`, so one storm serves all of
them. The broker is alone with an agent of ours that answers by itself: there are no turns, so several brokers die in a
second. `make test` does a few kills, `make chaos` a thousand for each client.

Source: docs/design/delivery.md section 11.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from goondan.kernel.spawn import memory_file
from goondan.schemas.transport import SOCKETS
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, Lease
from goondan.schemas.wire.tokens import SECRET_BYTES, Claims, mint
from tests.kernel_fixture import ROOT
from tests.polyglot_clients import BUILD_S, CLIENTS, command_of
from tests.process.bare_broker import plan

#: Five times as many as of those storms in which agents have turns.
KILLS: Final = 5 * int(os.environ["GOONDAN_CHAOS_KILLS"]) if "GOONDAN_CHAOS_KILLS" in os.environ else 8
#: Requests that are under way at a time, and the instances that they are for.
WINDOW: Final = 12
INSTANCES: Final = ("i0", "i1", "i2", "i3")
#: How long the agent works on a request at most (seconds).
WORK_S: Final = 0.02
#: Of all requests, what is wanted: mostly answers, sometimes with live events, sometimes only that it is accepted.
KINDS: Final = ("ask",) * 8 + ("stream", "send")
#: Of those that want an answer, this many are given up again.
GIVEN_UP: Final = 0.05
#: How long what is left may take when nothing is killed any more (seconds): longer than a silent link is believed in.
DRAIN_S: Final = 60.0
#: How long a process may take to end that was told to (seconds).
END_S: Final = 10.0
AT: Final = "2026-01-01T00:00:00Z"


@dataclass
class Tally:
    """What was asked, and what became of it."""

    #: The reference of each request -> what is wanted.
    asked: dict[str, str] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    #: Reference -> every line that ends it.
    ended: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    #: Instance -> the texts that were run, in order. A text is a request's reference.
    run: dict[str, list[str]] = field(default_factory=dict)
    #: Events that were handed to the agent once more.
    handed_again: int = 0


class Responder:
    """One instance of the agent: it runs each event once, and answers with what it was told."""

    def __init__(self, run_dir: Path, secret: bytes, instance: str, tally: Tally, chance: random.Random) -> None:
        self._tally, self._chance, self._instance = tally, chance, instance
        self._leases: dict[str, Lease] = {}
        self._answers: dict[str, Frame] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        token = mint(secret, Claims("agent", agent="coder", instance_key=instance))
        self.link = Link(
            f"ipc://{run_dir}/{SOCKETS['agent']}",
            token,
            on_frame=self._take,
            held=lambda: {"leases": list(self._leases.values())},
        )

    def _take(self, frame: Frame) -> None:
        if frame.type == "event":
            work = asyncio.get_running_loop().create_task(self._work(frame))
            self._tasks.add(work)
            work.add_done_callback(self._tasks.discard)

    async def _work(self, frame: Frame) -> None:
        event_id, epoch = frame.event_id or "", frame.epoch or 0
        self._leases[event_id] = Lease(event_id=event_id, epoch=epoch, instance_key=self._instance)
        if event_id in self._answers:
            self._tally.handed_again += 1
        else:
            text = str(from_raw(frame.payload, AgentEvent).input)
            self._tally.run.setdefault(self._instance, []).append(text)
            await asyncio.sleep(self._chance.uniform(0.0, WORK_S))
            answer = AgentEvent(id=f"{event_id}:answer", type="agent.response", created_at=AT)
            answer.answer = Answer(turn_id=event_id, status="completed", response=text)
            self._answers[event_id] = Frame("ack", stage="done", event_id=event_id, payload=to_raw(answer))
        done = self._answers[event_id]
        again = Frame("ack", stage="done", event_id=event_id, epoch=epoch, payload=done.payload)
        with suppress(GoondanError):
            await self.link.post(again)
        self._leases.pop(event_id, None)


class Client:
    """The client, driven by lines; what it says is in the tally."""

    def __init__(self, process: asyncio.subprocess.Process, tally: Tally) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._tally = process, tally
        self._stdin, self._stdout = process.stdin, process.stdout
        self._said = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while line := await self._stdout.readline():
            said = json.loads(line)
            if "ref" in said and "event" not in said:
                self._tally.ended.setdefault(said["ref"], []).append(said)
                self._said.set()

    def say(self, **wish: Any) -> None:
        self._stdin.write(json.dumps(wish).encode() + b"\n")

    def ask(self, chance: random.Random) -> None:
        """One more request of some kind, for some instance."""
        reference, kind = str(len(self._tally.asked)), chance.choice(KINDS)
        self._tally.asked[reference] = kind
        wish = {"do": kind, "ref": reference, "to": "coder", "text": reference, "instance": chance.choice(INSTANCES)}
        self.say(**wish, deadlineMs=600_000)
        if kind != "send" and chance.random() < GIVEN_UP:
            self._tally.given_up.add(reference)
            self.say(do="cancel", ref=reference)

    async def something_ends(self) -> None:
        """Wait for the end of a request."""
        await self._stdin.drain()
        waiting = asyncio.create_task(self._said.wait())
        await asyncio.wait([waiting, self._reader], timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert not self._reader.done(), "the client has ended"
        left = sorted(set(self._tally.asked) - set(self._tally.ended), key=int)
        assert self._said.is_set(), f"nothing was answered for {DRAIN_S:g} s: {left}"
        self._said.clear()

    async def close(self) -> None:
        """The client ends in an orderly way, and has said nothing more."""
        self.say(do="close")
        assert await asyncio.wait_for(self._process.wait(), END_S) == 0
        await self._reader


async def storm(command: list[str], environment: dict[str, str], seed: int, tally: Tally) -> None:
    """The whole of it, for one client."""
    chance, secret = random.Random(seed), os.urandom(SECRET_BYTES)
    async with AsyncExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gs", dir="/tmp")))
        token = run_dir / "client.token"
        token.touch(mode=0o600)
        token.write_text(mint(secret, Claims("client", operator=True, uid=os.getuid())))
        brokers, stdin, stdout = await start_brokers(run_dir, secret, seed)
        stack.callback(kill, brokers)
        assert await stdout.readline() == b"up\n"
        over = asyncio.create_task(stdout.readline())
        for instance in INSTANCES:
            responder = Responder(run_dir, secret, instance, tally, chance)
            await responder.link.start(DRAIN_S)
            stack.push_async_callback(responder.link.close, 0)
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, **environment, "GOONDAN_RUN_DIR": str(run_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(kill, process)
        client = Client(process, tally)
        while not over.done():
            while len(tally.asked) - len(tally.ended) < WINDOW:
                client.ask(chance)
            await client.something_ends()
        assert over.result() == b"over\n"
        while len(tally.ended) < len(tally.asked):
            await client.something_ends()
        until = time.monotonic() + DRAIN_S  # what was only sent is run some time after it was accepted
        while missing := unrun(tally):
            assert time.monotonic() < until, f"accepted and not run: {sorted(missing)}"
            await asyncio.sleep(0.02)
        await client.close()
        stdin.close()
        assert await asyncio.wait_for(brokers.wait(), END_S) == 0


async def start_brokers(
    run_dir: Path, secret: bytes, seed: int
) -> tuple[asyncio.subprocess.Process, asyncio.StreamWriter, asyncio.StreamReader]:
    """The storm itself, with its standard input and output."""
    made = msgspec.structs.replace(plan(str(run_dir / "state")), durability="process")
    fds = [memory_file("plan", msgspec.msgpack.encode(made)), memory_file("secret", secret)]
    try:
        arguments = [run_dir, *fds, seed, KILLS]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.broker_storm", *map(str, arguments)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            cwd=ROOT,
        )
    finally:
        for fd in fds:
            os.close(fd)
    assert process.stdin is not None
    assert process.stdout is not None
    return process, process.stdin, process.stdout


def kill(process: asyncio.subprocess.Process) -> None:
    """End a process of ours that is still there."""
    with suppress(ProcessLookupError):
        process.kill()


def unrun(tally: Tally) -> set[str]:
    """Requests that have to be run, and were not."""
    run = {text for texts in tally.run.values() for text in texts}
    return {reference for reference in tally.asked if reference not in tally.given_up} - run


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.timeout(BUILD_S + 60 + 2 * KILLS)
def test_each_request_is_answered_once_and_run_once_whatever_happens_to_the_broker(client: str) -> None:
    command, environment = command_of(client)
    tally, begun = Tally(), time.monotonic()
    asyncio.run(storm(command, environment, 1, tally))
    took = time.monotonic() - begun
    runs = Counter(text for texts in tally.run.values() for text in texts)
    doubled = {reference: lines for reference, lines in tally.ended.items() if len(lines) > 1}
    twice = {text: times for text, times in runs.items() if times > 1}
    print(
        f"\n{client}: {KILLS} kills, {len(tally.asked)} requests, {len(tally.asked) - len(tally.ended)} unanswered, "
        f"{len(doubled)} answered twice, {len(twice)} run twice, {len(tally.given_up)} given up, "
        f"{tally.handed_again} handed to the agent again, {took:.0f} s"
    )
    assert not doubled
    assert not twice
    for reference, kind in tally.asked.items():
        (line,) = tally.ended[reference]
        if reference in tally.given_up and "error" in line:
            assert line["error"]["code"] == "E_CANCELLED", line
        elif kind == "send":
            assert line == {"ref": reference, "accepted": True}
        else:
            assert (line["answer"]["status"], line["answer"]["response"]) == ("completed", reference), line
    for texts in tally.run.values():
        assert texts == sorted(texts, key=int), "in the order in which they were asked"
