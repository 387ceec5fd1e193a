"""Lists who waits for whom and since when, for `gdn ps --why`. Pure; it changes nothing.

Kinds of waits.
- `answer`: the turn of an instance has asked another instance and waits.
- `turn`: messages wait behind the turn that their instance runs.
- `place`: the instance has work and waits for a place for its turn. The sessions and roots that may pay are named.
- `process`: the instance has work. Its process is being started, or an earlier process has not ended yet.
- `tool`: the turn has calls open. Without a tool host they wait for one.
- `approval`: calls of the turn wait for a person, and messages wait behind them.
- `budget`: the turn's next model call waits until model calls of others give something back to a budget.
- `model`: the turn's next model call waits in the line before its server, or its model has sent nothing for a while, or
  it is asked again soon after a try that failed.
- `jail`: calls of the turn wait for a jail to begin with them.
- `extension`: a layer of an extension is not done with the turn.
- `disk`: decisions wait for the disk of the state, which is slow, or has no room for the ends of turns.

It also lists circles of turns that wait for each other's answers. A request that would close a circle is refused, so
there should be none. And it lists stuck leases: the holder was silent for so long that renewals are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Raw

from goondan.kernel.broker.state.bus import Core
from goondan.kernel.broker.state.entities import Call, Connection, Event, Instance
from goondan.kernel.broker.state.mailbox import LEASE_S
from goondan.kernel.broker.state.parts import LIST_BYTES, Op, Part, fitting
from goondan.schemas.wire import codec, errors, frames, runtime_events

#: Waits of one answer: it has to fit a frame.
MAX_LISTED: Final = 1000
#: A holder renews every 10 s; one that has missed two renewals is called stuck (seconds).
STUCK_S: Final = 25.0
#: A decision that waits for so long for the disk (seconds) is a wait that somebody notices.
DISK_S: Final = 1.0
#: Claims that are named of an instance that waits for a place.
MAX_CLAIMS: Final = 3


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Waits(core),)


class Waits(Part):
    """Looks at the broker's state when it is asked."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._bus = core.bus
        self.ops = (Op("why", self.tell),)

    def tell(self, connection: Connection, frame: frames.Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "why", eventId?}`: `{waits, more, cycles, stuck, turns}`; times are milliseconds that something lasted.

        With an event: only of its turn, and of the requests that its turn waits for, and so on. A turn of them that
        waits for nothing has a row `works`.
        """
        event_id = asked.get("eventId")
        events = None if event_id is None else _below(self._bus.mailbox.events.get(str(event_id)))
        every = self._bus.mailbox.instances.values() if events is None else [event.instance for event in events]
        instances = list(dict.fromkeys(every))
        waits = [row for instance in instances for row in self._of(instance, events, now)]
        waits += [row for event, row in self._elsewhere(now) if events is None or event is None or event in events]
        for event in events or ():
            if event.instance.leased is event and not any(row.get("eventId") == event.id for row in waits):
                waits.append({**_row("works", event.instance, event.since, now), "eventId": event.id})
        for each in waits:
            turn = self._bus.mailbox.events.get(each.get("eventId", ""))
            if turn is not None and turn.state == "leased" and turn.work.step:
                each.setdefault("step", turn.work.step)
        waits.sort(key=lambda row: -row["forMs"])
        edges = {instance.address: [event.instance.address for event in _asked(instance)] for instance in instances}
        stuck = [row for instance in instances if (row := self._stuck(instance, now)) is not None]
        turns = [_turn(instance.leased, now) for instance in instances if instance.leased is not None]
        listed = fitting(waits[:MAX_LISTED], LIST_BYTES // 2)
        body = {
            "waits": listed,
            "more": len(waits) - len(listed),
            "cycles": fitting(circles(edges)[:MAX_LISTED], LIST_BYTES // 8),
            "stuck": fitting(stuck[:MAX_LISTED], LIST_BYTES // 8),
            "turns": fitting(sorted(turns, key=lambda row: -row["forMs"])[:MAX_LISTED], LIST_BYTES // 4),
        }
        self._bus.reply(connection, frame.id, body)

    def _of(self, instance: Instance, events: Collection[Event] | None, now: float) -> Iterator[dict[str, Any]]:
        """What an instance waits for; `events`: what only these do."""
        if events is None or instance.leased in events:
            yield from self._of_turn(instance, now)
        if events is None or instance.leased not in events:
            yield from self._of_queue(instance, events, now)

    def _elsewhere(self, now: float) -> Iterator[tuple[Event | None, dict[str, Any]]]:
        """What is known of waits elsewhere than at the instances, each with its event; None: it is everybody's."""
        bus, calls = self._bus, dict[Event, list[Call]]()
        for call in bus.calls.open.values():
            calls.setdefault(call.event, []).append(call)
        for event, made in calls.items():
            for kind in ("tool", "jail"):
                these = [call for call in made if (kind == "jail") == (call.jail_since is not None)]
                if these and event.instance.leased is event:
                    yield (
                        event,
                        {
                            **_row(kind, event.instance, min(call.began for call in these), now),
                            "eventId": event.id,
                            "tools": sorted({call.tool or "" for call in these}),
                            "calls": len(these),
                            "host": all(call.host is not None for call in these),
                        },
                    )
        for kind, event, since, more in self._core.waiting(now):
            yield event, {**_row(kind, event.instance, since, now), "eventId": event.id, **more}
        if bus.disk_since is not None and now - bus.disk_since >= DISK_S:
            yield None, {"kind": "disk", "agent": "", "instanceKey": "", "forMs": _ms(now - bus.disk_since)}

    def _of_turn(self, instance: Instance, now: float) -> Iterator[dict[str, Any]]:
        """What the turn of an instance waits for: other agents, and what its holder has said."""
        turn = instance.leased
        if turn is None:
            return
        for asked in _asked(instance):
            yield {
                **_row("answer", instance, asked.since, now),
                "eventId": turn.id,
                "target": asked.instance.agent,
                "targetKey": asked.instance.key,
                "targetEventId": asked.id,
            }
        if turn.work.wait is not None and (told := _told(*turn.work.wait, instance, now)) is not None:
            yield {**told, "eventId": turn.id}

    def _of_queue(self, instance: Instance, events: Collection[Event] | None, now: float) -> Iterator[dict[str, Any]]:
        """What the messages of an instance wait for. `events`: how many are before the first of these is told."""
        turn = instance.leased
        waiting = [event for event in instance.queue if not event.ending]
        if not waiting and not instance.spawns:
            return
        since, more = min([event.since for event in waiting] or [now]), {"messages": len(waiting)}
        if events is not None:
            mine = next((at for at, event in enumerate(waiting) if event in events), 0)
            since, more = waiting[mine].since if waiting else now, {**more, "before": mine + (turn is not None)}
        if turn is not None:
            yield {**_row("turn", instance, since, now), **more, "eventId": turn.id}
        elif self._bus.mailbox.places.waits(instance):
            claims = [{"session": event.session, "root": event.root} for event in waiting[:MAX_CLAIMS]]
            yield {**_row("place", instance, since, now), **more, "claims": claims}
        elif instance.conn is None and not (instance.queue and instance.queue[0].waits):
            yield {**_row("process", instance, since, now), **more, "leaving": instance.leaving}

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


def _below(event: Event | None) -> list[Event]:
    """An event, the requests that its turn waits for, those that their turns wait for, and so on."""
    found = [] if event is None else [event]
    for one in found:  # it grows
        if one.instance.leased is one:
            found += [request for request in _asked(one.instance) if request not in found]
    return found


def _told(at: float, payload: Raw, instance: Instance, now: float) -> dict[str, Any] | None:
    """What a turn has said that it waits for. None when it cannot be read."""
    try:
        told = codec.from_raw(payload, runtime_events.RuntimeEvent)
    except errors.GoondanError:
        return None
    wait = told.wait or runtime_events.Wait()
    row = _row("extension", instance, at - wait.waited_ms / 1000, now)
    row["step"] = told.step
    if told.kind == "extension.waits":
        return {**row, "extension": wait.extension or "", "point": wait.point or ""}
    again_ms = None if wait.wait_ms is None else _ms(at + wait.wait_ms / 1000 - now)
    row |= {"kind": "model", "model": wait.model or "", "attempt": wait.attempt}
    return row if told.message is None else {**row, "message": told.message, "againMs": again_ms}


def _turn(event: Event, now: float) -> dict[str, Any]:
    """A turn that runs, since its message was accepted."""
    agent, key = event.instance.agent, event.instance.key
    about = {"agent": agent, "instanceKey": key, "eventId": event.id, "step": event.work.step}
    return {**about, "forMs": _ms(now - event.since)}


def _row(kind: str, instance: Instance, since: float, now: float) -> dict[str, Any]:
    return {"kind": kind, "agent": instance.agent, "instanceKey": instance.key, "forMs": _ms(now - since)}


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
