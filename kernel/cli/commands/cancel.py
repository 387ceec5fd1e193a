"""`gdn cancel`: ends a turn, with its model call and its tool calls, or a message that waits for one.

Source: docs/design/delivery.md section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from goondan.kernel.cli import options
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.cli.attach import Kernel

#: How long the command waits for the end of the turn by default (seconds). Extensions may take 30 s to leave a turn.
DEFAULT_TIMEOUT_S: Final = 60.0


@click.command(epilog="Without EVENT_ID it is what the instance works on; --agent alone means its instance `default`.")
@click.argument("event_id", required=False, metavar="[EVENT_ID]")
@options.bundle
@click.option(
    "--agent", metavar="AGENT", shell_complete=options.completed("agents"), help="Cancel what this agent works on."
)
@options.instance
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=options.Seconds(),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="Give up waiting for the end after this time; it is cancelled all the same.",
)
@options.as_json
def command(
    event_id: str | None, bundle: str | None, agent: str | None, instance: str, timeout: float, as_json: bool
) -> int:
    """Cancel a turn with all its calls, or a message that waits.

    EVENT_ID is what `gdn send --json` and `gdn send --no-wait` print. Returns when it has ended.
    """
    import asyncio

    from goondan.kernel.cli.attach import attach, locate
    from goondan.kernel.cli.batch import check_instance
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.cli.plain import one_line
    from goondan.kernel.paths import is_utf8

    if (event_id is None) == (agent is None):
        raise fail("E_USAGE", "give EVENT_ID or --agent, one of them")
    if not is_utf8(event_id or agent or ""):
        raise fail("E_USAGE", "the name is not UTF-8")
    agent, instance = options.named(agent, instance)
    key = check_instance(instance)
    kernel = attach(locate(bundle))
    try:
        known_id, state = asyncio.run(_cancel(kernel, event_id, agent, key, timeout))
    finally:
        kernel.finish()
    if as_json:
        write_json({"eventId": known_id, "status": state})
    elif state == "cancelled":
        write(f"cancelled {one_line(known_id, len(known_id))}")
    else:
        write(f"{one_line(known_id, len(known_id))} had ended by itself: {state}")
    return 0


async def _cancel(
    kernel: Kernel, event_id: str | None, agent: str | None, instance: str, timeout_s: float
) -> tuple[str, str]:
    """The event's id, and how it ended. Raises GoondanError E_EVENT_NOT_FOUND."""
    from goondan.kernel.cli.session import WELCOME_S, Session

    async with Session(kernel, min(timeout_s, WELCOME_S)) as session:
        if event_id is None:
            # The question has an id of its own, so it may be sent several times and is still one.
            listed = await session.admin({"op": "events", "agent": agent, "instanceKey": instance}, timeout_s)
            if not listed["events"]:
                raise fail("E_EVENT_NOT_FOUND", f"{agent}/{instance} works on nothing")
            event_id = str(listed["events"][0]["eventId"])
        return event_id, await session.cancel(event_id, timeout_s)
