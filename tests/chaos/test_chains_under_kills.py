"""`kill -9` of everything, the supervisor included, while eight agents ask each other in chains of three.

Every accepted request ends: with one finished turn or a dead letter, and whoever still waits gets one answer. After the
death of the supervisor the senders are gone, and what they had been promised is finished by the next kernel all the
same. `make chaos` runs it in full: GOONDAN_CHAOS_KILLS=200 and three deaths of the supervisor.

What is counted, and where.
- Runs of a tool: by the tool itself, which appends a line to a file when it begins and when it ends.
- Answers: at a socket that hides none.
- A kill counts only if its process held work: a call that has begun and not ended, or a request that is not answered.
- Kills of tool hosts by what was done since the last one, not by the clock: as many requests with a tool as can be
  under way at a time must have ended. A tool host takes its jails along, and where making them all takes longer than a
  tool host is left alive, each repeat of a call is lost as well. That would count how fast the machine is.
- Errors by cause. Most tools of the chains may run again (`idempotent: true`), and say so. One in a dozen may not: its
  outcome is unknown when its tool host was killed, and that is no error of ours.
"""

from __future__ import annotations

import asyncio
import fcntl
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
from pathlib import Path
from typing import Any, Final

import pytest

from goondan.agentproc.calls.caller import MAX_REPEATS
from goondan.kernel import lock, rundir
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from goondan.toolhost.watch.procfs import stranded
from tests.chaos.raw_client import RawClient
from tests.kernel_fixture import PATIENCE_S, Sandbox, sandbox, wait_until

