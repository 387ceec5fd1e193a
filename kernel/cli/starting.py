"""Starting a kernel: the supervisor that a command makes, its first words, and the question to a person before it.

Source: docs/design/commands.md section 4.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from goondan.kernel import paths
from goondan.kernel.bundle.rules.problems import BundleError, Problem
from goondan.kernel.cli import supervisor_ahead
from goondan.kernel.cli.commands import import_session
from goondan.kernel.cli.output import can_ask
from goondan.kernel.cli.state import BundleTarget, prepare
from goondan.kernel.spawn import environment, environment_file, memory_file
from goondan.kernel.start import SUPERVISOR
from goondan.kernel.supervisor.options import Options, command_line
from goondan.kernel.supervisor_client import READY_S, end_of
from goondan.kernel.traces.logs import open_log
from goondan.schemas.system.secrecy import close_memory
from goondan.schemas.wire import frames
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.grants.powers import Power

#: How often the user is asked about one start. Otherwise a bundle that changes after each answer would be asked about
#: without end.
MAX_QUESTIONS: Final = 3


class _Report(msgspec.Struct):
    """What the supervisor reports when its start fails."""

    #: The reason.
    error: frames.ErrorPayload
    #: The problems of the bundle.
    problems: list[Problem] = []
    #: How many more problems there are.
    dropped: int = 0


class Started:
    """A supervisor that this process has started. It stops when `parent_fd` is closed, unless it was let go."""

    def __init__(
        self,
        place: BundleTarget,
        *,
        detach: bool = False,
        shared: bool = False,
        allow_net: Sequence[str] = (),
        agreed: Sequence[Power] = (),
    ) -> None:
        """Start it. `agreed` are powers that the user has just agreed to.

        Raises GoondanError E_STATE when its log cannot be written.
        """
        logs = f"{place.state_dir}/logs"
        prepare(paths.root_of(place.state_dir), place.state_dir, make=True)
        paths.prepare_private(logs)
        ready_read, ready_write = os.pipe()
        parent_read, parent_write = os.pipe()
        agreed_fd = memory_file("agreed", msgspec.json.encode(list(agreed))) if agreed else None
        options = Options(
            bundle=place.bundle,
            state_dir=place.state_dir,
            ready_fd=ready_write,
            parent_fd=None if detach else parent_read,
            shared=shared,
            policy=place.policy,
            allow_net=[*allow_net],
            trust=place.trust,
            accept_loss=place.accept_loss,
            watch=place.watch,
            agreed_fd=agreed_fd,
            # The whole environment: the bundle may name any variable. The supervisor chooses what it hands on.
            environment_fd=environment_file(),
        )
        given = (ready_write, options.parent_fd, agreed_fd, options.environment_fd)
        pass_fds = [fd for fd in given if fd is not None]
        log: int | None = None
        try:
            log = open_log(f"{logs}/supervisor.log")
            self.pid = supervisor_ahead.take().start(
                SUPERVISOR,
                command_line(options),
                env=environment(os.environ),
                output_fd=log,
                pass_fds=pass_fds,
            )
        except OSError as error:
            os.close(ready_read)
            os.close(parent_write)
            raise fail("E_STATE", f"the supervisor could not be started: {error}") from None
        finally:
            for fd in (ready_write, parent_read, log, agreed_fd, options.environment_fd):
                if fd is not None:
                    os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)
        self._parent_fd = parent_write
        self._ready_fd = ready_read
        self._place = place
        #: Others may use it, and it ends with the last of them.
        self.shared = shared
        self._refused = False  # the record and the runtime directory are another kernel's

    def wait_ready(self) -> None:
        """Wait until the kernel is ready. Raises GoondanError with the reason when it will not be: BundleError
        with every problem of its bundle.
        """
        close_memory()  # soon it holds the kernel's token; while the supervisor starts, there is time for it
        data = b""
        until = time.monotonic() + READY_S
        while b"\n" not in data:
            readable, _, _ = select.select([self._ready_fd], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                self.kill()
                raise fail("E_KERNEL_SLOW", f"the kernel was not ready within {READY_S:g} s; see {self._log}")
            chunk = os.read(self._ready_fd, 65536)
            if not chunk:
                break
            data += chunk
        os.close(self._ready_fd)
        self._ready_fd = -1
        if data == b"\n":
            return
        try:
            report = msgspec.json.decode(data, type=_Report)
        except msgspec.DecodeError:
            self.wait_end()
            raise fail("E_KERNEL_LOST", f"the supervisor ended before it was ready; see {self._log}") from None
        self._refused = report.error.code == "E_KERNEL_RUNNING"
        self.wait_end()
        if report.problems:
            raise BundleError(report.problems, report.dropped)
        raise GoondanError(report.error)

    def let_go(self) -> None:
        """Leave it running on its own."""
        os.close(self.pidfd)

    def stop_soon(self) -> None:
        """Ask it to stop: close the pipe that also closes when this process dies."""
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1

    def wait_end(self) -> None:
        """Wait until the supervisor and all processes below it are gone. Processes that do not end in time are
        killed.
        """
        self.stop_soon()
        end_of(self.pidfd, self._place.state_dir, leftovers=not self._refused)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def kill(self) -> None:
        """Kill it. All processes below it die with their parent."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.wait_end()

    @property
    def _log(self) -> str:
        return f"{self._place.state_dir}/logs/supervisor.log"


def start_supervisor(
    place: BundleTarget,
    *,
    detach: bool = False,
    shared: bool = False,
    allow_net: Sequence[str] = (),
    meanwhile: Callable[[], object] | None = import_session,
) -> Started:
    """Start a supervisor, and wait until its kernel is ready. `meanwhile` is called at the same time.

    When the bundle asks for more than the user has agreed to (E_BUNDLE_UNTRUSTED), and a person is at the terminal, the
    person is asked. Raises GoondanError with the reason why it cannot start, BundleError among them.
    """
    agreed: Sequence[Power] = ()
    for left in reversed(range(MAX_QUESTIONS + 1)):
        started = Started(place, detach=detach, shared=shared, allow_net=allow_net, agreed=agreed)
        try:
            if meanwhile is not None:
                meanwhile()
            started.wait_ready()
        except GoondanError as error:
            if error.info.code != "E_BUNDLE_UNTRUSTED" or not left or not can_ask():
                raise
            from goondan.kernel.cli.consent import ask, look_again, remember

            inspected = look_again(place)
            if not inspected.judgement.trusted:  # otherwise the user has agreed in another terminal
                answer = ask(inspected)
                if answer == "no":
                    raise
                if answer == "always":
                    remember(inspected, place.state_dir, how="question")
            agreed = inspected.judgement.powers
        except BaseException:
            started.kill()
            raise
        else:
            return started
    raise AssertionError("the last start returns or raises")
