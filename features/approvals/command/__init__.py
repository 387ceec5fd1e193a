"""`gdn approve list|show|yes|no|answer`: calls that wait for a person, and what becomes of them.

Source: docs/approvals.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import click
from msgspec import Raw

from goondan.features.approvals.command.text import (
    COLUMNS,
    WHOLE_DIGITS,
    answered_lines,
    is_long,
    item_lines,
    list_lines,
    whole_digest,
    with_files,
)
from goondan.features.approvals.wire import MAX_ANSWER_BYTES
from goondan.kernel.cli import options
from goondan.kernel.cli.operator_question import Document, Op, ask_broker, operator_group
from goondan.kernel.cli.output import columns_of, emit
from goondan.kernel.cli.texts.batch import parse_json
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import fail

_whole = click.option(
    "--whole", metavar="DIGEST", default="", help="Of a long item: the digest at the end of what `show` prints."
)
_reason = click.option("--reason", default=None, help="Why; a model is told the reason for a no.")


def _list_lines(answer: Document, question: Document) -> list[str]:
    columns = columns_of(sys.stdout, COLUMNS)
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
    document = {**answer, "whole": whole_digest(answer)} if is_long(answer) else answer
    emit(document, item_lines(with_files(answer), columns_of(sys.stdout, COLUMNS), whole=True))


@approve.command()
@click.argument("id")
@_reason
@_whole
@options.bundle
@options.json
def yes(id: str, reason: str | None, whole: str, bundle: str | None) -> None:
    """Let a call run, once. ID is a callId or a code."""
    check_read(ask_broker(bundle, {"op": "approve.show", "id": id}), whole)
    _decide(bundle, {"id": id, "decision": "yes", "reason": reason})


@approve.command()
@click.argument("id")
@_reason
@options.bundle
@options.json
def no(id: str, reason: str | None, bundle: str | None) -> None:
    """Deny a call, or decline a question. ID is a callId or a code."""
    _decide(bundle, {"id": id, "decision": "no", "reason": reason})


@approve.command()
@click.argument("id")
@click.argument("json", required=False)
@_whole
@options.bundle
@options.json
def answer(id: str, json: str | None, whole: str, bundle: str | None) -> None:
    """Answer a question with a JSON value; without one it is read from standard input. ID is a callId or a code."""
    text: str | bytes = json if json is not None else sys.stdin.buffer.read(MAX_ANSWER_BYTES * 6 + 1)
    value = parse_json(text)
    item = ask_broker(bundle, {"op": "approve.show", "id": id})
    check_read(item, whole)
    issues = answer_issues(item.get("schema"), value)
    if issues:
        raise fail("E_USAGE", f"the answer does not fit: {'; '.join(issues)}", suggestion=f"See gdn approve show {id}.")
    _decide(bundle, {"id": id, "decision": "answer", "answer": encoded_answer(value)})


def check_read(item: dict[str, Any], whole: str) -> None:
    """Check that who agrees to a long item was shown all of it. Raises GoondanError E_USAGE."""
    given = whole.removeprefix("sha256:")
    if is_long(item) and (len(given) < WHOLE_DIGITS or not whole_digest(item).startswith(given)):
        hint = f"Read `gdn approve show {item['code']}`. Its last line has the digest for --whole."
        raise fail("E_USAGE", "this item is longer than what was shown of it at first", suggestion=hint)


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
    raw = to_raw(value)
    if len(memoryview(raw)) > MAX_ANSWER_BYTES:
        raise fail("E_USAGE", f"an answer has at most {MAX_ANSWER_BYTES} bytes")
    return raw


def _decide(bundle: str | None, decision: dict[str, Any]) -> None:
    told = ask_broker(bundle, {"op": "approve.answer", **decision})
    emit(told, [f"{told['code']} is {told['state']}"])


COMMANDS: Final[Mapping[str, click.Command]] = {"approve": approve}
