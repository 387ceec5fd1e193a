"""The turns of a trace as one tree across agents, and where their time went (pure).

Rules.
- A turn hangs on the span that asked for it: a tool call of another turn, or a turn whose middleware asked. One whose
  asker is not known begins a tree of its own.
- Work and waiting are told apart by intervals. At each moment a turn works if its own code does or a call of it is at
  work; else it waits for whatever it has open. So a turn that waits for one agent while another tool computes is at
  work.
- A call waits from its beginning until its jail has it, as its receipt says, and while a turn that it asked for is
  queued or runs. While a person is asked about it, it waits for the person and not for its jail.

The content of files is not believed: no data can make a circle, and a turn that lies too deep is shown at the deepest
level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from goondan.kernel.traces.rules.turn import ToolCall, Total, Trace, Waits, moment
from goondan.schemas.wire.spans import step_span

#: Turns that hang on each other in a row: agents that wait are 32 at most, messages that nobody waits for may be more.
MAX_DEPTH: Final = 64

Intervals = list[tuple[int, int]]


class TraceTree(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A trace, as `gdn trace --json` prints it."""

    #: The trace.
    trace_id: str
    #: The worst of the turns that nobody asked for: `running`, `interrupted`, `failed`, else `completed`.
    status: str
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: How long it took (milliseconds).
    duration_ms: int | None = None
    #: The sum over all turns (milliseconds).
    work_ms: int = 0
    #: How many turns are not shown, because there are too many.
    left_out: int = 0
    #: The turns that are not part of another one.
    turns: list[Trace] = []
    #: The sum over all turns that are shown.
    total: Total | None = None


def grow(turns: Sequence[Trace], now: str) -> list[Trace]:
    """Hang the turns on each other and say where their time went; those that hang on no other. `now`: RFC 3339."""
    ordered = sorted(turns, key=lambda turn: (turn.started_at, turn.turn_id))
    holders: dict[str, tuple[Trace, ToolCall | None]] = {}
    for turn in ordered:
        holders[turn.span_id or ""] = (turn, None)
        for step in turn.steps:
            holders[step_span(turn.turn_id, step.step)] = (turn, None)
        for tool in turn.tools:
            holders[tool.span_id or ""] = (turn, tool)
    above: dict[int, Trace] = {}
    depth: dict[int, int] = {}
    roots: list[Trace] = []
    for turn in ordered:
        holder = holders.get(turn.parent_span_id or "-")
        if holder is None or _is_above(turn, holder[0], above):
            roots.append(turn)
            continue
        asker, call = holder
        while depth.get(id(asker), 0) >= MAX_DEPTH and id(asker) in above:
            asker, call = above[id(asker)], None
        above[id(turn)] = asker
        depth[id(turn)] = depth.get(id(asker), 0) + 1
        (asker.turns if call is None else call.turns).append(turn)
    for turn in _deepest_first(roots):
        _measure(turn, now)
    return roots


def tree_of(trace_id: str, roots: list[Trace], left_out: int, now: str) -> TraceTree:
    """A whole trace; there is at least one turn."""
    everything = _deepest_first(roots)
    statuses = {turn.status for turn in roots}
    worst = next((status for status in ("running", "interrupted", "failed") if status in statuses), "completed")
    started = min(turn.started_at for turn in everything)
    span = [_span_of(turn, now) for turn in everything]
    whole = [found for found in span if found is not None]
    return TraceTree(
        trace_id=trace_id,
        status=worst,
        started_at=started,
        duration_ms=max(end for _, end in whole) - min(start for start, _ in whole) if whole else None,
        left_out=left_out,
        turns=roots,
        work_ms=sum(turn.work_ms or 0 for turn in everything),
    )


def total_of(found: Trace | TraceTree) -> Total:
    """The sum over all turns that are shown of a trace, or of a turn with those that hang on it."""
    everything = _deepest_first([found] if isinstance(found, Trace) else found.turns)
    total = Total(turns=len(everything), agents=sorted({turn.agent for turn in everything}))
    for call in (step.model for turn in everything for step in turn.steps if step.model is not None):
        total.add(call, call.costs)
    return total


def calls_of(found: Trace | TraceTree) -> list[ToolCall]:
    """The tool calls of all turns that are shown, in the order in which they began."""
    everything = _deepest_first([found] if isinstance(found, Trace) else found.turns)
    return sorted((call for turn in everything for call in turn.tools), key=lambda call: call.started_at)


def find(roots: Iterable[Trace], turn_id: str) -> Trace | None:
    """A turn somewhere in the tree."""
    return next((turn for turn in _deepest_first(list(roots)) if turn.turn_id == turn_id), None)


def below(turn: Trace) -> list[Trace]:
    """The turns that hang on this one."""
    return [*turn.turns, *(asked for call in turn.tools for asked in call.turns)]


