"""Finding the running kernel of a bundle, or starting one.

A command that talks to a swarm holds its kernel through `supervisor.sock` while it works. `gdn run` starts a kernel
that ends with the command. When no kernel runs, `gdn call` starts one. Other calls that come meanwhile share it, and it
ends with the last of them.

Source: docs/design/commands.md section 4.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from goondan.kernel import lock, rundir
from goondan.kernel.cli.commands import import_session
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.supervisor_client import ANSWER_S, PEER, READY_S, Reply, SupervisorClient, end_of, has_ended
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.cli.starting import Started

#: How long a command waits for a kernel that somebody else is just starting or stopping (seconds).
PATIENCE_S: Final = 20.0
#: How often it looks (seconds).
PATIENCE_POLL_S: Final = 0.02


class Kernel:
    """A running kernel, for as long as this command uses it: a context, at whose end it is let go. `pidfd` is readable
    when the kernel is gone.
    """

    def __init__(self, place: BundleTarget, pidfd: int) -> None:
        self.place = place
        self.pidfd = pidfd

    @property
    def entry_agent(self) -> str | None:
        """The agent that gets messages which name no agent. None when the bundle has no agent."""
        raise NotImplementedError

    @property
    def model(self) -> str | None:
        """The entry agent's model in a few words. None when it is not known."""
        return None

    @property
    def joinable(self) -> bool:
        """Whether `gdn run` may join it: it has a supervisor, and lives on without the command that started it."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Let the kernel go. If it ends with this command, or has ended, it is gone when this method returns.

        While an interrupt is being raised, this method does not wait for work that still runs.
        """
        raise NotImplementedError


class Supervised(Kernel):
    """A kernel whose supervisor knows that we use it. `started` is set when this command started it."""

    def __init__(self, place: BundleTarget, client: SupervisorClient, reply: Reply, started: Started | None) -> None:
        super().__init__(place, client.pidfd)
        self._client = client
        self._reply = reply
        self._started = started

    @property
    def joinable(self) -> bool:
        """As the supervisor says."""
        return self._reply.detached or self._reply.shared

    @property
    def entry_agent(self) -> str | None:
        """As the supervisor says."""
        return self._reply.entry_agent

    @property
    def model(self) -> str | None:
        """As the supervisor says."""
        return self._reply.model

    def finish(self) -> None:
        """Release the kernel. If it ends now, wait for its end."""
        interrupted = isinstance(sys.exception(), KeyboardInterrupt | SystemExit)
        try:
            over = self._client.ask("abandon" if interrupted else "release").stopping
        except GoondanError:  # it has ended
            over = True
        if self._started is not None:
            self._started.stop_soon()
            if over or not self._started.shared:
                self._started.wait_end()
            # else other calls use it, and the last of them ends it
        elif over:
            end_of(self.pidfd, self.place.state_dir)
        self._client.close()


def ticks_of(pid: int) -> int:
    """When a process began (ticks since the machine did); 0: it has ended. Raises OSError when there is none."""
    with open(f"/proc/{pid}/stat") as stat:
        state, *fields = stat.read().rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])  # perhaps nobody has asked yet how it ended


class ByHand(Kernel):
    """A broker that was started by hand, without a supervisor. This command neither starts nor ends it."""

    def __init__(self, place: BundleTarget, pid: int, pidfd: int, run_dir: str) -> None:
        super().__init__(place, pidfd)
        self.pid = pid
        self.run_dir = run_dir

    @property
    def started_ms(self) -> int:
        """When its process began: CLOCK_BOOTTIME in milliseconds."""
        return ticks_of(self.pid) * 1000 // os.sysconf("SC_CLK_TCK")

    @property
    def entry_agent(self) -> str | None:
        """The entry agent of the bundle. The bundle runs already, so the user need not agree to it here."""
        from goondan.kernel.bundle.loader import Asking, open_bundle

        place, asking = self.place, Asking(everything=True)
        return open_bundle(
            place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy, asking=asking, runs=False
        ).plan.entry_agent

    def finish(self) -> None:
        """Nothing to release."""
        os.close(self.pidfd)


def by_hand(place: BundleTarget) -> ByHand | None:
    """The broker of the bundle that runs without a supervisor. None when there is none.

    Raises GoondanError E_RUN_DIR, E_STATE.
    """
    record = lock.read_record(place.state_dir)
    if record is None or not record.by_hand:
        return None
    try:
        with (
            rundir.open_existing(record.run_dir) as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe,
        ):
            probe.settimeout(ANSWER_S)
            probe.connect(f"{directory.path}/{SOCKETS['client']}")
            pid, uid, _ = PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            if (pid, uid) != (record.pid, os.geteuid()):
                return None
            return ByHand(place, pid, os.pidfd_open(pid), record.run_dir)
    except OSError:
        return None


