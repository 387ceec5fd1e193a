"""`python -m goondan.agentproc.start.forkserver`: the warm parent of agent processes.

It imports once what every agent needs, and forks. So an agent shares the pages of its code with all others. The fork
server must stay fork-safe: no thread, no event loop, no ZeroMQ context, no bundle code.

It imports at its start when somebody waits for a first agent (`--soon`), else with the first step of the warm-up
(warmup.py) or the first request. The steps begin when the whole kernel is ready, and each waits until the machine has
time to spare (SpareTime): the start and the first turns need the processors. Requests that come meanwhile are answered
between two steps; those agents share less.

From the imports on one agent is always forked ahead and waits for its request, so a request costs no fork. It has no
name and no token before its request, and ends when the fork server does.

Parents. An agent is forked as a child of the fork server's parent, the supervisor, and outlives the fork server. It
asks to be killed with its parent, and checks then that the parent is still there.

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
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Final, NamedTuple, NoReturn

import msgspec

from goondan.schemas.system import secrecy, startup
from goondan.schemas.system.log_lines import begin_log
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.forkserver import MAX_PACKET, WARM, ForkReply, decode_request, encode_packet

#: A processor counts as free when it had nothing to do for this part of the time.
FREE_PART: Final = 0.75
#: How many processors have to be free, where there are so many: one for the work, and one for a turn that begins.
FREE_PROCESSORS: Final = 2


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
        with open("/proc/uptime", encoding="ascii") as source:
            idle = float(source.read().split()[1])  # behind the uptime; both have two digits
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
#: The C library's call of the system, made with the interpreter's lock held.
_syscall: Final = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.argtypes = (ctypes.c_long,) * 6
_syscall.restype = ctypes.c_long
#: clone(2), with what fork asks for (the child's number is written into the child's memory, and cleared at its end),
#: and for a child whose parent is the caller's.
_SYS_CLONE: Final = {"x86_64": 56}.get(os.uname().machine, 220)
_CLONE_PARENT: Final = 0x8000
_CLONE_FORK: Final = 0x0120_0000 | signal.SIGCHLD
#: What imports all that agents need.
AGENTS: Final = "goondan.agentproc.start.warmup"
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
        self._spare: Spare | None = None
        #: The endpoint and the user of the broker of the last request, to which the next agent connects ahead.
        self._broker: tuple[str, int | None] | None = None
        self._warm_by: float | None = None  # when steps no longer wait; None until the kernel is ready
        self._requests = 0  # that have come so far

    def serve(self, warming: Iterator[None]) -> int:
        """Answer requests until the other end is closed, and take the steps of `warming` meanwhile. Returns the exit
        status.
        """
        goes_on = self._warm(warming)
        while goes_on:
            self._prepare()
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
                self._prepare()
            except Exception:  # agents are larger without, and work; without the imports the next request is told
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
                if not self._answer_waiting():  # and fork no other one yet: that would slow the first turn down
                    return False
            elif self._warm_by is None:
                self._kernel_is_ready()
            elif spare_time.found():
                return True
            elif pause < MAX_SPARE_S:
                pause = min(2 * pause, MAX_SPARE_S)
            else:
                self._prepare()
        return not self._is_asked(0.0) or self._answer_waiting()

    def _kernel_is_ready(self) -> None:
        self._warm_by = time.monotonic() + MAX_WAIT_S
        self._prepare()

    def _is_asked(self, within_s: float) -> bool:
        return bool(select.select([self._server], [], [], within_s)[0])

    def _answer_waiting(self) -> bool:
        """Wait for a request and answer it. False when the other end is closed."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._server, MAX_PACKET + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return False
        if packet == WARM:
            self._kernel_is_ready()
            return True
        self._requests += 1
        try:
            reply = self.answer(packet, descriptors) if packet else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if reply is None:
            return False
        try:
            self._server.send(encode_packet(reply))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def answer(self, packet: bytes, descriptors: Collection[int]) -> ForkReply:
        """Carry the request out. Every failure is a reply with an error."""
        try:
            if len(packet) > MAX_PACKET:
                return ForkReply(seq=0, error=f"a request of more than {MAX_PACKET} bytes")
            request = decode_request(packet)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return ForkReply(seq=0, error=f"no request: {error}")
        broker = request.endpoint, request.broker_uid
        if self._broker not in (None, broker):
            self.close()
        self._broker = broker
        try:
            return ForkReply(seq=request.seq, pid=self._hand_over(packet, descriptors))
        except OSError as error:
            return ForkReply(seq=request.seq, error=f"no agent could be forked: {error.strerror or error}")
        except Exception as error:  # of an import: the installation is broken
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"[:500]
            return ForkReply(seq=request.seq, error=f"agents cannot be imported: {why}")

    def close(self) -> None:
        """Let the waiting agent end."""
        if self._spare is not None:
            self._spare.channel.close()
            self._spare = None

    def _prepare(self) -> None:
        """Have an agent waiting. If none can be forked now, the reply to the next request gives the reason."""
        if self._spare is None and AGENTS in sys.modules:
            with suppress(OSError):
                self._spare = self._fork()

    def _hand_over(self, packet: bytes, descriptors: Collection[int]) -> int:
        if (spare := self._spare) is not None:
            self._spare = None
            with suppress(BrokenPipeError, ConnectionResetError):  # it was killed while it waited
                return _give(spare, packet, descriptors)
        return _give(self._fork(), packet, descriptors)

    def _fork(self) -> Spare:
        """An agent that waits for its request. Raises OSError when the system refuses it."""
        import_agent()
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise OSError(0, f"the fork server has {threads} threads and cannot fork safely")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = _fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                _agent(theirs, self._broker, self._keep)
        return Spare(pid, ours)


