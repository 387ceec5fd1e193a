"""The conversation of one `gdn run`: lines become messages to the entry agent, and answers are printed.

Lines of stdin become events, and answers are printed in the order of the lines. On a terminal a person types message
after message, and sees each answer while it is made.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from goondan.kernel.cli import attach, output
from goondan.kernel.cli import session as sessions
from goondan.kernel.cli.console.conversation import Command, Commands, read_command
from goondan.kernel.cli.console.lines import MAX_LINE_BYTES, Line, LineReader, Room
from goondan.kernel.cli.console.prompt import HISTORY_FILE, PROMPT, Prompt, open_prompt
from goondan.kernel.cli.console.questions import Questions, questions
from goondan.kernel.cli.console.screen import Screen, follow, shows_status, tell_news
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules.plain import one_line
from goondan.schemas.wire import frames, runtime_events
from goondan.schemas.wire.errors import GoondanError, fail

#: The most lines without an answer. No more lines are read before one is answered.
MAX_IN_FLIGHT: Final = 64


#: The most lines that are typed ahead, and the longest part of one that is shown (characters).
MAX_QUEUED: Final = 64
MAX_QUEUED_SHOWN: Final = 80


class _Told(NamedTuple):
    """What became of a line. An empty line has no answer, no error and no lines."""

    #: The id of its event.
    event_id: str
    #: The answer.
    answer: frames.Answer | None = None
    #: The error.
    error: GoondanError | None = None
    #: The command that it was; None for a message.
    command: str | None = None
    #: Of a command: its result.
    lines: Sequence[str] = ()


class TalkOptions(NamedTuple):
    """The options of a conversation."""

    #: Print one JSON document at the end.
    as_json: bool
    #: Where tools work. None: in the instance's own directory.
    workdir: str | None
    #: The instance that is talked to.
    instance: str
    #: The instance is new, and has a name of ours.
    is_new: bool
    #: Print the reasoning where no terminal has shown it.
    reasoning: bool


class Talk:
    """The conversation of one `gdn run`."""

    _questions: Questions
    _commands: Commands

    def __init__(
        self, kernel: attach.Kernel, options: TalkOptions, about_server: Callable[[str | None], str | None]
    ) -> None:
        self._kernel = kernel
        #: What is known of the server of this model.
        self._about_server = about_server
        self._options = options
        self._as_json = options.as_json
        #: The input has ended, and the first line without an answer waits for a person.
        self._stuck = False
        self._failed = False
        #: What was said of servers that have ended.
        self._servers: set[str] = set()
        #: The lines that were typed while a turn ran.
        self._queue: list[Line] = []
        #: The exit status after a second Ctrl-C in one turn, which ends the conversation.
        self._status = 0
        #: With --json: the document that is printed at the end.
        self._documents: list[dict[str, Any]] = []

    def run(self) -> int:
        """Talk to the end of the input, and let the kernel go. Returns the exit status.

        Raises GoondanError E_KERNEL_LOST, E_KERNEL_STOPPED at the end of the kernel.
        """
        if self._kernel.place.watch:
            tell_news(self._kernel.place.state_dir)
        with self._kernel:
            sessions.over_session(self._kernel, self._talk)
        if self._as_json:
            output.write_json({"answers": self._documents})
        return self._status or int(self._failed)

    async def _talk(self, session: sessions.Session) -> None:
        self._questions = questions(session)
        self._commands = Commands(session, self._kernel, self._options.instance, self._options.workdir)
        watching = asyncio.ensure_future(self._questions.watch())
        terminal = output.is_terminal(sys.stdin) and output.is_terminal(sys.stderr)
        talking = self._interactive(session) if terminal else self._piped(session, LineReader(0, MAX_LINE_BYTES))
        work = asyncio.ensure_future(talking)
        await asyncio.wait({work, session.lost}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            raise session.lost_error()
        work.result()

    async def _piped(self, session: sessions.Session, lines: LineReader) -> None:
        """Send lines as they come, and print the answers in the order of the lines."""

        waiting: asyncio.Queue[tuple[int, str, asyncio.Future[_Told]] | None] = asyncio.Queue()
        room = Room(MAX_IN_FLIGHT)
        await self._tell_instance()
        announcing = asyncio.ensure_future(self._questions.announce())
        open_lines: set[asyncio.Future[_Told]] = set()

        async def read() -> None:
            async for line in lines:
                taken = await room.take(line)
                event_id = session.new_id()
                is_command = _command_of(line) is not None
                if is_command and open_lines:  # it is about what the lines before it have come to
                    await asyncio.wait(open_lines)
                asked = asyncio.ensure_future(self._ask(session, line, event_id))
                open_lines.add(asked)
                asked.add_done_callback(open_lines.discard)
                waiting.put_nowait((taken, event_id, asked))
                if is_command:
                    await asyncio.wait({asked})
            if lines.error is not None:
                raise lines.error

        reading = asyncio.ensure_future(read())
        reading.add_done_callback(lambda _: waiting.put_nowait(None))
        try:
            while (item := await waiting.get()) is not None:
                taken, event_id, asked = item
                self._show(await self._answered(event_id, asked, reading))
                room.give(taken)
            reading.result()
        finally:
            announcing.cancel()
            reading.cancel()
            while not waiting.empty():
                left = waiting.get_nowait()
                if left is not None:
                    left[2].cancel()

    async def _answered(self, event_id: str, asked: asyncio.Future[_Told], reading: asyncio.Future[None]) -> _Told:
        """The answer to one line. An error when the input has ended and only a person can make the line's work go on.

        Lines are worked on in their order, so the later lines wait as well.
        """

        while not asked.done():
            if reading.done() and not self._stuck and self._questions.stops(event_id):
                with suppress(GoondanError):
                    await self._questions.look()  # the known list may be older than a person's decision
                self._stuck = self._questions.stops(event_id) and not asked.done()
            if self._stuck:
                asked.cancel()
                return _Told(event_id, error=self._questions.stopped(event_id))
            changed = asyncio.ensure_future(self._questions.next_change())
            parts: set[asyncio.Future[Any]] = {asked, changed, *([] if reading.done() else [reading])}
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        return await asked

    async def _interactive(self, session: sessions.Session) -> None:
        """Take one message at a time, and show its answer while it is made. Ctrl-C cancels the turn. A second one ends
        the conversation.
        """
        prompt = open_prompt(f"{self._kernel.place.state_dir}/{HISTORY_FILE}", MAX_LINE_BYTES)
        output.write(f"{self._kernel.entry_agent or 'the swarm'} is ready; {prompt.hint}", stream=sys.stderr)
        if self._kernel.model is not None:
            output.write(f"it talks to {self._kernel.model}", stream=sys.stderr)
        learned = self._about_server(self._kernel.model)
        if learned is not None:
            output.write(learned, stream=sys.stderr)
        await self._tell_instance()
        with sessions.Interrupts(prompt.interrupted) as interrupts:
            while not self._status and (line := await self._read(prompt)) is not None:
                work = self._turn if _command_of(line) is None else self._carry_out
                await work(session, line, interrupts, prompt)
                interrupts.target = prompt.interrupted

    async def _tell_instance(self) -> None:
        """Say which conversation goes on, and under which name a new one is found again."""
        if self._as_json:
            return
        told = await self._commands.goes_on()
        key = self._commands.instance
        if told is not None:
            output.write(f"{told} (--new, or /new, begins another conversation)", stream=sys.stderr)
        elif self._options.is_new:
            output.write(f"a new conversation; gdn run --instance {key} comes back to it", stream=sys.stderr)

    async def _read(self, prompt: Prompt) -> Line | None:
        """The next message. Before it, the person is asked about items that wait. An item that comes while the person
        types is announced.
        """

        await self._questions.ask_waiting(prompt)
        if self._queue:
            line = self._queue.pop(0)
            output.write(f"{PROMPT}{_shown(line)}", stream=sys.stderr)
            return line
        if prompt.ended:
            return None
        telling = asyncio.ensure_future(self._questions.notices(prompt))
        try:
            return await prompt.read()
        finally:
            telling.cancel()

    async def _carry_out(
        self, session: sessions.Session, line: Line, interrupts: sessions.Interrupts, prompt: Prompt
    ) -> None:
        """Carry a command out. Ctrl-C ends the waiting for it."""

        asking = asyncio.ensure_future(self._ask(session, line))

        def interrupted() -> None:
            asking.cancel()
            self._drop_queue(prompt)

        interrupts.target = interrupted
        try:
            with prompt.ahead(lambda line: self._enqueue(line, lambda text: output.write(text, stream=sys.stderr))):
                await asyncio.wait({asking})
            if asking.cancelled():
                output.write("", "no longer waited for", stream=sys.stderr)
            else:
                self._show(asking.result())
        finally:
            asking.cancel()

    async def _turn(
        self, session: sessions.Session, line: Line, interrupts: sessions.Interrupts, prompt: Prompt
    ) -> None:

        screen = Screen(text=not self._as_json)
        event_id = session.new_id()

        def interrupted() -> None:
            screen.close()
            output.write("", "cancelling the turn; Ctrl-C again ends the conversation", stream=sys.stderr)
            self._drop_queue(prompt)

        cancelling = sessions.Cancelling(session.cancel, lambda: [event_id], on_first=interrupted, patience_s=None)
        interrupts.target = cancelling.came

        def hear(event: runtime_events.RuntimeEvent) -> None:
            if not cancelling.came_first:
                screen.handle(event)

        asking = asyncio.ensure_future(self._ask(session, line, event_id, hear))
        questions = asyncio.ensure_future(self._questions.ask_each(prompt, screen))
        place = self._kernel.entry_agent or "", self._commands.instance
        following = asyncio.ensure_future(follow(session, *place, event_id, screen if shows_status() else None))
        try:
            with prompt.ahead(lambda line: self._enqueue(line, screen.note)):
                told = await cancelling.wait(asking)
            if told is None:
                self._status = interrupts.status
            elif cancelling.came_first and sessions.was_cancelled(_error_of(told)):
                self._keep(told)
                output.write("cancelled", stream=sys.stderr)
            else:
                self._show(told, screen)
        finally:
            questions.cancel()
            following.cancel()
            screen.close()

    def _enqueue(self, line: Line, tell: Callable[[str], None]) -> None:
        """Keep a line that was typed while a turn runs, and say so."""
        if line.data is not None and not line.data.strip():
            return
        if len(self._queue) >= MAX_QUEUED:
            tell(f"(not queued, for {MAX_QUEUED} lines wait: {_shown(line)})")
            return
        self._queue.append(line)
        tell(f"(queued: {_shown(line)})")

    def _drop_queue(self, prompt: Prompt) -> None:
        """Drop the lines that wait, and say so."""
        prompt.forget_ahead()
        dropped, self._queue = self._queue, []
        if dropped:
            output.write(*[f"(dropped: {_shown(line)})" for line in dropped], stream=sys.stderr)

    async def _ask(
        self,
        session: sessions.Session,
        line: Line,
        event_id: str | None = None,
        listener: sessions.Listener | None = None,
    ) -> _Told:
        """Send one line, and wait for its answer; or carry out the command that it is. Raises only E_KERNEL_LOST,
        E_KERNEL_STOPPED.
        """
        event_id = event_id or session.new_id()
        command = _command_of(line)
        try:
            if command is not None:
                return _Told(event_id, command=command.name, lines=await self._commands.perform(command))
            if line.data is None:
                raise fail("E_FRAME_TOO_LARGE", f"line {line.number} has {line.size} bytes, limit {MAX_LINE_BYTES}")
            text = line.data.decode("utf-8", "replace")
            if not text.strip():
                return _Told(event_id)
            agent = self._kernel.entry_agent
            if not agent:
                raise fail("E_AGENT_NOT_FOUND", "the bundle has no entry agent to talk to")
            key, files = self._commands.instance, self._lay_down(session)
            message = Message(agent, key, text, event_id=event_id, workdir=self._options.workdir, files=files)
            return _Told(event_id, await session.ask(message, listener=listener))
        except GoondanError as error:
            if error.info.code in sessions.GONE:
                raise
            return _Told(event_id, error=error, command=None if command is None else command.name)

    def _lay_down(self, session: sessions.Session) -> list[frames.FilePart]:
        """Put the files that go with this message where its event can name them. Raises GoondanError."""
        with sessions.opened_files(self._commands.take_attached()) as files:
            return session.lay_down(files)

    def _show(self, told: _Told, screen: Screen | None = None) -> None:
        answer, error = told.answer, told.error
        if told.command is not None and error is None:
            self._keep(told) if self._as_json else output.write(*told.lines)
            return
        if answer is None and error is None:
            return
        info = _error_of(told)
        failed = answer is None or answer.status != "completed"
        self._failed = self._failed or failed
        if screen is not None and (failed or self._as_json):
            screen.close()
        if self._as_json:
            self._keep(told)
        elif answer is not None and not failed:
            if self._options.reasoning:
                output.tell_reasoning(answer)
            response = answer.response or ""
            output.write_text(response) if screen is None else screen.end(response)
            output.tell_cut_off(answer)
            if screen is not None:
                output.tell_usage(answer)
        elif info is not None:
            kept = [] if answer is None else output.kept_lines(info, told.event_id)
            output.write(*output.error_lines(info), *kept, stream=sys.stderr)
        if not self._as_json:
            output.tell_servers(self._kernel.place.state_dir, self._servers)

    def _keep(self, told: _Told) -> None:
        """Add the answer to the document that is printed at the end (--json)."""
        event_id, answer, error = told.event_id, told.answer, told.error
        document: dict[str, Any] = {"eventId": event_id}
        if answer is not None:
            document = output.answer_document(event_id, answer, reasoning=self._options.reasoning)
        elif error is not None:
            document |= {"status": "failed", "error": error.info}
        else:
            document |= {"status": "completed", "response": "\n".join(told.lines)}
        self._documents.append(document if told.command is None else {**document, "command": f"/{told.command}"})


def _error_of(told: _Told) -> frames.ErrorPayload | None:
    if told.error is not None:
        return told.error.info
    return told.answer.error if told.answer is not None else None


def _shown(line: Line) -> str:
    """A line as it is shown beside others."""
    text = f"line of {line.size} bytes" if line.data is None else line.data.decode("utf-8", "replace")
    return one_line(text, MAX_QUEUED_SHOWN)


def _command_of(line: Line) -> Command | None:
    """The console's command that a line is; None for a message."""
    if line.data is None or not line.data.startswith(b"/"):
        return None
    return read_command(line.data.decode("utf-8", "replace"))
