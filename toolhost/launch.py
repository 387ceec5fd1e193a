"""The tool host's end of the launcher: a plan becomes a request with the descriptors that belong to it.

It chooses nothing but which user number is free. Use from the main thread only: bubblewrap dies with the thread whose
child it is.

Source: sandbox.md section 3; delivery.md section 8.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from schemas.errors import fail
from schemas.worker_frames import WORKER_FD
from toolhost.launcher.request import Launch
from toolhost.limits.groups import Group
from toolhost.policy import ARGS_FD, BOOT_FD, FILES_FD, FILTER_FD, STATUS_FD, WORKDIR_FD, LaunchPlan
from toolhost.uids import Uids, instance_uid

#: Descriptors are moved above this before they go to their places, so that no place is taken by one of them.
_ABOVE: Final = 16
#: Where the launcher finds its socket.
_LAUNCHER_FD: Final = 3
#: The launcher answers within a millisecond once it runs; starting it takes some 50 ms on an idle machine (seconds).
_ANSWER_S: Final = 10.0
_MAX_ANSWER: Final = 4096
#: Handlers of ours must not reach it: what is ignored stays ignored through exec.
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Launched(NamedTuple):
    """A jail that has just been started. The caller owns every descriptor, reaps `pid`, and gives `uid` back.

    `pid` is bubblewrap outside the jail, `pidfd` refers to it; `channel` is our end of the worker's socket; `status`
    yields bubblewrap's JSON lines, `output` whatever is written to the jail's standard output and error. `uid` is the
    jail's user on this host, None when that is our own. `group` are its control groups, `counter` a descriptor that
    counts its processor time: None where there is none.
    """

    pid: int
    pidfd: int
    channel: socket.socket
    status: int
    output: int
    uid: int | None
    group: Group | None
    counter: int | None


class Launcher:
    """The launcher process of this process: started when it is needed, and again should it be gone."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._pid = 0
        self._registered = False

    def start(self) -> socket.socket:
        """See to it that it runs: our end of its socket. Raises OSError."""
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = os.path.join(os.path.dirname(os.path.realpath(__file__)), "launcher", "__main__.py")
        argv = [sys.executable, "-I", "-S", program, str(_LAUNCHER_FD)]
        with theirs:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._pid = _spawn(argv, {0: null, 1: null, 2: 2, _LAUNCHER_FD: theirs.fileno()})
            except OSError:
                ours.close()
                raise
            finally:
                os.close(null)
        ours.settimeout(_ANSWER_S)
        self._channel = ours
        if not self._registered:
            self._registered = True
            atexit.register(self.close)  # it would end by itself, but perhaps after us
        return ours

    def launch(self, request: Launch, fds: list[int]) -> tuple[int, int | None]:
        """The process id of what was started, and its counter. Raises GoondanError E_SANDBOX_UNAVAILABLE."""
        try:
            try:
                answer, counter = self._ask(request, fds)
            except OSError:  # it has ended, by whoever's hand; a new one does the same
                self.close()
                answer, counter = self._ask(request, fds)
        except OSError as error:
            self.close()
            raise fail("E_SANDBOX_UNAVAILABLE", f"the launcher does not answer: {error}") from None
        if "error" in answer:
            raise fail("E_SANDBOX_UNAVAILABLE", f"a jail could not be started: {answer['error']}")
        return int(answer["pid"]), counter

    def _ask(self, request: Launch, fds: list[int]) -> tuple[dict[str, Any], int | None]:
        channel = self.start()
        self._send(channel, request, fds)
        data, given, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("it has ended")
        answer: dict[str, Any] = json.loads(data)
        return answer, given[0] if given else None

    def prepare(self, owner_uid: int, owner_gid: int, uid: int) -> None:
        """Let it make what the next jail of that user will need, while nobody waits for it."""
        with suppress(OSError):
            self._send(self.start(), {"prepare": [owner_uid, owner_gid, uid]}, [])

    def _send(self, channel: socket.socket, message: Any, fds: list[int]) -> None:
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        channel.sendmsg([json.dumps(message).encode()], extra)

    def close(self) -> None:
        """End it and wait for its end, which is at once."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


#: One for the whole process: it costs some megabytes and does nothing between two jails.
LAUNCHER: Final = Launcher()
UIDS: Final = Uids(os.getpid())


def launch(plan: LaunchPlan) -> Launched:
    """Start the jail. Raises GoondanError: E_SANDBOX_DENIED (the workdir moved), E_SANDBOX_UNAVAILABLE (no start)."""
    given: list[int] = []  # descriptors of ours that are only for the jail
    kept: list[int] = []  # ours, closed only when the start fails
    channel: socket.socket | None = None
    uid: int | None = None
    group: Group | None = None
    try:
        channel, theirs = socket.socketpair()
        places = {WORKER_FD: theirs.detach()}
        given.append(places[WORKER_FD])
        channel.setblocking(False)
        status, places[STATUS_FD] = os.pipe()
        kept.append(status)
        given.append(places[STATUS_FD])
        output, places[1] = os.pipe()
        kept.append(output)
        given.append(places[1])
        places[2] = places[1]
        places[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        given.append(places[0])
        # The options as bubblewrap reads them: each followed by a zero byte.
        places[ARGS_FD] = _memory_file(b"".join(os.fsencode(option) + b"\0" for option in plan.options))
        given.append(places[ARGS_FD])
        places[FILTER_FD] = _memory_file(plan.filter)
        given.append(places[FILTER_FD])
        places[BOOT_FD] = _memory_file(_boot_plan(plan))
        given.append(places[BOOT_FD])
        for place, text in enumerate(plan.files, FILES_FD):
            places[place] = _memory_file(text.encode())
            given.append(places[place])
        if plan.open_workdir is not None:
            places[WORKDIR_FD] = _open_place(plan.open_workdir, "dir")
            given.append(places[WORKDIR_FD])
        staged = [_open_place(stage.source, stage.kind, given) for stage in plan.stages]
        if plan.stage is not None:
            uid = UIDS.take()
            if uid is None:
                raise fail("E_SANDBOX_UNAVAILABLE", "every user number for jails is in use")
        if plan.private is not None:
            _make_private(plan.private, plan.code)
        os.set_blocking(status, False)
        os.set_blocking(output, False)
        group = None if plan.group is None else Group(plan.group)
        request = _request(plan, list(places), uid, group)
        pid, counter = LAUNCHER.launch(request, [*(places[place] for place in request["places"]), *staged])
        pidfd = os.pidfd_open(pid)
    except BaseException as error:
        for fd in kept:
            os.close(fd)
        if channel is not None:
            channel.close()
        if uid is not None:
            UIDS.give_back(uid)
        if group is not None:
            group.remove()
        if isinstance(error, OSError):
            cause = error.strerror or str(error)
            raise fail("E_SANDBOX_UNAVAILABLE", f"a jail could not be started: {cause}") from None
        raise
    finally:
        for fd in given:
            os.close(fd)
    if uid is not None and (following := UIDS.next()) is not None:
        LAUNCHER.prepare(os.geteuid(), os.getegid(), following)
    return Launched(pid, pidfd, channel, status, output, uid, group, counter)


def _make_private(folder: str, code: str) -> None:
    """A folder for one jail that has no mounts: its home, its temporary files, and our code under its name there."""
    os.mkdir(folder, 0o700)
    for name in ("home", "tmp", "code"):
        os.mkdir(f"{folder}/{name}", 0o700)
    os.symlink(code, f"{folder}/code/goondan_tool")


def _boot_plan(plan: LaunchPlan) -> bytes:
    """What the boot stage puts up; bubblewrap installs the filter where there is one."""
    limits = [
        (number, value + _own_tasks() if number == resource.RLIMIT_NPROC and plan.tier == "reduced" else value)
        for number, value in plan.limits
    ]
    text = plan.filter.hex() if plan.tier == "reduced" else None  # msgpack of jails has no bytes
    return msgspec.msgpack.encode({"landlock": plan.landlock, "limits": limits, "filter": text, "calls": plan.calls})


def _own_tasks() -> int:
    """How many processes and threads this user has: without a user namespace a limit of processes counts them all."""
    found = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _request(plan: LaunchPlan, places: list[int], uid: int | None, group: Group | None) -> Launch:
    reduced = plan.tier == "reduced"
    return {
        "argv": plan.command if reduced else [plan.bwrap, "--args", str(ARGS_FD), "--", *plan.command],
        "env": plan.environment,
        "folder": plan.workdir if reduced else None,
        "places": [place for place in places if not reduced or place in (0, 1, 2, WORKER_FD, BOOT_FD)],
        "stage": plan.stage,
        "stages": [
            {
                "at": stage.at,
                "readOnly": stage.read_only,
                "owned": True,
                "folder": stage.kind == "dir",
                "unmapped": stage.unmapped,
            }
            for stage in plan.stages
        ],
        "uid": uid,
        "heir": None if plan.instance is None else instance_uid(plan.instance),
        "joins": [] if group is None else group.joins,
        "counted": group is None or not group.counts_cpu,
    }


def _memory_file(data: bytes) -> int:
    """A file in memory that will be read from its beginning."""
    fd = os.memfd_create("jail", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_place(path: str, kind: str, opened: list[int] | None = None) -> int:
    """The file or folder of that very path: a tool that can rename what is above it must not send us elsewhere."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECTORY if kind == "dir" else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be opened: {error.strerror}") from None
    if os.readlink(f"/proc/self/fd/{fd}") != path:
        os.close(fd)
        raise fail("E_SANDBOX_DENIED", f"{path} was replaced while a jail was being started")
    if opened is not None:
        opened.append(fd)
    return fd


def _spawn(argv: list[str], places: dict[int, int]) -> int:
    """posix_spawn with `places` (descriptor there -> descriptor here) and nothing else, not even an environment."""
    moved: list[int] = []
    # Whatever this process was given to inherit (tokens, status descriptors, a shell's leftovers) is not for it.
    actions: list[tuple[int, int] | tuple[int, int, int]] = [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()]
    try:
        for place, fd in places.items():
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
            moved.append(high)
            actions.append((os.POSIX_SPAWN_DUP2, high, place))
        return os.posix_spawn(
            argv[0], argv, {}, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
        )
    finally:
        for fd in moved:
            os.close(fd)


def _inheritable() -> list[int]:
    """Descriptors beyond the standard ones that would survive exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found