def attach(place: BundleTarget) -> Kernel:
    """Hold the running kernel of a bundle. Raises GoondanError E_KERNEL_NOT_RUNNING, E_RUN_DIR, E_STATE."""
    kernel = hold(place)
    if kernel is None:
        raise fail("E_KERNEL_NOT_RUNNING", f"no kernel runs {place.bundle}")
    import_session()
    return kernel


def attach_or_start(
    place: BundleTarget, allow_net: Sequence[str], meanwhile: Callable[[], object] = import_session
) -> Kernel:
    """Hold the running kernel of a bundle, or start one for as long as calls need it. `meanwhile` is called while it
    starts, and in any case.

    Raises GoondanError with the reason why it cannot start, and E_USAGE when `allow_net` is given and a kernel runs.
    """
    kernel, runs = _held_or_started(place, shared=True, allow_net=allow_net, meanwhile=meanwhile)
    if runs:
        _refuse_options(kernel, {"--allow-net": bool(allow_net), "--policy": place.policy is not None})
    return kernel


def join_or_start(place: BundleTarget, meanwhile: str) -> tuple[Kernel, bool]:
    """The kernel for `gdn run`: the one that runs detached or for calls, or a new one that ends with this command.
    Returns it, and whether it ran before. The module `meanwhile` is imported in any case.

    Raises GoondanError E_KERNEL_RUNNING for a kernel that belongs to another command, E_USAGE when options are given
    that only a new kernel can have, and the errors of `start_supervisor`.
    """
    kernel, runs = _held_or_started(place, meanwhile=partial(import_session, meanwhile))
    if runs:
        if not kernel.joinable:
            kernel.finish()
            message = f"another command runs {place.bundle}, and its kernel ends with it, or it was started by hand"
            suggestion = "Send messages with `gdn send`, or start the swarm with `gdn run --detach` and join it."
            raise fail("E_KERNEL_RUNNING", message, suggestion=suggestion)
        given = {"--policy": place.policy is not None, "--watch": place.watch, "--accept-loss": place.accept_loss}
        _refuse_options(kernel, given)
    return kernel, runs


def _refuse_options(kernel: Kernel, given: Mapping[str, bool]) -> None:
    """Let a kernel that runs already go, and raise GoondanError E_USAGE, if an option for a new one is given."""
    for option in (name for name, is_given in given.items() if is_given):
        kernel.finish()
        raise fail("E_USAGE", f"{option} applies only to a kernel that this command starts; one is running")


def _held_or_started(
    place: BundleTarget,
    *,
    shared: bool = False,
    allow_net: Sequence[str] = (),
    meanwhile: Callable[[], object] = import_session,
) -> tuple[Kernel, bool]:
    """The kernel that runs, or one that this command starts; and whether it ran before. `meanwhile` is called in any
    case. Raises the errors of `start_supervisor`.
    """
    until = time.monotonic() + PATIENCE_S
    while (kernel := hold(place)) is None:
        try:
            return start(place, shared=shared, allow_net=allow_net, meanwhile=meanwhile), False
        except GoondanError as error:
            if error.info.code != "E_KERNEL_RUNNING" or time.monotonic() >= until:
                raise
            time.sleep(PATIENCE_POLL_S)  # somebody else starts one, or one is just ending
    from goondan.kernel.cli import supervisor_ahead  # it was imported if a supervisor waits

    supervisor_ahead.end()  # this command may go on for long
    meanwhile()
    return kernel, True


def start(
    place: BundleTarget,
    *,
    shared: bool = False,
    allow_net: Sequence[str] = (),
    meanwhile: Callable[[], object] = import_session,
) -> Kernel:
    """Start a kernel that ends with this command, or `shared` with the last command that uses it. Raises the errors of
    `start_supervisor`.
    """
    from goondan.kernel.cli.starting import start_supervisor  # most commands find a kernel that runs

    started = start_supervisor(place, shared=shared, allow_net=allow_net, meanwhile=meanwhile)
    try:
        kernel = hold(place, started)
        if kernel is None:
            raise fail("E_KERNEL_LOST", f"the kernel ended as soon as it was ready; see {place.state_dir}/logs")
    except GoondanError:
        started.wait_end()
        raise
    except BaseException:
        if started.shared:  # another call may use it already
            started.stop_soon()
        else:
            started.kill()
        raise
    return kernel


def hold(place: BundleTarget, started: Started | None = None) -> Kernel | None:
    """Hold the kernel that runs; `started` if this command has started it. None when none runs. Waits while one is
    starting or stopping.

    Raises GoondanError E_RUN_DIR, E_STATE, E_KERNEL_LOST.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        client = SupervisorClient.connect(place.state_dir)
        if client is None:
            return by_hand(place)
        try:
            reply = client.ask("hold", READY_S)
        except GoondanError as error:
            gone = has_ended(client.pidfd, max(0.0, until - time.monotonic()))
            client.close()
            if not gone:
                raise
            if error.info.code in ("E_KERNEL_NOT_RUNNING", "E_KERNEL_LOST"):
                continue  # it was stopping, and is gone now
            return None  # its start failed, and the command that started it reports why
        return Supervised(place, client, reply, started)
