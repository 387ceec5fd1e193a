"""A client's connection to a running kernel: events out, answers back, and one clear error when the kernel is lost.
With it: the files that a person sends with a message, and signals while a person or a script waits for an answer.

The first signal cancels the turn or call, the second ends the command. By default, asyncio cancels the main task at
every SIGINT. Then the turn or call would go on although nobody waits for it, and between two messages the conversation
would end.

Source: docs/design/commands.md section 4; docs/design/delivery.md sections 2 and 5; docs/files.md; docs/design/files.md
section 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from goondan.kernel import lock
from goondan.kernel.cli.attach import Kernel
from goondan.kernel.cli.one_message import TRANSPORT, Message, client_token, event_frame
from goondan.schemas.system import blob_files, secrecy
from goondan.schemas.transport import SOCKETS
from goondan.schemas.transport.link import Link
from goondan.schemas.wire import blobs, runtime_events
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, FilePart, Frame, ReplyTo, Shutdown, Welcome

if TYPE_CHECKING:
    from goondan.kernel.cli.observing import Observation, Observer

_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class OpenFile(NamedTuple):
    """A file that may be sent."""

    #: The file's descriptor.
    descriptor: int
    #: Its size (bytes).
    size: int
    #: What it is by its content.
    media_type: str
    #: The last part of its path.
    name: str


@contextmanager
def opened_files(paths: Sequence[str], *, links: bool = True) -> Iterator[list[OpenFile]]:
    """The files of one message, open inside this context. `links`: a path may lead over a link at its end. Raises
    GoondanError E_USAGE, E_FILE_INVALID.
    """
    if len(paths) > blobs.MAX_FILES:
        raise fail("E_FILE_INVALID", f"{len(paths)} files with one message, limit {blobs.MAX_FILES}")
    with ExitStack() as closing:
        flags = _FLAGS if links else _FLAGS | os.O_NOFOLLOW
        opened = [_open(path, flags, closing) for path in paths]
        check_together(opened)
        yield opened


def check_together(files: Sequence[OpenFile]) -> None:
    """Raise GoondanError E_FILE_INVALID unless these may go with one message."""
    if len(files) > blobs.MAX_FILES:
        raise fail("E_FILE_INVALID", f"more than {blobs.MAX_FILES} files with one message")
    if (size := sum(file.size for file in files)) > blobs.MAX_MESSAGE_BYTES:
        raise fail("E_FILE_INVALID", f"files of {size} bytes with one message, limit {blobs.MAX_MESSAGE_BYTES}")


@contextmanager
def opened_data(data: bytes, name: str) -> Iterator[OpenFile]:
    """A file of one message of which somebody has sent the content, open inside this context. Raises GoondanError
    E_FILE_INVALID.
    """
    media_type = blobs.media_type_of(data)
    if media_type is None or len(data) > blobs.MAX_FILE_BYTES:
        limit = f"png, jpeg, gif, webp or PDF of at most {blobs.MAX_FILE_BYTES} bytes"
        raise fail("E_FILE_INVALID", f"the file {name[:100]!r} is no {limit}")
    descriptor = os.memfd_create("sent", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as writing:
        writing.write(data)
        writing.flush()
        yield OpenFile(descriptor, len(data), media_type, name)


def _open(path: str, flags: int, closing: ExitStack) -> OpenFile:
    try:
        descriptor = os.open(path, flags)
        closing.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise fail("E_USAGE", f"{path}: is no regular file")
        media_type = blobs.media_type_of(os.pread(descriptor, blobs.HEAD_BYTES, 0))
    except OSError as error:
        raise fail("E_USAGE", f"{path}: cannot be read: {error.strerror}") from None
    if media_type is None:
        raise fail("E_FILE_INVALID", f"{path}: is no png, jpeg, gif, webp or PDF by its content")
    if status.st_size > blobs.MAX_FILE_BYTES:
        raise fail("E_FILE_INVALID", f"{path}: has {status.st_size} bytes, limit {blobs.MAX_FILE_BYTES}")
    name = os.path.basename(path).encode("utf-8", "replace").decode()
    return OpenFile(descriptor, status.st_size, media_type, name[-blobs.MAX_NAME_CHARS :])


#: How long a client waits for the broker's welcome (seconds). The supervisor kills a broker that hangs before that.
WELCOME_S: Final = 30.0
#: The codes of the errors of a kernel that is gone.
GONE: Final = ("E_KERNEL_LOST", "E_KERNEL_STOPPED")
#: At most so many ids of messages are named in an error.
MAX_NAMED: Final = 3
#: How long the acknowledgement of a large answer may take to leave (seconds). It takes well under a millisecond.
LINGER_S: Final = 0.2


_T = TypeVar("_T")

#: Gets the live events of a running turn from `Session.ask`. It must not raise.
Listener = Callable[[runtime_events.RuntimeEvent], None]


class Session:
    """An open link of class client. Use it with `async with`, which waits `patience_s` seconds for the broker's
    welcome. `accepted` are the ids of events that the broker has accepted from this command before.
    """

    def __init__(self, kernel: Kernel, patience_s: float = WELCOME_S, accepted: Sequence[str] = ()) -> None:
        self._kernel = kernel
        self._patience_s = patience_s
        self._accepted = accepted
        self._link: Link | None = None
        self._run = os.urandom(8).hex()
        self._count = 0
        self._linger_s = 0.0
        #: The kernel has said that it stops.
        self._stopping = False
        #: The frames that were accepted, but not answered, when the kernel ended.
        self._kept: frozenset[str] = frozenset()
        #: The frames that wait for an answer: their ids, and those of their events.
        self._asked: dict[str, str] = {}
        #: Frame type -> what is called at such a frame, which can have been lost before; so also at each connection.
        self._hears: dict[str, Callable[[], None]] = {}
        #: Event id -> the listener of its live events.
        self._listeners: dict[str, Listener] = {}
        #: Observations, by their names.
        self._observations: dict[str, Observation] = {}
        #: Done when the supervisor has gone.
        self.lost: asyncio.Future[None]

    async def __aenter__(self) -> Self:
        secrecy.close_memory()
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        # The command that waits for the connection reports its end once. The loop must not report it a second time.
        loop.set_exception_handler(lambda loop, context: None)
        loop.add_reader(self._kernel.pidfd, self._gone)
        run_dir, token = self._read_token()
        endpoint = f"ipc://{run_dir}/{SOCKETS['client']}"
        self._link = Link(
            endpoint,
            token,
            on_frame=self._on_frame,
            on_welcome=self._on_welcome,
            renew_token=lambda: self._read_token()[1],
            transport=TRANSPORT,
        )
        try:
            await self._link.start(self._patience_s)
        except (GoondanError, asyncio.CancelledError) as error:
            loop.remove_reader(self._kernel.pidfd)
            if self.lost.done():
                raise self.lost_error() from None
            if isinstance(error, GoondanError) and error.info.code == "E_KERNEL_NOT_RUNNING":
                raise fail("E_KERNEL_LOST", f"the broker in {run_dir} does not answer") from None
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._kernel.pidfd)
        if self._link is not None:
            # Acknowledgements of answers may get lost. So the socket lingers only for those that free a file.
            await self._link.close(self._linger_s)

    def _read_token(self) -> tuple[str, str]:
        found = client_token(self._kernel.place.state_dir)
        if found is None:
            self._stopping = True  # a kernel that ends in order leaves no record
            raise self.lost_error()
        return found

    def on(self, frame_type: str, call: Callable[[], None]) -> None:
        """Call this at each frame of this type, and at each connection: frames before it can be lost."""
        self._hears[frame_type] = call

    def _on_welcome(self, _: Welcome) -> None:
        for heard in self._hears.values():
            heard()
        if self._link is not None:
            for one in list(self._observations.values()):
                one.begin_again(self._link)

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == "shutdown":
            with suppress(GoondanError):
                self._stopping = from_raw(frame.payload, Shutdown).reason != "restart"
        if (heard := self._hears.get(frame.type)) is not None:
            heard()
        if frame.type == "observed" and (observation := self._observations.get(frame.in_reply_to or "")) is not None:
            with suppress(GoondanError):
                observation.hear(frame)
            return
        listener = self._listeners.get(frame.event_id or "") if frame.type == "runtime.event" else None
        if listener is None:
            return
        with suppress(GoondanError):  # a kind of event that this version does not know
            listener(from_raw(frame.payload, runtime_events.RuntimeEvent))

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._kernel.pidfd)
        if not self.lost.done():
            self.lost.set_result(None)
        if self._link is not None:
            self._kept = self._link.accepted()
            self._closing = asyncio.ensure_future(self._link.close(0))  # every waiting request ends with an error

    @property
    def over(self) -> bool:
        """Whether nothing can be asked any more: the kernel has gone, or refuses us."""
        return self._link is None or self.lost.done() or self._link.closed.done()

    def new_id(self) -> str:
        """An event id that nobody else uses."""
        self._count += 1
        return f"{self._run}-{self._count}"

    async def ask(
        self,
        message: Message,
        *,
        timeout_s: float | None = None,
        listener: Listener | None = None,
        on_accepted: Callable[[Frame], None] | None = None,
    ) -> Answer:
        """Send a message and wait for its answer. `listener` gets the live events of the turn, `on_accepted` its
        acceptance; neither may raise.

        Raises GoondanError: the broker's refusal, E_AGENT_TIMEOUT after `timeout_s` seconds, E_KERNEL_STOPPED,
        E_KERNEL_LOST.
        """
        frame = self._frame(message, timeout_s)
        event_id = frame.event_id or ""
        frame.reply_to = ReplyTo("client", event_id)
        if listener is not None:
            frame.live = True
            self._listeners[event_id] = listener
        waiting = self._open.ask(frame, on_accepted=on_accepted)
        self._asked[frame.id] = event_id
        try:
            answered = await self._wait(waiting, frame, timeout_s)
        finally:
            self._listeners.pop(event_id, None)
            if not self.lost.done():  # what a lost kernel had accepted is told at the end
                self._asked.pop(frame.id, None)
        if len(memoryview(answered.payload)) > blobs.INLINE_FRAME_BYTES // 2:
            self._linger_s = LINGER_S
        answer = from_raw(answered.payload, AgentEvent).answer
        if answer is None:
            raise fail("E_AGENT_FAILED", "the agent's answer is empty")
        return answer

    async def observe(self, wish: runtime_events.Observe, listener: Observer) -> Observation:
        """Hear of the turns that `wish` names, whoever has asked for them. `listener` gets numbered events, and what it
        has missed; it must not raise. `Observation.read` says what it has read. Raises GoondanError.
        """
        from goondan.kernel.cli.observing import Observation  # few commands observe

        observation = Observation(wish, listener, self._observations)
        try:
            await self._wait(*observation.begin(self._open), WELCOME_S)
        except BaseException:
            observation.close()
            raise
        return observation

    async def tell(self, message: Message, timeout_s: float) -> str | None:
        """Send a message and wait until it is accepted. Returns its trace, None where the broker no longer knows it.
        Raises the errors of `ask`.
        """
        frame = self._frame(message, None)
        return (await self._wait(self._open.post(frame), frame, timeout_s)).trace_id

    def lay_down(self, files: Sequence[OpenFile]) -> list[FilePart]:
        """Copy the files of a message into the folder of large payloads, from which its event names them. They survive
        what messages survive. Raises GoondanError E_BLOB_UNAVAILABLE, E_DISK_FULL, E_STATE, E_FILE_INVALID.
        """
        welcome = self._open.welcome
        if not files:
            return []
        if welcome.blobs is None:
            raise fail("E_BLOB_UNAVAILABLE", "this process has no access to the folder of large payloads")
        place, sync = blob_files.BlobFolder(welcome.blobs), welcome.durability == "power"
        return [
            FilePart(place.copy(file.descriptor, file.size, sync=sync), file.media_type, file.name or None)
            for file in files
        ]

    async def admin(self, request: dict[str, Any], timeout_s: float | None = WELCOME_S) -> dict[str, Any]:
        """Ask the broker itself. Raises GoondanError; E_USAGE for what no frame can hold."""
        try:
            frame = Frame("admin", payload=to_raw(request))
        except (UnicodeEncodeError, OverflowError):
            raise fail("E_USAGE", "what was given is not UTF-8, or has an integer of more than 64 bits") from None
        return from_raw((await self._wait(self._open.post(frame), frame, timeout_s)).payload, dict)

    async def cancel(self, event_id: str, timeout_s: float | None = None) -> str:
        """Cancel an event and wait until it has ended. Returns how it ended: `cancelled`, or as it had ended before.

        Raises GoondanError: E_EVENT_NOT_FOUND, E_AGENT_TIMEOUT when it has not ended after `timeout_s` seconds.
        """
        return str((await self.admin({"op": "cancel", "eventId": event_id}, timeout_s)).get("state"))

    @property
    def _open(self) -> Link:
        if self._link is None or self.lost.done():
            raise self.lost_error()
        return self._link

    async def _wait(self, waiter: asyncio.Future[Frame], frame: Frame, timeout_s: float | None) -> Frame:
        try:
            # Not wait_for: in Python 3.11 it forgets to be cancelled when the answer comes that very moment.
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            self._open.forget(frame.id)
            raise self._late(frame, timeout_s or 0.0) from None
        except asyncio.CancelledError:
            if self._link is not None:
                self._link.forget(frame.id)
            raise
        except GoondanError as error:
            if self.lost.done() or error.info.code == "E_TOKEN_INVALID":
                raise self._lost_with(frame) from None
            raise

    def _late(self, frame: Frame, timeout_s: float) -> GoondanError:
        """The error for a frame that has no answer after this time."""
        if frame.type != "event":
            return fail("E_AGENT_TIMEOUT", f"no answer within {timeout_s:g} s")
        message = f"no answer to the message {frame.event_id} within {timeout_s:g} s"
        suggestion = (
            f"Give it more time (--timeout). The same command with `--event-id {frame.event_id}` asks for what became "
            "of it: a turn that has ended is not repeated."
        )
        return fail("E_AGENT_TIMEOUT", message, suggestion=suggestion)

    def _frame(self, message: Message, timeout_s: float | None) -> Frame:
        return event_frame(message, message.event_id or self.new_id(), timeout_s)

    def _lost_with(self, frame: Frame) -> GoondanError:
        """The error for one frame that was sent."""
        if frame.type != "event" or not self._was_stopped:
            return self.lost_error()
        if frame.id in self._kept or frame.event_id in self._accepted:
            return _stopped([frame.event_id or ""])
        message = f"the kernel was stopped before it had accepted the message {frame.event_id}"
        return fail("E_KERNEL_STOPPED", message, suggestion="Send it again when the kernel runs.")

    def lost_error(self) -> GoondanError:
        """The error for everything that a lost kernel left without an answer."""
        if self._was_stopped:
            asked = [event_id for frame_id, event_id in self._asked.items() if frame_id in self._kept]
            return _stopped([*dict.fromkeys((*self._accepted, *asked))])
        return fail("E_KERNEL_LOST", f"the kernel ended unexpectedly; see {self._kernel.place.state_dir}/logs")

    @property
    def _was_stopped(self) -> bool:
        """Whether the kernel ended in order. It says so; and a kernel that ends in order leaves no record."""
        if not self._stopping and self.lost.done():
            with suppress(GoondanError):
                self._stopping = lock.read_record(self._kernel.place.state_dir) is None
        return self._stopping


def over_session(
    kernel: Kernel,
    work: Callable[[Session], Awaitable[_T]],
    patience_s: float = WELCOME_S,
    *,
    accepted: Sequence[str] = (),
) -> _T:
    """Do some work over a session with a kernel. Raises what it raises, and the errors of Session."""

    async def go() -> _T:
        async with Session(kernel, patience_s, accepted) as session:
            return await work(session)

    return asyncio.run(go())


def _stopped(kept: list[str]) -> GoondanError:
    """The error of a command whose kernel was stopped. `kept` are the ids of its messages that the kernel keeps."""
    if not kept:
        return fail("E_KERNEL_STOPPED", "the kernel was stopped")
    named = ", ".join(kept[:MAX_NAMED]) + (f" and {len(kept) - MAX_NAMED} more" if len(kept) > MAX_NAMED else "")
    what = f"message {named} is kept, and its turn goes on"
    if len(kept) > 1:
        what = f"messages {named} are kept, and their turns go on"
    message = f"the kernel was stopped; the {what} at the next start"
    suggestion = f"Then `gdn send` with the same words and `--event-id {kept[0]}` waits for the answer."
    return fail("E_KERNEL_STOPPED", message, suggestion=suggestion)


#: How long a command that was told to end waits for the end of the work that it has cancelled (seconds). A tool host
#: kills a jail that does not stop within 2 s.
CANCEL_S: Final = 10.0
#: Added to a signal's number: the exit status that a shell reports.
EXIT_SIGNAL: Final = 128


class Interrupts:
    """A context in which signals (SIGINT if none is named) call `target`. Enter it in a running loop of the main
    thread.
    """

    def __init__(self, target: Callable[[], object], *signals: signal.Signals) -> None:
        self.target = target
        self._signals = signals or (signal.SIGINT,)
        #: The last signal that came. 0: none.
        self.number = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in self._signals}
        for number in self._signals:
            self._loop.add_signal_handler(number, self.came, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)

    @property
    def status(self) -> int:
        """The exit status of a command that such a signal has ended. 0: no signal came."""
        return EXIT_SIGNAL + self.number if self.number else 0

    def came(self, number: signal.Signals) -> None:
        """Handle a signal that has come."""
        self.number = number
        self.target()


class Cancelling:
    """Waits for answers while `came` may be called. The first call cancels `events()`, the second ends the waiting.

    `cancel` cancels one event (Session.cancel). The first call also calls `on_first`. When no second call follows, the
    waiting ends after `patience_s` seconds.
    """

    def __init__(
        self,
        cancel: Callable[[str], Awaitable[object]],
        events: Callable[[], Iterable[str]],
        *,
        on_first: Callable[[], object] | None = None,
        patience_s: float | None = CANCEL_S,
    ) -> None:
        self._cancels = cancel
        self._events = events
        self._on_first = on_first
        self._patience_s = patience_s
        self._waiting: asyncio.Future[Any] | None = None
        self._asked: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Whether `came` was called at all, and whether the waiting was given up.
        self.came_first = False
        self.left = False

    async def wait(self, waiting: asyncio.Future[_T]) -> _T | None:
        """Wait for `waiting`, and return its result. None when the waiting was given up (`left`). Raises what `waiting`
        raises.
        """
        self._waiting = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self.left:
                raise  # another caller has cancelled
            return None
        finally:
            waiting.cancel()
            if self._timer is not None:
                self._timer.cancel()
            for task in self._asked:
                task.cancel()

    def came(self) -> None:
        """Handle a signal: somebody wants the work to end."""
        if self.came_first:
            self._leave()
            return
        self.came_first = True
        loop = asyncio.get_running_loop()
        self._asked = [loop.create_task(self._cancel(event_id)) for event_id in self._events()]
        if self._patience_s is not None:
            self._timer = loop.call_later(self._patience_s, self._leave)
        if self._on_first is not None:
            self._on_first()

    def _leave(self) -> None:
        self.left = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _cancel(self, event_id: str) -> None:
        # It has just ended, or the command that waits for the answer gets the error.
        with suppress(GoondanError):
            await self._cancels(event_id)


def was_cancelled(info: ErrorPayload | None) -> bool:
    """Whether this error is the end of cancelled work."""
    return info is not None and info.code == "E_CANCELLED"
