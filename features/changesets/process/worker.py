"""`python -m goondan.features.changesets.process.worker`: does the git work of a kernel's changesets, task by task.

A process of its own, started when there is something to do: neither the broker nor the supervisor waits for a disk, and
agents need not see the repository. Tasks and answers pass over a socket, each with its length before it. If an earlier
worker was killed in a task, that task is completed or undone first.

Source: docs/decisions/067.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import struct
import sys
from typing import Final

import msgspec
from msgspec import Struct

from goondan.features.changesets.bundle.recovery import locked
from goondan.features.changesets.process.engine import Engine, not_committed
from goondan.features.changesets.process.proposed import refusal
from goondan.features.changesets.wire import ChangesetDone, ChangesetWish, CommittedChangeset, HeldChangeset
from goondan.kernel.grants.powers import Power
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.reader import Revision, RevisionRefused, read
from goondan.kernel.supervisor.reader import Task as Reading
from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.wire.errors import GoondanError

#: What is before every message: its length in bytes.
LENGTH: Final = struct.Struct("!I")
#: A worker sends this message without content when it begins with a task. A worker that is killed before that has not
#: tried the task.
BEGUN: Final = LENGTH.pack(0)


class Answer(Struct, frozen=True, kw_only=True):
    """The result of a task."""

    #: Of a wish: its answer.
    done: ChangesetDone | None = None
    #: Of a revert: how the commit ended.
    committed: CommittedChangeset | None = None
    #: Of the other tasks: the changesets whose worktrees exist.
    held: list[HeldChangeset] = []
    #: The bundle as it is now, if a commit has changed it.
    revision: Revision | None = None


class Task(Struct, frozen=True, kw_only=True):
    """A task. With none of `wish`, `revert` and `remove` it asks which worktrees there are."""

    #: A request of an agent.
    wish: ChangesetWish | None = None
    #: The changeset that is to be taken back.
    revert: str | None = None
    #: The changesets whose worktrees are removed.
    remove: list[str] = []
    #: The powers of the revision that runs.
    powers: list[Power] = []


class Worker:
    """Carries tasks out."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._seen: Revision | None = None

    def carry_out(self, task: Task) -> Answer:
        """One task. Raises nothing of its own."""
        self._seen = None
        engine = Engine(self._options, task.powers)
        with locked(engine.folder, wait=True):
            engine.recover()
            if task.wish is not None:
                done = self._wish(engine, task.wish, task.powers)
                return Answer(done=done, revision=self._revision(done.committed, task.powers))
            if task.revert is not None:
                try:
                    committed = engine.revert(task.revert, lambda: self._look(task.powers))
                except GoondanError as error:
                    committed = not_committed(task.revert, "", error.info)
                return Answer(committed=committed, revision=self._revision(committed, task.powers))
            engine.remove(task.remove)
            return Answer(held=engine.held())

    def _wish(self, engine: Engine, wish: ChangesetWish, powers: list[Power]) -> ChangesetDone:
        try:
            if wish.open is not None:
                return ChangesetDone(request=wish.request, opened=engine.open(wish, wish.open.reason))
            if wish.commit is None:
                raise AssertionError("a wish is one of the two")
            committed = engine.commit(
                wish.commit.changeset_id,
                wish.commit.message,
                agent=wish.agent,
                instance_key=wish.instance_key,
                look=lambda: self._look(powers),
            )
            return ChangesetDone(request=wish.request, committed=committed)
        except GoondanError as error:
            return ChangesetDone(request=wish.request, error=error.info)

    def _look(self, powers: list[Power]) -> None:
        """The bundle as it stands in the checkout. Raises GoondanError when it may not run."""
        found = read(Reading(self._options, powers))
        if isinstance(found, RevisionRefused):
            raise refusal(found)
        self._seen = found

    def _revision(self, committed: CommittedChangeset | None, powers: list[Power]) -> Revision | None:
        """What the bundle is after a commit. Whoever was killed behind one has not said it."""
        if committed is None or committed.status != "ok":
            return None
        if self._seen is None:
            try:
                self._look(powers)
            except GoondanError as error:
                logging.getLogger("changesets").warning("the bundle as it is now does not run: %s", error)
        return self._seen


def receive(channel: socket.socket) -> bytes | None:
    """One message; None at the end."""
    head = _exactly(channel, LENGTH.size)
    return None if head is None else _exactly(channel, LENGTH.unpack(head)[0])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size > 0:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """0 when nobody wants anything any more."""
    secrecy.close_memory()
    startup.close_to_others()
    parser = argparse.ArgumentParser(prog="python -m goondan.features.changesets.process.worker")
    parser.add_argument(
        "--options-fd", type=int, required=True, help="descriptor of the supervisor's options (msgpack)"
    )
    parser.add_argument("--channel-fd", type=int, required=True, help="socket of tasks and answers")
    parser.add_argument("--parent-pid", type=int, required=True, help="end when this process ends")
    given = parser.parse_args(arguments)
    startup.set_process_name("gdn-changesets")
    startup.die_with_parent(given.parent_pid)
    begin_log("supervisor")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    with open(given.options_fd, "rb") as source:
        worker = Worker(msgspec.msgpack.decode(source.read(), type=Options))
    os.set_inheritable(given.channel_fd, False)
    with socket.socket(fileno=given.channel_fd) as channel:
        while (data := receive(channel)) is not None:
            channel.sendall(BEGUN)
            answer = msgspec.msgpack.encode(worker.carry_out(msgspec.msgpack.decode(data, type=Task)))
            channel.sendall(LENGTH.pack(len(answer)) + answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
