"""The display of a running turn: its text on stdout and a line of status on stderr, each only on a terminal; what its
message waits for; and news of a watched bundle.

The status is in the line of the cursor, so it is shown only while no line of text is open. A terminal without cursor
movement (TERM=dumb) gets text and no status. NO_COLOR switches the colours off.

A person is told who is before the message, and from two seconds on each wait. A screen shows it in its status, with
what other agents do that work for the turn. Without one, each wait is a line on stderr. The broker is asked once a
second, so a turn that is answered soon costs nothing.

Source: docs/design/commands.md section 2; PROTOCOL.md "Ask" (`why`); https://no-color.org.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from goondan.kernel.cli import output
from goondan.kernel.cli.rules import plain, waits
from goondan.kernel.cli.rules.renderer import Break, Remark, Say, Shown, Think, TurnRenderer
from goondan.kernel.cli.session import Listener
from goondan.kernel.supervisor_client import SupervisorClient
from goondan.schemas.wire import errors, frames, runtime_events

if TYPE_CHECKING:
    from goondan.kernel.cli.session import Session


#: How long an answer may take before the status is shown (seconds).
PATIENCE_S: Final = 0.5
#: How often the status is drawn (seconds).
TICK_S: Final = 0.2
#: Moves the cursor to the beginning of the line, and erases the line.
_ERASE: Final = "\r\x1b[K"


async def shown(
    ask: Callable[[Listener | None], Awaitable[frames.Answer]],
    follow: Callable[[Screen | None], Awaitable[None]],
    *,
    reasoning: bool = False,
    text: bool = True,
    raw: bool = False,
) -> frames.Answer:
    """Ask, show live events on terminals meanwhile, and print the text of a completed answer. `follow` tells what the
    turn waits for: on a screen with a status, or (None) in lines. `reasoning`: print the reasoning, too, if no terminal
    has shown it. `text`: False prints nothing of the answer. `raw`: the text is printed as it is, and nothing else is
    shown.

    Raises what `ask` raises. An answer that failed is not printed.
    """
    screen = Screen() if text and not raw and wants_live() else None
    following = asyncio.ensure_future(follow(screen if shows_status() else None))
    try:
        answer = await ask(None if screen is None else screen.handle)
        if reasoning and text and answer.reasoning:
            if screen is not None:
                screen.pause()
            output.tell_reasoning(answer)
        if text and answer.status == "completed":
            response = answer.response or ""
            output.write_text(response, raw=raw) if screen is None else screen.end(response)
        return answer
    finally:
        following.cancel()
        if screen is not None:
            screen.close()


def has_cursor(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal here can move its cursor."""
    return env.get("TERM", "dumb") not in ("", "dumb")


def wants_live() -> bool:
    """Whether a person can see a turn while it runs."""
    return output.is_terminal(sys.stdout) or shows_status()


def shows_status() -> bool:
    """Whether there is a terminal for the status."""
    return output.is_terminal(sys.stderr) and has_cursor()


