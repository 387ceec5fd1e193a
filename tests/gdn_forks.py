"""`gdn`, forked from a process that has imported it: `python -I tests/gdn_forks.py SOCKET`.

To start an interpreter and to import the commands takes a tenth of a second of processor time, and the tests run `gdn`
many hundred times. Each run is a process of its own all the same, with the streams, the folder and the environment that
it is given. Tests that look at the start itself start `gdn` as a person's shell does (`Sandbox.popen`, `forked=False`).

A request over the socket: its length (4 bytes, little-endian), with the descriptors of stdin, stdout, stderr and the
pipe for the answer; then JSON `{"arguments": […], "environment": {…}, "folder": …, "terminal": …, "umask": …}`;
`terminal`: its stderr becomes its controlling terminal. The answer has two lines: the number of the process, and its
status as os.waitpid tells it, once it has ended.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import socket
import sys
import termios
import time
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from goondan.features import FEATURES
from goondan.kernel import cli
from goondan.kernel.cli.commands import CORE, command_of, helps

#: What commands import when they need it: some 5 ms of processor time for each `gdn`, and 30 ms for `gdn validate`.
LATER = (
    "goondan.kernel.bundle.rules.check",
    "goondan.kernel.bundle.documents",
    "goondan.kernel.bundle.handlers",
    "goondan.kernel.bundle.loader",
    "goondan.kernel.cli.commands.bundles",
    "goondan.kernel.cli.texts.renderer",
    "goondan.kernel.cli.console.talk",
    "goondan.kernel.traces.conversations",
    "goondan.kernel.trust.policy",
    "goondan.kernel.grants.granting",
    "goondan.kernel.traces.logs",
    "goondan.kernel.traces.search",
    "goondan.schemas.system.startup",
)


def main() -> None:
    """Until nobody asks any more."""
    for name in LATER:
        import_module(name)
    for name in (*CORE, *(name for feature in FEATURES for name in feature.commands)):
        if not helps(name):  # no group
            command_of(name)
    gc.freeze()
    asked = socket.socket(fileno=int(sys.argv[1]))
    while True:
        head, given, _, _ = socket.recv_fds(asked, 4, 4)
        if not head:
            return
        body = asked.makefile("rb", buffering=0)
        request = b""
        while len(request) < int.from_bytes(head, "little"):
            request += body.read(int.from_bytes(head, "little") - len(request))
        if not _fork():
            _attend(json.loads(request), *given)
        for fd in given:
            os.close(fd)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork() -> int:
    """As os.fork, with patience: other tests fill the machine with processes on purpose."""
    for _ in range(500):
        with suppress(BlockingIOError):
            return os.fork()
        time.sleep(0.01)
    return os.fork()


def _attend(request: Any, stdin: int, stdout: int, stderr: int, answer: int) -> NoReturn:
    """Run one command, and say how it ended."""
    pid = _fork()
    if not pid:
        _become(request, stdin, stdout, stderr)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    os.write(answer, f"{pid}\n".encode())
    status = os.waitpid(pid, 0)[1]
    with suppress(OSError):  # nobody waits for it any more
        os.write(answer, f"{status}\n".encode())
    os._exit(0)


def _become(request: Any, *streams: int) -> NoReturn:
    """Be `gdn`."""
    try:
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        os.closerange(3, 1024)
        if request["terminal"]:
            os.setsid()
            fcntl.ioctl(2, termios.TIOCSCTTY, 0)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.umask(request["umask"])
        os.chdir(request["folder"])
        sys.argv = ["gdn", *request["arguments"]]
        cli.main()
    finally:  # it ends the process by itself, unless the above has failed
        sys.excepthook(*sys.exc_info())
        os._exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
