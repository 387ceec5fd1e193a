"""The handover from a supervisor to the program that takes its place, under the same pid and with the same descriptors.

The locks of the kernel, its runtime directory, the socket that commands connect to and every command that is connected
stay open across execve. So no other process can become the kernel in between, and commands go on without an
interruption. All other processes were ended before. The new program starts its own.

The values pass in a memory file, because a plan holds keys.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from goondan.kernel import premises, spawn
from goondan.kernel.bundle.loader import OpenedBundle
from goondan.kernel.grants.powers import Power
from goondan.kernel.supervisor.command_socket import Waiting
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire import errors, frames

_log = logging.getLogger("supervisor")


class Handover(Struct, kw_only=True):
    """Everything that the new program needs."""

    #: The locks, the runtime directory and the record.
    held: premises.Held
    #: The socket that commands connect to.
    listener_fd: int
    #: The commands that are connected.
    waiting: list[Waiting]
    #: The plan that runs if the bundle cannot be read any more (msgpack of KernelPlan).
    plan: bytes
    #: What that plan asks for beyond its jails.
    powers: list[Power]
    #: The plan of the revision that ran, for the case that there is no new program.
    plan_before: bytes
    #: What that plan asks for beyond its jails.
    powers_before: list[Power]
    #: Why it restarts, for the log.
    reason: str
    #: The umask of whoever started the kernel.
    umask: int
    #: When the kernel was started (seconds since 1970).
    started_at: float
    #: How often it was restarted in place.
    restarts: int
    #: Of a kernel that ends with its last user: it had a user.
    held_once: bool = False
    #: Of a kernel that ends with its last user: its starter is gone.
    parent_gone: bool = False
    #: Why there is no new program. Then the old one goes on with all this.
    error: frames.ErrorPayload | None = None

    @property
    def descriptors(self) -> list[int]:
        """What stays open."""
        held = self.held
        kept = [held.folder_fd, held.lock_fd, held.alive_fd, held.run_dir_fd, self.listener_fd]
        return kept + [waiting.fd for waiting in self.waiting]

    def checked(self) -> OpenedBundle:
        """What runs if the bundle cannot be read any more."""
        return OpenedBundle(msgspec.msgpack.decode(self.plan, type=KernelPlan), self.powers)


def read(fd: int) -> Handover:
    """What was handed over; the descriptor is closed. Raises GoondanError E_USAGE."""
    try:
        with open(fd, "rb") as source:
            return msgspec.msgpack.decode(source.read(), type=Handover)
    except (OSError, msgspec.DecodeError) as error:
        raise errors.fail("E_USAGE", f"what was handed over cannot be read: {error}") from None


def stay(handover: Handover, refused: OSError) -> Handover:
    """The system refused the next program: what a supervisor in this one goes on with, the revision that ran."""
    message = f"the kernel could not be replaced and goes on as it was: {refused.strerror}"
    _log.error("%s", message)
    error = errors.error_payload("E_RESTART_FAILED", message)
    return msgspec.structs.replace(handover, plan=handover.plan_before, powers=handover.powers_before, error=error)


def execute(handover: Handover, arguments: Sequence[str], inherited: Sequence[int]) -> OSError:
    """Replace this program by a new supervisor. `arguments` are its command line but for `--resume-fd`, `inherited` are
    further descriptors that it gets. Returns only when the system refuses, with the reason.
    """
    passed = [*handover.descriptors, *inherited]
    files: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, premises.SIGNALS)
    try:
        files.append(spawn.memory_file("handover", msgspec.msgpack.encode(handover)))
        files.append(spawn.environment_file())
        for fd in [*passed, *files]:
            os.set_inheritable(fd, True)
        by_fd = ["--environment-fd", str(files[1]), "--resume-fd", str(files[0])]
        argv = spawn.command("goondan.kernel.supervisor", [*arguments, *by_fd])
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(argv[0], argv, spawn.environment(os.environ))
    except OSError as error:
        refused = error
    for fd in passed:
        os.set_inheritable(fd, fd == handover.held.alive_fd)
    for fd in files:
        os.close(fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return refused
