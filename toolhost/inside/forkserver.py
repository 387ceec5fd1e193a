"""The first worker of a jail whose tool says `isolation: call`. It forks a worker for each call, puts up the walls
around it, and loads no tool.

The call's first process puts up the walls, before its tool. The process begins in new process, mount and IPC
namespaces, as a copy of the fork server. It has two capabilities and the server's descriptors, and gives all of them up
here. Then it forks. The parent is process 1 of the namespace and only waits. The child is the worker, and returns from
`enter`. When process 1 ends, Linux ends every process of the namespace.

If a wall cannot be put up, the process ends, and the call with it.

It holds only the code of this folder, and no other process can look into it. For each call the host sends it the
descriptors of a new worker. The call itself goes over that worker's own socket, and this process does not see it. All
that it reads comes from the host.

It makes a child with the system call clone, because the child must be the first process of a new namespace, and only
one system call does both. The interpreter is not told. That is safe here: this process has one thread, and the child
forks again, in the way that the interpreter knows, before it does anything else.

Source: docs/design/sandbox.md section 5; toolhost/policy/launch_plan.py computes the plan; schemas/WORKER.md section 9.
"""

from __future__ import annotations

import gc
import posix
import sys
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket
from select import POLLIN, poll

from . import confine, wire, worker
from .confine import call, fail, landlock, limit, open_places, wait
from .wire import FD, READ_BYTES, Frames, framed

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn


# --- the walls around one call ----------------------------------------------------------------------------------------

_READ_ONLY, _BIND, _RECURSIVE = 1, 4096, 16384
_O_PATH, _O_NOFOLLOW = 0o10000000, posix.O_NOFOLLOW
_S_IFMT, _S_IFDIR = 0o170000, 0o040000
_ALL = 0xFFFFFFFF


class Walls:
    """What every call of this jail needs for its walls, prepared once."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan` is the jail's boot plan."""
        calls = plan["calls"]
        self.limits = [(number, value) for number, value in plan["limits"] if number == confine.RLIMIT_NOFILE]
        self.landlock = plan["landlock"]
        self.kept = [path.encode("utf-8", "surrogateescape") for path in calls["kept"]]
        self.covered = [path.encode() for path in calls["covered"]]
        self.fresh = [
            (fresh["kind"].encode(), fresh["at"].encode(), fresh["flags"], fresh["options"].encode())
            for fresh in calls["fresh"]
        ]
        # Places that no call can change are opened once, before any call: later a link could stand there. Each call
        # opens its fresh places itself. The descriptors of the former are the lowest, so one range keeps them.
        rules = [] if self.landlock is None else self.landlock["rules"]
        self.own = [(path, rights) for path, rights in rules if self._is_fresh(path.encode("utf-8", "surrogateescape"))]
        self.places = open_places([rule for rule in rules if rule not in self.own], plan["seen"])
        self.last_place = max((place for place, _ in self.places), default=FD)
        self.workdir = calls["workdir"]
        self.drop = calls["drop"]
        self.filter = confine.Filter(bytes.fromhex(calls["filter"]))

    def _is_fresh(self, path: bytes) -> bool:
        at = [place for _, place, _, _ in self.fresh]
        return _is_below(path, at) and not _is_below(path, self.kept)


def enter(walls: Walls, channel: int, output: int) -> None:
    """Become the worker of one call, with the socket `channel`, and print to `output`. Returns in the worker only."""
    try:
        posix.dup2(output, 1)
        posix.dup2(output, 2)
        posix.dup2(channel, FD, False)  # in place of the server's own
        posix.close(channel)
        posix.close(output)
        call("close_range", walls.last_place + 1, _ALL, 0)
        posix.setpgid(0, 0)  # or else a signal to its own group would reach the server and all other calls
        _mount(walls)
        posix.chdir(walls.workdir)  # the old one leads to what is covered now
        confine.bound_capabilities(walls.drop)
        confine.drop_capabilities()
        walls.filter.install()
        worker = posix.fork()
        if worker:
            wait(worker)
        if walls.landlock is not None:
            # Not on process 1, which must stay out of the worker's reach.
            landlock(walls.landlock, walls.places + open_places(walls.own, {}))
        for number, value in walls.limits:
            limit(number, value)
        call("prctl", confine.PR_SET_DUMPABLE, 1, 0, 0, 0)  # what the server hides, this process has none of
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{type(error).__name__}: {error}")


def _is_below(path: bytes, places: list[bytes]) -> bool:
    return any(path == place or path.startswith(place + b"/") for place in places)


def _mount(walls: Walls) -> None:
    kept = [(path, posix.open(path, _O_PATH | _O_NOFOLLOW | posix.O_CLOEXEC)) for path in walls.kept]
    for kind, at, flags, options in walls.fresh:
        if kind == b"tmpfs":
            call("mount", b"none", at, kind, flags, options)
    for path, fd in kept:
        _make(path, posix.fstat(fd).st_mode & _S_IFMT == _S_IFDIR)
        call("mount", f"/proc/self/fd/{fd}".encode(), path, None, _BIND | _RECURSIVE, None)
        posix.close(fd)
    for kind, at, flags, options in walls.fresh:
        if kind == b"devpts":
            try:
                call("mount", b"none", at, kind, flags, options)
            except OSError:  # some kernels want a user 0 for it: then there are no terminals, and not another call's
                call("mount", b"none", at, b"tmpfs", flags | _READ_ONLY, b"size=4k")
        elif kind != b"tmpfs":
            call("mount", b"none", at, kind, flags, options)
    for path in walls.covered:
        call("mount", b"/dev/null", path, None, _BIND, None)


