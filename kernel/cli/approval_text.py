"""The text of an item that waits for a person. Pure.

Everything in an item may be a model's text, and a model may imitate the output of the command. So every line of the
item begins with a mark that no other line has. Long lines are broken here and not by the terminal. `write` shows
characters that control a terminal by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from schemas.times import rfc3339_seconds
from schemas.visible import visible_line

#: In front of every line of an item.
MARK: Final = "│ "
#: The width when the width of the terminal is not known (columns).
COLUMNS: Final = 100
#: The least width. A terminal that reports less is not believed.
_MIN_COLUMNS: Final = 20
#: Lines of arguments; the rest is in `gdn approve show --json`.
MAX_LINES: Final = 400


def item_lines(item: dict[str, Any], columns: int = COLUMNS) -> list[str]:
    """The lines of one item: who asks for what, in which turn, and what a decision is about."""
    what = "a question of" if item["kind"] == "question" else "approve this call of"
    lines = [f"{item['code']}: {what} {item['agent']}/{item['instanceKey']}?"]
    lines.append(f"tool     {item['tool']}")
    if item.get("message"):
        lines.append(f"message  {item['message']}")
    lines += [f"args     {line}" if at == 0 else f"         {line}" for at, line in enumerate(_args(item))]
    if item.get("script") is not None:
        script = item["script"].split("\n")
        lines += [f"script   {line}" if at == 0 else f"         {line}" for at, line in enumerate(script[:MAX_LINES])]
        if len(script) > MAX_LINES:
            more = f"… and {len(script) - MAX_LINES} lines more"
            lines.append(f"         {more}; see gdn approve show {item['code']} --json")
    if item.get("covers"):
        others = f"up to {item['covers'] - 1} more of {item['tool']} in this script"
        lines.append(f"covers   this call, and {others} that this rule is about")
    if item.get("schema") is not None:
        lines.append(f"answer   {msgspec.json.encode(item['schema']).decode()}")
    if item.get("reason"):
        lines.append(f"rule     {item['reason']}")
    if item.get("workdir"):
        lines.append(f"workdir  {item['workdir']}")
    if item.get("waitedForBy"):
        lines.append(f"asked by {' -> '.join(item['waitedForBy'])}")
    lines.append(f"call     {item['id']}")
    lines.append(f"digest   sha256:{item['digest']}")
    asked = f"asked    {_when(item['askedMs'])}"
    lines.append(
        asked if item.get("expiresMs") is None else f"{asked}, denied if not answered by {_when(item['expiresMs'])}"
    )
    if item["state"] != "waits":
        lines.append(f"state    {_decided(item)}")
    width = max(_MIN_COLUMNS, columns) - len(MARK) - 1
    return [MARK + piece for line in lines for piece in _broken(visible_line(line), width)]


def command_lines(item: dict[str, Any]) -> list[str]:
    """The commands that answer the item from another terminal."""
    code = item["code"]
    if item["kind"] == "question":
        return [f"answer it with: gdn approve answer {code} JSON   (or gdn approve no {code})"]
    return [f"answer it with: gdn approve yes {code}   or: gdn approve no {code}"]


def list_lines(items: list[dict[str, Any]], more: int) -> list[str]:
    """Two lines for each item."""
    lines: list[str] = []
    for item in items:
        state = "" if item["state"] == "waits" else f"  {_decided(item)}"
        lines.append(f"{item['code']}  {_when(item['askedMs'])}  {item['agent']}/{item['instanceKey']}{state}")
        args = "…" if item.get("args") is None else msgspec.json.encode(item["args"]).decode()
        text = item.get("message") or f"{item['tool']} {args}"
        lines.append(MARK + (text if len(text) <= COLUMNS else text[:COLUMNS] + "…"))
    if more:
        lines.append(f"and {more} more")
    return lines or ["nothing waits for a person"]


def answered_lines(decisions: list[dict[str, Any]], more: int) -> list[str]:
    """Two lines for each decision: who decided when, then what about."""
    lines = [f"{more} earlier ones are not shown"] if more else []
    for one in decisions:
        by = "by the kernel" if one.get("uid") is None else f"by uid {one['uid']}"
        who = f"{one['agent']}/{one['instanceKey']}"
        lines.append(f"{one['code']}  {_when(one['decidedMs'])}  {who}  {one['how']} {by}")
        what = f"{one['tool']} {one['what']}" + (f"  because: {one['reason']}" if one.get("reason") else "")
        what = visible_line(what)
        lines.append(MARK + (what if len(what) <= 2 * COLUMNS else what[: 2 * COLUMNS] + "…"))
    return lines or ["nothing was decided"]


def _args(item: dict[str, Any]) -> Iterator[str]:
    if item.get("args") is None:
        yield f"{item.get('argsBytes', 0)} bytes; see gdn approve show {item['code']}"
        return
    lines = msgspec.json.format(msgspec.json.encode(item["args"]), indent=2).decode().split("\n")
    yield from lines[:MAX_LINES]
    if len(lines) > MAX_LINES:
        yield f"… and {len(lines) - MAX_LINES} lines more; see gdn approve show {item['code']} --json"


def _broken(line: str, width: int) -> list[str]:
    """The pieces of a line that fit into one row of a terminal each. A character outside of ASCII may take two
    columns.
    """
    step = width if line.isascii() else width // 2
    line = line.expandtabs(4)
    return [line[at : at + step] for at in range(0, len(line), step)] or [""]


def _decided(item: dict[str, Any]) -> str:
    by = "" if item.get("decidedMs") is None else " by the kernel"
    if item.get("uid") is not None:
        by = f" by uid {item['uid']}"
    reason = f": {item['decidedReason']}" if item.get("decidedReason") else ""
    return f"{item['state']}{by}{reason}"


def _when(ms: int) -> str:
    try:
        return rfc3339_seconds(ms / 1000)
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"
