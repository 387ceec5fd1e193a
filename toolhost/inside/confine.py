"""The jail's boot stage: it stops being root, puts up the last walls, which is possible from inside only, and becomes
the program of the jail. No tool code runs before it.

A jail without a user namespace stops being root first (`drop`). bubblewrap was root on the host, and so is this
process. It has three capabilities and nothing to use them on. It becomes the jail's user for good, and forks. The
parent is the first process of the namespace and only waits. The child goes on.

The plan comes on a descriptor, as one msgpack map. If a wall cannot be put up, the process ends, and with it the jail.

Limits are set here and not before bubblewrap. A limit of processes that is set inside a user namespace counts only the
processes there.

Where the jail runs another program than our Python worker, the boot stage becomes that program at last (`become`). Of
an MCP server, standard input and output are one socket, whose other end speaks with the server. Standard error is
the log. A JavaScript runtime finds what every worker finds (schemas/WORKER.md section 1).

Source: docs/design/sandbox.md sections 3.2, 3.5, 3.6, 8 and 9; toolhost/policy computes what is in the plan.
"""

from __future__ import annotations

import _ctypes  # without the package around it, which takes 5 ms
import _signal  # type: ignore[import-not-found] # without the enumerations of the module around it
import posix
import sys

from . import wire

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# --- system calls -----------------------------------------------------------------------------------------------------

_X86_64 = {"clone": 56, "capset": 126, "prctl": 157, "mount": 165, "prlimit64": 302, "seccomp": 317}
_AARCH64 = {"clone": 220, "capset": 91, "prctl": 167, "mount": 40, "prlimit64": 261, "seccomp": 277}
NUMBERS = {"x86_64": _X86_64, "aarch64": _AARCH64}[posix.uname().machine]
NUMBERS |= {  # the same on every machine
    "close_range": 436, "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
}  # fmt: skip

#: What a jail ends with when a wall cannot be put up, and when a place was replaced while it was being made: then it is
#: made again (toolhost/jails/jail.py).
FAILED = 125
REPLACED = 124
PR_SET_DUMPABLE, PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS = 4, 23, 38
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 22, 24, 47, 4
_SECCOMP_MODE_FILTER, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 2, 1, 1

_foreign: Any = _ctypes


class _Long(_foreign._SimpleCData):  # type: ignore[misc]
    _type_ = "l"


class _Char(_foreign._SimpleCData):  # type: ignore[misc]
    _type_ = "c"


class _Function(_foreign.CFuncPtr):  # type: ignore[misc]
    _flags_ = _foreign.FUNCFLAG_CDECL | _foreign.FUNCFLAG_USE_ERRNO
    _restype_ = _Long


_syscall: Callable[..., int] = _Function(_foreign.dlsym(_foreign.dlopen(None, posix.RTLD_NOW), "syscall"))


