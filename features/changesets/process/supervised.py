"""The supervisor's side of changesets: asks the worker, one task after another, and has what was committed taken over.

A task whose worker is killed is given to the next one: that completes or undoes what was begun, and finds what was
done.

What finishes a changeset comes before what begins one. When all openings came first, the worktree that was made first
would wait for all others to be made before it is committed. Then everything that is under way is lost, all at once,
whenever the kernel is killed. With commits first, a changeset is through soon after it was opened, however many wait.
No opening waits for ever: there are no more commits than were opened.

Source: docs/decisions/067.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from goondan.features.changesets import wire
from goondan.kernel.spawn import command, memory_file, start_program
from goondan.kernel.traces.logs import open_log
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.features.changesets.process.worker import Answer, Task
    from goondan.kernel.supervisor.conductor import Conductor
    from goondan.kernel.supervisor.reaping import Child, Exit

#: Commits and reverts, what a broker has to know, openings, and worktrees that may go. A smaller number comes first.
FINISHING: Final = 0
ASKING: Final = 1
OPENING: Final = 2
REMOVING: Final = 3


class WorkerQueue:
    """Those who wait for the worker. Of one kind, who came first is first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._busy = False

    @asynccontextmanager
    async def turn(self, kind: int) -> AsyncIterator[None]:
        """Alone with the worker."""
        if self._busy:
            came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (kind, next(self._numbers), came))
            try:
                await came
            except asyncio.CancelledError:
                if came.done() and not came.cancelled():
                    self._next()  # it was its turn already
                raise
        self._busy = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, _, came = heapq.heappop(self._waiting)
            if not came.done():
                came.set_result(None)
                return
        self._busy = False


#: How long a task may take (seconds): each git command has a limit of its own, and a commit has some twenty.
TASK_S: Final = 120.0
#: How many workers may end in the middle of one task before it is given up: each of them does it from its beginning. A
#: task that ends its workers by itself keeps the others waiting for some seconds.
MAX_TRIES: Final = 20
#: How long the start of a worker may take, with all those that are killed before they begin with the task (seconds). On
#: a busy machine one takes a second, so that kills in a row seldom meet one that has got further.
START_S: Final = 60.0
#: How long a worker without work stays (seconds): its start takes as long as a commit.
IDLE_S: Final = 15.0

_log = logging.getLogger("supervisor")


