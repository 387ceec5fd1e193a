"""Lists who waits for whom and since when, for `gdn ps --why`. Pure; it changes nothing.

Kinds of waits.
- `answer`: the turn of an instance has asked another instance and waits.
- `turn`: messages wait behind the turn that their instance runs.
- `place`: the instance has work and waits for a place for its turn. The sessions and roots that may pay are named.
- `process`: the instance has work. Its process is being started, or an earlier process has not ended yet.
- `tool`: the turn has calls open. Without a tool host they wait for one.
- `approval`: calls of the turn wait for a person, and messages wait behind them.
- `budget`: the turn's next model call waits until model calls of others give something back to a budget.
- `model`: the turn's next model call waits in the line before its server.

It also lists circles of turns that wait for each other's answers. A request that would close a circle is refused, so
there should be none. And it lists stuck leases: the holder was silent for so long that renewals are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kernel.broker.approvals.items import Item
from kernel.broker.budgets.desk import Budgets
from kernel.broker.bus import Bus
from kernel.broker.calls import Call
from kernel.broker.entities import Connection, Event, Instance
from kernel.broker.gate.desk import Gates
from kernel.broker.mailbox import LEASE_S
from kernel.broker.one_frame import LIST_BYTES, fitting
from schemas.codec import to_raw
from schemas.frames import Frame

#: Waits of one answer: it has to fit a frame.
MAX_LISTED: Final = 1000
#: A holder renews every 10 s; one that has missed two renewals is called stuck (seconds).
STUCK_S: Final = 25.0
#: Items and tools that are named of a turn that waits for a person.
MAX_ITEMS: Final = 20
#: Claims that are named of an instance that waits for a place.
MAX_CLAIMS: Final = 3


class Waits:
    """Looks at the broker's state when it is asked."""

    def __init__(self, bus: Bus, budgets: Budgets, gates: Gates) -> None:
        self._bus = bus
        self._gates = gates
        self._budgets = budgets

    def tell(self, connection: Connection, frame: Frame, now: float) -> None:
        """`{op: "why"}`: `{waits, more, cycles, stuck}`; times are milliseconds that something has lasted."""
        instances = [*self._bus.mailbox.instances.values()]
        calls: dict[Event, list[Call]] = {}
        for call in self._bus.calls.open.values():
            calls.setdefault(call.event, []).append(call)
        items: dict[Event, list[Item]] = {}
        for item in self._bus.approvals.values():
            if item.open:
                items.setdefault(item.event, []).append(item)
        waits = [row for instance in instances for row in self._of(instance, calls, now)]
        waits += [self._for_person(event, asked, now) for event, asked in items.items()]
        for event, since in self._budgets.waiting:
            waits.append({**_row("budget", event.instance, since, now), "eventId": event.id, "root": event.root})
        for event, since, before, held_until in self._gates.waiting(now):
            held_ms = max(0, round((held_until - now) * 1000))
            waited = _row("model", event.instance, since, now)
            waits.append({**waited, "eventId": event.id, "before": before, "heldMs": held_ms})
        waits.sort(key=lambda row: -row["forMs"])
        edges = {instance.address: [event.instance.address for event in _asked(instance)] for instance in instances}
        stuck = [row for instance in instances if (row := self._stuck(instance, now)) is not None]
        listed = fitting(waits[:MAX_LISTED], LIST_BYTES // 2)
        body = {
            "waits": listed,
            "more": len(waits) - len(listed),
            "cycles": fitting(circles(edges)[:MAX_LISTED], LIST_BYTES // 4),
            "stuck": fitting(stuck[:MAX_LISTED], LIST_BYTES // 4),
        }
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw(body)))

    def _of(self, instance: Instance, open_calls: Mapping[Event, list[Call]], now: float) -> Iterator[dict[str, Any]]:
        turn = instance.leased
        for asked in _asked(instance):
            yield {
                **_row("answer", instance, asked.since, now),
                "eventId": None if turn is None else turn.id,
                "target": asked.instance.agent,
                "targetKey": asked.instance.key,
                "targetEventId": asked.id,
            }
        calls = [] if turn is None else open_calls.get(turn, [])
        if turn is not None and calls:
            yield {
                **_row("tool", instance, min(call.began for call in calls), now),
                "eventId": turn.id,
                "tools": sorted({call.tool or "" for call in calls}),
                "calls": len(calls),
                "host": all(call.host is not None for call in calls),
            }
        waiting = [event for event in instance.queue if not event.ending]
        if not waiting and not instance.spawns:
            return
        since = min([event.since for event in waiting] or [now])
        if turn is not None:
            yield {**_row("turn", instance, since, now), "messages": len(waiting), "eventId": turn.id}
        elif self._bus.mailbox.places.waits(instance):
            claims = [{"session": event.session, "root": event.root} for event in waiting[:MAX_CLAIMS]]
            yield {**_row("place", instance, since, now), "messages": len(waiting), "claims": claims}
        elif instance.conn is None and not (instance.queue and instance.queue[0].waits):
            yield {**_row("process", instance, since, now), "messages": len(waiting), "leaving": instance.leaving}

    def _for_person(self, event: Event, items: list[Item], now: float) -> dict[str, Any]:
        instance = event.instance
        behind = sum(not other.ending and other is not event for other in instance.queue)
        return {
            **_row("approval", instance, min(item.asked for item in items), now),
            "eventId": event.id,
            "items": [item.code for item in items][:MAX_ITEMS],
            "tools": sorted({item.tool for item in items})[:MAX_ITEMS],
            "calls": len(items),
            "messages": behind,
        }

    def _stuck(self, instance: Instance, now: float) -> dict[str, Any] | None:
        turn = instance.leased
        if turn is None:
            return None
        silent = now - (turn.work.lease_until - LEASE_S)
        if silent < STUCK_S:
            return None
        row = _row("stuck", instance, now - silent, now)
        return {**row, "eventId": turn.id, "connected": instance.conn is not None, "attempts": turn.work.attempts}


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The circles of a graph, one for each group of nodes that reach each other. Each begins with its smallest name."""
    found: list[list[str]] = []
    done: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []
        at: dict[str, int] = {}
        iterators: list[Iterator[str]] = []
        node: str | None = start
        while True:
            if node is not None and node not in done:
                if node in at:
                    circle = path[at[node] :]
                    low = circle.index(min(circle))
                    circle = circle[low:] + circle[:low]
                    if circle not in found:
                        found.append(circle)
                else:
                    at[node] = len(path)
                    path.append(node)
                    iterators.append(iter(edges.get(node, ())))
            if not iterators:
                break
            node = next(iterators[-1], None)
            if node is None:
                iterators.pop()
                over = path.pop()
                del at[over]
                done.add(over)
    return found


def _asked(instance: Instance) -> list[Event]:
    """The requests of the instance's turn that have no answer yet."""
    return [] if instance.leased is None else [event for event in instance.leased.work.requests if not event.finished]


def _row(kind: str, instance: Instance, since: float, now: float) -> dict[str, Any]:
    lasted = max(0, round((now - since) * 1000))
    return {"kind": kind, "agent": instance.agent, "instanceKey": instance.key, "forMs": lasted}
