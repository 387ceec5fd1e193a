"""`gdn run`: starts a swarm and talks to its entry agent.

The kernel is a child process, and this process is a client like any other. Lines of stdin become events, and answers
are printed in the order of the lines. At the end of input the command waits for the answers, and then stops the kernel.
On a terminal a person types message after message, and sees each answer while it is made. A swarm that runs detached is
joined, and goes on when this command ends.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.attach import BundleTarget, Kernel, Started, hold, join_or_start, locate
from goondan.kernel.cli.output import emit, error_lines, is_terminal, wants_json, write, write_json, write_text
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from goondan.kernel.cli.console.commands import Command, Commands
    from goondan.kernel.cli.console.lines import Line, LineReader
    from goondan.kernel.cli.console.prompt import Prompt
    from goondan.kernel.cli.console.questions import Questions
    from goondan.kernel.cli.console.screen import Screen
    from goondan.kernel.cli.interrupts import Interrupts
    from goondan.kernel.cli.session import Listener, Session
    from goondan.schemas.wire.frames import Answer, ErrorPayload, FilePart
    from goondan.schemas.wire.runtime_events import RuntimeEvent

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
    answer: Answer | None = None
    #: The error.
    error: GoondanError | None = None
    #: The command that it was; None for a message.
    command: str | None = None
    #: Of a command: its result.
    lines: Sequence[str] = ()


class _Wishes(NamedTuple):
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


@click.command()
@options.bundle
@options.policy
@options.trust
@click.option("--detach", is_flag=True, help="Return when the swarm is ready and leave it running.")
@click.option("--watch", is_flag=True, help="Follow changes of the bundle: what they affect restarts.")
@click.option(
    "--accept-loss", is_flag=True, help="Go on with what is whole of a damaged journal; see E_JOURNAL_CORRUPT."
)
@click.option(
    "--instance",
    metavar="KEY",
    shell_complete=options.completed("instances"),
    help=f"Talk to this instance of the entry agent.  [default: {options.DEFAULT_INSTANCE}]",
)
@click.option("--new", "is_new", is_flag=True, help="Begin a new conversation, in an instance of its own.")
@options.workdir
@options.reasoning
@options.json
def command(
    bundle: str | None,
    policy: str | None,
    trust: bool,
    detach: bool,
    watch: bool,
    accept_loss: bool,
    instance: str | None,
    is_new: bool,
    workdir: str | None,
    reasoning: bool,
) -> int:
    """Start a swarm and talk to its entry agent, or talk to one that runs detached.

    The conversation of the instance goes on where it was; --new begins another one. A swarm that ran before goes on
    when this command ends.
    """
    from goondan.kernel.cli.batch import check_instance
    from goondan.kernel.cli.state import absolute_workdir

    place = locate(bundle, policy, trust=trust, accept_loss=accept_loss, watch=watch)
    of_messages = {"--workdir": workdir is not None, "--instance": instance is not None, "--new": is_new}
    if detach:
        for option in (name for name, is_given in of_messages.items() if is_given):
            raise fail("E_USAGE", f"{option} belongs to messages", suggestion="Give it to gdn send.")
        return _detach(place)
    if is_new and instance is not None:
        raise fail("E_USAGE", "give --new or --instance, not both")
    key = check_instance(options.DEFAULT_INSTANCE if instance is None else instance)
    if is_new:
        from goondan.kernel.cli.console.commands import new_instance

        key = new_instance()
    where = None if workdir is None else absolute_workdir(workdir, place)
    return _talk(place, _Wishes(wants_json(), where, key, is_new, reasoning))


def _detach(place: BundleTarget) -> int:
    from goondan.kernel import lock
    from goondan.kernel.cli.consent import started_when_trusted

    def begin(agreed: Any) -> Started:
        started = Started(place, detach=True, agreed=agreed)
        try:
            started.wait_ready()
        except KeyboardInterrupt:
            started.kill()
            raise
        return started

    started = started_when_trusted(place, begin)
    started.let_go()
    model = _model_of(place)
    record = lock.read_record(place.state_dir)
    run_dir = record.run_dir if record is not None else None
    document = {"pid": started.pid, "bundle": place.bundle, "runDir": run_dir, "stateDir": place.state_dir}
    talks_to = [] if model is None else [f"it talks to {model}"]
    emit({**document, "model": model}, [f"ready, pid {started.pid}; logs in {place.state_dir}/logs", *talks_to])
    return 0


def _model_of(place: BundleTarget) -> str | None:
    """The entry agent's model, as the kernel that has just started says."""
    try:
        kernel = hold(place)
    except GoondanError:
        return None  # it was stopped at once
    if kernel is None:
        return None
    try:
        return kernel.model
    finally:
        kernel.finish()


# --- talking


