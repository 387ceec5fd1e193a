"""Circles among those who wait, and the lines that people get to see."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs

from goondan.features.waits.broker import Waits, circles
from goondan.kernel.broker.loop import BrokerLoop
from goondan.kernel.broker.state.bus import Bus, Calls, Core
from goondan.kernel.broker.state.entities import Call, Connection, Content, Event, Instance
from goondan.kernel.broker.state.mailbox import Epochs, Mailbox, Quotas
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.kernel.cli.console.screen import new_lines
from goondan.kernel.cli.rules.waits import render, status_of, wait_line
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent, Wait
from tests.unit.kernel.broker.memory_journal import MemoryJournal


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({}, []),
        ({"a": ["b"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"c": ["a"], "a": ["b"], "b": ["c"]}, [["a", "b", "c"]]),
        ({"a": ["a"]}, [["a"]]),
        ({"x": ["a"], "a": ["b", "c"], "b": [], "c": ["a"], "p": ["q"], "q": ["p"]}, [["a", "c"], ["p", "q"]]),
        ({"a": ["gone"]}, []),
    ],
)
def test_circles(edges: dict[str, list[str]], found: list[list[str]]) -> None:
    assert circles(edges) == found


_GRAPHS = st.dictionaries(st.sampled_from("abcdefg"), st.lists(st.sampled_from("abcdefg"), max_size=4))


@given(_GRAPHS)
def test_a_circle_is_found_if_and_only_if_there_is_one(edges: dict[str, list[str]]) -> None:
    found = circles(edges)
    for circle in found:
        assert len(set(circle)) == len(circle)
        for one, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            assert other in edges[one]
    left = {node: set(nexts) for node, nexts in edges.items()}
    while ends := [node for node, nexts in left.items() if not nexts & set(left)]:
        for node in ends:
            del left[node]
    assert bool(found) == bool(left)


def test_what_a_person_reads() -> None:
    turn: dict[str, Any] = {"agent": "a", "instanceKey": "k\x1b[31m", "eventId": "e1", "forMs": 61_000}
    answer = {
        "waits": [
            {**turn, "kind": "answer", "target": "b", "targetKey": "k", "targetEventId": "e2"},
            {**turn, "kind": "turn", "messages": 2},
            {**turn, "kind": "place", "messages": 1, "claims": [{"session": "client/7", "root": "e1"}]},
            {**turn, "kind": "process", "messages": 1, "leaving": False},
            {**turn, "kind": "approval", "text": "waits for a person (gdn approve: 0a1)\n\x1b[2J"},
            {**turn, "kind": "tool", "tools": ["bash__exec"], "calls": 1, "host": False},
            {**turn, "kind": "model", "before": 12, "heldMs": 0, "text": "waits for its model: 12 before it"},
        ],
        "more": 3,
        "cycles": [["a/k", "b/k"]],
        "stuck": [{**turn, "connected": False, "attempts": 1}],
    }
    shown = render(answer)
    assert [line.split("] ")[-1].split("31m ")[-1] for line in shown] == [
        "waits for the answer of b/k (e2)",
        "is busy with e1; 2 messages behind it",
        "waits for a place with 1 message (session client/7, root e1)",
        "waits for its process to start with 1 message",
        "waits for a person (gdn approve: 0a1) \\x1b[2J",
        "waits for a tool host that runs bash__exec",
        "waits for its model: 12 before it",
        "and 3 more",
        "circle: a/k -> b/k -> a/k",
        shown[-1],
    ]
    assert shown[-1].endswith("its process, which is not connected, has said nothing about e1 for 1m")
    assert not any("\x1b" in line for line in shown)
    assert render({"waits": [], "more": 0, "cycles": [], "stuck": []}) == ["nobody waits"]


#: A model says nothing for two seconds.
SILENT = RuntimeEvent(kind="model.waits", step=2, wait=Wait(waited_ms=2000, model="openai/m", attempt=1))


class _Look:
    """As much of a broker as the question needs: one instance whose turn holds the only place, and another one."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(Epochs(1, 1_000_000), Quotas(100, 1 << 20, 1, 0), MemoryJournal())
        self.calls = Calls()
        self.sent: list[dict[str, Any]] = []
        self.disk_since: float | None = None
        self.turn = self.event("e1", "a")
        self.mailbox.lease(self.turn, 10.0)

    def event(self, event_id: str, agent: str) -> Event:
        instance = Instance(agent, "k", Workdir("/w"), self.mailbox.epochs.next(), 0.0)
        instance = self.mailbox.instances.setdefault((agent, "k"), instance)
        event = Event(event_id, instance, sender="client", content_here=Content(), session="client/7", since=5.0)
        self.mailbox.stage(event)
        self.mailbox.accept(event)
        return event

    def reply(self, connection: object, frame_id: str, body: dict[str, Any]) -> None:
        self.sent.append(from_raw(to_raw(body), dict))

    def ask(self, now: float, event_id: str | None = None) -> dict[str, Any]:
        waits = Waits(cast(Core, SimpleNamespace(bus=self, waiting=lambda now: ())))
        waits.tell(cast(Connection, None), Frame("admin", id="f"), {"eventId": event_id}, now)
        return self.sent.pop()

    def request(self, event_id: str, agent: str, asking: Event) -> Event:
        """A request of the turn of `asking`."""
        request = self.event(event_id, agent)
        asking.work.requests[request] = None
        return request

    def call(self, event: Event, tool: str, *, jail_since: float | None = None) -> None:
        call = Call(f"t/{tool}", event, "f", tool, None, 11.0, host=cast(Connection, self), jail_since=jail_since)
        self.calls.open[call.id] = call


