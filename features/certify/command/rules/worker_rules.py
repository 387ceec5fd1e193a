"""The rules of a worker that hold in every scenario, each decided from what was seen. Pure.

Source: schemas/WORKER.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from goondan.features.certify.command.rules.scenarios import Trace, short

#: How many levels of maps and arrays an output may have.
MAX_DEPTH: Final = 60
#: How much news a host forgives at once, and again in each second.
NEWS_AT_ONCE, NEWS_PER_S = 20_000, 2_000

Found = list[str] | None


def _got(trace: Trace, *kinds: str) -> Iterator[dict[str, Any]]:
    return (seen.what for seen in trace if seen.kind == "got" and (not kinds or seen.what["type"] in kinds))


def frames(trace: Trace) -> Found:
    """What is no frame of the protocol."""
    found = [seen.what for seen in trace if seen.kind == "odd"]
    return found if found or any(_got(trace)) else None


def results(trace: Trace) -> Found:
    """Results of calls that were never made, and more than one of a call."""
    made = [seen.what["callId"] for seen in trace if seen.kind == "sent" and seen.what["type"] == "call"]
    told = list(_got(trace, "result"))
    last = [what["callId"] for what in told if not (what["status"] == "pending" and what.get("continues"))]
    found = [f"a result of call {short(call)}, which was never made" for call in last if call not in made]
    return found + [f"two results of call {call}" for call in made if last.count(call) > 1] if told else None


def errors(trace: Trace) -> Found:
    """Results without what their status says: an error, or a handle that can be printed."""
    told = list(_got(trace, "result"))
    wrong = [what for what in told if what["status"] == "error" and not what.get("error")]
    for what in (one for one in told if one["status"] == "pending"):
        handle = what.get("handle")
        wrong += [] if isinstance(handle, str) and 1 <= len(handle) <= 1024 and handle.isprintable() else [what]
    return [short(what) for what in wrong] if told else None


def values(trace: Trace) -> Found:
    """Outputs that are not JSON, or too deep."""
    told = [what["output"] for what in _got(trace, "result") if "output" in what]
    return [text for value in told if (text := _no_json(value, MAX_DEPTH)) is not None] if told else None


def _no_json(value: Any, levels: int) -> str | None:
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        keys = all(isinstance(key, str) for key in value) if isinstance(value, dict) else True
        if levels == 0 or not keys:
            return "a key that is no text" if levels else f"more than {MAX_DEPTH} levels"
        return next((text for item in items if (text := _no_json(item, levels - 1)) is not None), None)
    if isinstance(value, float):
        return None if value - value == 0 else f"{value} as a number"
    return None if value is None or isinstance(value, bool | int | str) else f"a {type(value).__name__}"


def asks(trace: Trace) -> Found:
    """Questions without the permission, of no open call, or under the number of an open one."""
    found, may, calls, open_ = [], False, set(), set()
    for seen in trace:
        kind = seen.what["type"] if seen.kind in ("sent", "got") else ""
        if kind == "init":
            may = "agents" in seen.what.get("permissions", [])
        elif kind == "call":
            calls.add(seen.what["callId"])
        elif kind == "answer":
            open_.discard((seen.what["callId"], seen.what["askId"]))
        elif kind == "ask":
            asked = (seen.what.get("callId"), seen.what.get("askId"))
            if not may or asked[0] not in calls or asked in open_:
                found.append(short(seen.what))
            open_.add(asked)
    return found if found or may else None


def news(trace: Trace) -> Found:
    """More log lines and progress than a host forgives."""
    times = [seen.at for seen in trace if seen.kind == "got" and seen.what["type"] in ("log", "progress")]
    most = NEWS_AT_ONCE + NEWS_PER_S * (times[-1] - times[0]) if times else 0
    return ([f"{len(times)} log lines"] if len(times) > most else []) if times else None


JUDGES: Final = (frames, results, errors, values, asks, news)
