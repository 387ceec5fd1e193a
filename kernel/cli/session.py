"""A client's connection to a running kernel: events out, answers back, and one clear error when the kernel is lost.

Source: docs/design/commands.md section 4; docs/design/delivery.md section 5.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from goondan.kernel import lock, rundir
from goondan.kernel.cli.attach import Kernel
from goondan.kernel.cli.message_files import OpenFile, lay_down
from goondan.schemas.system.secrecy import close_memory
from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import AgentEvent, Answer, FilePart, Frame, ReplyTo, Shutdown, Welcome
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.wire.tokens import SOCKETS

#: The broker's code for a question of clients that nothing in it answers, as when the feature for it is not there.
NO_SUCH_QUESTION: Final = "E_FRAME_INVALID"
#: The AgentEvent.type of a message that a person sends.
USER_MESSAGE: Final = "user.message"
#: How long a client waits for the broker's welcome (seconds). The supervisor kills a broker that hangs before that.
WELCOME_S: Final = 30.0
#: The codes of the errors of a kernel that is gone.
GONE: Final = ("E_KERNEL_LOST", "E_KERNEL_STOPPED")
#: At most so many ids of messages are named in an error.
MAX_NAMED: Final = 3
#: How long the acknowledgement of a large answer may take to leave (seconds). It takes well under a millisecond.
LINGER_S: Final = 0.2


#: Gets the live events of a running turn from `Session.ask`. It must not raise.
Listener = Callable[[RuntimeEvent], None]


class Session:
    """An open link of class client. Use it with `async with`, which waits `patience_s` seconds for the broker's
    welcome.
    """

    def __init__(self, kernel: Kernel, patience_s: float = WELCOME_S) -> None:
        self._kernel = kernel
        self._patience_s = patience_s
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
        #: Done when the supervisor has gone.
        self.lost: asyncio.Future[None]

    async def __aenter__(self) -> Self:
        close_memory()
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
        """The kernel's runtime directory, and the token that it keeps there for us."""
        record = lock.read_record(self._kernel.place.state_dir)
        if record is None:
            raise self.lost_error()
        try:
            with rundir.open_existing(record.run_dir) as directory:
                return directory.path, rundir.read_private(directory, rundir.CLIENT_TOKEN)
        except OSError as error:
            raise fail("E_KERNEL_LOST", f"the kernel's token cannot be read: {error.strerror}") from None

    def on(self, frame_type: str, call: Callable[[], None]) -> None:
        """Call this at each frame of this type, and at each connection: frames before it can be lost."""
        self._hears[frame_type] = call

    def _on_welcome(self, _: Welcome) -> None:
        for heard in self._hears.values():
            heard()

    def _on_frame(self, frame: Frame) -> None:
        if frame.type == "shutdown":
            with suppress(GoondanError):
                self._stopping = from_raw(frame.payload, Shutdown).reason != "restart"
        if (heard := self._hears.get(frame.type)) is not None:
            heard()
        listener = self._listeners.get(frame.event_id or "") if frame.type == "runtime.event" else None
        if listener is None:
            return
        with suppress(GoondanError):  # a kind of event that this version does not know
            listener(from_raw(frame.payload, RuntimeEvent))

    def _gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._kernel.pidfd)
        if not self.lost.done():
            self.lost.set_result(None)
        if self._link is not None:
            self._kept = self._link.accepted()
            self._closing = asyncio.ensure_future(self._link.close(0))  # every waiting request ends with an error

    def new_id(self) -> str:
        """An event id that nobody else uses."""
        self._count += 1
        return f"{self._run}-{self._count}"

    async def ask(
        self,
        agent: str,
        instance: str,
        kind: str,
        input: Any,
        *,
        event_id: str,
        workdir: str | None = None,
        timeout_s: float | None = None,
        listener: Listener | None = None,
        trace_id: str | None = None,
        files: list[FilePart] | None = None,
    ) -> Answer:
        """Send an event and wait for its answer. `listener` gets the live events of the turn; it must not raise.
        `trace_id` None: a new trace. `files` are those that `lay_down` returned.

        Raises GoondanError: the broker's refusal, E_AGENT_TIMEOUT after `timeout_s` seconds, E_KERNEL_STOPPED,
        E_KERNEL_LOST.
        """
        frame = self._frame(agent, instance, kind, input, event_id, workdir, timeout_s, files)
        frame.trace_id = trace_id
        frame.reply_to = ReplyTo("client", event_id)
        if listener is not None:
            frame.live = True
            self._listeners[event_id] = listener
        waiting = self._open.ask(frame)
        self._asked[frame.id] = event_id
        try:
            answered = await self._wait(waiting, frame, timeout_s)
        finally:
            self._listeners.pop(event_id, None)
            if not self.lost.done():  # what a lost kernel had accepted is told at the end
                self._asked.pop(frame.id, None)
        if len(memoryview(answered.payload)) > INLINE_FRAME_BYTES // 2:
            self._linger_s = LINGER_S
        answer = from_raw(answered.payload, AgentEvent).answer
        if answer is None:
            raise fail("E_AGENT_FAILED", "the agent's answer is empty")
        return answer

    async def tell(
        self,
        agent: str,
        instance: str,
        kind: str,
        input: Any,
        *,
        event_id: str,
        workdir: str | None = None,
        timeout_s: float | None = None,
        trace_id: str | None = None,
        files: list[FilePart] | None = None,
    ) -> str | None:
        """Send an event and wait until it is accepted. Returns its trace, None where the broker no longer knows it.
        Raises the errors of `ask`.
        """
        frame = self._frame(agent, instance, kind, input, event_id, workdir, None, files)
        frame.trace_id = trace_id
        return (await self._wait(self._open.post(frame), frame, timeout_s)).trace_id

    def lay_down(self, files: Sequence[OpenFile]) -> list[FilePart]:
        """Put the files of a message where its event can name them. Raises the errors of message_files.lay_down."""
        welcome = self._open.welcome
        return lay_down(files, welcome.blobs, sync=welcome.durability == "power")

    async def admin(self, request: dict[str, Any], timeout_s: float | None = WELCOME_S) -> dict[str, Any]:
        """Ask the broker itself. Raises GoondanError."""
        frame = Frame("admin", payload=to_raw(request))
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

    def _frame(
        self,
        agent: str,
        instance: str,
        kind: str,
        input: Any,
        event_id: str,
        workdir: str | None,
        timeout_s: float | None,
        files: list[FilePart] | None,
    ) -> Frame:
        said = encode_value([kind, input, [file.blob.digest for file in files or ()]])
        event = AgentEvent(id=event_id, type=kind, created_at=rfc3339(time.time()), input=input, instance_key=instance)
        return Frame(
            "event",
            to=agent,
            instance_key=instance,
            event_id=event_id,
            workdir=workdir,
            deadline_ms=None if timeout_s is None else max(1, int(timeout_s * 1000)),
            files=files or None,
            digest=hashlib.sha256(said).hexdigest(),  # without the time: --event-id may be given once more
            payload=to_raw(event),
        )

    def _lost_with(self, frame: Frame) -> GoondanError:
        """The error for one frame that was sent."""
        if frame.type != "event" or not self._was_stopped:
            return self.lost_error()
        if frame.id in self._kept:
            return _stopped([frame.event_id or ""])
        message = f"the kernel was stopped before it had accepted the message {frame.event_id}"
        return fail("E_KERNEL_STOPPED", message, suggestion="Send it again when the kernel runs.")

    def lost_error(self) -> GoondanError:
        """The error for everything that a lost kernel left without an answer."""
        if self._was_stopped:
            return _stopped([event_id for frame_id, event_id in self._asked.items() if frame_id in self._kept])
        return fail("E_KERNEL_LOST", f"the kernel ended unexpectedly; see {self._kernel.place.state_dir}/logs")

    @property
    def _was_stopped(self) -> bool:
        """Whether the kernel ended in order. It says so; and a kernel that ends in order leaves no record."""
        if not self._stopping and self.lost.done():
            with suppress(GoondanError):
                self._stopping = lock.read_record(self._kernel.place.state_dir) is None
        return self._stopping


def _stopped(kept: list[str]) -> GoondanError:
    """The error of a command whose kernel was stopped. `kept` are the ids of its messages that the kernel keeps."""
    if not kept:
        return fail("E_KERNEL_STOPPED", "the kernel was stopped")
    named = ", ".join(kept[:MAX_NAMED]) + (f" and {len(kept) - MAX_NAMED} more" if len(kept) > MAX_NAMED else "")
    if len(kept) == 1:
        message = f"the kernel was stopped; the message {named} is kept, and its turn goes on at the next start"
    else:
        message = f"the kernel was stopped; the messages {named} are kept, and their turns go on at the next start"
    suggestion = f"Then `gdn send` with the same words and `--event-id {kept[0]}` waits for the answer."
    return fail("E_KERNEL_STOPPED", message, suggestion=suggestion)
