"""The SDK template: a process that has the SDK imported, and forks an MCP worker when the tool host asks for one.

It starts with the first server. Importing the SDK takes half a second and some 50 MiB; a forked worker shares them. The
template has one thread and no loop. It puts up its walls before its first request, so every worker begins behind them.
A worker puts up one more: it can start no process.

One request is one message: JSON, `{"ends": [...]}` with the names of the descriptors that come along, in their order:
`channel` and `output` always, then `server` or `connector`. The answer is `{"pid": N}` with a descriptor of the worker
(a pidfd), or `{"error": "…"}`.

Rules.
- A worker ends with the template, and the template with the tool host: Linux kills it then (PR_SET_PDEATHSIG).
- A worker does nothing before the template holds a descriptor of it. So the descriptor can be of no other process.
- The template waits for no child: Linux forgets them at once when they end (SIGCHLD is ignored). The tool host sees the
  end by the descriptor.

Source: docs/design/processes.md; docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from goondan import schemas, toolhost
from goondan.toolhost import own_confinement
from goondan.toolhost.inside.system import Filter

#: One request: a few words (bytes), and so many descriptors.
MAX_REQUEST: Final = 4096
MAX_DESCRIPTORS: Final = 4
#: Memory that one worker may have, what it shares with the template included (bytes). A line of 16 MiB, once as text,
#: once as values, once as a result, takes some 200 MiB at worst.
MEMORY: Final = 512 << 20
#: Descriptors of one worker: its channel and its server, or 64 connections at once.
_DESCRIPTORS: Final = 256
#: Where the libraries, certificates and time zones are that are loaded only when they are needed.
_SYSTEM: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/usr/share/ca-certificates",
                  "/etc/ssl", "/etc/pki")  # fmt: skip
#: What a worker ends with that could not begin.
_NOT_BEGUN: Final = 125

#: A worker: its channel to the tool host; the server's standard input and output, or the maker of its connections.
Serve = Callable[[socket.socket, socket.socket | None, socket.socket | None], int]


def main(channel: int, filter_fd: int, worker_filter_fd: int, *, user: int | None) -> int:
    """Serve until the tool host closes its end."""
    control = socket.socket(fileno=channel)
    control.set_inheritable(False)
    with open(worker_filter_fd, "rb") as source:
        of_worker = Filter(source.read())
    from goondan.features.mcp.jail.warmup import warm_up  # now: these import the SDK
    from goondan.features.mcp.jail.worker import serve as work

    warm_up()
    confine(filter_fd, user)
    return serve(control, of_worker, work)


def confine(filter_fd: int, user: int | None) -> None:
    """Give everything up that neither the template nor a worker needs. Raises OSError."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    own = {sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isdir(path))}
    packages = {
        os.path.dirname(os.path.abspath(file or "")) for file in (schemas.__file__, toolhost.__file__, __file__)
    }
    readable = [*_SYSTEM, *sorted(own | packages)]
    own_confinement.confine(
        filter_fd, readable, user=own_confinement.NOBODY if user is None else user, descriptors=_DESCRIPTORS
    )


def serve(control: socket.socket, of_worker: Filter, become: Serve) -> int:
    """Fork a worker for each request. Returns when the tool host has closed its end."""
    gc.collect()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return 0
        try:
            ends = dict(zip(json.loads(data)["ends"], fds, strict=True))
            pid, pidfd = _fork(control, ends, of_worker, become)
        except OSError as error:
            control.send(json.dumps({"error": error.strerror or str(error)}).encode())
        else:
            socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
            os.close(pidfd)
        for fd in fds:
            os.close(fd)


def _fork(control: socket.socket, ends: dict[str, int], of_worker: Filter, become: Serve) -> tuple[int, int]:
    """The worker's number, and a descriptor of it. Raises OSError."""
    template = os.getpid()
    gate, opened = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            control.close()
            os.read(gate, 1)
            os.close(gate)
            _begin(template, ends, of_worker, become)
        return pid, os.pidfd_open(pid)
    finally:
        os.close(gate)
        os.close(opened)


def _begin(template: int, ends: dict[str, int], of_worker: Filter, become: Serve) -> NoReturn:
    """The life of a worker."""
    status = _NOT_BEGUN
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        own_confinement.die_with_parent()
        if os.getppid() != template:
            os._exit(status)
        os.dup2(ends["output"], 1)
        os.dup2(ends["output"], 2)
        os.close(ends["output"])
        made = {name: socket.socket(fileno=fd) for name, fd in ends.items() if name != "output"}
        of_worker.install()
        status = become(made["channel"], made.get("server"), made.get("connector"))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
