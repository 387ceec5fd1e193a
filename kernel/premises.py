"""The two places that a running kernel has: its folder in the state, with locks and record, and its runtime directory.

`enter` takes both. Nothing of an earlier kernel is touched before `is_quiet` says that nobody of it lives; `settle`
clears it then. `leave` takes everything away that `enter` has made, but for the locks. A restart in place keeps both:
`resume` takes over what `held` names.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from goondan.kernel import lock, paths, rundir
from goondan.schemas.system.directories import Directory
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.errors import GoondanError, fail

#: Signals that wait, at a restart in place, until the new program can handle them: their default would end it.
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Held(Struct, kw_only=True):
    """The descriptors of what makes a process the kernel of a workspace and its record, as plain values: they stay open
    across a restart in place (kernel/supervisor/handover.py).
    """

    #: The folder of the locks and of the record.
    folder_fd: int
    #: The lock of the supervisor.
    lock_fd: int
    #: The lock that every trusted process of the kernel holds.
    alive_fd: int
    #: The runtime directory.
    run_dir_fd: int
    #: The path of the runtime directory, without links.
    run_dir: str
    #: The record of the kernel.
    record: lock.KernelRecord


class Premises:
    """What `enter` gives. `run_dir` is the path of the runtime directory, without links."""

    def __init__(self, locks: lock.Locks, directory: Directory, record: lock.KernelRecord, unused: list[str]) -> None:
        self._locks = locks
        self._directory = directory
        self._record = record
        self._settled = False
        #: Why runtime directories that come first were not used, a sentence each.
        self.unused = unused

    @classmethod
    def enter(
        cls, bundle: str, state_dir: str, run_dir: str | None = None, *, by_hand: bool = False, base: str | None = None
    ) -> Premises:
        """Become the kernel of a workspace and say so. `run_dir` is a runtime directory that was named by hand; `base`
        stands in for /tmp.

        Raises GoondanError E_KERNEL_RUNNING, E_STATE, E_RUN_DIR.
        """
        locks = lock.lock(state_dir)
        try:
            base = base or paths.FRESH_BASE
            directory, unused = rundir.take(
                paths.run_dirs(bundle, base=base),
                name=paths.runtime_name(bundle),
                state_dir=state_dir,
                given=run_dir,
                base=base,
            )
        except GoondanError:
            locks.close()
            raise
        earlier = lock.held_record(locks)
        record = lock.KernelRecord(
            pid=os.getpid(),
            bundle=bundle,
            run_dir=directory.path,
            state_dir=state_dir,
            started_at=rfc3339(time.time()),
            by_hand=by_hand,
            leftovers=[] if earlier is None else sorted({earlier.run_dir, *earlier.leftovers}),
        )
        made = cls(locks, directory, record, unused)
        try:
            made._write()
        except OSError as error:
            locks.close()
            raise fail("E_STATE", f"{state_dir}: {error.strerror}") from None
        return made

    @classmethod
    def resume(cls, held: Held) -> Premises:
        """Go on as the kernel that this process was before it was replaced, or that failed to replace itself.

        Raises GoondanError E_STATE.
        """
        # Our own lock would not tell us of a process that has inherited it: they are one.
        alive_fd = lock.open_alive(held.folder_fd, held.record.state_dir)
        os.close(held.alive_fd)
        locks = lock.Locks(held.folder_fd, held.lock_fd, alive_fd)
        return cls(locks, Directory(held.run_dir_fd, held.run_dir), held.record, [])

    def held(self) -> Held:
        """For `resume`; this object is not used any more."""
        locks = self._locks
        return Held(
            folder_fd=locks.folder_fd,
            lock_fd=locks.lock_fd,
            alive_fd=locks.alive_fd,
            run_dir_fd=self._directory.fd,
            run_dir=self.run_dir,
            record=self._record,
        )

    @property
    def run_dir(self) -> str:
        """The path of the runtime directory, without links."""
        return self._directory.path

    @property
    def alive_fd(self) -> int:
        """What every trusted process of this kernel inherits."""
        return self._locks.alive_fd

    def is_ours(self, pid: int) -> bool:
        """Whether a process has inherited what every trusted process of this kernel does."""
        try:
            theirs = os.stat(f"/proc/{pid}/fd/{self.alive_fd}")
        except OSError:
            return False
        return os.path.samestat(theirs, os.fstat(self.alive_fd))

    def is_quiet(self) -> bool:
        """Whether no process of an earlier kernel lives."""
        return lock.is_quiet(self._locks)

    def settle(self, keep: Sequence[str] = ()) -> None:
        """No process of an earlier kernel lives. Remove its files, except those in `keep`, which are ours already."""
        rundir.sweep(self._directory, keep)
        self._settled = True
        if self._record.leftovers:
            for path in self._record.leftovers:
                if path != self.run_dir:
                    rundir.clear(path)
            self._record.leftovers = []
            self._write()

    def describe(self, entry_agent: str, revision: str) -> None:
        """The bundle is loaded: say in the record what it is."""
        self._record.entry_agent, self._record.revision = entry_agent, revision
        self._write()

    def write(self, name: str, data: bytes) -> None:
        """Write a file that only we can read into the runtime directory. Raises OSError."""
        rundir.write_private(self._directory.fd, name, data)

    def is_intact(self) -> bool:
        """Whether the runtime directory and the supervisor's socket in it are still there."""
        return rundir.is_intact(self._directory) and rundir.owner_of(self._directory, rundir.SUPERVISOR_SOCKET) in (
            os.geteuid(),
            0,
        )

    def restore(self) -> None:
        """Make the runtime directory again where it was. Raises GoondanError E_RUN_DIR."""
        if not rundir.is_intact(self._directory):
            lost, self._directory = self._directory, rundir.again(self._directory)
            lost.close()

    def clear(self) -> None:
        """Remove the runtime directory, as far as nobody writes into it any more."""
        if self._settled:
            rundir.remove(self._directory)
        if not rundir.is_intact(self._directory):
            self._directory.close()  # some disks free it only now, which takes milliseconds

    def leave(self) -> None:
        """The kernel ends: nothing of it is left. Files that it could not remove stay for the next one."""
        self.clear()
        if self._settled:
            lock.remove_record(self._locks)
        self._directory.close()
        self._locks.close()

    def _write(self) -> None:
        lock.write_record(self._locks, self._record)