def _talk(place: BundleTarget, wishes: _Wishes) -> int:
    import asyncio

    about_server: Callable[[str | None], str | None] = lambda model: None
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        from goondan.kernel.bundle.kinds import local_models

        about_server = local_models().before_start(place.bundle, place.state_dir, place.policy)
    kernel, joined = join_or_start(place)
    if kernel.place.watch:
        from goondan.kernel.cli.console.screen import tell_news

        tell_news(kernel.place.state_dir)
    if joined and not wishes.as_json:
        write("joined the swarm that runs already; it goes on when you leave", stream=sys.stderr)
    talk = _Talk(kernel, wishes, about_server)
    try:
        asyncio.run(talk.run())
    finally:
        kernel.finish()
    if wishes.as_json:
        write_json({"answers": talk.documents})
    return talk.status or (1 if talk.failed else 0)


class _Talk:
    """The conversation of one `gdn run`."""

    _questions: Questions
    _commands: Commands

    def __init__(self, kernel: Kernel, wishes: _Wishes, about_server: Callable[[str | None], str | None]) -> None:
        self._kernel = kernel
        #: What is known of the server of this model.
        self._about_server = about_server
        self._wishes = wishes
        self._as_json = wishes.as_json
        #: The input has ended, and the first line without an answer waits for a person.
        self._stuck = False
        self.failed = False
        #: What was said of MCP servers that have ended.
        self._servers: set[str] = set()
        #: The lines that were typed while a turn ran.
        self._queue: list[Line] = []
        #: The exit status after a second Ctrl-C in one turn, which ends the conversation.
        self.status = 0
        #: With --json: the document that is printed at the end.
        self.documents: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Talk until the end of the input. Raises GoondanError E_KERNEL_LOST, E_KERNEL_STOPPED at the end of the
        kernel.
        """
        import asyncio

        from goondan.kernel.cli.console.commands import Commands
        from goondan.kernel.cli.console.lines import MAX_LINE_BYTES, LineReader
        from goondan.kernel.cli.console.questions import questions
        from goondan.kernel.cli.session import Session

        async with Session(self._kernel) as session:
            self._questions = questions(session)
            self._commands = Commands(session, self._kernel, self._wishes.instance, self._wishes.workdir)
            watching = asyncio.ensure_future(self._questions.watch())
            terminal = is_terminal(sys.stdin) and is_terminal(sys.stderr)
            talking = self._interactive(session) if terminal else self._piped(session, LineReader(0, MAX_LINE_BYTES))
            work = asyncio.ensure_future(talking)
            await asyncio.wait({work, session.lost}, return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                raise session.lost_error()
            work.result()

    async def _piped(self, session: Session, lines: LineReader) -> None:
        """Send lines as they come, and print the answers in the order of the lines."""
        import asyncio

        from goondan.kernel.cli.console.lines import Room

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
        import asyncio
        from contextlib import suppress

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

    async def _interactive(self, session: Session) -> None:
        """Take one message at a time, and show its answer while it is made. Ctrl-C cancels the turn. A second one ends
        the conversation.
        """
        from goondan.kernel.cli.console.lines import MAX_LINE_BYTES
        from goondan.kernel.cli.console.prompt import HISTORY_FILE, open_prompt
        from goondan.kernel.cli.interrupts import Interrupts

        prompt = open_prompt(f"{self._kernel.place.state_dir}/{HISTORY_FILE}", MAX_LINE_BYTES)
        write(f"{self._kernel.entry_agent or 'the swarm'} is ready; {prompt.hint}", stream=sys.stderr)
        if self._kernel.model is not None:
            write(f"it talks to {self._kernel.model}", stream=sys.stderr)
        learned = self._about_server(self._kernel.model)
        if learned is not None:
            write(learned, stream=sys.stderr)
        await self._tell_instance()
        with Interrupts(prompt.interrupted) as interrupts:
            while not self.status and (line := await self._read(prompt)) is not None:
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
            write(f"{told} (--new, or /new, begins another conversation)", stream=sys.stderr)
        elif self._wishes.is_new:
            write(f"a new conversation; gdn run --instance {key} comes back to it", stream=sys.stderr)

    async def _read(self, prompt: Prompt) -> Line | None:
        """The next message. Before it, the person is asked about items that wait. An item that comes while the person
        types is announced.
        """
        import asyncio

        from goondan.kernel.cli.console.prompt import PROMPT

        await self._questions.ask_waiting(prompt)
        if self._queue:
            line = self._queue.pop(0)
            write(f"{PROMPT}{_shown(line)}", stream=sys.stderr)
            return line
        if prompt.ended:
            return None
        telling = asyncio.ensure_future(self._questions.notices(prompt))
        try:
            return await prompt.read()
        finally:
            telling.cancel()

    async def _carry_out(self, session: Session, line: Line, interrupts: Interrupts, prompt: Prompt) -> None:
        """Carry a command out. Ctrl-C ends the waiting for it."""
        import asyncio

        asking = asyncio.ensure_future(self._ask(session, line))

        def interrupted() -> None:
            asking.cancel()
            self._drop_queue(prompt)

        interrupts.target = interrupted
        try:
            with prompt.ahead(lambda line: self._enqueue(line, lambda text: write(text, stream=sys.stderr))):
                await asyncio.wait({asking})
            if asking.cancelled():
                write("", "no longer waited for", stream=sys.stderr)
            else:
                self._show(asking.result())
        finally:
            asking.cancel()

    async def _turn(self, session: Session, line: Line, interrupts: Interrupts, prompt: Prompt) -> None:
        import asyncio

        from goondan.kernel.cli.console.screen import Screen, follow, shows_status
        from goondan.kernel.cli.interrupts import Cancelling, was_cancelled

        screen = Screen(text=not self._as_json)
        event_id = session.new_id()

        def interrupted() -> None:
            screen.close()
            write("", "cancelling the turn; Ctrl-C again ends the conversation", stream=sys.stderr)
            self._drop_queue(prompt)

        cancelling = Cancelling(session, lambda: [event_id], on_first=interrupted, patience_s=None)
        interrupts.target = cancelling.came

        def hear(event: RuntimeEvent) -> None:
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
                self.status = interrupts.status
            elif cancelling.came_first and was_cancelled(_error_of(told)):
                self._keep(told)
                write("cancelled", stream=sys.stderr)
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
            write(*[f"(dropped: {_shown(line)})" for line in dropped], stream=sys.stderr)

    async def _ask(
        self, session: Session, line: Line, event_id: str | None = None, listener: Listener | None = None
    ) -> _Told:
        """Send one line, and wait for its answer; or carry out the command that it is. Raises only E_KERNEL_LOST,
        E_KERNEL_STOPPED.
        """
        from goondan.kernel.cli.console.lines import MAX_LINE_BYTES
        from goondan.kernel.cli.session import GONE, USER_MESSAGE

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
            answer = await session.ask(
                agent,
                self._commands.instance,
                USER_MESSAGE,
                text,
                event_id=event_id,
                workdir=self._wishes.workdir,
                listener=listener,
                files=self._lay_down(session),
            )
            return _Told(event_id, answer)
        except GoondanError as error:
            if error.info.code in GONE:
                raise
            return _Told(event_id, error=error, command=None if command is None else command.name)

    def _lay_down(self, session: Session) -> list[FilePart]:
        """Put the files that go with this message where its event can name them. Raises GoondanError."""
        paths = self._commands.take_attached()
        if not paths:
            return []
        from goondan.kernel.cli.message_files import close_files, open_files

        files = open_files(paths)
        try:
            return session.lay_down(files)
        finally:
            close_files(files)

    def _show(self, told: _Told, screen: Screen | None = None) -> None:
        from goondan.kernel.cli.console.answered import (
            kept_lines,
            tell_cut_off,
            tell_reasoning,
            tell_servers,
            tell_usage,
        )

        answer, error = told.answer, told.error
        if told.command is not None and error is None:
            self._keep(told) if self._as_json else write(*told.lines)
            return
        if answer is None and error is None:
            return
        info = _error_of(told)
        failed = answer is None or answer.status != "completed"
        self.failed = self.failed or failed
        if screen is not None and (failed or self._as_json):
            screen.close()
        if self._as_json:
            self._keep(told)
        elif answer is not None and not failed:
            if self._wishes.reasoning:
                tell_reasoning(answer)
            response = answer.response or ""
            write_text(response) if screen is None else screen.end(response)
            tell_cut_off(answer)
            if screen is not None:
                tell_usage(answer)
        elif info is not None:
            kept = [] if answer is None else kept_lines(info, told.event_id)
            write(*error_lines(info), *kept, stream=sys.stderr)
        if not self._as_json:
            tell_servers(self._kernel.place.state_dir, self._servers)

    def _keep(self, told: _Told) -> None:
        """Add the answer to the document that is printed at the end (--json)."""
        from goondan.kernel.cli.commands.messages import answer_document

        event_id, answer, error = told.event_id, told.answer, told.error
        document: dict[str, Any] = {"eventId": event_id}
        if answer is not None:
            document = answer_document(event_id, answer, reasoning=self._wishes.reasoning)
        elif error is not None:
            document |= {"status": "failed", "error": error.info}
        else:
            document |= {"status": "completed", "response": "\n".join(told.lines)}
        self.documents.append(document if told.command is None else {**document, "command": f"/{told.command}"})


def _error_of(told: _Told) -> ErrorPayload | None:
    if told.error is not None:
        return told.error.info
    return told.answer.error if told.answer is not None else None


def _shown(line: Line) -> str:
    """A line as it is shown beside others."""
    from goondan.kernel.cli.plain import one_line

    text = f"line of {line.size} bytes" if line.data is None else line.data.decode("utf-8", "replace")
    return one_line(text, MAX_QUEUED_SHOWN)


def _command_of(line: Line) -> Command | None:
    """The console's command that a line is; None for a message."""
    from goondan.kernel.cli.console.commands import read_command

    if line.data is None or not line.data.startswith(b"/"):
        return None
    return read_command(line.data.decode("utf-8", "replace"))
