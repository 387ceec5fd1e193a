"""The rules of a client that hold in every scenario, each decided from what was seen; and a broker that keeps them, for
scenarios in which only its life is short. Pure.

A judge gives what breaks its rule, and None where there was no occasion for it. It takes no notice of how quick the
program is. The headers of frames that were `got` have the types of their fields. client.yaml has the words of each
rule.

Source: schemas/PROTOCOL.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from goondan.features.certify.command.rules.scenarios import Seen, Trace, short
from goondan.schemas.text.visible import is_visible

#: The types that a client's socket takes.
TYPES: Final = frozenset(("hello", "ping", "pong", "bye", "event", "ack", "admin", "log", "runtime.event"))
#: What was sent so long before (seconds) has been read by a program that lives.
READ_S: Final = 1.0
#: A repeat so long after the first sending (milliseconds) says less than the whole deadline.
LATER_MS: Final = 500

_EVENT_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}(?<!:answer)\Z")
_BLOB: Final = re.compile(r"[0-9a-f]{32}\Z")

Found = list[str] | None


def _got(trace: Trace, *kinds: str) -> Iterator[Seen]:
    return (seen for seen in trace if seen.kind == "got" and (not kinds or seen.what["type"] in kinds))


def _repeated(trace: Trace) -> Iterator[tuple[Seen, Seen]]:
    """Each sending of an event, with the first one."""
    first: dict[Any, Seen] = {}
    return ((first.setdefault(seen.what.get("eventId"), seen), seen) for seen in _got(trace, "event"))


def frames(trace: Trace) -> Found:
    """Messages that are no frame, or have a type that the socket does not take."""
    odd = [seen.what for seen in trace if seen.kind == "odd" and not seen.what.startswith("a line")]
    odd += [f"a frame of type {short(seen.what['type'])}" for seen in _got(trace) if seen.what["type"] not in TYPES]
    return odd if odd or any(_got(trace)) else None


def routing_ids(trace: Trace) -> Found:
    """A routing id of the client's own that is no new 16 bytes for each connection."""
    links = [seen.what for seen in trace if seen.kind == "link"]
    return [f"the routing id {one}" for one in links if one is not None and len(one) != 32] if links else None


def names(trace: Trace) -> Found:
    """Names that break the rule of names."""
    found = []
    for what in (seen.what for seen in _got(trace)):
        reply = what.get("replyTo") or {}
        said = [(key, what.get(key), 256) for key in ("id", "eventId", "instanceKey")]
        for key, name, most in [*said, *((key, reply.get(key), 512) for key in ("target", "correlationId"))]:
            if name is not None and not (1 <= len(name) <= most and is_visible(name)):
                found.append(f"{key} {short(name)}")
        if what["type"] == "event" and not _EVENT_ID.match(what.get("eventId") or ""):
            found.append(f"eventId {short(what.get('eventId'))}")
    return found if any(_got(trace, "event")) else None


def hello_first(trace: Trace) -> Found:
    """Frames before a program can know that it is welcome: before its first hello, and between hello and welcome.

    What comes before a later hello was under way when the connection was lost.
    """
    found, welcomed, greeted = [], set(), set()
    for seen in trace:
        if seen.kind == "sent" and seen.what["type"] == "welcome":
            welcomed.add(seen.link)
        elif seen.kind == "got" and seen.what["type"] == "hello":
            greeted.add(seen.link)
        elif seen.kind != "got" or seen.what["type"] in ("ping", "pong") or seen.link in welcomed:
            continue
        elif seen.link == 1 or seen.link in greeted:
            found.append(f"{seen.what['type']} on connection {seen.link} before its welcome")
    return found if found or greeted else None


def acknowledged(trace: Trace) -> Found:
    """Answers that are not acknowledged, or more than once. What was sent just before a loss may not have been read."""
    found, occasion = [], False
    acks = [(seen.what.get("inReplyTo"), seen.what.get("eventId"), seen.link) for seen in _got(trace, "ack")]
    last = {seen.link: seen.at for seen in trace if seen.kind != "lost"}
    for sent in (seen for seen in trace if seen.kind == "sent" and seen.what["type"] == "event"):
        count = acks.count((sent.what["id"], sent.what["eventId"], sent.link))
        wrong = count > 1 or (count == 0 and last[sent.link] - sent.at >= READ_S)
        occasion = occasion or count > 0 or wrong
        found += [f"the answer {short(sent.what['id'])} was acknowledged {count} times"] if wrong else []
    return found if occasion else None


def order(trace: Trace) -> Found:
    """Events of one agent and instance in another order than they were first sent in, after a welcome."""
    found: list[str] = []
    first: dict[Any, int] = {}
    sent: dict[Any, list[int]] = {}
    welcomed = set()
    for seen in trace:
        if seen.kind == "sent" and seen.what["type"] == "welcome":
            welcomed.add(seen.link)
        elif seen.kind == "got" and seen.what["type"] == "event" and seen.link in welcomed:
            # What comes before a welcome is taken by nobody: the library connected anew without a word.
            place = first.setdefault(seen.what.get("eventId"), len(first))
            places = sent.setdefault((seen.link, seen.what.get("to"), seen.what.get("instanceKey")), [])
            if place not in places and place < max(places, default=0):
                found.append(f"event {place + 1} after a later one on connection {seen.link}")
            places.append(place)
    return found if any(len(set(places)) > 1 for places in sent.values()) else None