def call(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call; bytes are passed as a pointer to them. Raises OSError."""
    words = [_Long(value) if isinstance(value, int) else value for value in arguments]
    result = _syscall(_Long(NUMBERS[name]), *words)
    if result < 0:
        code = _foreign.get_errno()
        raise OSError(code, f"{name}: {posix.strerror(code)}")
    return result


def bound_capabilities(numbers: list[int]) -> None:
    """No program that this process starts gets these capabilities, nor any by inheritance. Raises OSError."""
    for number in numbers:
        call("prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def drop_capabilities() -> None:
    """Empty all capability sets of this thread. Raises OSError."""
    header = (0x20080522).to_bytes(8, "little")  # struct __user_cap_header_struct: version 3, this thread
    call("capset", header, bytes(24))


class Filter:
    """A system call filter, ready to be installed."""

    def __init__(self, program: bytes) -> None:
        """`program` is an array of struct sock_filter."""
        kind: Any = type("Code", (_foreign.Array,), {"_type_": _Char, "_length_": len(program)})
        self._code = kind.from_buffer_copy(program)  # the header refers to it
        # struct sock_fprog: unsigned short, padding, pointer
        address = _foreign.addressof(self._code)
        self._header = (len(program) // 8).to_bytes(8, "little") + address.to_bytes(8, "little")

    def install(self, *, threads: bool = False) -> None:
        """From now on it counts for this thread and for all that it starts. With `threads` it counts for every thread.

        Raises OSError.
        """
        if not threads:
            call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._header, 0, 0)
        elif call("seccomp", _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, self._header) != 0:
            raise OSError("a thread cannot take the filter")


# --- process 1 --------------------------------------------------------------------------------------------------------

_ALL = 0xFFFFFFFF
_SIGINT, _SIGCHLD = 2, 17


def wait(child: int) -> NoReturn:
    """Reap until that child has ended, and end with its status, as bubblewrap would. Linux then ends what is left."""
    try:
        _not_interrupted()
        call("close_range", 0, _ALL, 0)  # or else the host would not see the worker close its channel
        while True:
            _reaped(child, *posix.waitpid(-1, 0))
    finally:
        posix._exit(FAILED)


def wait_with_host(child: int, host: int) -> NoReturn:
    """The same, and end as well when nobody reads the pipe `host` any more. Only the tool host reads it.

    Elsewhere a death signal does this. The parent of this process is root without capabilities, and Linux lets it send
    no signal to another user, a death signal neither.
    """
    try:
        from select import POLLIN, poll

        _not_interrupted()
        call("close_range", 0, host - 1, 0)
        call("close_range", host + 1, _ALL, 0)
        waking, woken = posix.pipe2(posix.O_NONBLOCK | posix.O_CLOEXEC)
        _signal.set_wakeup_fd(woken)
        _signal.signal(_SIGCHLD, lambda number, frame: None)
        watch = poll()
        watch.register(host, 0)
        watch.register(waking, POLLIN)
        while True:
            try:
                while (ended := posix.waitpid(-1, posix.WNOHANG))[0]:
                    _reaped(child, *ended)
            except ChildProcessError:
                pass
            for fd, _ in watch.poll():
                if fd == host:
                    posix._exit(FAILED)
                posix.read(waking, 4096)
    finally:
        posix._exit(FAILED)


def _not_interrupted() -> None:
    """A namespace's first process gets no signal from within that it does not handle, but Python handles SIGINT. The
    worker can send that where Landlock has no scopes (before Linux 6.12), also to all of its group.
    """
    _signal.signal(_SIGINT, _signal.SIG_DFL)


def _reaped(child: int, pid: int, status: int) -> None:
    if pid == child:
        code = posix.waitstatus_to_exitcode(status)
        posix._exit(128 - code if code < 0 else code)


# --- no root ----------------------------------------------------------------------------------------------------------

#: More than any kernel has; the last one is found by asking.
_CAPABILITIES = 64
#: Standard error, a pipe that the tool host reads.
_OUTPUT = 2


def drop(user: int, folder: str) -> None:
    """Become that user (and group), and go on in `folder`, in a new process. Raises OSError."""
    bound_capabilities([number for number in range(_CAPABILITIES) if _is_bounding(number)])
    posix.setgroups([])
    posix.setresgid(user, user, user)
    posix.setresuid(user, user, user)
    drop_capabilities()  # what could be inherited outlives the change of user
    if user == 0 or posix.getresuid() != (user,) * 3 or posix.getresgid() != (user,) * 3 or posix.getgroups():
        raise OSError(f"it is still {posix.getresuid()}")
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    posix.chdir(folder)  # which root without capabilities may not enter
    child = posix.fork()
    if child:
        wait_with_host(child, _OUTPUT)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # or else its own /proc would be closed to it


def _is_bounding(number: int) -> bool:
    try:
        return call("prctl", PR_CAPBSET_READ, number, 0, 0, 0) == 1
    except OSError:  # there is none of that number
        return False


# --- the walls --------------------------------------------------------------------------------------------------------

#: The descriptor of the plan (goondan.toolhost.policy.subject.BOOT_FD).
PLAN_FD = 8
#: A plan is some kilobytes; one per path that shows.
MAX_PLAN = 1 << 20

RLIMIT_NOFILE = 7  # include/uapi/asm-generic/resource.h
_PATH_BENEATH = 1
_O_PATH = 0o10000000
_S_IFMT, _S_IFDIR = 0o170000, 0o040000
#: Run, write, read, truncate, drive a device.
_FOR_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def confine() -> dict[str, Any]:
    """Put up the walls of the plan, and return the plan.

    With `drops` this process is still root. It becomes the user of its first argument before anything else. The other
    arguments are places of which the launcher made copies.

    With `calls` this is the fork server, and two walls are left to each call. Landlock forbids mounts, which the server
    makes for each call. The limit of open files is the tool's, and the server needs more.

    The places of the jail must still be those of the plan: somebody who can write to a folder of the host could have
    put a link in the place of one before it was mounted.
    """
    try:
        plan = _read_plan()
        if plan["drops"]:
            drop(int(sys.argv[1]), plan["folder"])
        for path in sys.argv[2:]:
            plan["seen"].pop(path, None)  # a copy, made where no jail can write
        for path, (device, inode) in plan["seen"].items():
            _check(path, posix.lstat(path), device, inode)
        for number, value in plan["limits"]:
            if number != RLIMIT_NOFILE or plan["calls"] is None:
                limit(number, value)
        if plan["filter"] is not None:
            call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # where bubblewrap has not seen to it
        if plan["landlock"] is not None and plan["calls"] is None:
            landlock(plan["landlock"], open_places(plan["landlock"]["rules"], plan["seen"]))
        if plan["filter"] is not None:
            Filter(bytes.fromhex(plan["filter"])).install()
    except Replaced as error:
        fail(str(error), REPLACED)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{type(error).__name__}: {error}")
    return plan


def _read_plan() -> dict[str, Any]:
    data = b""
    while len(data) < MAX_PLAN:
        more = posix.read(PLAN_FD, MAX_PLAN)
        if not more:
            break
        data += more
    posix.close(PLAN_FD)
    plan: dict[str, Any] = wire.unpack(data)
    return plan


def limit(number: int, value: int) -> None:
    """Lower a resource limit for good; what is lower already stays."""
    try:  # noqa: SIM105 # contextlib is not imported here
        call("prlimit64", 0, number, value.to_bytes(8, "little") * 2, 0)
    except PermissionError:
        pass  # it would have been raised


class Replaced(ValueError):
    """A place of the jail is not the one that was looked at."""


def _check(path: str, status: posix.stat_result, device: int, inode: int) -> None:
    if (status.st_dev, status.st_ino) != (device, inode):
        raise Replaced(f"{path} was replaced while the jail was being made")


def open_places(rules: list[tuple[str, int]], seen: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """The places of rules as descriptors, with the rights that they get; one that is not there gets none.

    `seen` are the device and inode that some must have. Raises Replaced.
    """
    places = []
    for path, rights in rules:
        try:
            place = posix.open(path, _O_PATH | posix.O_CLOEXEC)
        except FileNotFoundError:
            continue
        status = posix.fstat(place)
        if path in seen:  # without mounts it could have been replaced since
            _check(path, status, *seen[path])
        if status.st_mode & _S_IFMT != _S_IFDIR:
            rights &= _FOR_FILES  # the kernel refuses a rule that gives a file what only folders have
        places.append((place, rights))
    return places


def landlock(ruleset: dict[str, Any], places: list[tuple[int, int]]) -> None:
    """Put this process, and all that it starts, under a ruleset for good, and close the places. Raises OSError."""
    # An older kernel knows a shorter structure, and takes a longer one that ends in zeros.
    attributes = b"".join(ruleset[name].to_bytes(8, "little") for name in ("files", "net", "scopes"))
    fd = call("landlock_create_ruleset", attributes, len(attributes), 0)
    for place, rights in places:
        rule = rights.to_bytes(8, "little") + place.to_bytes(4, "little")
        call("landlock_add_rule", fd, _PATH_BENEATH, rule, 0)
        posix.close(place)
    call("landlock_restrict_self", fd, 0)
    posix.close(fd)


def fail(reason: str, status: int = FAILED) -> NoReturn:
    """Write to standard error, which the host reads, why a wall cannot be put up, and end this process."""
    posix.write(2, f"boot: {reason}\n".encode("utf-8", "replace"))
    posix._exit(status)


# --- another program than our Python worker ---------------------------------------------------------------------------

#: The other end is closed when the jail has what it was granted: its network, above all.
_GATE_FD = 3
#: What a shell ends with when there is no such program.
_NOT_FOUND = 127
#: Signals that Python ignores or handles, and no program expects to find so.
_CHANGED = (2, 13, 25)  # SIGINT, SIGPIPE, SIGXFSZ
_ENOENT, _ENOTDIR, _ENOEXEC = 2, 20, 8


def become(program: dict[str, Any]) -> NoReturn:
    """Run the program. When it cannot be run, say why on standard error, and end."""
    if program["gated"]:
        while posix.read(_GATE_FD, 1):
            pass
        posix.close(_GATE_FD)
    for number in _CHANGED:
        _signal.signal(number, _signal.SIG_DFL)
    argv = program["argv"]
    environment = {**posix.environ, **{name.encode(): value.encode() for name, value in program["env"].items()}}
    why = f"there is no {argv[0]} in the PATH of its jail"
    for path in _candidates(argv[0], environment.get(b"PATH", b"").decode("utf-8", "surrogateescape")):
        try:
            posix.execve(path, argv, environment)
        except OSError as error:
            if error.errno not in (_ENOENT, _ENOTDIR) or "/" in argv[0]:
                hint = " (a script begins with #! and its interpreter)" if error.errno == _ENOEXEC else ""
                why = f"{path} cannot be run in its jail: {error.strerror}{hint}"
    posix.write(2, f"{why}\n".encode("utf-8", "replace"))
    posix._exit(_NOT_FOUND)


def _candidates(name: str, path: str) -> list[str]:
    if "/" in name:
        return [name]
    return [f"{folder}/{name}" for folder in path.split(":") if folder]
