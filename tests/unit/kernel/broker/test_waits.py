"""Circles among those who wait, and the lines that people get to see."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.broker.budgets.desk import Budgets
from kernel.broker.bus import Bus
from kernel.broker.calls import Calls
from kernel.broker.entities import Connection, Content, Event
from kernel.broker.epochs import Epochs
from kernel.broker.gate.desk import Gates
from kernel.broker.journal.memory import MemoryJournal
from kernel.broker.mailbox import Mailbox, Quotas
from kernel.broker.waits import Waits, circles
from kernel.cli.waits import render
from schemas.codec import from_raw
from schemas.frames import Frame


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
            {**turn, "kind": "approval", "tools": ["bash__exec"], "items": ["0a1"], "calls": 1, "messages": 2},
            {**turn, "kind": "tool", "tools": ["bash__exec"], "calls": 1, "host": False},
            {**turn, "kind": "model", "before": 12, "heldMs": 0},
            {**turn, "kind": "model", "before": 0, "heldMs": 4000},
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
        "waits for a person to approve 1 call of bash__exec (gdn approve: 0a1); 2 messages behind it",
        "waits for a tool host that runs bash__exec",
        "waits for its model: 12 before it",
        "waits for its model: held back for 4s by the limit of its server",
        "and 3 more",
        "circle: a/k -> b/k -> a/k",
        shown[-1],
    ]
    assert shown[-1].endswith("its process, which is not connected, has said nothing about e1 for 1m")
    assert not any("\x1b" in line for line in shown)
    assert render({"waits": [], "more": 0, "cycles": [], "stuck": []}) == ["nobody waits"]


class _Open:
    """Gates at which nobody waits."""

    def waiting(self, now: float) -> list[object]:
        return []


class _Look:
    """As much of a broker as the question needs: one instance whose turn holds the only place, and another one."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(Epochs(1, 1_000_000), Quotas(100, 1 << 20, 1, 0), MemoryJournal())
        self.calls = Calls()
        self.approvals: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []
        self.waiting: list[tuple[Event, float]] = []  # of budgets
        self.turn = self.event("e1", "a")
        self.mailbox.lease(self.turn, 10.0)

    def event(self, event_id: str, agent: str) -> Event:
        instance = self.mailbox.instance(agent, "k", "/w", 0.0)
        event = Event(event_id, instance, sender="client", content=Content(), session="client/7", since=5.0)
        self.mailbox.stage(event)
        self.mailbox.accept(event)
        return event

    def send(self, connection: object, frame: Frame) -> None:
        self.sent.append(from_raw(frame.payload, dict))

    def ask(self, now: float) -> dict[str, Any]:
        waits = Waits(cast(Bus, self), cast(Budgets, self), cast(Gates, _Open()))
        waits.tell(cast(Connection, None), Frame("admin", id="f"), now)
        return self.sent.pop()


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
