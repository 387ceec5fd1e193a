"""`supervisor.sock`, the commands' half and the messages of both; and all kernels of this user that run.

The supervisor's half is supervisor/command_socket.py.

One JSON object a line in, one a line out, any number on a connection. Operations:
- `{"op":"ps"}` -> `{"ok":true,"processes":[…],"privateCopy":…,"stateDir":…}`.
- `{"op":"stop"}` -> `{"ok":true}` at once; the stop is over when the process that listens here is gone.
- `{"op":"hold"}` -> when the kernel is ready `{"ok":true,"entryAgent":…,"model":…,"shared":…,"detached":…}`, or
  `{"error":…}` when it will not be. A kernel that `gdn call` started for itself (`shared`) lives until nobody holds it.
- `{"op":"release"}` -> `{"ok":true,"stopping":…}`. Closing the connection releases, too.
- `{"op":"abandon"}`: the same. If this ends the kernel, the kernel does not wait for running work.
- `{"op":"restart"}` -> as `hold`, when the kernel has restarted in place and is ready; or `{"error":…}`. First the
  bundle is read again. If it may not run, nothing stops. `"fresh":true`: all conversations begin again.
- `{"op":"restart","agent":NAME}` -> `{"ok":true,"restarted":N}` when the N processes of that agent are gone, each at
  the end of its step. Instances with work are started again. The bundle is not read.
- `{"op":"feature","feature":NAME,"question":…}` -> `{"ok":true,"answer":…}`: what the feature's client of the conductor
  answers (revisions/conductor.py).
- `{"op":"news","after":N}` -> `{"ok":true,"news":[…],"told":M}`: the news of a watched bundle after the first N lines,
  as soon as there is any.

Connections outlive a restart in place, and a kernel that they hold stays held.

No event loop is needed here, so `ps` and `stop` start quickly.

Kernels are found by the workspaces of the usual state root, and by the sockets of supervisors that the system lists.

Source: docs/design/commands.md section 4.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.kernel import lock, paths, rundir
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.worker.tool_host_reports import WorkerNews

#: How long a supervisor may take to accept and answer `ps` before it counts as hung (seconds).
ANSWER_S: Final = 5.0
#: How long `gdn stop` may take (seconds). The steps of the supervisor take less time together.
STOP_S: Final = 10.0
#: How long a start may take (seconds): the supervisor's own limit, and some time for the interpreter.
READY_S: Final = 40.0
#: How long a living kernel that cannot be reached is waited for (seconds): a supervisor looks after its runtime
#: directory every second (kernel/supervisor/__main__.py), and makes it again at once.
RETURN_S: Final = 3.0
#: How often (seconds).
RETURN_POLL_S: Final = 0.02
#: What SO_PEERCRED gives: pid, uid, gid.
PEER: Final = struct.Struct("3i")
#: What SO_SNDTIMEO takes: seconds, microseconds.
_TIMEVAL: Final = struct.Struct("@ll")


class ProcessInfo(msgspec.Struct, rename="camel", kw_only=True):
    """One line of `gdn ps`."""

    #: Its role.
    role: str
    #: Its name.
    name: str
    #: Its instance.
    instance_key: str | None = None
    #: Its pid on the host. None: there is no process.
    pid: int | None
    #: What it does.
    status: str
    #: When `status` began: RFC 3339.
    since: str
    #: How often it was restarted.
    restarts: int = 0
    #: Why it ended last.
    last_exit: str | None = None
    #: Of the broker: the folder of its sockets and of the operator's token.
    run_dir: str | msgspec.UnsetType = msgspec.UNSET
    #: Its memory (bytes), for who asks a door.
    memory: int | msgspec.UnsetType | None = msgspec.UNSET


def memory_of(pid: int | None) -> int | None:
    """The resident memory of a process (bytes). None: there is no such process."""
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


class Request(msgspec.Struct, rename="camel", omit_defaults=True):
    """A command's request."""

    #: The operation.
    op: str
    #: Of a restart: why, for the log.
    reason: str = ""
    #: Of a restart: the agent whose processes alone restart.
    agent: str | None = None
    #: Of a restart: conversations begin again.
    fresh: bool = False
    #: See the operation `news`.
    after: int = 0
    #: The feature that is asked.
    feature: str | None = None
    #: What it is asked.
    question: Any = None


