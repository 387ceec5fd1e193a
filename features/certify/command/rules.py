"""What `gdn certify` decides: scenarios, what was seen of a program in one, the rules of a client that hold in every
scenario, and what a certificate says. Pure.

A file of scenarios has `short` (steps for which one word stands), `rules` and `scenarios`. In the steps of a word, `%n`
is the number that it is given, `%key` any other value, and a map with `%more` gets all the values that it is given
besides. `each` of a scenario is a list of such values: one scenario for each of them. Names that the program chose are
put into what it is sent, and found in what it sends.

A judge of a client gives what breaks its rule, and None where there was no occasion for it. It takes no notice of how
quick the program is. The headers of frames that were `got` have the types of their fields. client.yaml has the words of
each rule. A broker that keeps the rules is here too, for scenarios in which only its life is short.

Source: docs/certify.md; docs/design/tests.md section 7; schemas/vectors/README.md; schemas/PROTOCOL.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.text.visible import is_visible
from goondan.schemas.wire.errors import fail

Kind = Literal["link", "lost", "got", "odd", "sent", "file", "said", "do", "token"]


class Seen(Struct, frozen=True):
    """One thing that was seen."""

    #: When (seconds, of a clock that does not jump).
    at: float
    #: `link`: the program connected. `lost`: its connection was taken away. `got`: it sent this frame. `odd`: it sent
    #: what is no frame. `sent`: it was sent this frame. `file`: what was found under the name of its blob. `said`: it
    #: wrote this line. `do`: it was told this. `token`: the token was written.
    kind: Kind
    #: The frame, the line, the token, or why it is odd.
    what: Any = None
    #: The connection, counted from 1.
    link: int = 0


Trace = list[Seen]


class Rule(Struct, frozen=True):
    """A rule that holds in every scenario."""

    #: The heading of the document that states it.
    section: str
    #: It, in one line.
    text: str
    #: What in a trace breaks it; None when there was no occasion.
    judge: Callable[[Trace], list[str] | None]
    #: Ids of the document's sentences.
    must: list[str] = []


class Scenario(Struct, frozen=True):
    """A scenario: one rule, shown by a row of steps."""

    #: The rule that it shows, in one line.
    name: str
    #: The heading of the document that states it.
    section: str
    #: What happens, in order.
    steps: list[dict[str, Any]]
    #: Ids of the document's sentences.
    must: list[str] = []
    #: It lasts long because of what it is about, so it begins first.
    long: bool = False
    #: A program that answers with this code does not offer what the scenario is about.
    refused: str | None = None


class Played(Struct):
    """How a scenario went."""

    #: It.
    scenario: Scenario
    #: What was seen.
    trace: Trace
    #: What was not as the steps say. None: all was.
    fault: str | None = None
    #: The program said that it cannot do what the scenario is about.
    offered: bool = True


def read(document: dict[str, Any], judges: Sequence[Any]) -> tuple[list[Scenario], list[Rule]]:
    """The scenarios and the rules of a file. `judges`: functions whose names are those of the rules."""
    short = document.get("short", {})
    scenarios = []
    for one in document["scenarios"]:
        for values in one.pop("each", [{}]):
            made = _put(one, values, {})
            steps = [step for written in made["steps"] for step in _whole(written, short)]
            scenarios.append(scenario(made | {"steps": steps}))
    judge = {one.__name__: one for one in judges}
    rules = [
        Rule(row["section"], row["text"], judge[name], row.get("must", [])) for name, row in document["rules"].items()
    ]
    return scenarios, rules


def scenario(one: dict[str, Any]) -> Scenario:
    """A scenario whose steps are whole."""
    long = one.get("long", False) or sum(step.get("passes", 0) for step in one["steps"]) > 2000
    return Scenario(one["name"], one["section"], one["steps"], one.get("must", []), long, one.get("offered"))


def _whole(step: dict[str, Any] | str, short: dict[str, Any]) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {step: {}} if isinstance(step, str) else step
    name = next(iter(whole))
    if name not in short:
        return [whole]
    given = whole[name] if isinstance(whole[name], dict) else {"n": whole[name]}
    values = {"instanceKey": "default"} | given
    more = {key: value for key, value in given.items() if key != "n"}
    return [_put(one, values, more) for written in short[name] for one in _whole(written, short)]


def _put(value: Any, values: dict[str, Any], more: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        made = {key: _put(item, values, more) for key, item in value.items() if key != "%more"}
        return _merged(made, more) if "%more" in value else made
    if isinstance(value, list):
        return [_put(item, values, more) for item in value]
    if not isinstance(value, str) or "%" not in value:
        return value
    for key, item in values.items():
        if value == f"%{key}":
            return item
        value = value.replace(f"%{key}", item if isinstance(item, str) else json.dumps(item))
    return value


def _merged(made: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    deep = {
        key: _merged(made[key], item)
        for key, item in more.items()
        if isinstance(item, dict) and isinstance(made.get(key), dict)
    }
    return made | more | deep


def chosen(scenarios: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """Those whose name or section has one of the words, without words all; the longest first. Raises E_USAGE."""
    low = [word.lower() for word in words]
    found = [one for one in scenarios if not low or any(word in f"{one.section} {one.name}".lower() for word in low)]
    if not found:
        raise fail("E_USAGE", f"no scenario has {words[0]!r} in its name or section")
    return sorted(found, key=lambda one: not one.long)


#: Characters of a value that a report shows.
SHOWN: Final = 160
#: Lists in lists that are values, and may come back.
SHALLOW: Final = 60
#: Milliseconds by which a deadline may be more than the steps say: what was waited on a machine is never exact.
DEADLINE_SLACK_MS: Final = 250


class Names:
    """What `$name`, and each text of `chosen`, stands for. The first frame that has it decides."""

    def __init__(self, chosen: Iterable[str] = ()) -> None:
        self.known: dict[str, Any] = {}
        self._chosen = frozenset(chosen)

    def fill(self, value: Any) -> Any:
        """A value of a step as it is sent. {"repeat": text, "times": n} is a long text, {"nest": n} lists in lists.

        Raises KeyError for a text of `chosen` that the program has not said yet.
        """
        if isinstance(value, dict):
            if value.keys() == {"repeat", "times"}:
                return value["repeat"] * value["times"]
            if value.keys() == {"nest"}:
                return _nested(value["nest"])
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, str):
            name, colon, rest = value.partition(":")
            if value in self.known or value in self._chosen:
                return self.known[value]
            return f"{self.known[name]}:{rest}" if colon and name in self._chosen and name in self.known else value
        return value

    def differs(self, wanted: Any, got: Any, at: str = "") -> str | None:
        """Where `got` is not what a step wants; None when it is. It may have more fields. null: the field is absent."""
        if isinstance(wanted, dict) and not wanted.keys() & {"repeat", "nest"}:
            if not isinstance(got, dict):
                return f"{at or 'it'} is {short(got)}"
            return next(
                (
                    text
                    for key, item in wanted.items()
                    if (text := self._field(key, item, got.get(key), at)) is not None
                ),
                None,
            )
        if isinstance(wanted, str) and (wanted.startswith("$") or wanted in self._chosen):
            known = self.known.setdefault(wanted, got)
            good = known == got and isinstance(got, str | int)
            return None if good else f"{at} is {short(got)}, and was {short(known)}"
        if self.fill(wanted) == got and isinstance(wanted, bool) == isinstance(got, bool):
            return None
        return f"{at} is {short(got)}, not {short(self.fill(wanted))}"

    def _field(self, key: str, wanted: Any, got: Any, at: str) -> str | None:
        if got is None and (key == "versions" or (wanted is not None and wanted in (0, False, []))):
            return None  # what has its default is absent
        if key == "exports" and isinstance(got, list):
            return self.differs(sorted(wanted), sorted(map(str, got)), key)
        if key == "deadlineMs" and wanted is not None:
            good = isinstance(got, int) and 1 <= got <= wanted + DEADLINE_SLACK_MS
            return None if good else f"{at}{key} is {short(got)}, and {wanted} are left"
        return self.differs(wanted, got, f"{at}.{key}" if at else key)


def _nested(depth: int) -> Any:
    if depth > SHALLOW:
        return Raw(b"\x91" * (depth - 1) + b"\x90")  # an encoder of values would not go so deep
    return [_nested(depth - 1)] if depth > 1 else []


def short(value: Any) -> str:
    """A value for a report, on one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # TypeError: a key that is none of JSON's
        text = repr(type(value))
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


