"""`gdn dead list|show|requeue|drop`: messages that were given up, and a person's decision about them.

A message is given up when agents ended on it five times without progress, or could not be started for it, or when its
turn failed by a cause outside of it: a full disk, a model server that is not there (docs/error-causes.md). The asker
that waited for its answer was told. The message stays until a person has decided.

Source: docs/design/delivery.md section 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.operator_question import ask_broker
from goondan.kernel.cli.output import write, write_json, write_pretty, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.group()
def dead() -> None:
    """Show messages that were given up; send them again, or drop them."""


@dead.command(name="list")
@options.bundle
@options.as_json
def list_(bundle: str | None, as_json: bool) -> int:
    """List them, the oldest first, each with the reason."""
    answer = ask_broker(bundle, {"op": "dead.list"})
    write_result(answer, *render(answer["events"], answer["more"]), as_json=as_json)
    return 0


@dead.command()
@click.argument("event_id")
@options.bundle
@options.as_json
def show(event_id: str, bundle: str | None, as_json: bool) -> int:
    """Show one with what it asked."""
    answer = ask_broker(bundle, {"op": "dead.show", "eventId": event_id})
    if as_json:
        write_json(answer)
        return 0
    write(*render([answer], 0))
    if answer["large"] is not None:
        write(f"its content is {answer['large']} bytes in a file of the state directory")
    else:
        write_pretty(answer["event"])
    return 0


@dead.command()
@click.argument("event_id")
@options.bundle
@options.as_json
def requeue(event_id: str, bundle: str | None, as_json: bool) -> int:
    """Send one again, as a new message behind those that wait. Its answer goes to nobody; gdn trace shows it."""
    answer = ask_broker(bundle, {"op": "dead.requeue", "eventId": event_id})
    write_result(answer, f"{event_id} waits again, as {answer['newEventId']}", as_json=as_json)
    return 0


@dead.command()
@click.argument("event_id")
@options.bundle
@options.as_json
def drop(event_id: str, bundle: str | None, as_json: bool) -> int:
    """Forget one."""
    answer = ask_broker(bundle, {"op": "dead.drop", "eventId": event_id})
    write_result(answer, f"dropped {event_id}", as_json=as_json)
    return 0


def render(events: Sequence[dict[str, Any]], more: int) -> list[str]:
    """Two lines for each message: its id and time, then the reason."""
    from goondan.schemas.text.times import rfc3339_seconds

    lines: list[str] = []
    for event in events:
        at = rfc3339_seconds(event["endedMs"] / 1000)
        lines.append(f"{event['eventId']}  {event['agent']}/{event['instanceKey']}  {at}")
        lines.append(f"    {event['cause']}")
    if more:
        lines.append(f"and {more} more")
    return lines or ["no message was given up"]


COMMANDS = {"dead": dead}