class Reply(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """The supervisor's reply."""

    #: The operation was done.
    ok: bool = False
    #: Why it was not done.
    error: ErrorPayload | None = None
    #: The processes.
    processes: list[ProcessInfo] | None = None
    #: How each session of an MCP server is.
    servers: list[WorkerNews] | None = None
    #: Name of the entry agent.
    entry_agent: str | None = None
    #: The entry agent's model in a few words.
    model: str | None = None
    #: Other commands may use the kernel.
    shared: bool = False
    #: It runs without the command that started it.
    detached: bool = False
    #: The kernel is about to end.
    stopping: bool = False
    #: How many processes of an agent were restarted.
    restarted: int | None = None
    #: What has happened to a bundle that is watched.
    news: list[str] | None = None
    #: How many such lines there were in all.
    told: int = 0
    #: What a feature answers.
    answer: Any = None
    #: The folder that the bundle's code runs from, if others can write to its own folder.
    private_copy: str | None = None
    #: The state of the workspace.
    state_dir: str | None = None


class SupervisorClient:
    """A connection to the supervisor of one workspace."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self._connection = connection
        self._input = connection.makefile("rb")
        #: The supervisor; `pidfd` tells when it is gone.
        self.pid = pid
        self.pidfd = pidfd

    @classmethod
    def connect(cls, state_dir: str) -> SupervisorClient | None:
        """The supervisor of a workspace, found by the record in its state. None: there is none.

        Waits a little for a supervisor that is starting, or that makes its removed runtime directory again. Raises
        GoondanError E_RUN_DIR, E_STATE, E_KERNEL_LOST.
        """
        until = time.monotonic() + RETURN_S
        while True:
            record = lock.read_record(state_dir)
            if record is None or record.by_hand:
                return None
            client = cls.at(record.run_dir, record.pid)
            if client is not None or time.monotonic() >= until or not lock.is_held(state_dir):
                return client
            time.sleep(RETURN_POLL_S)

    @classmethod
    def at(cls, run_dir: str, expected: int | None = None) -> SupervisorClient | None:
        """The supervisor in a runtime directory; None if there is none, or not the one with the `expected` pid. Raises
        GoondanError E_RUN_DIR, E_KERNEL_LOST.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # A blocking connect waits while many others connect, too; Python's own timeout would give up at once.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(ANSWER_S), 0))
        try:
            with rundir.open_existing(run_dir) as directory:
                connection.connect(f"{directory.path}/{rundir.SUPERVISOR_SOCKET}")
            pid, uid, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            # A directory can be another kernel's after ours was killed.
            if expected in (None, pid) and uid == os.geteuid():
                return cls(connection, pid, os.pidfd_open(pid))
        except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
            pass
        except BlockingIOError:
            connection.close()
            raise fail("E_KERNEL_LOST", f"the supervisor in {run_dir} does not answer") from None
        except GoondanError:
            connection.close()
            raise
        connection.close()
        return None

    def ask(self, op: str, timeout_s: float | None = ANSWER_S, **more: Any) -> Reply:
        """One question; `more` are further fields of Request. `timeout_s` None: wait for as long as it takes.

        Raises GoondanError: the answer's error, or E_KERNEL_LOST when none comes.
        """
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(msgspec.json.encode(Request(op, **more)) + b"\n")
            line = self._input.readline()
            reply = msgspec.json.decode(line, type=Reply) if line else None
        except UnicodeEncodeError:
            raise fail("E_USAGE", "what was given is not UTF-8") from None
        except (OSError, msgspec.DecodeError):
            reply = None
        if reply is None:
            raise fail("E_KERNEL_LOST", "the supervisor went away without an answer")
        if reply.error is not None:
            raise GoondanError(reply.error)
        return reply

    def close(self) -> None:
        """Leave; a hold ends with it."""
        self._input.close()
        self._connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Whether a process has ended, or does within this time (seconds). The descriptor may have any number: a door has
    thousands, and `select.select` takes those up to 1023.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def end_of(pidfd: int, state_dir: str, timeout_s: float = STOP_S, *, leftovers: bool = True) -> bool:
    """Wait for the end of a supervisor. One that does not end in time is killed, and its leftovers are removed. Returns
    whether it ended by itself.

    `leftovers`: the processes and folders in the record of the workspace are this supervisor's.
    """
    if has_ended(pidfd, timeout_s):
        if leftovers:
            lock.clear_after_death(state_dir)  # a supervisor that ends in order leaves nothing
        return True
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    has_ended(pidfd, 1.0)
    lock.clear_after_death(state_dir)
    return False


#: How long a supervisor may take to answer (seconds): one that hangs keeps nobody from seeing the others.
OTHERS_ANSWER_S: Final = 1.0


def kernels() -> list[lock.KernelRecord]:
    """Their records, in the order of their bundles. One that does not answer, or whose state others can change, is
    left out.
    """
    workspaces = os.path.join(paths.state_root(), "workspaces")
    states: set[str] = set()
    with suppress(OSError):
        states.update(os.path.join(workspaces, name) for name in os.listdir(workspaces))
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            folder, _, name = line.rstrip("\n").rpartition("/")
            if name == rundir.SUPERVISOR_SOCKET and "/" in folder:
                with suppress(GoondanError, OSError):
                    states.update(_state_in(folder[folder.index("/") :]))
    found = []
    for state_dir in states:
        with suppress(GoondanError):
            record = lock.read_record(state_dir)
            if record is not None and lock.is_held(state_dir):
                found.append(record)
    return sorted(found, key=lambda record: (record.bundle, record.pid))


def _state_in(run_dir: str) -> list[str]:
    """The state of the kernel in this runtime directory, if there is one of ours. Raises GoondanError."""
    client = SupervisorClient.at(run_dir)
    if client is None:
        return []
    try:
        state_dir = client.ask("ps", OTHERS_ANSWER_S).state_dir
    finally:
        client.close()
    return [] if state_dir is None else [state_dir]


def ask_supervisor(state_dir: str, op: str, timeout_s: float | None = ANSWER_S, **more: Any) -> Reply | None:
    """One question to the supervisor of a workspace. None: there is none. Raises the errors of `connect` and `ask`."""
    client = SupervisorClient.connect(state_dir)
    if client is None:
        return None
    try:
        return client.ask(op, timeout_s, **more)
    finally:
        client.close()
