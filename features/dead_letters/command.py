"""`gdn dead list|show|requeue|drop`: messages that were given up, and a person's decision about them.

A message is given up when agents ended on it five times without progress, or could not be started for it, or when its
turn failed by a cause outside of it: a full disk, a model server that is not there (docs/error-causes.md). The asker
that waited for its answer was told. The message stays until a person has decided.

Source: docs/design/delivery.md section 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from goondan.kernel.cli.operator_question import Document, Op, operator_group
from goondan.kernel.cli.output import pretty_lines
from goondan.schemas.text.times import rfc3339_seconds


def _show_lines(letter: Document, _: Document) -> list[str]:
    large = letter["large"]
    head = render([letter], 0)
    if large is not None:
        return [*head, f"its content is {large} bytes in a file of the state directory"]
    return [*head, *pretty_lines(letter["event"])]


def render(events: Sequence[Mapping[str, Any]], more: int) -> list[str]:
    """Two lines for each message: its id and time, then the reason."""
    lines: list[str] = []
    for event in events:
        at = rfc3339_seconds(event["endedMs"] / 1000)
        lines.append(f"{event['eventId']}  {event['agent']}/{event['instanceKey']}  {at}")
        lines.append(f"    {event['cause']}")
    if more:
        lines.append(f"and {more} more")
    return lines or ["no message was given up"]


_event_id = click.argument("event_id")

COMMANDS = {
    "dead": operator_group(
        "dead",
        "Show messages that were given up; send them again, or drop them.",
        Op(
            "dead.list",
            "List them, the oldest first, each with the reason.",
            lambda answer, _: render(answer["events"], answer["more"]),
        ),
        Op("dead.show", "Show one with what it asked.", _show_lines, (_event_id,)),
        Op(
            "dead.requeue",
            "Send one again, as a new message behind those that wait. Its answer goes to nobody; gdn trace shows it.",
            lambda answer, asked: [f"{asked['eventId']} waits again, as {answer['newEventId']}"],
            (_event_id,),
        ),
        Op("dead.drop", "Forget one.", lambda _, asked: [f"dropped {asked['eventId']}"], (_event_id,)),
    )
}