def _is_above(turn: Trace, other: Trace, above: dict[int, Trace]) -> bool:
    """Whether `turn` is `other`, or what that hangs on."""
    at: Trace | None = other
    while at is not None:
        if at is turn:
            return True
        at = above.get(id(at))
    return False


def _deepest_first(roots: list[Trace]) -> list[Trace]:
    found = list(roots)
    for turn in found:  # it grows
        found.extend(below(turn))
    return found[::-1]


# --- times


def _interval(start: str | None, duration_ms: int | None, until: int) -> Intervals:
    """From a time on, for so long or until it is cut off."""
    begin = moment(start)
    if begin is None:
        return []
    end = until if duration_ms is None else begin + duration_ms
    return [(begin, end)] if end > begin else []


def _span_of(turn: Trace, now: str) -> tuple[int, int] | None:
    start = moment(turn.started_at)
    end = moment(turn.ended_at or (now if turn.status == "running" else turn.last_at))
    return None if start is None or end is None else (start, max(start, end))


def _measure(turn: Trace, now: str) -> None:
    """How a turn used its time. The turns that it asked for have been measured before."""
    span = _span_of(turn, now)
    if span is None:
        return
    _, until = span
    models, calls, asked, starting, working, people = [], [], [], [], [], []
    for step in turn.steps:
        if step.model is not None:
            models += _interval(step.model.started_at, step.model.duration_ms, until)
    for call in turn.tools:
        whole = _interval(call.started_at, call.duration_ms, until)
        others = _common(whole, [piece for other in call.turns for piece in _with_queue(other, now)])
        before_jail = _before_jail(call)
        person = _common(whole, _asking(turn, call, until))
        if before_jail is not None:  # people are asked before a jail has the call
            person = _common(person, before_jail)
        jail = _without(_common(whole, before_jail or []), person)
        work = _without(whole, others + jail + person)
        call.work_ms = _length(work) if call.duration_ms is not None else None
        calls += whole
        asked += others
        starting += jail
        people += person
        working += work
    lost = [
        piece
        for before, after in zip(turn.lost_at, turn.resumed_at, strict=False)
        for piece in _interval(before, None, moment(after) or 0)
    ]
    asked += [piece for other in turn.turns if other.awaited for piece in _with_queue(other, now)]  # by middleware
    own = _without([span], models + calls + lost + asked)
    work = _union(own + _common([span], working))
    before = turn.waits or Waits()
    turn.work_ms = _length(work)
    turn.waits = Waits(
        queue_ms=before.queue_ms,
        place_ms=before.place_ms,
        model_ms=_length(_without(_common([span], models), work)),
        agents_ms=_length(_without(_common([span], asked), work)),
        sandbox_ms=_length(_without(_common([span], starting), work)),
        lost_ms=_length(_without(_common([span], lost), work + people)),
        person_ms=_length(_without(_common([span], people), work)),
    )


def _with_queue(turn: Trace, now: str) -> Intervals:
    """A turn, and before it the time for which its event had waited."""
    span = _span_of(turn, now)
    if span is None:
        return []
    waited = 0 if turn.waits is None else turn.waits.queue_ms + turn.waits.place_ms
    return [(span[0] - waited, span[1])]


def _asking(turn: Trace, call: ToolCall, until: int) -> Intervals:
    """While a person was asked about a call: until its turn was resumed, or to its end."""
    resumed = [at for text in turn.resumed_at if (at := moment(text)) is not None]
    found: Intervals = []
    for text in call.asked_at:
        start = moment(text)
        if start is not None:
            found.append((start, min([at for at in resumed if at >= start], default=until)))
    return found


def _before_jail(call: ToolCall) -> Intervals | None:
    """The part of a call before its jail had it; None where nobody knows."""
    start = moment(call.started_at)
    if call.receipt is None or call.duration_ms is None or start is None:
        return None
    ms = call.duration_ms - round(call.receipt.call.wall_ms)
    return [(start, start + ms)] if ms > 0 else []


def _union(pieces: Intervals) -> Intervals:
    found: Intervals = []
    for start, end in sorted(pieces):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _without(pieces: Intervals, taken: Intervals) -> Intervals:
    """What is in the one and not in the other."""
    found: Intervals = []
    holes = _union(taken)
    at = 0
    for start, end in _union(pieces):
        while at > 0 and holes[at - 1][1] > start:
            at -= 1
        begin = start
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > begin:
                found.append((begin, holes[at][0]))
            begin = max(begin, holes[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def _common(pieces: Intervals, others: Intervals) -> Intervals:
    return _without(pieces, _without(pieces, others))


def _length(pieces: Intervals) -> int:
    return sum(end - start for start, end in _union(pieces))
