"""Tells a person what a message waits for while its turn runs: who is before it, and from two seconds on each wait.

A screen shows it in its status, with what other agents do that work for the turn. Without one, each wait is a line on
stderr. The broker is asked once a second, so a turn that is answered soon costs nothing.

Source: docs/design/commands.md section 2; PROTOCOL.md "Ask" (`why`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from goondan.kernel.cli.output import write
from goondan.kernel.cli.terminal import printable
from goondan.kernel.cli.waits import SEEN, status_of, wait_line
from goondan.schemas.wire.errors import GoondanError

if TYPE_CHECKING:
    from goondan.kernel.cli.console.screen import Screen
    from goondan.kernel.cli.session import Session

#: How long a message may wait before a person is told what it waits for (seconds). An idle agent has begun by then.
QUEUE_NOTICE_S: Final = 0.5
#: From when on the broker is asked what the turn waits for, and how often (seconds).
FIRST_LOOK_S: Final = 2.0
LOOK_S: Final = 1.0
#: How long the broker may take to answer (seconds). After that the person is not told.
ANSWER_S: Final = 5.0
#: A wait is told again when it has lasted so many times as long as when it was told.
AGAIN: Final = 5


async def follow(session: Session, agent: str, instance: str, event_id: str, screen: Screen | None) -> None:
    """Tell what the event waits for, until this task is cancelled. `screen` shows it; None: lines on stderr do."""
    await asyncio.sleep(QUEUE_NOTICE_S)
    await _tell_queue(session, agent, instance, event_id)
    told: dict[tuple[str, ...], int] = {}
    await asyncio.sleep(FIRST_LOOK_S - QUEUE_NOTICE_S)
    while True:
        with suppress(GoondanError):
            rows = (await session.admin({"op": "why", "eventId": event_id}, ANSWER_S))["waits"]
            if screen is not None:
                screen.tell_wait(status_of(rows, (agent, instance)))
            elif lines := [f"gdn: {line}" for line in new_lines(rows, told)]:
                write(*lines, stream=sys.stderr)
        await asyncio.sleep(LOOK_S)


def new_lines(rows: Sequence[Mapping[str, Any]], told: dict[tuple[str, ...], int]) -> Iterator[str]:
    """The lines for what was not told yet, or long ago. `told` has what was, and gets it."""
    for row in rows:
        if row["kind"] in SEEN or row["forMs"] < 1000 * QUEUE_NOTICE_S:
            continue
        name = (row["kind"], row["agent"], row["instanceKey"], row.get("message") or "", str(row.get("point")))
        if row["forMs"] >= AGAIN * told.get(name, 0):
            told[name] = row["forMs"]
            yield wait_line(row)


async def _tell_queue(session: Session, agent: str, instance: str, event_id: str) -> None:
    """Say once on stderr how many messages are before this one at its instance, if there are any."""
    with suppress(GoondanError):
        question = {"op": "events", "agent": agent, "instanceKey": instance}
        listed = (await session.admin(question, ANSWER_S))["events"]
        before = next((at for at, event in enumerate(listed) if event["eventId"] == event_id), 0)
        if before:
            what = "1 message" if before == 1 else f"{before} messages"
            place = printable(f"{agent}/{instance}")
            write(f"gdn: {place} is busy; {what} before yours (gdn ps --why shows for what)", stream=sys.stderr)
