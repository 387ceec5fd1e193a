"""`gdn approve list|show|yes|no|answer|revoke`: calls that wait for a person, and what becomes of them.

The text of an item. Everything in an item may be a model's text, and a model may imitate the output of the command. So
every line of the item begins with a mark that no other line has, and every row of text from outside stands behind a
second mark, also where a long line was broken: what stands without it is the kernel's word. Lines are broken here and
not by the terminal. Characters that control a terminal or are not seen are shown by their number, and so are letters
that look like those beside them.

A long text is shown with its beginning and its end. Only who was shown the whole says yes to it: the last line of the
whole has a digest of it.

Beside the arguments stand digests of the small files that they name (kernel/cli/named_files.py).

Source: docs/approvals.md.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
import msgspec
from msgspec import Raw

from goondan.features.approvals.wire import MAX_ANSWER_BYTES
from goondan.kernel.cli import options, output
from goondan.kernel.cli.named_files import with_files
from goondan.kernel.cli.operator_question import Document, Op, ask_broker, operator_group
from goondan.kernel.cli.rules import batch, plain
from goondan.schemas.text import times, visible
from goondan.schemas.wire import codec, errors

# --- items as text ----------------------------------------------------------------------------------------------------


#: In front of every line of an item.
MARK: Final = "│ "
#: In front of every row of text from outside, behind its label.
OUTSIDE: Final = "┊ "
#: The width when the width of the terminal is not known (columns).
COLUMNS: Final = 100
#: The least width. A terminal that reports less is not believed.
_MIN_COLUMNS: Final = 24
#: The width of a label (columns), and what is left free: in some terminals each of the marks takes two columns.
_LABEL: Final = 8
_FREE: Final = 3
#: A longer text is shown without its middle at first: lines, and characters.
MAX_LINES: Final = 400
MAX_CHARACTERS: Final = 40_000
#: Digits of the digest of a whole item that a person gives back.
WHOLE_DIGITS: Final = 8

#: What a pattern means, before a person agrees to it.
OPEN_END: Final = (
    "later calls run if this text begins so, whatever follows: git status; rm -rf . begins with git status"
)


def item_lines(item: dict[str, Any], columns: int = COLUMNS, *, whole: bool = False) -> list[str]:
    """The lines of one item: who asks for what, in which turn, and what a decision is about. `whole`: with the middle
    of long texts, and with the digest of all.
    """
    what = "a question" if item["kind"] == "question" else "approve this call"
    parts: list[tuple[str, str, bool]] = [("", f"{item['code']}: {what}?", False)]
    parts.append(("agent", f"{item['agent']}/{item['instanceKey']}", True))
    for label, text in _contents(item):
        parts += [(label, line, outside) for line, outside in _shown(text, whole)]
    if _has_more(item):
        parts.append(("", f"not all of it is here; see gdn approve show {item['code']}", False))
    if item.get("covers"):
        others = f"up to {item['covers'] - 1} more of this tool in this script"
        parts.append(("covers", f"this call, and {others} that this rule is about", False))
    parts += [(label, text, True) for label, text in _about(item)]
    parts.append(("digest", f"sha256:{item['digest']}", False))
    asked = _when(item["askedMs"])
    until = item.get("expiresMs")
    parts.append(("asked", asked if until is None else f"{asked}, denied if not answered by {_when(until)}", False))
    if item["state"] != "waits":
        parts.append(("state", _decided(item), False))
    if item.get("decidedReason"):
        parts.append(("because", item["decidedReason"], True))
    if whole and is_long(item):
        parts.append(("whole", f"sha256:{whole_digest(item)}", False))
    return list(_rows(parts, max(_MIN_COLUMNS, columns)))


def is_long(item: dict[str, Any]) -> bool:
    """Whether an item is more than is shown at first."""
    return _has_more(item) or any(_is_cut(text) for _, text in _contents(item))


def whole_digest(item: dict[str, Any]) -> str:
    """SHA-256 of all that a person decides about: who says yes to a long item gives its beginning."""
    return hashlib.sha256(msgspec.json.encode([item["digest"], *_contents(item)])).hexdigest()


def command_lines(item: dict[str, Any]) -> list[str]:
    """The commands that answer the item from another terminal."""
    code = item["code"]
    read = [f"read all of it with: gdn approve show {code}"] if is_long(item) else []
    told = f" --whole {'#' * WHOLE_DIGITS}" if read else ""  # at the end of what `show` prints
    how = f"answer {code} JSON" if item["kind"] == "question" else f"yes {code}"
    return [*read, f"answer it with: gdn approve {how}{told}   or: gdn approve no {code}"]


def list_lines(items: list[dict[str, Any]], more: int, columns: int = COLUMNS) -> list[str]:
    """Two lines for each item, each of one row."""
    lines: list[str] = []
    for item in items:
        state = "" if item["state"] == "waits" else f"  {_decided(item)}"
        head = f"{item['code']}  {_when(item['askedMs'])}{state}  {item['agent']}/{item['instanceKey']}"
        args = "…" if item.get("args") is None else msgspec.json.encode(item["args"]).decode()
        lines += [_cut(head, columns), _cut(MARK + (item.get("message") or f"{item['tool']} {args}"), columns)]
    if more:
        lines.append(f"and {more} more")
    return lines or ["nothing waits for a person"]


def answered_lines(decisions: list[dict[str, Any]], more: int, columns: int = COLUMNS) -> list[str]:
    """Two lines for each decision: who decided when, then what about."""
    lines = [f"{more} earlier ones are not shown"] if more else []
    for one in decisions:
        by = "by the kernel" if one.get("uid") is None else f"by uid {one['uid']}{_always(one)}"
        who = f"{one['agent']}/{one['instanceKey']}"
        lines.append(_cut(f"{one['code']}  {_when(one['decidedMs'])}  {one['how']} {by}  {who}", columns))
        what = f"{one['tool']} {one['what']}" + (f"  because: {one['reason']}" if one.get("reason") else "")
        lines += _rows([("", what if len(what) <= 2 * COLUMNS else what[: 2 * COLUMNS] + "…", True)], columns)
    return lines or ["nothing was decided"]


def always_lines(yeses: list[dict[str, Any]], columns: int = COLUMNS) -> list[str]:
    """Lines for each lasting yes: who has agreed when, then what to."""
    lines: list[str] = []
    for yes in yeses:
        lines.append(_cut(f"{yes['code']}  {_when(yes['atMs'])}  by uid {yes['uid']}  {yes['agent']}", columns))
        but = f"{yes['argument']} begins with {yes['prefix']}" if yes.get("argument") else ""
        stale = "it answers nothing: its rule was changed, or is gone" if yes.get("stale") else ""
        parts = (("tool", yes["tool"], True), ("args", yes["what"], True), ("but", but, True), ("", stale, False))
        lines += _rows([part for part in parts if part[1]], max(_MIN_COLUMNS, columns))
    return lines or ["there is no lasting yes"]


def _cut(text: str, columns: int) -> str:
    """As much of a line as fits into one row."""
    first, *rest = plain.broken(visible.visible_names(text), max(_MIN_COLUMNS, columns) - _FREE)
    return first + "…" if rest else first


def _contents(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is decided about: labels and texts from outside."""
    args, schema = item.get("args"), item.get("schema")
    for label, text in (
        ("tool", item["tool"]),
        ("message", item.get("message")),
        ("args", None if args is None else msgspec.json.format(msgspec.json.encode(args), indent=2).decode()),
        ("script", item.get("script")),
        ("answer", None if schema is None else msgspec.json.encode(schema).decode()),
        ("workdir", item.get("workdir")),
    ):
        if text:
            yield label, text


