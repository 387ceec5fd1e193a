"""`python -m agentproc.forkserver`: the warm parent of agent processes.

It imports what an agent needs once, and forks on request: an agent is ready in milliseconds and shares the pages of
its code with all others. So it must stay fork-safe: no thread, no event loop, no ZeroMQ context, no bundle code.

Parents. An agent is forked twice, so that it becomes a child of the supervisor (a subreaper) and outlives the fork
server: the middle process ends at once, the agent waits until its parent is the supervisor, only then asks to be
killed with it, and looks once more.

Source: design section 2; delivery.md section 8. Protocol: schemas/forkserver.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from schemas.forkserver import MAX_PACKET, ForkReply, ForkRequest, decode_request, encode_packet
from schemas.startup import die_with_parent, report_ready, set_process_name

#: How long a new agent waits to become the supervisor's child (seconds): it takes microseconds, or never happens.
ADOPTION_S: Final = 2.0
#: Exit status of an agent that could not even begin (sysexits: internal software error).
EXIT_FAILED: Final = 70
#: What a middle process says when its fork failed, before the reason.
_FAILED: Final = b"!"


def preload() -> None:
    """Import and warm everything that an agent process uses, so that its pages are shared."""
    import sqlite3

    import uvloop  # noqa: F401

    from agentproc import app  # noqa: F401
    from agentproc.providers import embedded  # noqa: F401
    from schemas import codec, frames, launch

    sqlite3.connect(":memory:").close()
    # Decoders are built at their first use; a payload that does not fit builds them just as well.
    for kind in (
        frames.Welcome, frames.AgentEvent, frames.ToolResult, frames.Credit, frames.Shutdown, frames.ErrorPayload,
        launch.AgentSpec,
    ):  # fmt: skip
        with suppress(codec.FrameError):
            codec.from_raw(frames.NO_PAYLOAD, kind)


def serve(server: socket.socket, keep: Collection[int] = ()) -> int:
    """Answer requests until the other end is closed. `keep`: descriptors that stay open in the agents."""
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(server, MAX_PACKET + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return 0
        if not packet:
            return 0
        try:
            reply = _answer(packet, descriptors[0] if descriptors else None, keep)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            server.send(encode_packet(reply))
        except (BrokenPipeError, ConnectionResetError):
            return 0


def _answer(packet: bytes, ready_fd: int | None, keep: Collection[int]) -> ForkReply:
    try:
        if len(packet) > MAX_PACKET:
            return ForkReply(seq=0, error=f"a request of more than {MAX_PACKET} bytes")
        request = decode_request(packet)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return ForkReply(seq=0, error=f"no request: {error}")
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return ForkReply(seq=request.seq, error=f"the fork server has {threads} threads and cannot fork safely")
    try:
        pid = fork_agent(request, ready_fd, keep)
    except OSError as error:
        return ForkReply(seq=request.seq, error=f"fork failed: {error.strerror}")
    return ForkReply(seq=request.seq, pid=pid)


def fork_agent(request: ForkRequest, ready_fd: int | None = None, keep: Collection[int] = ()) -> int:
    """Fork one agent process; its pid. Raises OSError when the system refuses."""
    told, tell = os.pipe2(os.O_CLOEXEC)  # the agent's pid, from the middle process
    orphaned, middle = os.pipe2(os.O_CLOEXEC)  # its end says that the middle process is gone
    try:
        first = os.fork()
        if first == 0:
            _middle(request, tell, orphaned, middle, ready_fd, keep)
        os.close(tell)
        os.close(middle)
        tell = middle = -1
        said = b""
        while chunk := os.read(told, 256):
            said += chunk
        os.waitpid(first, 0)
    finally:
        for descriptor in (told, tell, orphaned, middle):
            if descriptor >= 0:
                os.close(descriptor)
    if not said or said.startswith(_FAILED):
        reason = said[1:].decode("utf-8", "replace") or "the middle process was killed"
        raise OSError(0, reason)
    return int(said)


def _middle(
    request: ForkRequest, tell: int, orphaned: int, middle: int, ready_fd: int | None, keep: Collection[int]
) -> NoReturn:
    """The process between fork server and agent: fork again, say the pid, end."""
    try:
        pid = os.fork()
        if pid == 0:
            os.close(middle)
            os.close(tell)
            _agent(request, orphaned, ready_fd, keep)
        os.write(tell, b"%d" % pid)
    except OSError as error:
        os.write(tell, _FAILED + (error.strerror or "fork failed").encode())
    finally:
        os._exit(0)


def _agent(request: ForkRequest, orphaned: int, ready_fd: int | None, keep: Collection[int]) -> NoReturn:
    """The agent process, from its first instruction to its last."""
    status = EXIT_FAILED
    try:
        os.setsid()  # a signal to the fork server's group is not meant for agents
        _redirect(request.log_path)
        os.read(orphaned, 1)
        _await_parent(request.parent_pid)
        die_with_parent(request.parent_pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _close_descriptors({0, 1, 2, ready_fd, *keep})
        random.seed()
        set_process_name("gdn-agent")
        gc.enable()
        from agentproc.app import main

        name = f"{request.agent}/{request.instance_key}"
        status = main(request.endpoint, request.token, name=name, ready=lambda: report_ready(ready_fd))
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _await_parent(parent_pid: int) -> None:
    """The middle process has closed its descriptors and is about to end; wait until we have been handed on."""
    give_up = time.monotonic() + ADOPTION_S
    pause = 0.00002
    while os.getppid() != parent_pid:
        if time.monotonic() > give_up:
            sys.exit(f"process {parent_pid} did not become the parent of this agent; it is {os.getppid()}")
        time.sleep(pause)
        pause = min(pause * 2, 0.001)


def _redirect(log_path: str | None) -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if log_path is not None:
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            log = os.open(log_path, flags, 0o600)
        except OSError as error:
            print(f"the log {log_path} cannot be opened: {error.strerror}", file=sys.stderr, flush=True)
        else:
            os.dup2(log, 2)


def _close_descriptors(keep: Collection[int | None]) -> None:
    """Everything that the agent is not meant to have; the fork server's socket first of all."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, warm up, serve; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m agentproc.forkserver", description="Starts agent processes.")
    parser.add_argument("--socket-fd", type=int, required=True, help="AF_UNIX SOCK_SEQPACKET socket to the supervisor")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when requests can be sent")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--keep-fd", type=int, action="append", default=[], help="descriptor that agents keep open")
    options = parser.parse_args(argv)
    die_with_parent(options.parent_pid)
    set_process_name("gdn-forksrv")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    os.set_inheritable(options.socket_fd, False)
    with socket.socket(fileno=options.socket_fd) as server:
        preload()
        gc.collect()
        gc.disable()  # a collection would touch, and so unshare, every page that holds objects
        gc.freeze()
        report_ready(options.ready_fd)
        return serve(server, options.keep_fd)


if __name__ == "__main__":
    sys.exit(main())
