"""The rules of a client that hold in every scenario, each decided from what was seen. Pure.

A judge gives what breaks its rule, and None where there was no occasion for it. It takes no notice of how quick the
program is: what was sent to it less than a second before its connection was lost, it may not have had.

Source: schemas/PROTOCOL.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from kernel.certify.matching import short
from kernel.certify.trace import Rule, Seen, Trace
from schemas.visible import is_visible

#: What was sent so long before (seconds) has been read by a program that lives.
READ_S: Final = 1.0
#: The types that a client's socket takes.
TYPES: Final = frozenset(("hello", "ping", "pong", "bye", "event", "ack", "admin", "log", "runtime.event"))
#: A timer may be early by so much of its time.
EARLY: Final = 0.05

_EVENT_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}\Z")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)\Z")
_BLOB: Final = re.compile(r"[0-9a-f]{32}\Z")


def _got(trace: Trace, kind: str = "") -> Iterator[Seen]:
    return (seen for seen in trace if seen.kind == "got" and kind in ("", seen.what["type"]))


def _sent(trace: Trace, kind: str) -> Iterator[Seen]:
    return (seen for seen in trace if seen.kind == "sent" and seen.what["type"] == kind)


def _was_read(trace: Trace, sent: Seen) -> bool:
    """Whether a program has surely had it: its connection lasted a second longer."""
    last = max((seen.at for seen in trace if seen.link == sent.link and seen.kind != "lost"), default=sent.at)
    return last - sent.at >= READ_S


def _payload(seen: Seen) -> dict[str, Any]:
    payload = seen.what.get("payload")
    return payload if isinstance(payload, dict) else {}


def _questions(trace: Trace) -> Iterator[Seen]:
    return (seen for seen in _got(trace, "event") if isinstance(seen.what.get("replyTo"), dict))


def one_part(trace: Trace) -> list[str] | None:
    """Messages of several parts."""
    found = [f"a message of {seen.what}" for seen in trace if seen.kind == "odd" and seen.what.endswith(" parts")]
    return found if found or any(_got(trace)) else None


def frames(trace: Trace) -> list[str] | None:
    """Messages that are no frame."""
    found = [
        seen.what
        for seen in trace
        if seen.kind == "odd" and not seen.what.startswith("a line") and " parts" not in seen.what
    ]
    return found if found or any(_got(trace)) else None


def types(trace: Trace) -> list[str] | None:
    """Frames of a type that the socket does not take."""
    found = [f"a frame of type {short(seen.what['type'])}" for seen in _got(trace) if seen.what["type"] not in TYPES]
    return found if found or any(_got(trace)) else None


def hello_first(trace: Trace) -> list[str] | None:
    """Frames before a program can know that it is welcome: before its first hello, and between hello and welcome.

    What comes before a later hello was under way when the connection was lost.
    """
    found, welcomed, greeted = [], set(), set()
    for seen in trace:
        if seen.kind == "sent" and seen.what["type"] == "welcome":
            welcomed.add(seen.link)
        elif seen.kind == "got" and seen.what["type"] == "hello":
            greeted.add(seen.link)
        elif seen.kind == "got" and seen.link not in welcomed and (seen.link == 1 or seen.link in greeted):
            if seen.what["type"] in ("ping", "pong"):
                continue
            found.append(f"{seen.what['type']} on connection {seen.link} before its welcome")
    return found if found or greeted else None


def incarnation(trace: Trace) -> list[str] | None:
    """Hellos with another incarnation, or with none."""
    said = [_payload(seen).get("incarnation") for seen in _got(trace, "hello")]
    if any(not isinstance(one, str) or not 1 <= len(one) <= 256 for one in said):
        return [f"the incarnation {short(said[0])}"]
    return [f"incarnations {short(sorted(set(said)))}"] if len(set(said)) > 1 else [] if len(said) > 1 else None


def token(trace: Trace) -> list[str] | None:
    """Hellos without the token that client.token holds, and the token in any other place."""
    found, now, occasion = [], "", False
    for seen in trace:
        if seen.kind == "token":
            now = seen.what
        elif seen.kind == "got" and seen.what["type"] == "hello":
            occasion = True
            if _payload(seen).get("token") != now:
                found.append(
                    f"a hello with the token {short(_payload(seen).get('token'))}, and client.token holds {short(now)}"
                )
        elif seen.kind in ("got", "said") and len(now) > 8 and now in str(seen.what):
            found.append(f"the token in {short(seen.what)}")
    return found if occasion else None


def awaiting(trace: Trace) -> list[str] | None:
    """Hellos that do not name a question that is out."""
    open_: dict[Any, Any] = {}
    found, occasion = [], False
    for seen in trace:
        if seen.kind == "got" and seen.what["type"] == "event" and isinstance(seen.what.get("replyTo"), dict):
            open_.setdefault(seen.what.get("eventId"), seen.what["replyTo"].get("correlationId"))
        elif seen.kind == "sent" and seen.what["type"] == "event":
            open_ = {event: q for event, q in open_.items() if q != seen.what.get("inReplyTo")}
        elif seen.kind == "sent" and seen.what["type"] == "error":
            open_ = {} if seen.what.get("inReplyTo") else open_  # whose it was need not be known here
        elif seen.kind == "got" and seen.what["type"] == "hello" and open_:
            occasion = True
            named = _payload(seen).get("awaiting") or []
            found += [f"a hello that does not await {short(q)}" for q in open_.values() if q not in named]
    return found if occasion else None


def names(trace: Trace) -> list[str] | None:
    """Names that break the rule of names."""
    found = []
    for seen in _got(trace):
        what = seen.what
        reply = what.get("replyTo") if isinstance(what.get("replyTo"), dict) else {}
        for key, name, most in (
            *((key, what.get(key), 256) for key in ("id", "eventId", "instanceKey", "callId")),
            ("replyTo.target", reply.get("target"), 256),
            ("replyTo.correlationId", reply.get("correlationId"), 512),
        ):
            if name is not None and not (isinstance(name, str) and 1 <= len(name) <= most and is_visible(name)):
                found.append(f"{key} {short(name)}")
        event = what.get("eventId")
        if what["type"] == "event" and not (
            isinstance(event, str) and _EVENT_ID.match(event) and not event.endswith(":answer")
        ):
            found.append(f"eventId {short(event)}")
    return found if any(_got(trace, "event")) else None


def unique_ids(trace: Trace) -> list[str] | None:
    """An id that two different frames have."""
    found: list[str] = []
    first: dict[Any, Any] = {}
    for seen in _got(trace):
        key = seen.what.get("id")
        if key is not None and seen.what["type"] != "hello":
            same = (seen.what["type"], seen.what.get("eventId"), short(seen.what.get("payload")))
            if first.setdefault(key, same) != same:
                found.append(f"id {short(key)} of two frames")
    return found if first else None


def events(trace: Trace) -> list[str] | None:
    """Events whose payload is no AgentEvent of theirs."""
    found = []
    for seen in _got(trace, "event"):
        payload = _payload(seen)
        if seen.what.get("blob") is not None:
            continue
        if payload.get("id") != seen.what.get("eventId"):
            found.append(
                f"an event {short(seen.what.get('eventId'))} whose payload has the id {short(payload.get('id'))}"
            )
        if not isinstance(payload.get("type"), str) or not _TIME.match(str(payload.get("createdAt"))):
            found.append(
                f"a payload with type {short(payload.get('type'))}, createdAt {short(payload.get('createdAt'))}"
            )
    return found if any(_got(trace, "event")) else None


def repeats(trace: Trace) -> list[str] | None:
    """Repeats that are not the same: another id, agent, instance, correlation id or content."""
    found: list[str] = []
    first: dict[Any, Any] = {}
    occasion = False
    for seen in _got(trace, "event"):
        same = {key: seen.what.get(key) for key in ("id", "to", "instanceKey", "replyTo", "payload", "blob", "files")}
        known = first.setdefault(seen.what.get("eventId"), same)
        if known is not same:
            occasion = True
            found += [
                f"a repeat whose {key} is {short(same[key])}, not {short(known[key])}"
                for key in same
                if same[key] != known[key]
            ]
    return found if occasion else None


def answered_is_over(trace: Trace) -> list[str] | None:
    """Events that are sent again after their answer was acknowledged."""
    found, over = [], set()
    for seen in _got(trace):
        event = str(seen.what.get("eventId"))
        if seen.what["type"] == "ack" and event.endswith(":answer"):
            over.add(event.removesuffix(":answer"))
        elif seen.what["type"] == "event" and event in over:
            found.append(f"event {short(event)} after its answer")
    return found if over else None


def order(trace: Trace) -> list[str] | None:
    """Events of one agent and instance in another order than they were first sent in."""
    found: list[str] = []
    first: dict[Any, Any] = {}
    occasion = False
    seen_on: dict[int, list[tuple[int, Any]]] = {}
    for seen in trace:
        if seen.kind == "sent" and seen.what["type"] == "welcome":
            seen_on.setdefault(seen.link, [])
        elif seen.kind == "got" and seen.what["type"] == "event" and seen.link in seen_on:
            # What comes before a welcome is taken by nobody: the library connected anew without a word.
            place = first.setdefault(seen.what.get("eventId"), len(first))
            seen_on[seen.link].append((place, (seen.what.get("to"), seen.what.get("instanceKey"))))
    for link, sent in seen_on.items():
        for instance in {whose for _, whose in sent}:
            places = list(dict.fromkeys(place for place, whose in sent if whose == instance))
            occasion = occasion or len(places) > 1
            if places != sorted(places):
                found.append(f"on connection {link} the events of {short(instance)} in the order {places}")
    return found if occasion else None


def deadlines(trace: Trace) -> list[str] | None:
    """Repeats that say more than is left."""
    found: list[str] = []
    first: dict[Any, Any] = {}
    occasion = False
    for seen in _got(trace, "event"):
        left = seen.what.get("deadlineMs")
        if not isinstance(left, int):
            continue
        began = first.setdefault(seen.what.get("eventId"), seen)
        passed = (seen.at - began.at) * 1000
        if passed > 500:
            occasion = True
            if left > began.what["deadlineMs"] - passed / 2:
                found.append(f"a repeat {passed:.0f} ms later with {left} of {began.what['deadlineMs']} ms left")
        if left < 1:
            found.append(f"deadlineMs {left}")
    return found if occasion or found else None


def credit(trace: Trace) -> list[str] | None:
    """More events that are not accepted than there is credit for."""
    found: list[str] = []
    out: dict[Any, Any] = {}
    window, occasion, link = 256, False, 0
    for seen in trace:
        what = seen.what if isinstance(seen.what, dict) else {}
        if seen.kind == "sent" and what["type"] == "welcome":
            # Twice on one connection: the second came with frames under way, and what they count as is not known here.
            window, out, link = what["payload"]["credit"] + (len(out) if seen.link == link else 0), {}, seen.link
        elif seen.kind == "sent" and what["type"] == "credit":
            window = max(window, what["payload"]["window"])
        elif seen.kind == "sent":
            out = {event: key for event, key in out.items() if what.get("inReplyTo") not in key}
        elif seen.kind == "got" and what["type"] == "event" and seen.link == link:
            reply = what.get("replyTo")
            out[what.get("eventId")] = (what.get("id"), reply.get("correlationId") if isinstance(reply, dict) else None)
            occasion = occasion or window < 256
            if len(out) > window:
                found.append(f"{len(out)} events are out, and the credit is {window}")
    return found if occasion else None


def overload(trace: Trace) -> list[str] | None:
    """Frames that come again before they may."""
    found, until, occasion = [], {}, False
    for seen in trace:
        what = seen.what if isinstance(seen.what, dict) else {}
        if seen.kind == "sent" and what["type"] == "error" and what["payload"]["code"] == "E_OVERLOADED":
            until[what.get("inReplyTo")] = (seen.at, what["payload"]["retryAfterMs"] / 1000, seen.link)
        elif seen.kind == "got" and what.get("id") in until and what["type"] in ("event", "admin"):
            since, wait, link = until.pop(what["id"])
            occasion = True
            if link == seen.link and seen.at - since < wait * (1 - EARLY):
                found.append(f"the frame again after {(seen.at - since) * 1000:.0f} ms of {wait * 1000:.0f}")
    return found if occasion else None


def acknowledged(trace: Trace) -> list[str] | None:
    """Answers that are not acknowledged, or more than once."""
    found, occasion = [], False
    acks = [
        (seen.what.get("inReplyTo"), seen.what.get("eventId"), seen.link)
        for seen in _got(trace, "ack")
        if seen.what.get("stage") == "done"
    ]
    for sent in _sent(trace, "event"):
        count = acks.count((sent.what["id"], sent.what["eventId"], sent.link))
        occasion = occasion or count > 0
        if count > 1 or (count == 0 and _was_read(trace, sent)):
            occasion = True
            found.append(f"the answer {short(sent.what['id'])} was acknowledged {count} times")
    return found if occasion else None


def pongs(trace: Trace) -> list[str] | None:
    """Pings that get no pong with their id, or two."""
    found, occasion = [], False
    said = [(seen.what.get("inReplyTo"), seen.link) for seen in _got(trace, "pong")]
    for sent in _sent(trace, "ping"):
        count = said.count((sent.what["id"], sent.link)) if len(said) < 100 else 1
        occasion = True
        if count > 1 or (count == 0 and _was_read(trace, sent)):
            found.append(f"the ping {short(sent.what['id'])} got {count} pongs")
    return found if occasion else None


def answers_nothing_else(trace: Trace) -> list[str] | None:
    """Frames that answer what wants no answer: errors, acks, replies, news."""
    wanted = {seen.what.get("id") for kind in ("ping", "event") for seen in _sent(trace, kind)}
    replies = [seen for seen in _got(trace) if seen.what.get("inReplyTo") is not None]
    found = [
        f"a {seen.what['type']} in reply to {short(seen.what['inReplyTo'])}"
        for seen in replies
        if seen.what["inReplyTo"] not in wanted
    ]
    return found if replies else None


def routing_ids(trace: Trace) -> list[str] | None:
    """A routing id of the client's own that is no new 16 bytes for each connection."""
    links = [seen.what for seen in trace if seen.kind == "link"]
    own = [one for one in links if one is not None]
    found = [f"the routing id {one}" for one in own if len(one) != 32]
    return found if links else None


