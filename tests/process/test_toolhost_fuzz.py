"""Mutated frames at the worker channel, seeded: no crash, no hang, memory flat.

In-process the host's own handling of a channel is fed, because a jail for each of 100,000 frames would take an hour;
through real jails some hundred of the same mutations are sent by a hostile handler. `make chaos` feeds 100,000, `make
test` a part of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.bundle.launch import Limits, SandboxSpec, ToolHostSpec
from goondan.schemas.transport.link import Done
from goondan.schemas.wire.codec import encode
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.worker_frames import (
    Answer,
    Ask,
    Ended,
    LoadFailed,
    Log,
    Progress,
    Ready,
    Result,
    WorkerError,
    WorkerFrame,
)
from goondan.toolhost.calls.machine import Start
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.calls.untrusted import Channel, Violation
from goondan.toolhost.host import Host
from goondan.toolhost.lookup.hiding import Hiding
from goondan.toolhost.policy.limits import Used
from goondan.toolhost.serving.live import LiveSession
from goondan.toolhost.watch.jail_usage import JailUsage
from goondan.toolhost.watch.keeper import Keeper
from tests.toolhost_fixture import POWERS, bench, make_tool

SEED = 20261121
FRAMES = 100_000 if "GOONDAN_CHAOS_KILLS" in os.environ else 10_000
#: Through real jails, 24 at a time; some of them wait for the rest of a frame until their deadline.
ATTACKS = 72
#: What the process may grow by over all of them (bytes); one kept frame of each kind is a fraction of it.
GROWTH = 24 << 20

pack = msgspec.msgpack.encode
OUTPUT = Raw(pack({"a": [1, 2.5, None, "한글"], "b": {"c": "x" * 40}}))
SAMPLES: list[bytes] = [
    pack(frame)
    for frame in (
        Ready(1, ["f"]),
        LoadFailed("no"),
        Result(call_id="1", status="ok", output=OUTPUT),
        Result(call_id="2", status="pending", handle="h"),
        Result(call_id="3", status="error", error=WorkerError(name="E", message="m", code="C")),
        Log(level="info", message="line", call_id="1"),
        Progress(call_id="1", done=0.5, total=1.0, message="half"),
        Ended(1, 0),
        Ask(call_id="1", ask_id=1, op="request", target="b", input=OUTPUT, metadata=Raw(pack({"k": 1}))),
        Ask(call_id="2", ask_id=2, op="spawn", target="b", cwd="."),
    )
]


def mutate(rng: random.Random) -> bytes:
    """One frame with its length, changed in one of the ways that matter."""
    body = bytearray(rng.choice(SAMPLES))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(body)) if body else 0
        kind = rng.randrange(6)
        if kind == 0 and body:
            body[at] = rng.randrange(256)
        elif kind == 1:
            del body[at : at + rng.randrange(1, 9)]
        elif kind == 2:
            body[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 3:
            body[at:at] = bytes([rng.choice((0x91, 0x81, 0xDD, 0xDF, 0xDB, 0xC6, 0xC9))]) * rng.randrange(1, 200)
        elif kind == 4:
            body = bytearray(rng.choice(SAMPLES)) + body
        else:
            del body[at:]
    length = len(body) if rng.random() < 0.9 else rng.choice((0, 1, len(body) + 3, 1 << 20, 1 << 31, 0xFFFFFFFF))
    return length.to_bytes(4, "little") + bytes(body)


class NoJail:
    """Stands for a jail's processes: everything else about it is the host's.

    There are tens of thousands: each has a copy of `usage`, because a new one reads /proc.
    """

    def __init__(self, usage: JailUsage) -> None:
        self.live = True
        self.dying = False
        self.was_replaced = False
        self.name = "t"
        self.worker_pid = None
        self.tenant: Any = None
        self.last_words = ""
        request = SimpleNamespace(named=[])
        self.plan = SimpleNamespace(tier="full", walls=[], mechanisms={}, calls=None, alone=False, request=request)
        self.usage = copy(usage)

    def kill(self, reason: str) -> None:
        self.dying = True

    def mark_live(self) -> None:
        self.live = True

    def used(self) -> Used:
        return Used(0, 0)

    unread = 0

    def send(self, frame: Any) -> None:
        assert isinstance(frame, Answer), "nothing else is sent to a worker here"


class NoBus:
    """Stands for a link whose broker never answers. What was sent must be a frame, and is forgotten in the end."""

    def __init__(self) -> None:
        self.sent: dict[str, asyncio.Future[Frame]] = {}
        self.count = 0

    def ask(self, frame: Frame) -> asyncio.Future[Frame]:
        self.count += 1
        frame.id = frame.id or f"f{self.count}"
        encode(frame)
        assert frame.call_id in {f"turn/{number}" for number in (1, 2, 3)}
        future = self.sent[frame.id] = asyncio.get_running_loop().create_future()
        return future

    post = ask

    def ask_caller(self, frame: Frame, done: Done) -> None:
        self.ask(frame)

    def forget(self, frame_id: str) -> None:
        self.sent.pop(frame_id).cancel()


async def test_mutated_frames_in_process(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POWERS.offload, "submit", lambda work: work())  # a thread would be woken for each jail
    usage = JailUsage(Limits(), [], Keeper(POWERS), 0, POWERS)
    rng = random.Random(SEED)
    tool = make_tool(short_tmp, "", "f")
    sent: list[Frame] = []

    def send(frame: Frame) -> bool:
        sent.append(frame)
        return True

    lines = 0

    def count(line: Any) -> None:
        nonlocal lines
        lines += 1

    bus = NoBus()
    spec = ToolHostSpec(tools=[tool], state_dir="/nonexistent", revision="1")
    host = Host(spec, POWERS, send=send, on_log=count, speaker=bus)
    host.sessions.open(None)
    before = 0
    refused = accepted = made = 0
    while made < FRAMES:
        if made >= FRAMES // 10 and not before:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        jail, calls = fresh_jail(host, tool, usage)
        channel = Channel(1 << 20, 0.0)
        for _ in range(rng.randrange(1, 30)):
            made += 1
            try:
                frames: list[WorkerFrame] = channel.feed(mutate(rng), 0.0)
            except Violation as violation:
                jail.kill(str(violation))
                host.sessions.worker_broken(jail, violation)
            else:
                host.sessions.worker_frames(jail, frames)
                accepted += len(frames)
            assert channel.kept <= (1 << 20) + (64 << 10) + 4
            if jail.dying:
                refused += 1
                break
        if not jail.dying:
            jail.kill("the end")
        host.sessions.worker_gone(jail, "exited with status 0")
        results = [frame.call_id or "" for frame in sent if frame.type == "tool.result"]
        assert sorted(results) == sorted(calls), "each call has exactly one result"
        host.on_frame(Frame("ack", stage="result", calls=calls))
        sent.clear()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert growth < GROWTH
    assert host.sessions.jail_count == 0
    assert host.answers.calls.known_ids() == []
    assert bus.count > FRAMES // 100
    assert (bus.sent, host.asking._askers) == ({}, {}), "what a call has asked ends with it"
    assert refused > FRAMES // 50
    assert accepted > FRAMES // 50
    await host.close()


def fresh_jail(host: Host, tool: Any, usage: JailUsage) -> tuple[Any, list[str]]:
    """A slot with three running calls, "1" to "3" to its worker, and no processes."""
    from tests.unit.toolhost.test_calls import call

    calls = [call(f"turn/{number}") for number in (1, 2, 3)]
    pool, book = host.sessions.pool, host.answers.calls
    jail: Any = NoJail(usage)
    for number, made in enumerate(calls, 1):
        made.tool = tool
        book.open(made)
        slot = pool.find(("t",))
        if slot is None:
            actions = pool.place(("t",), made)
            assert isinstance(actions[0], Start)
            slot = actions[0].session
            slot.permissions = ["agents"]
            host.sessions.adopt(LiveSession(slot, jail, tool, Hiding([])))
            pool.withdraw(("t",), made)
            pool.launched(slot, 0.0)
        enter(host, slot, str(number), made)
    return jail, [made.id for made in calls]


def enter(host: Host, slot: JailSession, worker_call_id: str, made: Any) -> None:
    host.sessions.pool.enter(slot, worker_call_id, made)
    made.session, made.state, made.worker_call_id = slot.number, "running", worker_call_id


HOSTILE = """
import os, time
def send(ctx, input):
    for data in input["data"]:
        os.write(3, bytes.fromhex(data))
    time.sleep(input["s"])
    return "harmless"
