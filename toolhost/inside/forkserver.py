"""The first worker of a jail whose tool says `isolation: call`. It forks a worker for each call, and loads no tool.

It holds only the code of this folder, and no other process can look into it. For each call the host sends it the
descriptors of a new worker. The call itself goes over that worker's own socket, and this process does not see it. All
that it reads comes from the host.

It makes a child with the system call clone, because the child must be the first process of a new namespace, and only
one system call does both. The interpreter is not told. That is safe here: this process has one thread, and the child
forks again, in the way that the interpreter knows, before it does anything else.

Source: docs/design/sandbox.md section 5; schemas/WORKER.md section 9.
"""

from __future__ import annotations

import gc
import posix
import sys
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, socket
from select import POLLIN, poll

from . import wire, worker
from .nest import Walls, enter
from .system import FAILED, PR_SET_DUMPABLE, call
from .wire import FD, READ_BYTES, Frames, framed

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

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
            self._send({"type": "ended", "cell": cell, "status": FAILED, "message": problem})
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
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
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
    """Load a module as a tool is loaded, while nobody waits for it.

    A forked process copies a page of its parent when it first writes to it, and reading an object writes its reference
    count. Without this a call would wait for a hundred copies before the first line of its tool.
    """
    entry = __file__.rpartition("/")[0] + "/warmup.py"
    frame = wire.unpack(wire.pack({"type": "init", "protocol": worker.PROTOCOL, "entry": entry, "env": {}}))
    worker.load_handlers(frame["entry"], compiled=False)
    del sys.modules["warmup"]