def blobs(trace: Trace) -> list[str] | None:
    """Files of large payloads that are not as their frames say."""
    found, occasion = [], False
    for seen in trace:
        if seen.kind != "file":
            continue
        occasion, asked, what = True, seen.what["asked"], seen.what
        if "missing" in what or not _BLOB.match(str(asked.get("file"))):
            found.append(f"the file {short(asked.get('file'))}: {what.get('missing', 'no such name')}")
        elif (what["size"], what["digest"]) != (asked.get("size"), asked.get("digest")):
            found.append(f"a file of {what['size']} bytes that is not what its frame says")
        elif what["mode"] & 0o077:
            found.append(f"a file of mode {what['mode']:o}")
    return found if occasion else None


def lines(trace: Trace) -> list[str] | None:
    """Lines that break the line protocol."""
    found = [seen.what for seen in trace if seen.kind == "odd" and seen.what.startswith("a line")]
    told: dict[str, int] = {}
    asked: set[Any] = set()
    for seen in trace:
        if seen.kind == "do":
            asked.add(seen.what.get("ref"))
        elif seen.kind == "said" and "ref" in seen.what:
            ref = seen.what["ref"]
            if ref not in asked:
                found.append(f"a line about ref {short(ref)}, which was never asked")
            elif "event" not in seen.what:
                told[ref] = told.get(ref, 0) + 1
            elif told.get(ref):
                found.append(f"an event of ref {ref} after its answer")
    found += [f"{count} answers to ref {ref}" for ref, count in told.items() if count > 1]
    return found if found or asked - {None} else None


