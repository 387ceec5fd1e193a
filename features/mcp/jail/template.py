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
- Before its walls it is the worker of sessions of each kind, from the connection to the end (`warm_up`). The SDK, its
  types and the event loop make much of what they need when it is needed first: checkers of messages, modules, memory.
  A worker that finds it made begins some hundred milliseconds earlier, and shares it with the others. Some of it is
  files that a worker could not read any more. The tool host and the server of these sessions are one process that the
  template forks.

Source: docs/design/processes.md; docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 # names of servers are written in it
import gc
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import msgspec
from mcp_types.version import LATEST_MODERN_VERSION
from msgspec import Raw

from goondan import schemas, toolhost
from goondan.features.mcp.jail.worker import serve as be_worker
from goondan.schemas.worker import servers, worker_frames
from goondan.toolhost import own_confinement
from goondan.toolhost.inside.confine import Filter
from goondan.toolhost.inside.wire import Frames, framed

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
    warm_up()
    confine(filter_fd, user)
    return serve(control, of_worker, be_worker)


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


#: The process on the other side ends after this time in any case (seconds). A session takes a quarter of a second.
LIMIT_S: Final = 20
_READ: Final = 65536
_TEXT: Final = {"content": [{"type": "text", "text": "warm"}], "structuredContent": {"warm": True}}
_TOOL: Final = {
    "name": "warm",
    "description": "Nothing.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}}},
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
}
_ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "tools/list": {"tools": [_TOOL]},
    "tools/call": _TEXT,
    "resources/list": {"resources": [{"uri": "warm://1", "name": "warm"}]},
    "resources/templates/list": {"resourceTemplates": []},
    "resources/read": {"contents": [{"uri": "warm://1", "text": "warm"}]},
    "prompts/list": {"prompts": [{"name": "warm", "arguments": [{"name": "a"}]}]},
    "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": "warm"}}]},
}
_CAPABILITIES: Final = {
    "tools": {"listChanged": True}, "resources": {"listChanged": True}, "prompts": {"listChanged": True}, "logging": {},
}  # fmt: skip
#: What each result of the modern era has besides.
_OF_MODERN: Final = {"resultType": "complete", "ttlMs": 1000, "cacheScope": "private"}
_CALLS: Final = (("warm", {"a": "x"}), ("read_resource", {"uri": "warm://1"}), ("get_prompt", {"name": "warm"}))


def warm_up() -> None:
    """Be the worker of a server of each era, on a descriptor and at an URL. What fails here is not ours to tell: a
    worker meets it again.
    """
    for at_url in (False, True):
        for modern in (False, True):
            with suppress(Exception):
                _session(modern=modern, at_url=at_url)


def _session(*, modern: bool, at_url: bool) -> None:
    channel, host = socket.socketpair()
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if at_url else socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        channel.close()
        ours.close()
        try:
            signal.alarm(LIMIT_S)
            (_AtUrl if at_url else _Other)(host, server, modern=modern).run()
        finally:
            os._exit(0)
    host.close()
    server.close()
    try:
        be_worker(channel, *((None, ours) if at_url else (ours, None)))
    finally:
        channel.close()  # the other process ends when it finds both closed
        ours.close()
        os.waitpid(pid, 0)


class _Other:
    """Host and server of one session, in turns of a loop."""

    server_init = servers.ServerInit(transport="stdio", tools=True, resources=True, prompts=True, secrets=["warm-warm"])

    def __init__(self, host: socket.socket, server: socket.socket, *, modern: bool) -> None:
        self._host = host
        self._server = server
        self._modern = modern
        self._frames = Frames()
        self._lines = b""
        self._left = list(_CALLS)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the worker is gone."""
        self._send(worker_frames.Init(worker_frames.WORKER_PROTOCOL, "warm", "", {}, server=self.server_init))
        with self._selector as selector:
            selector.register(self._host, selectors.EVENT_READ, self._heard)
            selector.register(self._server, selectors.EVENT_READ, self._asked)
            while selector.get_map():
                for key, _ in selector.select():
                    end: Any = key.fileobj
                    data = end.recv(_READ)
                    if data:
                        key.data(data)
                    else:
                        selector.unregister(end)
                        end.close()

    def _send(self, frame: worker_frames.HostFrame) -> None:
        self._host.sendall(framed(msgspec.msgpack.encode(frame)))

    def _heard(self, data: bytes) -> None:
        """Frames of the worker."""
        for body in self._frames.feed(data):
            frame = msgspec.msgpack.decode(body, type=worker_frames.WorkerFrame)
            if isinstance(frame, worker_frames.Ready):
                self._send(worker_frames.List(1))
            elif isinstance(frame, worker_frames.Listed | worker_frames.Result):
                self._next()

    def _next(self) -> None:
        if not self._left:
            self._send(worker_frames.Exit())
            return
        export, args = self._left.pop(0)
        call = worker_frames.Call(
            call_id=export, export=export, input=Raw(msgspec.msgpack.encode(args)), agent_name="a", instance_key="k",
            turn_id="t", tool_call_id=export, workdir="/", deadline_ms=10_000,
        )  # fmt: skip
        self._send(call)

    def _asked(self, data: bytes) -> None:
        """Lines of the worker to the server."""
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "id" in message and "method" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"], **self._answer(message["method"])}
                self._server.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, method: str) -> dict[str, Any]:
        who = {"name": "warm", "version": "1"}
        if method == "server/discover" and self._modern:
            found = {"supportedVersions": [LATEST_MODERN_VERSION], "capabilities": _CAPABILITIES, "serverInfo": who}
            return {"result": {**_OF_MODERN, **found}}
        if method == "initialize" and not self._modern:
            return {"result": {"protocolVersion": "2025-11-25", "capabilities": _CAPABILITIES, "serverInfo": who}}
        if method in _ANSWERS:
            return {"result": {**_OF_MODERN, **_ANSWERS[method]} if self._modern else _ANSWERS[method]}
        return {"error": {"code": -32601, "message": "no such method"}}


class _AtUrl(_Other):
    """The same with a server at an URL: the other side of the connector is the proxy and the server at once."""

    server_init = servers.ServerInit(
        transport="http", endpoint="http://warm.invalid/mcp", tools=True, resources=True, prompts=True
    )

    def _asked(self, data: bytes) -> None:
        """The worker wants a connection."""
        near, far = socket.socketpair()
        socket.send_fds(self._server, [b"warm"], [far.fileno()])
        far.close()
        self._selector.register(near, selectors.EVENT_READ, _Connection(near, self._answer).heard)


class _Connection:
    """One connection: a tunnel, and requests in it."""

    def __init__(self, near: socket.socket, answer: Callable[[str], dict[str, Any]]) -> None:
        self._near = near
        self._answer = answer
        self._data = b""

    def heard(self, data: bytes) -> None:
        """Bytes of the worker."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            found = re.search(rb"content-length: (\d+)", head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < size:
                return
            body, self._data = self._data[end + 4 : size], self._data[size:]
            self._near.sendall(self._reply(head, body))

    def _reply(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"connect"):
            return b"HTTP/1.1 200 Warm\r\n\r\n"
        message = json.loads(body) if body else {}
        if "id" not in message:
            return b"HTTP/1.1 405 Warm\r\nContent-Length: 0\r\n\r\n"
        answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], **self._answer(message["method"])}).encode()
        kind = b"application/json"
        if message["method"] == "tools/call":
            kind, answer = b"text/event-stream", b"event: message\ndata: " + answer + b"\n\n"
        return b"HTTP/1.1 200 Warm\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(answer)) + answer