def _about(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What else is told of it: labels and texts from outside."""
    told = (("rule", item.get("reason")), ("asked by", " -> ".join(item.get("waitedForBy") or ())))
    yield from ((label, text) for label, text in told if text)
    yield from (("file", f"sha256:{digest} {name}") for name, digest in item.get("files", {}).items())
    yield "call", item["id"]


def _has_more(item: dict[str, Any]) -> bool:
    """Whether a list has left out arguments or a script that are too large for it."""
    args = item.get("args") is None and item.get("argsBytes", 0) > 1  # one byte: there are none
    return args or bool(item.get("covers") and item.get("script") is None)


def _is_cut(text: str) -> bool:
    return len(text) > MAX_CHARACTERS or text.count("\n") >= MAX_LINES


def _shown(text: str, whole: bool) -> Iterator[tuple[str, bool]]:
    """The lines of a text, of a long one its beginning and its end, and whether each is from outside."""
    if whole or not _is_cut(text):
        yield from ((line, True) for line in text.split("\n"))
        return
    head = text[: MAX_CHARACTERS // 2].split("\n")[: MAX_LINES // 2]
    tail = text[-(MAX_CHARACTERS // 2) :].split("\n")[-(MAX_LINES // 2) :]
    hidden = len(text) - sum(map(len, head)) - sum(map(len, tail))
    yield from ((line, True) for line in head)
    yield f"({hidden} characters between are not shown here)", False
    yield from ((line, True) for line in tail)


def _rows(parts: list[tuple[str, str, bool]], columns: int) -> Iterator[str]:
    """The rows of labels and texts. Each fits into one row of a terminal."""
    before = ""
    for label, text, outside in parts:
        shown = "" if label == before else label
        before = label
        edge = OUTSIDE if outside else ""
        width = columns - len(MARK) - (_LABEL + 1 if label else 0) - len(edge) - _FREE
        for piece in plain.broken(visible.visible_names(text), width):
            yield f"{MARK}{shown:<{_LABEL}} {edge}{piece}" if label else MARK + edge + piece
            shown = ""


def _decided(item: dict[str, Any]) -> str:
    by = "" if item.get("decidedMs") is None else " by the kernel"
    if item.get("uid") is not None:
        by = f" by uid {item['uid']}{_always(item)}"
    return f"{item['state']}{by}"


def _always(decided: dict[str, Any]) -> str:
    return f", always ({decided['always']})" if decided.get("always") else ""


def _when(ms: int) -> str:
    try:
        return times.rfc3339_seconds(ms / 1000)
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


_whole = click.option(
    "--whole", metavar="DIGEST", default="", help="Of a long item: the digest at the end of what `show` prints."
)
_reason = click.option("--reason", default=None, help="Why; a model is told the reason for a no.")


def _list_lines(answer: Document, question: Document) -> list[str]:
    columns = output.columns_of(sys.stdout, COLUMNS)
    if question["always"]:
        return always_lines(answer["always"], columns)
    if question["answered"]:
        return answered_lines(answer["answered"], answer["more"], columns)
    return list_lines(answer["items"], answer["more"], columns)


approve = operator_group(
    "approve",
    "Show calls that wait for a person; approve or deny them, or answer a question.",
    Op(
        "approve.list",
        "List what waits, the oldest first.",
        _list_lines,
        (
            click.option("--all", is_flag=True, help="Also what was decided, as long as its turn goes on."),
            click.option("--answered", is_flag=True, help="Who decided what and when, also in turns that are over."),
            click.option("--always", is_flag=True, help="What is agreed to for always, until it is revoked."),
        ),
    ),
)


@approve.command()
@click.argument("id")
@options.bundle
@options.json
def show(id: str, bundle: str | None) -> None:
    """Show one item with all of its arguments. ID is a callId or a code."""
    answer = ask_broker(bundle, {"op": "approve.show", "id": id})
    if "kind" not in answer:
        output.emit(answer, always_lines([answer], output.columns_of(sys.stdout, COLUMNS)))
        return
    document = {**answer, "whole": whole_digest(answer)} if is_long(answer) else answer
    output.emit(document, item_lines(with_files(answer), output.columns_of(sys.stdout, COLUMNS), whole=True))


@approve.command()
@click.argument("id")
@_reason
@_whole
@click.option("--always", is_flag=True, help="Also let later calls of this agent run that have the same arguments.")
@click.option("--pattern", metavar="ARGUMENT=BEGINNING", help="As --always; of this text only the beginning counts.")
@options.bundle
@options.json
def yes(id: str, reason: str | None, whole: str, always: bool, pattern: str | None, bundle: str | None) -> None:
    """Let a call run, once or always. ID is a callId or a code."""
    check_read(ask_broker(bundle, {"op": "approve.show", "id": id}), whole)
    lasting: dict[str, str] | None = {} if always else None
    if pattern is not None:
        argument, _, beginning = pattern.partition("=")
        lasting = {argument: beginning}
        for line in _rows([("", OPEN_END, False), ("pattern", f"{argument}: {beginning}", True)], COLUMNS):
            output.write(line, stream=sys.stderr)
        if output.can_ask() and not output.confirmed("Agree to all of these? [y/N]"):
            raise errors.fail("E_CANCELLED", "nothing was decided", suggestion="Answer y, or leave --pattern out.")
    _decide(bundle, {"id": id, "decision": "yes", "reason": reason, "always": lasting})


@approve.command()
@click.argument("id")
@_reason
@options.bundle
@options.json
def no(id: str, reason: str | None, bundle: str | None) -> None:
    """Deny a call, or decline a question. ID is a callId or a code."""
    _decide(bundle, {"id": id, "decision": "no", "reason": reason})


@approve.command()
@click.argument("code")
@options.bundle
@options.json
def revoke(code: str, bundle: str | None) -> None:
    """Take a lasting yes back: such calls ask again. `gdn approve list --always` shows the CODE."""
    _decide(bundle, {"id": code, "decision": "revoke"})


@approve.command()
@click.argument("id")
@click.argument("json", required=False)
@_whole
@options.bundle
@options.json
def answer(id: str, json: str | None, whole: str, bundle: str | None) -> None:
    """Answer a question with a JSON value; without one it is read from standard input. ID is a callId or a code."""
    text: str | bytes = json if json is not None else sys.stdin.buffer.read(MAX_ANSWER_BYTES * 6 + 1)
    value = batch.parse_json(text)
    item = ask_broker(bundle, {"op": "approve.show", "id": id})
    check_read(item, whole)
    issues = answer_issues(item.get("schema"), value)
    if issues:
        raise errors.fail(
            "E_USAGE", f"the answer does not fit: {'; '.join(issues)}", suggestion=f"See gdn approve show {id}."
        )
    _decide(bundle, {"id": id, "decision": "answer", "answer": encoded_answer(value)})


def check_read(item: dict[str, Any], whole: str) -> None:
    """Check that who agrees to a long item was shown all of it. Raises GoondanError E_USAGE."""
    given = whole.removeprefix("sha256:")
    if is_long(item) and (len(given) < WHOLE_DIGITS or not whole_digest(item).startswith(given)):
        hint = f"Read `gdn approve show {item['code']}`. Its last line has the digest for --whole."
        raise errors.fail("E_USAGE", "this item is longer than what was shown of it at first", suggestion=hint)


def answer_issues(schema: Any, value: Any) -> list[str]:
    """The reasons why an answer does not fit the JSON Schema of a question, in words."""
    from goondan.schemas.bundle.arguments import (
        compile_arguments,  # which takes a while, and few questions have a schema
    )

    if not isinstance(schema, dict):
        return []
    wrapped = {"type": "object", "properties": {"answer": schema}, "required": ["answer"]}
    return compile_arguments(wrapped, {}).apply({"answer": value})[1]


def encoded_answer(value: Any) -> Raw:
    """An answer in the form that goes to the broker. Raises GoondanError E_USAGE."""
    raw = codec.to_raw(value)
    if len(memoryview(raw)) > MAX_ANSWER_BYTES:
        raise errors.fail("E_USAGE", f"an answer has at most {MAX_ANSWER_BYTES} bytes")
    return raw


def _decide(bundle: str | None, decision: dict[str, Any]) -> None:
    told = ask_broker(bundle, {"op": "approve.answer", **decision})
    output.emit(told, [f"{told['code']} is {told['state']}"])


COMMANDS: Final[Mapping[str, click.Command]] = {"approve": approve}