Outcome = Literal["holds", "broken", "not offered"]


class Row(Struct, rename="camel"):
    """A rule, and what was seen."""

    #: The heading of the document that states it.
    section: str
    #: It, in one line.
    rule: str
    #: Ids of the document's sentences.
    ids: list[str]
    #: `not offered`: the program said that it cannot do what the rule is about.
    outcome: Outcome
    #: What broke it, or in how many scenarios there was an occasion.
    seen: str


class Report(Struct, rename="camel"):
    """The document of --json."""

    #: Every rule that was tried holds.
    certified: bool
    #: What was certified: `client` or `worker`.
    kind: str
    #: Its argument list.
    command: list[str]
    #: Each rule.
    rules: list[Row]


def report(kind: str, command: Sequence[str], played: Sequence[Played], rules: Sequence[Rule]) -> Report:
    """The rows of the scenarios, then those of the rules for which there was an occasion."""
    rows = [_row(one) for one in played] + [row for rule in rules if (row := _judged(rule, played)) is not None]
    return Report(all(row.outcome != "broken" for row in rows), kind, list(command), rows)


def _row(one: Played) -> Row:
    scenario = one.scenario
    outcome: Outcome = "broken" if one.fault is not None else "holds" if one.offered else "not offered"
    seen = one.fault or ("as it should" if one.offered else "it cannot do this")
    return Row(scenario.section, scenario.name, scenario.must, outcome, seen)


def _judged(rule: Rule, played: Sequence[Played]) -> Row | None:
    judged = [(one.scenario.name, found) for one in played if (found := rule.judge(one.trace)) is not None]
    if not judged:
        return None
    broken = [(name, found) for name, found in judged if found]
    if not broken:
        return Row(rule.section, rule.text, list(rule.must), "holds", f"in {len(judged)} scenarios")
    name, found = broken[0]
    more = f" (and in {len(broken) - 1} more)" if len(broken) > 1 else ""
    return Row(rule.section, rule.text, list(rule.must), "broken", f"{found[0]}, in: {name}{more}")


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
