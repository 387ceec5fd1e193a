"""`python -m goondan.agentproc.start.forkserver`: the warm parent of agent processes.

It imports once what every agent needs, and forks. So an agent shares the pages of its code with all others. The fork
server must stay fork-safe: no thread, no event loop, no ZeroMQ context, no
bundle code.

It is ready after the first step of the warm-up (warmup.py), which imports. The other steps follow when the whole kernel
is ready, and each waits until the machine has time to spare (SpareTime): the start and the first turns need the
processors. Requests that come meanwhile are answered between two steps; those agents share less.

From then on one agent is always forked ahead and waits for its request, so a request costs no fork. Two forks and the
end of the middle process were half of the time to an agent's welcome. The waiting agent has no name and no token before
its request, and ends when the fork server does.

Parents. An agent is forked twice. So it becomes a child of the supervisor (a subreaper) and outlives the fork server.
The middle process ends at once. The agent waits until its parent is the supervisor. Only then it asks to be killed with
its parent, and checks the parent once more.

Bursts. A fork takes a millisecond or two of a processor, and forks run one after the other. So requests that wait at
the same time share one middle process: nine forks for eight agents instead of sixteen.

Source: docs/design/processes.md section 3. Protocol: schemas/wire/forkserver.py.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec

from goondan.agentproc.start import app, warmup
from goondan.agentproc.start.app import main as run_agent
from goondan.schemas.system import secrecy, startup
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.forkserver import MAX_PACKET, WARM, ForkReply, decode_request, encode_packet

#: A processor counts as free when it had nothing to do for this part of the time.
FREE_PART: Final = 0.75
#: How many processors have to be free, where there are so many: one for the work, and one for a turn that begins.
FREE_PROCESSORS: Final = 2
#: Uptime, and the time without work of all processors together (both in seconds, with two digits).
_UPTIME: Final = Path("/proc/uptime")


def is_spare(idle_s: float, elapsed_s: float, processors: int) -> bool:
    """Whether so many processors, which together had nothing to do for `idle_s` of the last `elapsed_s` seconds, leave
    room for more work.
    """
    return idle_s >= FREE_PART * min(processors, FREE_PROCESSORS) * elapsed_s


def idle_time() -> float | None:
    """For how long the processors had nothing to do since the machine's start, added up (seconds). None where the
    system does not tell.
    """
    try:
        idle = float(_UPTIME.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return idle or None  # systems that do not count say 0


class SpareTime:
    """Whether the machine has processors to spare, for work that nobody waits for, since this was made.

    The system adds up for how long its processors had nothing to do. What is done at the same time as a turn slows the
    turn down, because two processors rarely are worth two. So such work waits until a turn could begin and still find
    one free.
    """

    def __init__(
        self,
        idle: Callable[[], float | None] = idle_time,
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        self._idle = idle
        self._clock = clock
        self._processors = processors or os.cpu_count() or 1
        self._began = clock()
        self._idle_before = idle()

    def found(self) -> bool:
        """Whether there were processors to spare since this was made. True where the system does not tell."""
        idle = self._idle()
        if idle is None or self._idle_before is None:
            return True
        return is_spare(idle - self._idle_before, self._clock() - self._began, self._processors)


#: How long a new agent waits to become the supervisor's child (seconds). It takes microseconds, or never happens.
ADOPTION_S: Final = 2.0
#: How many requests are read at once: as many as the broker lets agents start at a time.
BURST: Final = 8
#: Exit status of an agent that could not begin (sysexits: internal software error).
EXIT_FAILED: Final = 70
#: When the kernel is ready, each step of the warm-up waits until for so long (seconds) nobody asked for an agent and
#: processors were free. A turn of a fast model and a fast tool takes some 10 ms, so this is several of them.
SPARE_S: Final = 0.05
#: As long as the machine is busy, the next look takes twice as long, up to this (seconds).
MAX_SPARE_S: Final = 0.8
#: The warm-up begins after so long (seconds) when nobody says that the kernel is ready. Then it was started by hand.
KERNEL_STARTS_S: Final = 1.0
#: So long after the start of the kernel the warm-up goes on in any case (seconds). By then the first turns are over,
#: even on a busy machine.
MAX_WAIT_S: Final = 10.0
#: After so many requests the warm-up goes on in any case: the first turns of so many agents that are not warm cost as
#: much more as all its steps, and all later agents become smaller.
MAX_COLD: Final = 8
#: The C library, called with the interpreter's lock held.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
#: Stands for the step after the last one.
_NO_MORE: Final = object()


class Spare(NamedTuple):
    """An agent process that waits for its request at the other end of `channel`. It ends when the channel is closed."""

    pid: int
    channel: socket.socket


class ForkServer:
    """Keeps an agent process waiting, gives each request to one, and forks the next after the replies."""

    def __init__(
        self, server: socket.socket, keep: Collection[int] = (), look: Callable[[], SpareTime] = SpareTime
    ) -> None:
        """`server` is the socket to the supervisor. Agents keep the descriptors of `keep`. `look` begins a look at how
        busy the machine is.
        """
        self._server = server
        self._keep = keep
        self._look = look
        self._spares: deque[Spare] = deque()
        self._warm_by: float | None = None  # when steps no longer wait; None until the kernel is ready
        self._requests = 0  # that have come so far

    def serve(self, warming: Iterator[None]) -> int:
        """Answer requests until the other end is closed, and take the steps of `warming` meanwhile. Returns the exit
        status.
        """
        goes_on = self._warm(warming)
        while goes_on:
            self._prepare(1)
            goes_on = self._answer_waiting()
        return 0

    def _warm(self, warming: Iterator[None]) -> bool:
        """Take the steps when there is time for them. False when the other end is closed."""
        steps_left = True
        while steps_left:
            if not self._answer_until_spare():
                return False
            try:
                steps_left = next(warming, _NO_MORE) is not _NO_MORE
            except Exception:  # agents are larger without, and work
                traceback.print_exc()
                steps_left = False
        self.close()  # who waits now shares less than the next one will
        return True

    def _answer_until_spare(self) -> bool:
        """Answer requests until there is time for a step of the warm-up. False when the other end is closed."""
        pause = SPARE_S
        while self._requests < MAX_COLD and (self._warm_by is None or time.monotonic() < self._warm_by):
            spare_time = self._look()
            if self._is_asked(KERNEL_STARTS_S if self._warm_by is None else pause):
                if not self._answer_waiting():
                    return False
                self._prepare(1)
            elif self._warm_by is None:
                self._kernel_is_ready()
                self._prepare(1)
            elif spare_time.found():
                return True
            else:
                pause = min(2 * pause, MAX_SPARE_S)
        return not self._is_asked(0.0) or self._answer_waiting()

    def _kernel_is_ready(self) -> None:
        self._warm_by = time.monotonic() + MAX_WAIT_S

    def _is_asked(self, within_s: float) -> bool:
        return bool(select.select([self._server], [], [], within_s)[0])

    def _answer_waiting(self) -> bool:
        """Wait for a request and answer it and the requests behind it. False when the other end is closed."""
        requests, over = self._receive()
        self._requests += len(requests)
        for done, (packet, descriptors) in enumerate(requests):
            try:
                if done:
                    self._prepare(len(requests) - done)
                reply = self.answer(packet, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                self._server.send(encode_packet(reply))
            except (BrokenPipeError, ConnectionResetError):
                over = True
        return not over

    def _receive(self) -> tuple[list[tuple[bytes, list[int]]], bool]:
        """The next request and those behind it, at most BURST and without WARM; and whether the other end is closed."""
        requests: list[tuple[bytes, list[int]]] = []
        while not requests or (len(requests) < BURST and self._is_asked(0.0)):
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._server, MAX_PACKET + 1, 1, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                return requests, True
            if not packet:
                return requests, True
            if packet == WARM:
                self._kernel_is_ready()
                return requests, False
            requests.append((packet, descriptors))
        return requests, False

    def answer(self, packet: bytes, descriptors: Collection[int]) -> ForkReply:
        """Carry the request out. Every failure is a reply with an error."""
        try:
            if len(packet) > MAX_PACKET:
                return ForkReply(seq=0, error=f"a request of more than {MAX_PACKET} bytes")
            request = decode_request(packet)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return ForkReply(seq=0, error=f"no request: {error}")
        try:
            return ForkReply(seq=request.seq, pid=self._hand_over(packet, descriptors))
        except OSError as error:
            return ForkReply(seq=request.seq, error=f"no agent could be forked: {error.strerror or error}")

    def close(self) -> None:
        """Let the waiting agents end."""
        while self._spares:
            self._spares.popleft().channel.close()

    def _prepare(self, wanted: int) -> None:
        """Have an agent waiting. When there is none, fork one for each request and one more. If that fails now, the
        reply to the next request gives the reason.
        """
        if not self._spares:
            with suppress(OSError):
                self._fork(1 if wanted == 1 else wanted + 1)

    def _hand_over(self, packet: bytes, descriptors: Collection[int]) -> int:
        while self._spares:
            try:
                return _give(self._spares.popleft(), packet, descriptors)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was killed while it waited
        self._fork(1)
        return _give(self._spares.popleft(), packet, descriptors)

    def _fork(self, number: int) -> None:
        """Fork so many agents through one middle process, which reports their pids. Raises OSError when the system
        refuses all of them.
        """
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise OSError(0, f"the fork server has {threads} threads and cannot fork safely")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(number)]
        told, tell = os.pipe2(os.O_CLOEXEC)
        said = b""
        try:
            first = _fork()
            if first == 0:
                self._middle(tell, [theirs for _, theirs in pairs])
            os.close(tell)
            tell = -1
            os.waitpid(first, 0)
            os.set_blocking(told, False)  # the agents have its other end until each of them has closed it
            with suppress(BlockingIOError):
                said = os.read(told, 4096)
        finally:
            pids = [int(pid) for pid in said.split() if pid.isdigit()] if said[:1].isdigit() else []
            for at, (ours, theirs) in enumerate(pairs):
                theirs.close()
                if at < len(pids):
                    self._spares.append(Spare(pids[at], ours))
                else:
                    ours.close()
            os.close(told)
            if tell >= 0:
                os.close(tell)
        if not pids:
            raise OSError(0, said.decode("utf-8", "replace") or "the process between was killed")

    def _middle(self, tell: int, channels: Sequence[socket.socket]) -> NoReturn:
        """The middle process between fork server and agents: fork, report the pids, end."""
        begun = False
        try:
            for channel in channels:
                pid = _fork()
                if pid == 0:
                    os.close(tell)
                    _agent(channel, self._keep)
                os.write(tell, b"%d " % pid)
                begun = True
        except OSError as error:
            if not begun:
                os.write(tell, (error.strerror or "fork failed").encode())
        finally:
            os._exit(0)


def _fork() -> int:
    """fork(2) alone: 0 in the child, in which nothing else has changed. Raises OSError.

    os.fork also calls what the library has registered for it: new locks for threads and log, a new seed. Here is one
    thread that holds no lock, and the seed is the agent's business (`_agent`). So an agent shares 140 pages more and is
    forked in two thirds of the time.
    """
    pid: int = _libc.fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _give(spare: Spare, packet: bytes, descriptors: Collection[int]) -> int:
    with spare.channel as channel:
        socket.send_fds(channel, [packet], list(descriptors))
    return spare.pid


def _agent(channel: socket.socket, keep: Collection[int]) -> NoReturn:
    """The agent process, from its first instruction to its last."""
    status = EXIT_FAILED
    try:
        os.setsid()  # a signal to the fork server's group is not meant for agents
        startup.set_process_name("gdn-spare")
        _close_inherited({channel.fileno(), *keep})
        random.seed()  # else all agents would draw the same numbers
        atexit._clear()  # what the fork server's modules have registered is the fork server's
        gc.enable()
        loop = app.new_loop()
        warmup.rehearse_start(loop)
        with channel:
            packet, descriptors, _, _ = socket.recv_fds(channel, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        secrecy.close_memory()  # from here on it has a token, and soon a key
        if not packet:
            os._exit(0)  # the fork server is gone, and with it whoever could want this agent
        request = decode_request(packet)
        ready_fd = descriptors[0] if descriptors else None
        startup.set_process_name("gdn-agent")
        _redirect(request.log_path)
        _await_parent(request.parent_pid)
        startup.die_with_parent(request.parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = f"{request.agent}/{request.instance_key}"
        status = run_agent(
            loop, request.endpoint, request.token, name=name, ready_fd=ready_fd, broker_uid=request.broker_uid
        )
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # of extensions; what they raise is printed
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _await_parent(parent_pid: int) -> None:
    """Wait until the supervisor is the parent. The middle process has closed its descriptors and is about to end."""
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
            print(visible_line(f"the log {log_path} cannot be opened: {error.strerror}"), file=sys.stderr, flush=True)
        else:
            os.dup2(log, 2)


def _close_inherited(keep: Collection[int]) -> None:
    """Close the descriptors that the agent must not have, the fork server's socket first."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def _warming(providers: Collection[str], scratch: str | None) -> Iterator[None]:
    """The steps of the warm-up. Then garbage is collected and holes are filled."""
    yield from warmup.warm_up(providers, scratch)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    warmup.fill_pools()


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve. Returns the exit status."""
    parser = startup.option_parser("goondan.agentproc.start.forkserver", "Starts agent processes.")
    parser.add_argument("--socket-fd", type=int, required=True, help="AF_UNIX SOCK_SEQPACKET socket to the supervisor")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when requests can be sent")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--keep-fd", type=int, action="append", default=[], help="descriptor that agents keep open")
    parser.add_argument("--provider", action="append", default=[], help="model provider that agents will use")
    parser.add_argument("--scratch", help="folder to make for the files of the warm-up; the kernel clears its place")
    secrecy.forbid_core_dumps()  # and no more: the supervisor knows a waiting agent by its descriptors
    options = parser.parse_args(argv)
    startup.close_to_others()
    startup.keep_memory_steady()  # an agent's threads for files would have a heap of their own each
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name("gdn-forksrv")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    os.set_inheritable(options.socket_fd, False)
    with socket.socket(fileno=options.socket_fd) as server:
        gc.disable()  # a collection would touch, and so unshare, every page that holds objects
        warming = _warming(options.provider, options.scratch)
        next(warming)
        gc.freeze()
        fork_server = ForkServer(server, options.keep_fd)
        startup.report_ready(options.ready_fd)
        try:
            return fork_server.serve(warming)
        finally:
            fork_server.close()


if __name__ == "__main__":
    sys.exit(main())