def repeats(trace: Trace) -> Found:
    """Repeats that are not the same: another id, agent, instance, correlation id or content."""
    keys = ("id", "to", "instanceKey", "replyTo", "payload", "blob", "files")
    again = [(one, other) for one, other in _repeated(trace) if one is not other]
    differ = [(one.what.get(key), other.what.get(key), key) for one, other in again for key in keys]
    return [f"a repeat whose {key} is {short(b)}, not {short(a)}" for a, b, key in differ if a != b] if again else None


def deadlines(trace: Trace) -> Found:
    """Repeats that say more than is left."""
    found, occasion = [], False
    if any(seen.kind == "sent" and seen.what["type"] == "clock" for seen in trace):
        return None  # time stood still
    for one, other in _repeated(trace):
        left, whole, passed = other.what.get("deadlineMs"), one.what.get("deadlineMs"), (other.at - one.at) * 1000
        if left is not None and whole is not None and passed > LATER_MS:
            occasion = True
            if not 1 <= left <= whole - passed / 2:
                found.append(f"a repeat {passed:.0f} ms later with {left} of {whole} ms left")
    return found if occasion else None


def credit(trace: Trace) -> Found:
    """More events that are not accepted than there is credit for."""
    found: list[str] = []
    out: dict[Any, tuple[Any, Any]] = {}
    window = link = 0
    for seen in trace:
        what = seen.what if isinstance(seen.what, dict) else {}
        if seen.kind == "sent" and what["type"] == "welcome":
            # Twice on one connection: the second met frames under way, which nobody can count here.
            window, out, link = what["payload"]["credit"] + (len(out) if seen.link == link else 0), {}, seen.link
        elif seen.kind == "sent" and what["type"] == "credit":
            window = max(window, what["payload"]["window"])
        elif seen.kind == "sent":
            out = {event: names for event, names in out.items() if what.get("inReplyTo") not in names}
        elif seen.kind == "got" and what["type"] == "event" and seen.link == link:
            out[what.get("eventId")] = (what.get("id"), (what.get("replyTo") or {}).get("correlationId"))
            if len(out) > window:
                found.append(f"{len(out)} events are out, and the credit is {window}")
    return found if window else None


def blobs(trace: Trace) -> Found:
    """Files of large payloads that are not as their frames say."""
    files = [seen.what for seen in trace if seen.kind == "file"]
    wrong = [w for w in files if w["asked"] != w["found"] or w["mode"] & 0o077 or not _BLOB.match(w["asked"]["file"])]
    return (
        [f"{short(w['asked'])}, and there is {short(w['found'])} of mode {w['mode']:o}" for w in wrong]
        if files
        else None
    )


def lines(trace: Trace) -> Found:
    """Lines that break the line protocol."""
    found = [seen.what for seen in trace if seen.kind == "odd" and seen.what.startswith("a line")]
    told: dict[Any, int] = {}
    for seen in trace:
        if seen.kind == "do" and "ref" in seen.what:
            told.setdefault(seen.what["ref"], 0)
        elif seen.kind == "said" and "ref" in seen.what:
            ref = seen.what["ref"]
            if ref not in told:
                found.append(f"a line about ref {short(ref)}, which was never asked")
            elif told[ref] or "event" not in seen.what:
                told[ref] += 1
    found += [f"{count} answers to ref {ref}" for ref, count in told.items() if count > 1]
    return found if found or told else None


JUDGES: Final = (
    frames, routing_ids, names, hello_first, acknowledged, order, repeats, deadlines, credit, blobs, lines,
)  # fmt: skip


def too_early(frame: dict[str, Any]) -> list[dict[str, Any]]:
    """What a broker says to a frame that comes before its hello, if the frame has a name to say it by."""
    payload = {"code": "E_HELLO_REQUIRED", "message": "too early"}
    return [{"type": "error", "inReplyTo": frame["id"], "payload": payload}] if "id" in frame else []


class Model:
    """It answers each question with its own text."""

    def __init__(self) -> None:
        self._sent = 0

    def hello_required(self) -> dict[str, Any]:
        """What it says to a connection that it does not know."""
        return {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "say hello"}}

    def hear(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        """What it says to a frame."""
        if frame["type"] == "hello":
            welcome = {"version": 1, "principal": "client/7", "broker": "b", "credit": 8, "maxFrame": 1 << 20}
            return [{"type": "welcome", "inReplyTo": frame.get("id"), "payload": welcome}]
        if frame["type"] == "ping":
            return [{"type": "pong"} | ({"inReplyTo": frame["id"]} if "id" in frame else {})]
        if frame["type"] != "event":
            return []
        event, reply, asked = frame.get("eventId"), frame.get("replyTo") or {}, frame.get("payload")
        self._sent += 1
        text = asked.get("input") if isinstance(asked, dict) else None
        answer = {"turnId": event, "status": "completed", "response": text}
        payload: dict[str, Any] = {
            "id": f"{event}:answer",
            "type": "agent.response",
            "createdAt": "2026-11-24T09:30:08Z",
        }
        payload |= {"metadata": {"inReplyTo": event}, "answer": answer}
        header = {"id": f"b.{self._sent}", "inReplyTo": reply.get("correlationId"), "eventId": f"{event}:answer"}
        accepted = {"type": "ack", "stage": "accepted", "inReplyTo": frame.get("id"), "eventId": event}
        return [accepted, {"type": "event", **header, "payload": payload}]