def test_who_waits_for_a_place_and_whose_it_would_be() -> None:
    look = _Look()
    other = look.event("e2", "b")
    assert not look.mailbox.places.take(other.instance, other.claim)
    look.mailbox.places.wait(other.instance, [other.claim])
    [row] = look.ask(12.0)["waits"]
    assert row == {
        "kind": "place", "agent": "b", "instanceKey": "k", "forMs": 7000, "messages": 1,
        "claims": [{"session": "client/7", "root": "e2"}],
    }  # fmt: skip
    look.mailbox.give_back(look.turn.instance)
    grant = look.mailbox.places.first()
    assert grant is not None
    look.mailbox.places.grant(grant)
    assert [row["kind"] for row in look.ask(12.0)["waits"]] == ["process", "process"]


@pytest.mark.parametrize(("now", "stuck"), [(20.0, False), (34.9, False), (35.1, True)])
def test_a_turn_whose_holder_has_missed_renewals_is_stuck(now: float, stuck: bool) -> None:
    found = _Look().ask(now)["stuck"]
    assert [row["eventId"] for row in found] == (["e1"] if stuck else [])


def test_two_turns_that_wait_for_each_other_are_a_circle() -> None:
    look = _Look()
    other = look.event("e2", "b")
    look.mailbox.lease(other, 10.0)
    for turn, name, agent in ((look.turn, "e3", "b"), (other, "e4", "a")):
        asked = look.event(name, agent)
        asked.asking = turn
        turn.work.requests[asked] = None
    answer = look.ask(12.0)
    assert answer["cycles"] == [["a/k", "b/k"]]
    assert sorted(row["kind"] for row in answer["waits"]) == ["answer", "answer", "turn", "turn"]


def test_what_a_turn_says_that_it_waits_for_is_a_wait_until_it_goes_on() -> None:
    look = _Look()
    failed = structs.replace(SILENT, message="no connection: refused")
    failed = structs.replace(failed, wait=Wait(waited_ms=2000, model="openai/m", attempt=1, wait_ms=4000))
    look.turn.work.wait = 12.0, to_raw(SILENT)
    [row] = look.ask(15.0)["waits"]
    about = {"agent": "a", "instanceKey": "k", "eventId": "e1", "step": 2, "forMs": 5000}
    assert row == about | {"kind": "model", "model": "openai/m", "attempt": 1}
    assert wait_line(row) == "a/k (step 2) waits for its model openai/m: nothing came for 5s (try 1)"
    look.turn.work.wait = 12.0, to_raw(failed)
    [row] = look.ask(13.0)["waits"]
    assert wait_line(row) == "a/k (step 2) waits for its model openai/m: no connection: refused; try 2 in 3s"
    hangs = RuntimeEvent(kind="extension.waits", step=2, wait=Wait(waited_ms=3000, extension="guard", point="step.pre"))
    look.turn.work.wait = 12.0, to_raw(hangs)
    [row] = look.ask(13.0)["waits"]
    assert row == about | {"kind": "extension", "extension": "guard", "point": "step.pre", "forMs": 4000}
    assert wait_line(row) == "a/k (step 2) waits for the extension guard, which hangs at step.pre"
    look.turn.work.wait = 12.0, Raw(b"\xc1")
    assert look.ask(13.0)["waits"] == []
    look.turn.work.wait = None
    assert look.ask(13.0)["waits"] == []


