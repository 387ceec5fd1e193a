"""Seeded histories of a whole bus: what happens, and what must hold once everything has come to rest.

A history is named by its number. Every fourth number belongs to a series: one walk without kills, and the broker dies
in its first write, before or after it is durable, then in its second, and so on. The other numbers are walks by dice,
with cuts and kills of every kind.

What is lost, and what is late: a connection that breaks loses what it holds in both directions. Each peer is served by
dice, so messages of different peers overtake each other, and everything may wait for any time. Within one connection
ZeroMQ keeps the order and duplicates nothing; frames that are sent again after a broken connection are duplicates all
the same, and `again` repeats frames also within one.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

from goondan.features import FEATURES
from goondan.kernel.broker.state.records import event_of, event_subject
from tests.unit.kernel.broker.journals import BothJournals
from tests.unit.kernel.broker.world import World

#: What features have in histories: `parts_of(number)` gives what the specification of `coder` has of theirs, and
#: `check(world)` says what must hold at the end.
OF_FEATURES: Final = [
    import_module(f"tests.features.{feature.name}.in_histories")
    for feature in FEATURES
    if (Path(__file__).parents[3] / "features" / feature.name / "in_histories.py").is_file()
]
NAMES: Final = (
    "up",
    "down",
    "round",
    "round",
    "ask",
    "cancel",
    "work",
    "reconcile",
    "advance",
    "cut",
    "leave",
    "again",
)
#: Where the disk is slow: the broker hears of what was written.
SETTLED: Final = ("settled", "settled", "all_settled")
KILLS: Final = ("kill_agent", "kill_host", "kill_broker", "die_before_write", "die_after_write")
#: Histories that `make test` lives through: the first ones. Four of five are short, to keep that quick.
TESTED: Final = 150 if "GOONDAN_WHOLE_RUN" in os.environ else 300
#: Steps of a walk by dice at most.
LONGEST_STEPS: Final = 300
SHORTER_STEPS: Final = 110
#: Steps of a series' walk: as many as make some SERIES_WRITES writes.
SERIES_STEPS: Final = 60
#: Writes of a walk in which the broker dies, one after the other; each is a history for before and one for after it.
SERIES_WRITES: Final = 50
#: Every so often the broker's journal is a real file beside the one in memory, and both must say the same. Odd, so that
#: large payloads and small ones, dice and series come under it.
REAL_JOURNAL_EVERY: Final = 13
#: Every so often what an event says is in the journal only while it waits.
LETS_GO_EVERY: Final = 3
#: Every so often a client observes, with a small window.
OBSERVED_EVERY: Final = 7
#: Where real journals of histories lie, so that no disk slows them down.
RAM: Final = "/dev/shm"


def history(number: int) -> World:
    """Live through the history of that number. Raises AssertionError when something does not hold."""
    collected = gc.isenabled()
    gc.disable()  # what a history makes is gone with it; looking for more costs a quarter
    folder = tempfile.TemporaryDirectory(dir=RAM if os.path.isdir(RAM) else None)
    journal = BothJournals(Path(folder.name)) if number % REAL_JOURNAL_EVERY == 0 else None
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if number % LETS_GO_EVERY == 0:
                monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
            world = _series(number // 4, journal) if number % 4 == 3 else _dice(number, journal, monkeypatch)
            world.settle()
        check(world)
        return world
    finally:
        if collected:
            gc.enable()
        if journal is not None:
            journal.close()
        folder.cleanup()


def _dice(number: int, journal: BothJournals | None, monkeypatch: pytest.MonkeyPatch) -> World:
    """Anything may happen at any time.

    In every seventh a client observes all turns. In every other one the payloads of events, answers, calls and results
    are large, and lie in files. In every fifth the broker has room for a few events only, so that many are refused and
    sent again. In every third the journal is slow, and the broker goes on meanwhile.
    """
    if number // 2 % 2 == 1:
        monkeypatch.setattr("goondan.schemas.wire.peer.INLINE_FRAME_BYTES", 40)
    dice = random.Random(number)
    room = 4 if number % 5 == 0 else 65_536
    live = dice.choice([1, 2, 256])
    parts = {name: part for module in OF_FEATURES for name, part in module.parts_of(number).items()}
    world = World(
        max_live_agents=live, max_open_events=room, handlers_ask=number % 2 == 1, journal=journal, parts=parts
    )
    world.slow_disk = number % 3 == 1
    world.clients[1].observes = 3 if number % OBSERVED_EVERY == 0 else 0
    names = NAMES + KILLS + SETTLED * world.slow_disk
    longest = LONGEST_STEPS if number >= TESTED or number % 5 == 0 else SHORTER_STEPS
    for _ in range(dice.randrange(10, longest)):
        perform(world, dice.choice(names), dice.randrange(8) or 1)
    return world


def _series(number: int, journal: BothJournals | None) -> World:
    """One walk, and one death of the broker, in a certain write."""
    walk, at = divmod(number, 2 * SERIES_WRITES)
    dice = random.Random(-1 - walk)
    world = World(max_live_agents=dice.choice([1, 2, 256]), handlers_ask=walk % 2 == 1, journal=journal)
    world.dies_in = at // 2 + 1
    world.dies = "before" if at % 2 == 0 else "after"
    for _ in range(SERIES_STEPS):
        perform(world, dice.choice(NAMES), dice.randrange(8) or 1)
    return world


def perform(world: World, action: str, number: int) -> None:
    actors = world.actors()
    agents = list(world.agents.values())
    match action:
        case "up":
            world.pump_up(actors[number % len(actors)])
        case "down":
            world.pump_down(actors[number % len(actors)])
        case "round":
            for _ in range(number):
                for actor in world.actors():
                    world.pump_up(actor)
                for actor in world.actors():
                    world.pump_down(actor)
                world.supervisor.reconcile()
        case "ask":
            client = world.clients[number % 2]
            count = len(client.asked)
            agent = "coder" if number & 2 else "reviewer"
            client.ask(f"c{number % 2}e{count}", agent, f"k{number // 4}", calls=number % 3, live=number % 2 == 0)
        case "cancel":
            client = world.clients[number % 2]
            if client.asked:
                client.cancel(client.asked[-1 - number // 2 % len(client.asked)])
        case "work":
            world.host.work()
        case "reconcile":
            world.supervisor.reconcile()
        case "advance":
            world.advance(number / 10)
        case "cut":
            world.cut(actors[number % len(actors)])
        case "kill_agent":
            if agents:
                world.kill_agent(agents[number % len(agents)])
        case "kill_host":
            world.kill_host()
        case "kill_broker":
            world.kill_broker()
        case "die_before_write":
            world.dies = "before"
        case "die_after_write":
            world.dies = "after"
        case "leave":
            if agents:
                agents[number % len(agents)].ask_to_leave()
        case "settled":
            world.settle_next()
            world.after_round()
        case "all_settled":
            world.disk_catches_up()
        case "again":
            world.again(actors[number % len(actors)])


def check(world: World) -> None:
    """What must hold once everything has come to rest."""
    for client in world.clients:
        assert not client.errors, client.errors
        for event_id in client.asked:
            answers = client.answers.get(event_id, [])
            assert len(answers) == 1, f"{event_id} was answered {len(answers)} times"
        for event_id, times in client.cancels.items():
            ended = client.ended.get(event_id, [])
            assert len(ended) == times, "every question to cancel has its answer"
            answer = client.answers[event_id][0].answer
            assert answer is not None
            known = {"done"} if answer.status == "completed" else {"cancelled", "failed"}
            if world.plan.max_open_events < 100:
                known.add("E_EVENT_NOT_FOUND")  # asked while there was no room for it
            assert set(ended) <= known, f"{event_id} ended as {ended}, and was answered with {answer.status}"
            assert answer.status == "completed" or (answer.error is not None and answer.error.code == "E_CANCELLED")
    for store in world.stores.values():
        assert max(Counter(store.completed).values(), default=1) == 1, "a turn was completed twice"
    runs = Counter(world.ran)
    assert max(runs.values(), default=1) == 1, "a tool host ran a call twice"
    by_call: dict[str, set[int]] = {}
    for launch, call_id in world.ran:
        by_call.setdefault(call_id, set()).add(launch)
    assert all(len(launches) == 1 for launches in by_call.values()), "a call ran again after its host was lost"
    # What a call has asked ends as it does: answered, unless nobody waited any more.
    assert set(world.host.heard.values()) <= {None, "E_CANCELLED"}
    assert not world.host.asking
    bus = world.router.bus
    assert len(bus.calls) == 0, "a call is still open"
    assert all(i.leased is None and not i.queue for i in bus.mailbox.instances.values()), "work was left behind"
    kept = {row.subject for row in world.journal.rows() if event_of(row.subject) is not None}
    assert kept == {event_subject(event_id) for event_id in bus.mailbox.dead}, "the journal holds what is over"
    assert set(bus.mailbox.events) <= set(bus.mailbox.dead), "the broker holds what is over"
    for module in OF_FEATURES:
        module.check(world)
    places = bus.mailbox.places
    assert (bus.mailbox.open.held, bus.mailbox.held.held, bus.calls.large.held) == (0, 0, 0), "counted for ever"
    assert (bus.mailbox.answers.held, bus.mailbox._late, bus.mailbox._roots) == (0, {}, {}), "counted for ever"
    assert (places.pool.held, places.lent, places.waiting) == (0, 0, 0), "a place was left behind"