#: In the order of the document.
RULES: Final = (
    Rule("Transport", "a message has one part", one_part),
    Rule("Transport", "a routing id is unset, or new for each connection", routing_ids, ("C-TRANSPORT-3",)),
    Rule("Frames", "a frame is a msgpack map of at most 1 MiB, with a type", frames, ("C-FRAME-1",)),
    Rule("Frames", "an id is one frame's", unique_ids),
    Rule("Frames", "only types are sent that a client's socket takes", types),
    Rule(
        "Names",
        "names are 1 to 256 seen characters; an eventId has ASCII letters, digits, _ - . :",
        names,
        ("C-NAME-1",),
    ),
    Rule("Hello", "hello comes first, then nothing until the welcome", hello_first, ("C-HELLO-1", "C-HELLO-2")),
    Rule("Hello", "the incarnation stays the same over reconnects", incarnation, ("C-HELLO-3",)),
    Rule("Hello", "the token is read anew before each hello, and stands nowhere else", token, ("C-HELLO-8",)),
    Rule("Hello", "awaiting names the questions that are out", awaiting, ("C-HELLO-4",)),
    Rule("Hello", "a ping is answered once, with its id", pongs, ("C-HELLO-9",)),
    Rule("Payloads", "the payload of an event has its id, a type and a time", events, ("C-EVENT-1",)),
    Rule("The answer", "each answer is acknowledged once, with its id", acknowledged, ("C-ANSWER-2",)),
    Rule("Sending until answered", "what is answered is not sent again", answered_is_over, ("C-OUTBOX-1",)),
    Rule("Sending until answered", "the events of an instance keep their order", order, ("C-OUTBOX-1", "C-CREDIT-1")),
    Rule(
        "Repeats",
        "a repeat has the same id, agent, instance and content",
        repeats,
        ("C-REPEAT-1", "C-REPEAT-2", "C-BLOB-4"),
    ),
    Rule(
        "Credit and overload",
        "no more events are out than there is credit for",
        credit,
        ("C-CREDIT-1", "C-CREDIT-3", "C-CREDIT-4", "C-CREDIT-5"),
    ),
    Rule(
        "Credit and overload",
        "what was refused comes again after retryAfterMs, not before",
        overload,
        ("C-OVERLOAD-1",),
    ),
    Rule("Deadlines", "a repeat says what is left of its deadline", deadlines, ("C-DEADLINE-1",)),
    Rule("Errors", "nothing is answered but pings and answers", answers_nothing_else, ("C-ERROR-2", "C-LIVE-4")),
    Rule(
        "Large payloads", "the file of a large payload is as its frame says, and closed to others", blobs, ("C-BLOB-2",)
    ),
    Rule("The line protocol", "each line is a JSON object, and each ref gets one answer", lines),
)