def _fork() -> int:
    """clone(2) alone, for a child of our parent: 0 in the child, in which nothing else has changed. Raises OSError.

    os.fork also calls what the library has registered for it: new locks for threads and log, a new seed. Here is one
    thread that holds no lock, and the seed is the agent's business (`_agent`). So an agent shares 140 pages more and is
    forked in two thirds of the time. Of what the C library's fork does with one thread, only the thread's number counts
    here: recursive locks know their owner by it.
    """
    number = startup.thread_number_address()
    # Two kinds of machines take the address as the fourth or as the fifth argument, and ignore the other one.
    pid: int = _syscall(_SYS_CLONE, _CLONE_PARENT | _CLONE_FORK, 0, 0, number, number)
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _give(spare: Spare, packet: bytes, descriptors: Collection[int]) -> int:
    with spare.channel as channel:
        socket.send_fds(channel, [packet], list(descriptors))
    return spare.pid


def _agent(channel: socket.socket, broker: tuple[str, int | None] | None, keep: Collection[int]) -> NoReturn:
    """The agent process, from its first instruction to its last. It connects to `broker` before it has its request."""
    from goondan.agentproc.start import app, warmup

    status = EXIT_FAILED
    try:
        os.setsid()  # a signal to the fork server's group is not meant for agents
        startup.set_process_name("gdn-spare")
        _close_inherited({channel.fileno(), *keep})
        random.seed()  # else all agents would draw the same numbers
        atexit._clear()  # what the fork server's modules have registered is the fork server's
        gc.enable()
        loop = app.new_loop()
        warmup.give_back_untouched(loop)
        ahead = None if broker is None else loop.run_until_complete(app.connected(channel, *broker))
        with channel:
            packet, descriptors, _, _ = socket.recv_fds(channel, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        secrecy.close_memory()  # from here on it has a token, and soon a key
        if not packet:
            os._exit(0)  # the fork server is gone, and with it whoever could want this agent
        request = decode_request(packet)
        ready_fd = descriptors[0] if descriptors else None
        startup.set_process_name("gdn-agent")
        _redirect(request.log_path)
        startup.die_with_parent(request.parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        name = f"{request.agent}/{request.instance_key}"
        begin_log("agent", name)
        endpoint, token, uid = request.endpoint, request.token, request.broker_uid
        status = app.main(loop, endpoint, token, name=name, ready_fd=ready_fd, broker_uid=uid, ahead=ahead)
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


def import_agent() -> None:
    """Import what every agent needs, unless that was done. No collection looks at what is there by then."""
    import_module(AGENTS)
    gc.freeze()


def _warming(providers: Collection[str], scratch: str | None) -> Iterator[None]:
    """Imports, and the steps of the warm-up. Then garbage is collected and holes are filled."""
    import_agent()
    yield
    from goondan.agentproc.start import warmup

    yield from warmup.warm_up(providers, scratch)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    yield
    warmup.fill_pools()
    warmup.fill_heap()


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve. Returns the exit status."""
    parser = startup.option_parser("goondan.agentproc.start.forkserver", "Starts agent processes.")
    parser.add_argument("--socket-fd", type=int, required=True, help="AF_UNIX SOCK_SEQPACKET socket to the supervisor")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one newline when requests can be sent")
    parser.add_argument("--parent-pid", type=int, help="end when this process, our parent, ends")
    parser.add_argument("--keep-fd", type=int, action="append", default=[], help="descriptor that agents keep open")
    parser.add_argument("--provider", action="append", default=[], help="model provider that agents will use")
    parser.add_argument("--soon", action="store_true", help="an agent is asked for as soon as the kernel is ready")
    parser.add_argument("--scratch", help="folder to make for the files of the warm-up; the kernel clears its place")
    secrecy.forbid_core_dumps()  # and no more: the supervisor knows a waiting agent by its descriptors
    options = parser.parse_args(argv)
    startup.close_to_others()
    startup.keep_memory_steady()  # an agent's threads for files would have a heap of their own each
    startup.die_with_parent(options.parent_pid)
    startup.set_process_name("gdn-forksrv")
    begin_log("forkserver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    os.set_inheritable(options.socket_fd, False)
    with socket.socket(fileno=options.socket_fd) as server:
        gc.disable()  # a collection would touch, and so unshare, every page that holds objects
        fork_server = ForkServer(server, options.keep_fd)
        if options.soon:
            import_agent()
        startup.report_ready(options.ready_fd)
        try:
            return fork_server.serve(_warming(options.provider, options.scratch))
        finally:
            fork_server.close()


if __name__ == "__main__":
    sys.exit(main())