KILLS: Final = int(os.environ.get("GOONDAN_CHAOS_KILLS", "4"))
ENDS: Final = 3 if KILLS >= 200 else 1
#: How often each role is killed at least while it holds work.
LEAST: Final = 10 if KILLS >= 200 else 1
AGENTS: Final = [f"a{number}" for number in range(8)]
ROLES: Final = ("broker", "toolhost", "forkserver", "agent", "worker")
#: Requests that are under way at any time, each for an instance key of its own.
WINDOW: Final = 12 if KILLS >= 200 else 5
#: Every so many requests end in a tool that may run again, and some in one that may not; the others in the last agent's
#: answer.
AGAIN_EVERY: Final = 3
ONCE_EVERY: Final = 12
#: How long a run of the tool takes (seconds): long enough to be killed in it.
RUN_S: Final = 0.15
#: What a call that may not be repeated ends with when the process that ran it was killed.
HONEST: Final = {"E_TOOL_OUTCOME_UNKNOWN", "E_TOOL_CRASHED"}
#: Of all requests, so many may end with an error, apart from those that may not be repeated. Of the few hundred of
#: `make test`, one in any case: that whose own process is killed twice, which nobody repeats once more.
MAX_ERRORS: Final = 0.01
FEW_ERRORS: Final = 1
#: How long everything may take to come to its end once nothing is killed any more (seconds).
DRAIN_S: Final = 90.0
#: Runs of a call that may be repeated, by one process of its agent: the first, and one for each tool host it lost.
MAX_RUNS: Final = 1 + MAX_REPEATS
TOOL: Final = f"""\
import fcntl
import os
import time


def run(ctx, input):
    log = os.open(os.path.join(ctx.workdir, "runs.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    fcntl.flock(log, fcntl.LOCK_EX)
    os.write(log, f"begin {{input['word']}}\\n".encode())
    time.sleep({RUN_S})
    os.write(log, f"end {{input['word']}}\\n".encode())
    os.close(log)
    return input["word"]


handlers = {{"again": run, "once": run}}
"""
_EXPORT: Final = (
    "parameters: {type: object, properties: {word: {type: string}}, required: [word], additionalProperties: false}"
)
BUNDLE: Final = "".join(
    [
        "apiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: console}\nspec: {provider: embedded}\n",
        "---\napiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {name: runs}\n",
        "spec:\n  entry: ./tools/runs.py\n  exports:\n",
        f"    - {{name: again, description: Says a word., {_EXPORT}, idempotent: true}}\n",
        f"    - {{name: once, description: Says a word., {_EXPORT}}}\n",
        *(
            f"---\napiVersion: goondan.ai/v1\nkind: Agent\nmetadata: {{name: {name}}}\n"
            "spec: {modelConfig: {modelRef: Model/console}, tools: [Tool/agents, Tool/runs]}\n"
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
    #: Event id -> the text that its asker was given.
    answered: dict[str, str] = field(default_factory=dict)
    #: Event id -> every answer that came over the wire, and how often it was asked for.
    heard: dict[str, list[bytes]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    #: Errors by cause: of turns, of tools that may run again, and of tools that may not.
    failed: Counter[str] = field(default_factory=Counter)
    tool_errors: Counter[str] = field(default_factory=Counter)
    unrepeated: Counter[str] = field(default_factory=Counter)
    #: Requests with a tool that have come to an end, and how many had when a tool host was killed last.
    ended: int = 0
    ended_before: int = 0
    #: How often the process of an instance (agent, key) was killed.
    agents_killed: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: By role: processes that were killed while they held work.
    killed: Counter[str] = field(default_factory=Counter)
    #: Requests that were finished by a kernel after the one that had accepted them.
    inherited: int = 0
    #: One of each error, for the report.
    examples: dict[str, str] = field(default_factory=dict)
    #: Accepted by a kernel whose supervisor was killed, before they were answered: id -> the agent and key.
    left: dict[str, tuple[str, str]] = field(default_factory=dict)


@pytest.fixture
def kernel() -> Iterator[Sandbox]:
    """Eight agents; afterwards no process, no folder and no mount may be left."""
    with sandbox(BUNDLE) as made:
        (made.home / "tools").mkdir()
        (made.home / "tools" / "runs.py").write_text(TOOL)
        yield made


@pytest.mark.timeout(120 + 3 * KILLS)
def test_every_accepted_request_ends_whatever_dies(kernel: Sandbox) -> None:
    tally, chance = Tally(), random.Random(KILLS)
    for number in range(ENDS + 1):
        kernel.detach()
        look_at_what_was_left(kernel, tally)
        asyncio.run(load(kernel, tally, chance, KILLS // (ENDS + 1) + 1, ends=number < ENDS))
    begun, where, _ = runs(kernel)
    report(tally, begun)
    assert_answered_once(tally)
    assert_run_as_often_as_allowed(tally, begun, where)
    assert set(tally.unrepeated) <= HONEST, tally.unrepeated
    errors = tally.failed + tally.tool_errors
    assert sum(errors.values()) <= max(FEW_ERRORS, MAX_ERRORS * tally.asked), errors
    assert all(tally.killed[role] >= LEAST for role in ROLES), tally.killed
    assert tally.killed["supervisor"] == ENDS
    assert_nothing_is_left(kernel)


def assert_nothing_is_left(kernel: Sandbox) -> None:
    """After the last kernel was stopped: no process, no lock, no socket, no mount, no runtime directory."""
    assert locks(kernel), "a kernel that runs holds some"
    kernel.gdn("stop")
    kernel.wait_for_nothing()
    assert not locks(kernel), "locks that nobody gives back"
    assert all(lock.read_record(str(state_dir)) is None for state_dir in kernel.state_dirs), "a kernel that is gone"
    top = str(kernel.home.parent)
    left = [line for line in Path("/proc/net/unix").read_text().splitlines() if top in line]
    assert not left, "sockets that nobody closes"
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if top in line], "a mount"
    assert kernel.run_dirs == []


def locks(kernel: Sandbox) -> list[str]:
    """Lines of /proc/locks about files of this kernel."""
    files = [path.lstat() for path in kernel.home.parent.glob("state/workspaces/*/kernel/*")]
    inodes = {f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}" for file in files}
    return [line for line in Path("/proc/locks").read_text().splitlines() if inodes & set(line.split())]


def report(tally: Tally, begun: Counter[str]) -> None:
    """The counts, for whoever runs it."""
    twice = sum(len(answers) > 1 for answers in tally.heard.values())
    print(
        f"\n{tally.asked} requests, {len(tally.answered)} answered ({twice} of them again, when asked "
        f"again), {tally.inherited} finished without their senders; killed while they held work: {dict(tally.killed)}; "
        f"{sum(begun.values())} runs of {len(begun)} calls; errors of turns {dict(tally.failed)}, of tools "
        f"{dict(tally.tool_errors)}, of tools that may not be repeated {dict(tally.unrepeated)}"
    )
    for code, example in tally.examples.items():
        print(f"{code}: {example}")


def assert_answered_once(tally: Tally) -> None:
    """An answer comes again only if it was asked for again, and says the same."""
    for event_id, answers in tally.heard.items():
        assert len(set(answers)) == 1, f"{event_id} was answered in different words"
        assert len(answers) <= tally.sent[event_id], f"{event_id} was answered more often than asked"


def assert_run_as_often_as_allowed(tally: Tally, begun: Counter[str], where: dict[str, tuple[str, str]]) -> None:
    """At the true end: what the tool itself wrote, and in which instance."""
    for word, times in begun.items():
        processes = 1 + tally.agents_killed[where[word]] + tally.killed["supervisor"]
        most = MAX_RUNS * processes if word.startswith("again") else 1
        assert times <= most, f"{word} ran {times} times"
    for event_id, text in tally.answered.items():
        said = word_of(int(event_id.partition("-")[2]))
        assert said is None or said not in text or begun[said] >= 1, f"{said} was answered and never ran"


def runs(kernel: Sandbox) -> tuple[Counter[str], dict[str, tuple[str, str]], set[tuple[str, str]]]:
    """What the tool has written: word -> how often it began, word -> the instance (agent, key); and where one runs now.

    A run holds a lock, which ends with its process: one that was killed in its run does not run any more.
    """
    begun: Counter[str] = Counter()
    where: dict[str, tuple[str, str]] = {}
    running: set[tuple[str, str]] = set()
    for path in kernel.home.glob("state/workspaces/*/instances/*/*/workspace/runs.log"):
        instance = path.parts[-4], path.parts[-3]
        with open(path, "rb") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                running.add(instance)
            lines = [line.split() for line in log.read().decode("ascii").splitlines()]
        words = [word for what, word in lines if what == "begin"]
        begun.update(words)
        where.update(dict.fromkeys(words, instance))
    return begun, where, running


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


def word_of(number: int) -> str | None:
    """What the tool at the end of this chain says; None when it ends in an agent's own answer."""
    if number % ONCE_EVERY == 1:
        return f"once-{number}-end"
    return f"again-{number}-end" if number % AGAIN_EVERY == 0 else None


def chain(number: int) -> tuple[str, str, str]:
    """The agent that is asked, its input, and the text that comes out at the end."""
    first = number % len(AGENTS)
    names = [AGENTS[(first + step) % len(AGENTS)] for step in range(3)]
    word, text = word_of(number), "hello"
    if word is not None:
        text = f"/runs__{word.partition('-')[0]} word={word}"
    for name in reversed(names[1:]):
        text = f"/agents__request {json.dumps({'target': name, 'input': text})}"
    return names[0], text, word or "embedded console"


async def load(kernel: Sandbox, tally: Tally, chance: random.Random, kills: int, *, ends: bool) -> None:
    """Ask all the time while things are killed; then wait for all answers, or kill the supervisor (`ends`)."""
    (state_dir,) = kernel.state_dirs
    record = lock.read_record(str(state_dir))
    assert record is not None
    with rundir.open_existing(record.run_dir) as folder:
        run_dir, token = folder.path, rundir.read_private(folder, rundir.CLIENT_TOKEN)
    client = RawClient(f"ipc://{run_dir}/{SOCKETS['client']}", token)
    client.answers, client.sent = tally.heard, tally.sent
    open_: dict[str, tuple[str, str]] = {}
    more = True

    async def one(number: int, key: str) -> None:
        agent, text, expected = chain(number)
        event_id = f"chaos-{number}"
        event = AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=text)
        frame = Frame("event", to=agent, instance_key=key, event_id=event_id, payload=to_raw(event))
        frame.reply_to = ReplyTo("client", event_id)
        open_[event_id] = (agent, key)
        try:
            answer = from_raw((await client.ask(frame)).payload, AgentEvent).answer
        except GoondanError as error:
            if error.info.code != "E_LINK_CLOSED":
                tally.failed[error.info.code] += 1
                open_.pop(event_id, None)
            return
        open_.pop(event_id, None)
        assert answer is not None
        said = tally.answered[event_id] = answer.response or ""
        if answer.error is not None:
            tally.failed[answer.error.code] += 1
        elif expected not in said:
            codes = re.findall(r"\bE_[A-Z_]+", said)
            cause = codes[0] if codes else "another text"
            (tally.unrepeated if expected.startswith("once") else tally.tool_errors)[cause] += 1
            tally.examples.setdefault(cause, f"{text!r} -> {said!r}"[:600])

    async def ask(lane: int) -> None:
        while more:
            tally.asked += 1
            number = tally.asked
            await one(number, f"k{lane}")
            tally.ended += word_of(number) is not None

    lanes = [asyncio.create_task(ask(lane)) for lane in range(WINDOW)]
    for _ in range(kills):
        await kill(kernel, ROLES[sum(tally.killed[role] for role in ROLES) % len(ROLES)], open_, tally, chance)
        await asyncio.sleep(chance.uniform(0.1, 0.5))
    more = False
    if ends:
        pid = kernel.pid("supervisor")
        tally.left = {event_id: at for event_id, at in open_.items() if event_id in client.accepted}
        os.kill(pid, signal.SIGKILL)
        tally.killed["supervisor"] += 1
        client.close()
        await asyncio.gather(*lanes)
        await asyncio.to_thread(wait_for_all_but_stranded, kernel)
        return
    tally.left = {}
    await asyncio.wait_for(asyncio.gather(*lanes), DRAIN_S)
    client.close()


def wait_for_all_but_stranded(kernel: Sandbox) -> None:
    """All has gone with the supervisor, but for jails whose making was cut off: the next tool host ends those."""
    wait_until(lambda: not kernel.processes().keys() - set(stranded()), 5.0, "processes without their supervisor")


async def kill(
    kernel: Sandbox, role: str, open_: dict[str, tuple[str, str]], tally: Tally, chance: random.Random
) -> None:
    """`kill -9` of a process of this role that holds work, as soon as there is one."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        rows: list[dict[str, Any]] = await asyncio.to_thread(kernel.ps)
        of_role = [row for row in rows if row["role"] == role and row["pid"]]
        _, _, running = runs(kernel)
        if role == "worker":
            of_role = [row for row in of_role if any(key == row["instanceKey"] for _, key in running)]
        elif role == "toolhost":
            of_role = of_role if running and tally.ended >= tally.ended_before + WINDOW else []
        elif role == "agent":
            of_role = [row for row in of_role if (row["name"], row["instanceKey"]) in {*open_.values(), *running}]
        if of_role and open_:
            with suppress(ProcessLookupError):
                victim = chance.choice(of_role)
                os.kill(victim["pid"], signal.SIGKILL)
                tally.killed[role] += 1
                if role == "toolhost":
                    tally.ended_before = tally.ended
                elif role == "agent":
                    tally.agents_killed[victim["name"], victim["instanceKey"]] += 1
            return
        await asyncio.sleep(0.02)
