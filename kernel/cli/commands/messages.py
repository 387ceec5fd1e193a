"""`gdn send` and `gdn cancel`: one message to an agent of a running swarm, with its answer; and the end of a turn,
or of a message that waits for one.

Source: docs/design/delivery.md section 2; docs/design/commands.md section 2.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import click

from goondan.kernel.cli import options, output
from goondan.kernel.cli import session as sessions
from goondan.kernel.cli.attach import Kernel, attach
from goondan.kernel.cli.console.lines import FROM_STDIN, MAX_LINE_BYTES, read_all
from goondan.kernel.cli.console.screen import Screen, follow, shown
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules import batch, plain
from goondan.kernel.cli.state import absolute_workdir, locate
from goondan.kernel.paths import is_utf8
from goondan.schemas.wire import codec, frames, spans
from goondan.schemas.wire.errors import fail

#: How long `send` waits by default (seconds): longer than most turns take, and short enough for a forgotten terminal.
ANSWER_TIMEOUT_S: Final = 600.0
#: The longest event id (characters). The broker refuses longer ones.
MAX_EVENT_ID: Final = 256


@click.command(
    epilog="With one argument it is TEXT, and the swarm's entry agent gets it. With `-` TEXT comes from standard input."
)
@click.argument(
    "words", metavar="[AGENT] TEXT", nargs=-1, required=True, shell_complete=options.completed("first_agent")
)
@options.bundle
@options.instance
@click.option("--event-id", metavar="ID", help="Send under this id: sent again, it is the same event, answered once.")
@click.option("--trace-id", metavar="ID", help="The trace that it belongs to, 32 hexadecimal digits; else a new one.")
@click.option(
    "--attach",
    "attached",
    metavar="FILE",
    multiple=True,
    shell_complete=options.completed_path("file"),
    help="Send this picture (png, jpeg, gif, webp) or PDF with the message; may be given several times.",
)
@click.option("--no-wait", is_flag=True, help="Return when the event is accepted; print its id.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=options.Seconds(),
    default=ANSWER_TIMEOUT_S,
    show_default=True,
    help="Give up waiting after this time.",
)
@options.workdir
@options.reasoning
@click.option("--raw", is_flag=True, help="Print the answer with its control characters. Otherwise they are \\xNN.")
@options.json
def send(
    words: tuple[str, ...],
    bundle: str | None,
    instance: str,
    event_id: str | None,
    trace_id: str | None,
    attached: tuple[str, ...],
    no_wait: bool,
    timeout: float,
    workdir: str | None,
    reasoning: bool,
    raw: bool,
) -> int:
    """Send one message to a running swarm and print the answer. The exit status is 3 when the answer was cut off.

    Ctrl-C cancels the turn; a second one does not wait for its end. When the time of --timeout is over, the turn ends,
    too. Any other end of this command leaves the message to the agent; --event-id asks for the answer later.
    """
    if len(words) > 2:
        raise fail("E_USAGE", f"expected [AGENT] TEXT, got {len(words)} arguments", suggestion="Put TEXT in quotes.")
    if event_id is not None and not 0 < len(event_id) <= MAX_EVENT_ID:
        raise fail("E_USAGE", f"an event id has 1 to {MAX_EVENT_ID} characters")
    if trace_id is not None and not spans.is_trace_id(trace_id):
        message = "a trace id has 32 hexadecimal digits, in lower case and not all of them zero"
        raise fail("E_USAGE", message, suggestion="Take the second field of a W3C traceparent, or leave it out.")
    agent, instance = options.named(words[0] if len(words) == 2 else None, instance)
    text = codec.replace_surrogates(words[-1])
    if text == FROM_STDIN:
        text = read_all(MAX_LINE_BYTES).decode("utf-8", "replace").removesuffix("\n")
    if not text.strip() and not attached:
        raise fail("E_USAGE", "the message is empty", suggestion="Write the message as TEXT, in quotes.")
    place = locate(bundle)
    if workdir is not None:
        workdir = absolute_workdir(workdir, place)
    with sessions.opened_files(attached) as files, attach(place) as kernel:
        agent = agent or kernel.entry_agent
        if not agent:
            raise fail("E_USAGE", "the bundle has no entry agent; name the agent")
        key = batch.check_instance(instance)
        told = Message(agent, key, text, event_id=event_id, workdir=workdir, trace_id=trace_id)
        sent = asyncio.run(_send(kernel, told, files, not no_wait, timeout, reasoning, raw))
        if not output.wants_json():
            output.tell_servers(place.state_dir, set())
    known_id, answer, interrupted = sent
    if isinstance(answer, str) or answer is None:
        document = {"eventId": known_id, "status": "accepted"} | ({} if answer is None else {"traceId": answer})
        output.emit(document, [known_id])
        return 0
    return _tell(known_id, answer, interrupted, reasoning)


def _tell(event_id: str, answer: frames.Answer, interrupted: int, reasoning: bool) -> int:
    """Print what is not on stdout yet, and return the exit status. `interrupted`: that of SIGINT if it came, else 0."""
    cancelled = bool(interrupted) and sessions.was_cancelled(answer.error)
    if output.wants_json():
        output.write_json(output.answer_document(event_id, answer, reasoning=reasoning))
    elif answer.status == "completed":
        output.tell_cut_off(answer)  # the text is on stdout already
        output.tell_usage(answer)
    elif answer.error is not None:
        _tell_failure(answer.error, event_id, cancelled=cancelled)
    if cancelled:
        return interrupted
    if answer.status != "completed":
        return 1
    return output.CUT_OFF_STATUS if answer.cut_off else 0


def _tell_failure(error: frames.ErrorPayload, event_id: str, *, cancelled: bool) -> None:
    """Say on stderr why there is no answer, and after a timeout under which id it can be asked for."""
    output.write(
        *(["cancelled"] if cancelled else [*output.error_lines(error), *output.kept_lines(error, event_id)]),
        stream=sys.stderr,
    )
    if error.code == "E_AGENT_TIMEOUT":
        output.write(f"  the message was {output.printable(event_id)} (--event-id)", stream=sys.stderr)


async def _send(
    kernel: Kernel,
    message: Message,
    files: list[sessions.OpenFile],
    wait: bool,
    timeout_s: float,
    reasoning: bool,
    raw: bool,
) -> tuple[str, frames.Answer | str | None, int]:
    """Send the message with its files. Returns the event id, the answer, and the exit status: that of SIGINT if it
    came, otherwise 0. The text of the answer is printed without --json, and with `reasoning` its reasoning. Without
    `wait`, the trace is returned in place of the answer, None where it is not known.
    """
    async with sessions.Session(kernel, min(timeout_s, sessions.WELCOME_S)) as session:
        known_id = message.event_id or session.new_id()
        message = message._replace(event_id=known_id, files=session.lay_down(files))
        if not wait:
            return known_id, await session.tell(message, timeout_s), 0

        async def ask(listener: sessions.Listener | None) -> frames.Answer:
            return await session.ask(message, timeout_s=timeout_s, listener=listener)

        cancelling = sessions.Cancelling(session.cancel, lambda: [known_id])
        with sessions.Interrupts(cancelling.came) as interrupts:

            async def tell(screen: Screen | None) -> None:
                await follow(session, message.agent, message.instance, known_id, screen)

            asking = shown(ask, tell, reasoning=reasoning, text=not output.wants_json(), raw=raw)
            answer = await cancelling.wait(asyncio.ensure_future(asking))
        if answer is None:
            raise SystemExit(interrupts.status)
        return known_id, answer, interrupts.status


#: How long the command waits for the end of the turn by default (seconds). Extensions may take 30 s to leave a turn.
END_TIMEOUT_S: Final = 60.0


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
    default=END_TIMEOUT_S,
    show_default=True,
    help="Give up waiting for the end after this time; it is cancelled all the same.",
)
@options.json
def cancel(event_id: str | None, bundle: str | None, agent: str | None, instance: str, timeout: float) -> None:
    """Cancel a turn with all its calls, or a message that waits.

    EVENT_ID is what `gdn send --json` and `gdn send --no-wait` print. Returns when it has ended.
    """
    if (event_id is None) == (agent is None):
        raise fail("E_USAGE", "give EVENT_ID or --agent, one of them")
    if not is_utf8(event_id or agent or ""):
        raise fail("E_USAGE", "the name is not UTF-8")
    agent, instance = options.named(agent, instance)
    key = batch.check_instance(instance)
    with attach(locate(bundle)) as kernel:
        known_id, state = sessions.over_session(
            kernel, lambda session: _cancel(session, event_id, agent, key, timeout), min(timeout, sessions.WELCOME_S)
        )
    name = plain.one_line(known_id, len(known_id))
    text = f"cancelled {name}" if state == "cancelled" else f"{name} had ended by itself: {state}"
    output.emit({"eventId": known_id, "status": state}, [text])


async def _cancel(
    session: sessions.Session, event_id: str | None, agent: str | None, instance: str, timeout_s: float
) -> tuple[str, str]:
    """The event's id, and how it ended. Raises GoondanError E_EVENT_NOT_FOUND."""
    if event_id is None:
        # The question has an id of its own, so it may be sent several times and is still one.
        listed = await session.admin({"op": "events", "agent": agent, "instanceKey": instance}, timeout_s)
        if not listed["events"]:
            raise fail("E_EVENT_NOT_FOUND", f"{agent}/{instance} works on nothing")
        event_id = str(listed["events"][0]["eventId"])
    return event_id, await session.cancel(event_id, timeout_s)


COMMANDS = {"send": send, "cancel": cancel}