def _make(path: bytes, is_folder: bool) -> None:
    """An empty place to mount on, and the folders above it."""
    names = path.split(b"/")
    for depth in range(2, len(names) + is_folder):
        try:  # noqa: SIM105 # contextlib is not imported here
            posix.mkdir(b"/".join(names[:depth]), 0o755)
        except FileExistsError:
            pass
    if not is_folder:
        posix.close(posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC, 0o644))


# --- the server -------------------------------------------------------------------------------------------------------

#: Descriptors of one frame: the worker's socket, and the pipe for what it prints.
DESCRIPTORS = 2
#: CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID, and SIGCHLD at the end.
_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 17
_SIGKILL = 9


class Server:
    """The fork server of one jail."""

    def __init__(self, walls: Walls) -> None:
        self._walls = walls
        self._channel = socket(fileno=FD)
        self._frames = Frames()
        #: Descriptors that the host has sent, two for each worker, in order.
        self._descriptors: list[int] = []
        #: The workers by their pidfds: process id, and the host's number of the call.
        self._children: dict[int, tuple[int, int]] = {}
        self._poll = poll()
        self._poll.register(FD, POLLIN)

    def run(self) -> None:
        """Serve. Returns in the worker of a call; in the server itself never."""
        self._send({"type": "ready", "protocol": worker.PROTOCOL, "exports": []})
        while True:
            for fd, _ in self._poll.poll():
                if fd != FD:
                    self._ended(fd)
                elif self._serve():
                    return

    def _serve(self) -> bool:
        """Read and handle what the host has sent; True in a process that is the worker of a call now."""
        space = CMSG_SPACE(4 * DESCRIPTORS)
        data, extra, _, _ = self._channel.recvmsg(READ_BYTES, space, MSG_CMSG_CLOEXEC)
        for _, _, content in extra:
            words = range(0, len(content) - 3, 4)
            self._descriptors += [int.from_bytes(content[at : at + 4], sys.byteorder) for at in words]
        if not data:
            posix._exit(0)
        return any(self._handle(wire.unpack(body)) for body in self._frames.feed(data))

    def _handle(self, frame: dict[str, Any]) -> bool:
        kind = frame["type"]
        if kind == "fork":
            return self._fork(frame["cell"])
        if kind == "kill":
            for pid, cell in self._children.values():
                if cell == frame["cell"]:
                    posix.kill(pid, _SIGKILL)
        elif kind == "exit":
            posix._exit(0)
        return False

    def _fork(self, cell: int) -> bool:
        """Make the worker of a call; whether this is it."""
        channel, output, *self._descriptors = self._descriptors
        problem = None
        try:
            pid = call("clone", _NAMESPACES, 0, 0, 0, 0)
        except OSError as error:
            pid, problem = -1, str(error)
        if pid == 0:
            self._channel.detach()  # its number is the worker's own socket from now on
            enter(self._walls, channel, output)
            return True
        posix.close(channel)
        posix.close(output)
        if pid < 0:
            self._send({"type": "ended", "cell": cell, "status": confine.FAILED, "message": problem})
        else:
            pidfd = posix.pidfd_open(pid)
            self._children[pidfd] = (pid, cell)
            self._poll.register(pidfd, POLLIN)
            self._send({"type": "forked", "cell": cell, "pid": pid})
        return False

    def _ended(self, pidfd: int) -> None:
        pid, cell = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        posix.close(pidfd)
        code = posix.waitstatus_to_exitcode(posix.waitpid(pid, 0)[1])
        self._send({"type": "ended", "cell": cell, "status": 128 - code if code < 0 else code})

    def _send(self, frame: dict[str, Any]) -> None:
        self._channel.sendall(framed(wire.pack(frame)))


def serve(plan: dict[str, Any]) -> NoReturn:
    """Serve calls; in the worker of each, run it."""
    call("prctl", confine.PR_SET_DUMPABLE, 0, 0, 0, 0)
    posix.set_inheritable(FD, False)
    compile("0", "", "exec")  # the first one makes a hundred types, 2 ms that every call would take for its tool
    gc.freeze()  # what is here now stays: a collection in a child would copy all of its memory
    Server(Walls(plan)).run()
    if not _has_call():
        _warm_up()
    worker.main()
    posix._exit(0)


def _has_call() -> bool:
    """Whether a call waits for this worker already. Otherwise it was made ahead of one."""
    channel = poll()
    channel.register(FD, POLLIN)
    return bool(channel.poll(0))


def _warm_up() -> None:
    """Load the module of the probe as a tool is loaded, while nobody waits for it.

    A forked process copies a page of its parent when it first writes to it, and reading an object writes its reference
    count. Without this a call would wait for a hundred copies before the first line of its tool.
    """
    entry = __file__.rpartition("/")[0] + "/probe/look.py"
    frame = wire.unpack(wire.pack({"type": "init", "protocol": worker.PROTOCOL, "entry": entry, "env": {}}))
    worker.load_handlers(frame["entry"], compiled=False)
    del sys.modules["look"]
