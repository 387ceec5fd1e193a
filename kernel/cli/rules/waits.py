"""The output of `gdn ps --why`: one line for each wait, the longest first, then what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from goondan.kernel.cli.rules.plain import one_line
from goondan.schemas.text.times import age

#: The most of an instance key or an id that is shown (characters). Both are text from outside.
MAX_NAME = 80
#: The most of a server's words that is shown (characters).
MAX_WORDS = 100
#: The most of what a feature says of a wait (characters).
MAX_TEXT = 2000
#: Kinds of rows that the live events of a turn show as well, or that are no waits of its own.
SEEN = frozenset(("tool", "answer", "works"))


def render(answer: Mapping[str, Any]) -> list[str]:
    """The lines for `answer`, what the broker says to `why` (PROTOCOL-OPERATORS.md)."""
    lines = [f"{_span(row['forMs']):>5}  {wait_line(row)}" for row in answer["waits"]]
    if answer["more"]:
        lines.append(f"and {answer['more']} more")
    lines += [_circle([*circle, circle[0]]) for circle in answer["cycles"]]
    for row in answer["stuck"]:
        holder = "its process" if row["connected"] else "its process, which is not connected,"
        lines.append(
            f"stuck: {_place(row)}: {holder} has said nothing about {_name(row['eventId'])} for {_span(row['forMs'])}"
        )
    return lines or ["nobody waits"]


def wait_line(row: Mapping[str, Any]) -> str:
    """Who waits for what, in one line."""
    if row["kind"] == "disk":
        return "the kernel waits for the disk of its state, which is slow or has no room"
    step = f" (step {row['step']})" if row.get("step") and row["kind"] != "turn" else ""
    return f"{_place(row)}{step} {_for_what(row)}"


def status_of(rows: Iterable[Mapping[str, Any]], own: tuple[str, str]) -> str:
    """What the turn of the instance `own` waits for, in a few words: itself, or else an agent that works for it. "":
    nothing that its other news do not say.
    """
    at = [((row["agent"], row["instanceKey"]) == own, row) for row in rows]
    found = next((row for is_own, row in at if is_own and row["kind"] not in SEEN and not row.get("live")), None)
    if found is not None:
        return _for_what(found) if found["kind"] != "turn" else f"queued behind {_messages(found['before'])}"
    found = next((row for is_own, row in at if not is_own and row["kind"] != "answer"), None)
    if found is None:
        return ""
    if found["kind"] == "turn":
        return f"queued behind {_messages(found['before'])} of {_place(found)}"
    if found["kind"] not in ("tool", "works"):
        return wait_line(found)
    doing = [f"step {found['step']}"] if found.get("step") else []
    return ", ".join([f"{_place(found)} works", *doing, *(_name(name) for name in found.get("tools", ())[:2])])


def silence(for_ms: int, attempt: int, message: str | None, again_ms: int | None) -> str:
    """Why a model that is asked has not answered: nothing came for so long, or the last try failed."""
    if message is None:
        return f"nothing came for {_span(for_ms)} (try {attempt})"
    return f"{one_line(message, MAX_WORDS)}; try {attempt + 1} in {_span(again_ms or 0)}"


def _for_what(row: Mapping[str, Any]) -> str:
    if "text" in row:
        return one_line(row["text"], MAX_TEXT)
    kind, messages = row["kind"], _messages(row.get("messages", 0))
    if kind == "answer":
        return (
            f"waits for the answer of {_name(row['target'] + '/' + row['targetKey'])} ({_name(row['targetEventId'])})"
        )
    if kind in ("tool", "jail"):
        names = ", ".join(_name(name) for name in row["tools"])
        if not row["host"]:
            return f"waits for a tool host that runs {names}"
        return f"waits for {names}" if kind == "tool" else f"waits for a jail for {names}"
    if kind == "model":
        said = silence(row["forMs"], row["attempt"], row.get("message"), row.get("againMs"))
        return f"waits for its model {_name(row['model'])}: {said}"
    if kind == "extension":
        return f"waits for the extension {_name(row['extension'])}, which hangs at {_name(row['point'])}"
    if kind == "works":
        return "works"
    if kind == "turn":
        return f"is busy with {_name(row['eventId'])}; {messages} behind it"
    if kind == "place":
        who = "; ".join(f"session {_name(claim['session'])}, root {_name(claim['root'])}" for claim in row["claims"])
        return f"waits for a place with {messages} ({who})"
    return f"waits for its {'leaving process to end' if row['leaving'] else 'process to start'} with {messages}"


def _circle(names: list[str]) -> str:
    return "circle: " + " -> ".join(map(_name, names))


def _messages(number: int) -> str:
    return "1 message" if number == 1 else f"{number} messages"


def _place(row: Mapping[str, Any]) -> str:
    return _name(f"{row['agent']}/{row['instanceKey']}")


def _name(text: str) -> str:
    return one_line(text, MAX_NAME)


def _span(milliseconds: int) -> str:
    return age(milliseconds / 1000)
