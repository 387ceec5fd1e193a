"""The loops of root's two programs: of the launcher, where a request comes in and a process goes out, and of the
privileged helper.

Rules of the launcher.
- The new process is the tool host's child, not ours: the tool host waits for it, and bubblewrap dies with the tool
  host.
- The answer is sent as soon as that process exists. A later failure in it is one line on its standard error that begins
  with `launcher: `, and status 125.
- Nothing of ours reaches the new program: not a descriptor beyond `places`, no signal setting, no session keyring.

The privileged helper keeps root's powers for a tool host that gave them up. It makes launchers and does the privileged
operations (operations.py).

    first:  the allow-list (allow_list.py), from a tool host that is still root; no answer
    then:   {"operation": NAME, "with": [...]}  -> {"done": value} or {"error": [errno, text]}

The operation `make_launcher` answers with the new launcher's process number, and with one descriptor: the tool host's
end of its socket.

Rules of the helper.
- One request at a time, one answer to each. It never starts a program that a request names.
- A launcher is forked from here and not executed again: that takes two milliseconds and shares the loaded modules. It
  is the tool host's child, and so is every jail, as if the tool host had started them.
- It ends when the tool host ends, and removes the control groups that the tool host has left.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from goondan.toolhost.launcher import allow_list, staging, syscalls
from goondan.toolhost.launcher.operations import Operations, Settled, user_of
from goondan.toolhost.launcher.places import ReadOnlyPlace, check_stages, write_text

TYPE_CHECKING = False  # see allow_list.py
if TYPE_CHECKING:
    from typing import Any, Final, NoReturn

    from goondan.toolhost.launcher.requests import AllowList, Launch, Run

    #: Checks a request of a tool host that gave root up, with the descriptors of its places. Raises OSError when the
    #: tool host may not have it; otherwise returns what must stay read-only in the places.
    Guard = Callable[[Launch | Run, list[int]], list[ReadOnlyPlace]]

#: Descriptors are first moved to this number or above, so that no place is taken by one of them.
_ABOVE: Final = 64
FAILED: Final = 125
#: The first descriptor of a program of ours.
_FIRST_PLACE: Final = 3
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAMS: Final = {
    "proxy": f"{_PACKAGE}/egress/start.py",
    "listen": f"{_PACKAGE}/egress/listen.py",
}
#: The features, of which some have a worker.
_FEATURES: Final = os.path.join(os.path.dirname(_PACKAGE), "features")


def serve_launches(channel: socket.socket, umask: int, guard: Guard | None = None) -> NoReturn:
    """Do what the tool host asks for until it is gone. Without a `guard` it may ask for anything that we can do.

    Jails write under `umask`; files that we make are closed to others.
    """
    begin("gdn-launcher")
    namespaces = staging.UserNamespaces()
    while True:
        data, fds = _receive(channel)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "prepare" in request:
            with suppress(OSError):  # then the launch that needs it says why
                namespaces.get(*request["prepare"])
            continue
        if "prompt" in request:
            with suppress(OSError):  # an ordinary user may not; then it takes its turn
                _put_first(request["prompt"])
            continue
        counter: list[int] = []
        try:
            kept = [] if guard is None else guard(request, fds)
            if "program" in request:
                answer = _run(request, fds)
            else:
                answer, counter = _launch(request, fds, namespaces, kept, umask)
        except OSError as error:
            answer = {"error": error.strerror or str(error), "fix": None}
        socket.send_fds(channel, [json.dumps(answer).encode()], counter)
        for given in [*fds, *counter]:
            os.close(given)


def begin(name: str) -> None:
    """Be called `name` in ps, and leave a terminal's Ctrl-C to the tool host."""
    gc.freeze()  # what is here now is shared with every fork
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        write_text("/proc/self/comm", name)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, flags, _ = socket.recv_fds(
        channel, allow_list.MAX_REQUEST, allow_list.MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        sys.exit("launcher: a request is too large")
    return data, fds


def _start(output: int, become: Callable[[], NoReturn]) -> int:
    """Fork a child of the tool host, which calls `become`. A failure in it is written to `output`."""
    pid = syscalls.sibling()
    if pid == 0:
        kept = _moved(output)  # where it stays, whatever is moved around below
        try:
            become()
        except BaseException as error:
            _fail(kept, f"{type(error).__name__}: {error}")
    return pid


def _launch(
    request: Launch,
    fds: list[int],
    namespaces: staging.UserNamespaces,
    kept: list[ReadOnlyPlace],
    umask: int,
) -> tuple[dict[str, Any], list[int]]:
    places, uid = request["places"], request["uid"]
    staged = staging.Staged([], 0)
    counter: list[int] = []
    gate, opened = os.pipe()  # the child goes through when its counter is there, or could not be made
    try:
        if uid is not None:
            staged = staging.copy(request["stages"], fds[len(places) :], uid, request["fallbackOwner"], namespaces)
            request["uid"] = staged.uid
            if request["enclosure"] is not None or staged.copied:
                request["argv"] += [str(staged.uid), *staged.copied]

        def become() -> NoReturn:
            os.close(opened)
            os.read(gate, 1)
            _become(request, fds[: len(places)], staged, kept, umask)

        pid = _start(fds[places.index(2)], become)
        if request["counted"]:
            with suppress(OSError):  # refused to users on some hosts: then it is sampled
                counter.append(syscalls.clock_of(pid))
    except OSError as error:
        return {"error": error.strerror or str(error), "fix": getattr(error, "fix", None)}, counter
    finally:
        for fd in (gate, opened):
            os.close(fd)
        staging.close(staged.trees)
    return {"pid": pid, "unmapped": staged.unmapped}, counter


def _put_first(thread: int) -> None:
    """Let this thread of the tool host run before all that have no such place, whenever it is ready."""
    if os.path.exists(f"/proc/{os.getppid()}/task/{thread}"):
        os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _run(request: Run, fds: list[int]) -> dict[str, Any]:
    """Start a program of ours with our own powers; it gives up by itself what it does not need. Raises OSError."""
    places = range(_FIRST_PLACE, _FIRST_PLACE + len(fds))
    name, arguments = request["program"], request["arguments"]
    if name == "worker":
        program, arguments = _worker(arguments[0]), arguments[1:]
    else:
        program = _PROGRAMS[name]
    options = ("-I", "-S", "-B", program)

    def become() -> NoReturn:
        os.setsid()
        syscalls.fresh_session_keyring()
        placed = {place: _moved(fd) for place, fd in zip(places, fds, strict=True)}
        _execute([sys.executable, *options, *arguments, *map(str, places)], {}, placed, (0, 1, 2))

    return {"pid": _start(2, become)}


def _worker(feature: str) -> str:
    """The file that starts the workers of a feature. It is one of ours: its place follows from the name alone.

    Raises OSError.
    """
    program = f"{_FEATURES}/{feature}/jail/start.py"
    if not allow_list.is_feature(feature) or not os.path.isfile(program):
        raise OSError(errno.ENOENT, f"no feature {feature[:40]!r} with a worker is installed")
    return program


def _execute(argv: list[str], env: dict[str, str], placed: dict[int, int], inherited: tuple[int, ...] = ()) -> NoReturn:
    """Execute a program with these descriptors at their places; of our own it inherits only `inherited`."""
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # what is ignored stays ignored through exec
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for place, fd in placed.items():
        os.dup2(fd, place)  # inheritable; everything else of ours is closed on exec
    # Whatever else would survive exec without the mark: descriptors of the interpreter or of a debugger.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in placed and int(name) not in inherited:
            with suppress(OSError):  # the listing's own
                os.set_inheritable(int(name), False)
    os.execve(argv[0], argv, env)


def _become(request: Launch, fds: list[int], staged: staging.Staged, kept: list[ReadOnlyPlace], umask: int) -> NoReturn:
    """Do everything between fork and exec."""
    os.umask(0o022)  # the jail's user goes through the folders that its places are put in
    for path in request["joins"]:
        write_text(path, "0")
    os.setsid()
    # The niceness of the whole session against others; Linux takes ten changes a second from a user.
    with suppress(OSError):
        write_text("/proc/self/autogroup", str(request["niceness"]))
    syscalls.fresh_session_keyring()
    placed = {place: _moved(fd) for place, fd in zip(request["places"], fds, strict=True)}
    uid = request["uid"]
    if uid is not None:
        os.setgroups([])
        if request["enclosure"] is not None and request["stage"] is not None:
            staging.enter_enclosure(request["stage"], request["enclosure"], request["stages"], staged.trees, uid, kept)
        else:
            if request["stage"] is not None:
                staging.attach(request["stage"], request["stages"], staged.trees, kept)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
    if request["folder"] is not None:
        os.chdir(request["folder"])
        syscalls.die_with_parent()
    os.umask(umask)
    _execute(request["argv"], request["env"], placed)


def _moved(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)


def _fail(output: int, reason: str) -> NoReturn:
    with suppress(OSError):
        os.write(output, f"launcher: {reason}\n".encode("utf-8", "replace"))
    os._exit(FAILED)


# --- the privileged helper --------------------------------------------------------------------------------------------

#: Largest request of an operation (bytes): a name and some paths. The allow-list names the folders of our code.
MAX_OPERATION: Final = 1 << 16
#: Largest size of the options and of a filter, which have some kilobytes (bytes).
MAX_TEXT: Final = 1 << 20
#: How long jails may take to end after their tool host (seconds). Groups that remain are left to the next tool host.
_LEFT_S: Final = 2.0
_LEFT_POLL_S: Final = 0.02


def serve_operations(channel: socket.socket, umask: int) -> NoReturn:
    """Serve requests until the tool host is gone. Jails write under `umask`."""
    begin("gdn-privileged")
    if not (first := _received(channel)):
        os._exit(0)  # a tool host that could not start
    allowed: AllowList = json.loads(first)
    settled = Settled()
    operations = Operations(allowed, settled)
    names = {name for name in vars(Operations) if not name.startswith("_")}
    while True:
        data = _received(channel)
        if not data:
            _tidy(operations, allowed)
            os._exit(0)
        fds: list[int] = []
        try:
            request = json.loads(data)
            name = request["operation"]
            if name == "make_launcher":
                answer: dict[str, Any] = {"done": _make_launcher(channel, umask, allowed, settled, fds)}
            elif name in names:
                answer = {"done": getattr(operations, name)(*request["with"])}
            else:
                raise allow_list.NotAllowed(f"there is no {name}")
        except OSError as error:
            answer = {"error": [error.errno or 0, error.strerror or str(error)]}
        except (ValueError, TypeError, KeyError) as error:
            answer = {"error": [0, f"{type(error).__name__}: {error}"]}
        with suppress(ConnectionError):
            socket.send_fds(channel, [json.dumps(answer).encode()], fds)
        for fd in fds:
            os.close(fd)


def _received(channel: socket.socket) -> bytes:
    """A request; b"" when the tool host is gone. Then it may have left an answer of ours unread."""
    with suppress(ConnectionError):
        return channel.recv(MAX_OPERATION)
    return b""


def _make_launcher(channel: socket.socket, umask: int, allowed: AllowList, settled: Settled, fds: list[int]) -> int:
    """Fork a launcher. Returns its process number, and adds the tool host's end of its socket to `fds`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = syscalls.sibling()
        if pid == 0:
            try:
                channel.close()
                ours.close()
                os.setsid()
                serve_launches(theirs, umask, lambda request, given: guard(request, given, allowed, settled))
            finally:
                os._exit(FAILED)
    fds.append(ours.detach())
    return pid


def guard(request: Launch | Run, fds: list[int], allowed: AllowList, settled: Settled) -> list[ReadOnlyPlace]:
    """What must stay read-only for a request. Raises OSError when a launcher must not do it for this tool host."""
    state_root, may_enclose = settled.read()
    if "argv" in request:
        allow_list.check_launch(request, allowed, enclosed=may_enclose)
        if request["enclosure"] is not None:
            _hold_enclosed(request, fds, allowed)
        return check_stages(request["stages"], fds[len(request["places"]) :], allowed, state_root)
    if set(request) != {"program", "arguments"}:
        raise allow_list.NotAllowed("that is no request of a tool host")
    _check_program(request, allowed)
    return []


def _hold_enclosed(request: Launch, fds: list[int], allowed: AllowList) -> None:
    """Check such a launch. What was checked is replaced by a copy that nobody else can write to."""
    way = allow_list.way_of(request, allowed["enclosed"])
    found = {}
    for number in (way["options"], way["filter"]):
        if number not in request["places"]:
            raise allow_list.NotAllowed("that is not how bubblewrap is started here")
        index = request["places"].index(number)
        data = found[number] = os.pread(fds[index], MAX_TEXT, 0)
        copy = os.memfd_create("jail", os.MFD_CLOEXEC)
        os.close(fds[index])
        fds[index] = copy
        os.write(copy, data)
        os.lseek(copy, 0, os.SEEK_SET)
    allow_list.check_enclosed(request, found[way["options"]], found[way["filter"]], way, allowed["filters"])


def _check_program(request: Run, allowed: AllowList) -> None:
    """Raise NotAllowed unless a program is asked for in the way in which a tool host may have it."""
    program_, given = request["program"], request["arguments"]
    into_jail = program_ == "listen" and len(given) == 1 and allow_list.is_jails(user_of(int(given[0])), allowed)
    as_jail = (
        program_ == "worker"
        and len(given) == 2
        and allow_list.is_feature(given[0])
        and allow_list.is_jails(int(given[1]), allowed)
    )
    if not into_jail and not as_jail and (program_ != "proxy" or given):
        raise allow_list.NotAllowed("that is no program of a tool host")


def _tidy(operations: Operations, allowed: AllowList) -> None:
    until = time.monotonic() + _LEFT_S
    while True:
        operations.remove_groups()
        if not any(os.path.exists(group) for group in allowed["groups"]) or time.monotonic() > until:
            return
        time.sleep(_LEFT_POLL_S)