class Tries:
    """The workers that have ended while one task was theirs. `now` is seconds of a clock that never goes back."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._failed = 0

    def ended(self, now: float, *, begun: bool) -> None:
        """One has, after it had `begun` with the task or before. Raises GoondanError E_CHANGESET_IO when no other one
        is to try.
        """
        if begun:
            self._failed += 1
            self._started = now
        if self._failed >= MAX_TRIES:
            raise fail("E_CHANGESET_IO", f"the changeset worker ended {MAX_TRIES} times in the same task")
        if now - self._started >= START_S:
            raise fail("E_CHANGESET_IO", f"no changeset worker has started within {START_S:g} s")


class Changesets:
    """The changesets of one kernel: a client of its conductor."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._reader = conductor.reader
        self._queue = WorkerQueue()
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: socket.socket | None = None
        self._child: Child | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    def heard(self, payload: Raw) -> None:
        """A message of the broker's half."""
        try:
            message = wire.decode_to_supervisor(payload)
        except codec.DECODE_ERRORS as error:
            _log.error("the broker sent no message about changesets: %s", error)
            return
        if isinstance(message, wire.ChangesetAsked):
            if message.wish.request not in self._asked:  # a broker after the one that asked asks again
                self._asked.add(message.wish.request)
                self._soon(self._serve(message.wish))
        elif isinstance(message, wire.ChangesetsOver):
            self._soon(self._remove(message.changeset_ids))
        else:
            self._soon(self._say_held())

    async def ask(self, question: Any) -> Any:
        """Take the commit of a changeset back; `question` is its id. Answers with a CommittedChangeset. Raises
        GoondanError.
        """
        if not isinstance(question, str):
            raise fail("E_USAGE", "a changeset that is to be taken back has an id")
        from goondan.features.changesets.process.worker import Task

        answer = await self._done(FINISHING, lambda: Task(revert=question, powers=self._conductor.powers))
        if answer.committed is None:
            raise AssertionError("a revert is answered with what was committed")
        return msgspec.to_builtins(answer.committed)

    def close(self) -> None:
        """End what still runs: the next kernel completes or undoes it."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._end_worker()

    # --- inside

    def _tell(self, message: wire.ToBroker) -> None:
        self._conductor.tell(wire.FEATURE, codec.to_raw(message))

    async def _serve(self, wish: wire.ChangesetWish) -> None:
        from goondan.features.changesets.process.worker import Task

        try:
            kind = OPENING if wish.commit is None else FINISHING
            answer = await self._done(kind, lambda: Task(wish=wish, powers=self._conductor.powers))
            done = answer.done or wire.ChangesetDone(request=wish.request)
        except GoondanError as error:
            done = _failed(wish, error.info)
        self._asked.discard(wish.request)
        self._tell(wire.ChangesetAnswered(done))

    async def _remove(self, changeset_ids: list[str]) -> None:
        from goondan.features.changesets.process.worker import Task

        try:
            await self._done(REMOVING, lambda: Task(remove=changeset_ids))
        except GoondanError as error:
            _log.warning("worktrees of changesets were not removed: %s", error)

    async def _say_held(self) -> None:
        """Without a folder of changesets there are no changesets, and nobody has to look."""
        from goondan.features.changesets.bundle.entries import FOLDER

        if not os.path.isdir(os.path.join(self._reader.options.state_dir, FOLDER)):
            self._tell(wire.ChangesetsHeld([]))
            return
        from goondan.features.changesets.process.worker import Task

        try:
            self._tell(wire.ChangesetsHeld((await self._done(ASKING, Task)).held))
        except GoondanError as error:
            _log.warning("the worktrees of changesets were not looked at: %s", error)

    async def _done(self, kind: int, task: Callable[[], Task]) -> Answer:
        """Have a task done, and what it has committed taken over; `kind` says who is next. Raises GoondanError."""
        async with self._queue.turn(kind), self._reader.turn:
            tries = Tries(self._reader.loop.time())
            while (answer := await self._ask(task(), tries)) is None:
                _log.warning("the changeset worker was ended in the middle of a task")
            if answer.revision is not None:
                try:
                    await self._conductor.take_over(answer.revision)
                except GoondanError as error:  # the commit is there, and the next start has it
                    _log.error("what a changeset has committed was not taken over: %s", error)
            return answer

    async def _ask(self, task: Task, tries: Tries) -> Answer | None:
        """One task; None when the worker ended, and another one may try. Raises GoondanError."""
        from goondan.features.changesets.process.worker import LENGTH
        from goondan.features.changesets.process.worker import Answer as Given

        if self._closed:
            raise fail("E_CHANGESET_IO", "the kernel is stopping")
        if self._idle is not None:
            self._idle.cancel()
        channel = self._channel or self._start()
        data = msgspec.msgpack.encode(task)
        loop, begun = self._reader.loop, False
        try:
            async with asyncio.timeout(TASK_S):
                await loop.sock_sendall(channel, LENGTH.pack(len(data)) + data)
                begun = not LENGTH.unpack(await _exactly(loop, channel, LENGTH.size))[0]
                size = LENGTH.unpack(await _exactly(loop, channel, LENGTH.size))[0]
                answer = msgspec.msgpack.decode(await _exactly(loop, channel, size), type=Given)
        except TimeoutError:
            self._end_worker()
            raise fail("E_CHANGESET_IO", f"the changeset worker did not answer within {TASK_S:g} s") from None
        except (OSError, EOFError):
            self._end_worker()
            tries.ended(loop.time(), begun=begun)
            return None
        except asyncio.CancelledError:
            self._end_worker()
            raise
        self._idle = loop.call_later(IDLE_S, self._end_worker)
        return answer

    def _start(self) -> socket.socket:
        """A worker. Raises GoondanError E_CHANGESET_IO."""
        reader = self._reader
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        given = [memory_file("options", msgspec.msgpack.encode(reader.options)), theirs.detach()]
        options_fd, channel_fd = given
        try:
            log = open_log(reader.log_path)
            given.append(log)
            arguments = ["--options-fd", str(options_fd), "--channel-fd", str(channel_fd)]
            pid = start_program(
                command("goondan.features.changesets.process.worker", [*arguments, "--parent-pid", str(os.getpid())]),
                env=os.environ,  # the bundle may name any variable
                output_fd=log,
                pass_fds=[options_fd, channel_fd],
            )
        except OSError as error:
            ours.close()
            raise fail("E_CHANGESET_IO", f"the changeset worker could not be started: {error}") from None
        finally:
            for fd in given:
                os.close(fd)
        child = reader.reaper.watch(pid, lambda seen: self._ended(pid, seen), leads_group=True)
        if child is None:
            raise AssertionError(f"the changeset worker, pid {pid}, cannot be watched")
        self._child, self._channel = child, ours
        return ours

    def _ended(self, pid: int, seen: Exit) -> None:
        if self._child is not None and self._child.pid == pid:
            if not seen.clean:
                _log.warning("the changeset worker ended: %s", seen.cause)
            self._child = None

    def _end_worker(self) -> None:
        """It has nothing to do any more, or does not do it."""
        channel, child = self._channel, self._child
        self._channel = self._child = None
        if channel is not None:
            channel.close()
        if child is not None:
            # All of its group, and not by force: git removes its locks from the repository.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        task = self._reader.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _failed(wish: wire.ChangesetWish, error: frames.ErrorPayload) -> wire.ChangesetDone:
    """The answer when there is no worker that could give one."""
    if wish.commit is None:
        return wire.ChangesetDone(request=wish.request, error=error)
    committed = wire.CommittedChangeset(
        status="failed",
        changeset_id=wish.commit.changeset_id,
        base_ref="",
        error=wire.ChangesetError("E_CHANGESET_IO", error.message),
    )
    return wire.ChangesetDone(request=wish.request, committed=committed)


async def _exactly(loop: asyncio.AbstractEventLoop, channel: socket.socket, size: int) -> bytes:
    """Raises EOFError at the end."""
    parts: list[bytes] = []
    while size > 0:
        part = await loop.sock_recv(channel, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