class Screen:
    """Shows one turn: `handle` its events, then `end` it with the answer, or `close` it without one. Use inside the
    running loop.

    `text`: whether its text is shown, if stdout is a terminal.
    """

    def __init__(self, *, text: bool = True) -> None:
        self._renderer = TurnRenderer()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._shows_text = text and output.is_terminal(sys.stdout)
        self._shows_status = shows_status()
        self._line_open = False
        #: The events that came while a person is being asked. None: nobody is being asked.
        self._heard: list[runtime_events.RuntimeEvent] | None = None
        self._status = ""
        self._notes: list[str] = []  # that wait for the end of an open line
        self._timer: asyncio.TimerHandle | None = None
        if self._shows_status:
            self._timer = self._loop.call_later(PATIENCE_S, self._tick)

    def handle(self, event: runtime_events.RuntimeEvent) -> None:
        """Show an event. A terminal that is gone is noticed when the answer is printed."""
        if self._heard is not None:
            self._heard.append(event)
            return
        with suppress(OSError, ValueError):
            self._show(self._renderer.handle(event, self._loop.time()))

    def end(self, response: str) -> None:
        """Show the rest of the answer. Then the whole answer is on stdout."""
        self.go_on()
        self._stop_status()
        if self._shows_text:
            self._show(self._renderer.end(response))
            if not response:
                output.write_text("")
        else:
            output.write_text(response)

    def tell_wait(self, text: str) -> None:
        """What the turn waits for; "": nothing."""
        self._renderer.waits = text

    def note(self, text: str) -> None:
        """Say something else on stderr, behind the line that is open now: it never stands inside the text."""
        self._notes.append(text)
        self._tell_notes()

    def pause(self) -> None:
        """A person is being asked: leave the cursor at the beginning of a line, and show nothing until `go_on`."""
        with suppress(OSError, ValueError):
            self._erase_status()
            self._show([Break()])
        self._heard = [] if self._heard is None else self._heard

    def go_on(self) -> None:
        """Show the events that came meanwhile."""
        heard, self._heard = self._heard or [], None
        for event in heard:
            self.handle(event)

    def close(self) -> None:
        """There is no answer: leave the cursor at the beginning of a line."""
        with suppress(OSError, ValueError):
            self._stop_status()
            self._show([Break()])

    # --- inside

    def _tell_notes(self) -> None:
        if self._line_open or self._heard is not None:
            return
        with suppress(OSError, ValueError):
            notes, self._notes = self._notes, []
            for text in notes:
                self._erase_status()
                _put(sys.stderr, output.shown_line(output.style_of(sys.stderr).dim(text)) + "\n")

    def _show(self, shown: list[Shown]) -> None:
        if self._shows_text:
            self._write(shown)
        self._tell_notes()

    def _write(self, shown: list[Shown]) -> None:
        for item in shown:
            self._erase_status()
            if isinstance(item, Say | Think):
                text = plain.flowing(item.text)
                text = output.shown_text(output.style_of(sys.stdout).dim(text)) if isinstance(item, Think) else text
                _put(sys.stdout, text)
                self._line_open = not item.text.endswith("\n")
            elif self._line_open:
                _put(sys.stdout, "\n")
                self._line_open = False
            if isinstance(item, Remark):
                _put(sys.stdout, output.shown_line(output.style_of(sys.stdout).dim(item.text)) + "\n")

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        if self._line_open or self._heard is not None:
            return
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = plain.fit(self._renderer.status(self._loop.time() - self._began), columns - 1)
            if line != self._status:
                _put(sys.stderr, _ERASE + output.shown_line(output.style_of(sys.stderr).dim(line)))
                self._status = line

    def _erase_status(self) -> None:
        if self._status:
            _put(sys.stderr, _ERASE)
            self._status = ""

    def _stop_status(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._erase_status()


def _put(stream: TextIO, text: str) -> None:
    stream.buffer.write(text.encode(stream.encoding or "utf-8", "replace"))
    stream.buffer.flush()


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
        with suppress(errors.GoondanError):
            rows = (await session.admin({"op": "why", "eventId": event_id}, ANSWER_S))["waits"]
            if screen is not None:
                screen.tell_wait(waits.status_of(rows, (agent, instance)))
            elif lines := [f"gdn: {line}" for line in new_lines(rows, told)]:
                output.write(*lines, stream=sys.stderr)
        await asyncio.sleep(LOOK_S)


def new_lines(rows: Sequence[Mapping[str, Any]], told: dict[tuple[str, ...], int]) -> Iterator[str]:
    """The lines for what was not told yet, or long ago. `told` has what was, and gets it."""
    for row in rows:
        if row["kind"] in waits.SEEN or row["forMs"] < 1000 * QUEUE_NOTICE_S:
            continue
        name = (row["kind"], row["agent"], row["instanceKey"], row.get("message") or "", str(row.get("point")))
        if row["forMs"] >= AGAIN * told.get(name, 0):
            told[name] = row["forMs"]
            yield waits.wait_line(row)


async def _tell_queue(session: Session, agent: str, instance: str, event_id: str) -> None:
    """Say once on stderr how many messages are before this one at its instance, if there are any."""
    with suppress(errors.GoondanError):
        question = {"op": "events", "agent": agent, "instanceKey": instance}
        listed = (await session.admin(question, ANSWER_S))["events"]
        before = next((at for at, event in enumerate(listed) if event["eventId"] == event_id), 0)
        if before:
            what = "1 message" if before == 1 else f"{before} messages"
            place = output.printable(f"{agent}/{instance}")
            output.write(f"gdn: {place} is busy; {what} before yours (gdn ps --why shows for what)", stream=sys.stderr)


def tell_news(state_dir: str) -> None:
    """Begin to print the news. It ends with the kernel or with this process."""
    # A thread, because the conversation reads its lines in its own way. The thread holds nothing that has to be
    # released.
    threading.Thread(target=_tell, args=(state_dir,), daemon=True).start()


def _tell(state_dir: str) -> None:
    told = 0
    try:
        client = SupervisorClient.connect(state_dir)
        while client is not None:
            reply = client.ask("news", None, after=told)
            told = reply.told
            output.write(*(f"gdn: {output.printable(line)}" for line in reply.news or []), stream=sys.stderr)
    except (errors.GoondanError, OSError, ValueError):
        return  # the kernel has ended, and the conversation reports that