def echo(ctx, input): return input
handlers = {"send": send, "echo": echo}
"""


def crashed(results: list[dict[str, Any]]) -> bool:
    """Whether a jail was ended for what it said."""
    return any(result["status"] == "error" and result["error"]["code"] == "E_TOOL_CRASHED" for result in results)


@pytest.mark.timeout(120)
async def test_mutated_frames_through_real_jails(short_tmp: Path) -> None:
    rng = random.Random(SEED)
    workdir = short_tmp / "work"
    workdir.mkdir()
    # Half of them by calls that are forked in a jail, which must outlive each of them: there is room for every jail.
    forked = make_tool(short_tmp, HOSTILE, "send", "echo", name="c", sandbox=SandboxSpec(isolation="call"))
    async with bench(make_tool(short_tmp, HOSTILE, "send", "echo"), forked, max_jails=16) as made:

        async def attack(number: int, data: list[str], within_ms: int = 2500) -> dict[str, Any]:
            arguments = {"data": data, "s": 0.05}
            tool, key = ("t", f"k{number}") if number % 2 else ("c", "k")
            return await made.call(f"{tool}__send", arguments, workdir=workdir, instance_key=key, deadline_ms=within_ms)

        attacks = [[mutate(rng).hex() for _ in range(rng.randrange(1, 5))] for _ in range(ATTACKS)]
        results = []
        for at in range(0, len(attacks), 24):
            results += await asyncio.gather(*(attack(n, data) for n, data in enumerate(attacks[at : at + 24])))
        assert len(results) == ATTACKS
        assert {result["status"] for result in results} <= {"ok", "error", "pending"}
        if not crashed(results):  # the machine was too busy to make the jails in time
            results = await asyncio.gather(*(attack(n, data, 20_000) for n, data in enumerate(attacks[:8])))
        assert crashed(results)
        for tool, key in (("t", "k1"), ("t", "k3"), ("c", "k")):
            result = await made.call(f"{tool}__echo", {"still": "here"}, workdir=workdir, instance_key=key)
            assert result["output"] == {"still": "here"}
        assert [news.op for news in made.workers if news.tool == "c"] == ["start"]