def test_a_call_without_its_jail_and_a_disk_that_takes_nothing_are_waits() -> None:
    look = _Look()
    look.call(look.turn, "bash__exec")
    look.call(look.turn, "build__run", jail_since=12.0)
    look.disk_since = 12.5
    rows = {row["kind"]: row for row in look.ask(14.0)["waits"]}
    assert (rows["tool"]["tools"], rows["jail"]["tools"]) == (["bash__exec"], ["build__run"])
    assert wait_line(rows["jail"]) == "a/k waits for a jail for build__run"
    assert wait_line(rows["disk"]) == "the kernel waits for the disk of its state, which is slow or has no room"
    assert "disk" not in {row["kind"] for row in look.ask(13.0)["waits"]}


def test_since_when_the_oldest_decision_waits_for_the_disk() -> None:
    loop, bus = BrokerLoop.__new__(BrokerLoop), SimpleNamespace(disk_since=None)
    loop._unsettled, loop._oldest, loop._bus = deque([[], []]), None, cast(Bus, bus)
    since = []
    for now, settles in ((5.0, False), (6.0, True), (7.0, True), (8.0, False)):
        loop._look_at_disk(now)
        since.append(bus.disk_since)
        if settles:
            loop._unsettled.popleft()
    assert since == [5.0, 5.0, 7.0, None]


def test_of_one_event_only_its_turn_and_those_below_it_are_told() -> None:
    look = _Look()
    other = look.event("e9", "z")
    look.mailbox.lease(other, 10.0)
    look.call(other, "wait__seconds")
    asked = look.request("e2", "b", look.turn)
    assert {row["kind"] for row in look.ask(14.0, "e1")["waits"]} == {"answer", "process"}
    look.mailbox.lease(asked, 10.0)
    rows = look.ask(14.0, "e1")["waits"]
    assert {(row["kind"], row["agent"]) for row in rows} == {("works", "b"), ("answer", "a")}
    assert status_of(rows, ("a", "k")) == "b/k works"
    look.call(asked, "bash__exec")
    asked.work.step = 3
    assert status_of(look.ask(14.0, "e1")["waits"], ("a", "k")) == "b/k works, step 3, bash__exec"
    look.calls.open.clear()
    asked.work.wait = 12.0, to_raw(structs.replace(SILENT, step=4))
    below = "b/k (step 4) waits for its model openai/m: nothing came for 4s (try 1)"
    assert status_of(look.ask(14.0, "e1")["waits"], ("a", "k")) == below
    assert look.ask(14.0, "no such event")["waits"] == []
    look.turn.work.wait = 12.0, to_raw(SILENT)
    own = "waits for its model openai/m: nothing came for 4s (try 1)"
    assert status_of(look.ask(14.0, "e1")["waits"], ("a", "k")) == own


def test_turns_that_run_are_told_whether_they_wait_or_not_the_longest_first() -> None:
    look = _Look()
    look.turn.since, look.turn.work.step = 3.0, 2
    asked = look.request("e2", "b", look.turn)
    look.event("e3", "c")
    assert [row["eventId"] for row in look.ask(14.0)["turns"]] == ["e1"]
    look.mailbox.lease(asked, 10.0)
    first, second = look.ask(14.0)["turns"]
    assert first == {"agent": "a", "instanceKey": "k", "eventId": "e1", "step": 2, "forMs": 11_000}
    assert (second["eventId"], second["step"], second["forMs"]) == ("e2", 0, 9000)
    assert [row["eventId"] for row in look.ask(14.0, "e2")["turns"]] == ["e2"]


def test_a_request_behind_other_messages_says_behind_how_many() -> None:
    look = _Look()
    busy = look.event("e5", "b")
    look.mailbox.lease(busy, 10.0)
    look.event("e6", "b")
    look.request("e7", "b", look.turn)
    rows = look.ask(14.0, "e1")["waits"]
    assert {row["kind"]: row.get("before") for row in rows} == {"answer": None, "turn": 2}
    assert status_of(rows, ("a", "k")) == "queued behind 2 messages of b/k"
    assert status_of(look.ask(14.0, "e6")["waits"], ("b", "k")) == "queued behind 1 message"


def test_a_wait_is_told_once_and_again_when_it_has_lasted_five_times_as_long() -> None:
    told: dict[tuple[str, ...], int] = {}
    row = {"kind": "model", "agent": "a", "instanceKey": "k", "forMs": 2000, "model": "openai/m", "attempt": 1}
    assert list(new_lines([row], told)) == ["a/k waits for its model openai/m: nothing came for 2s (try 1)"]
    assert list(new_lines([{**row, "forMs": 9000}], told)) == []
    assert len(list(new_lines([{**row, "forMs": 10_000}], told))) == 1
    assert len(list(new_lines([{**row, "message": "503", "forMs": 400}], told))) == 0
    assert len(list(new_lines([{**row, "message": "503", "forMs": 600}], told))) == 1
    assert list(new_lines([{**row, "kind": "tool", "tools": ["x"], "host": True}], told)) == []
