"""The jail's boot stage: the last walls, which can only be put up from inside, before any tool code is there.

The plan for it comes on a descriptor, one msgpack map, and is closed again. A wall that cannot be put up ends the
process: a jail without it is none.

Limits come here and not before bubblewrap, because a limit of processes that is set inside a user namespace counts only
the processes there.

Source: sandbox.md section 3, items 5 and 6; toolhost/landlock.py and policy.py compute what is in the plan.
"""

from __future__ import annotations

import _ctypes
import posix

from . import wire

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

#: The descriptor of the plan (policy.BOOT_FD).
PLAN_FD = 8
#: A plan is some kilobytes; one per path that shows.
MAX_PLAN = 1 << 20
#: What a jail ends with when a wall cannot be put up.
FAILED = 125

_PRLIMIT64 = {"x86_64": 302, "aarch64": 261}  # by hand, because the module resource is one more library to load
# The same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_O_PATH = 0o10000000
_S_IFMT, _S_IFDIR = 0o170000, 0o040000
#: Run, write, read, truncate, drive a device.
_FOR_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


def confine() -> None:
    """Put up what the plan says. Returns only with all of it in place."""
    try:
        plan = _read_plan()
        call = _system_call()
        for number, value in plan["limits"]:
            _limit(number, value, call)
        if plan["filter"] is not None:
            _no_new_privileges()
        if plan["landlock"] is not None:
            _landlock(plan["landlock"], call)
        if plan["filter"] is not None:
            _filter(bytes.fromhex(plan["filter"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _fail(f"{type(error).__name__}: {error}")


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


def _limit(number: int, value: int, call: Callable[..., int]) -> None:
    """Lower a resource limit for good; what is lower already stays."""
    try:  # noqa: SIM105 # contextlib is not imported here
        call(_PRLIMIT64[posix.uname().machine], 0, number, value.to_bytes(8, "little") * 2, 0)
    except PermissionError:
        pass  # it would have been raised


def _landlock(ruleset: dict[str, Any], call: Callable[..., int]) -> None:
    # An older kernel knows a shorter structure, and takes a longer one that ends in zeros.
    attributes = b"".join(ruleset[name].to_bytes(8, "little") for name in ("files", "net", "scopes"))
    fd = call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path, rights in ruleset["rules"]:
        try:
            place = posix.open(path, _O_PATH | posix.O_CLOEXEC)
        except FileNotFoundError:
            continue  # nothing there, so nothing to give
        if posix.fstat(place).st_mode & _S_IFMT != _S_IFDIR:
            rights &= _FOR_FILES  # the kernel refuses a rule that gives a file what only folders have
        rule = rights.to_bytes(8, "little") + place.to_bytes(4, "little")
        call(_ADD_RULE, fd, _PATH_BENEATH, rule, 0)
        posix.close(place)
    call(_RESTRICT_SELF, fd, 0)
    posix.close(fd)


def _no_new_privileges() -> None:
    """Where bubblewrap has not seen to it. The package ctypes is slow to import, but here no mounts are made."""
    import ctypes

    _must(ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "no new privileges")


def _filter(program: bytes) -> None:
    """Install the system call filter where bubblewrap has not."""
    import ctypes

    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: unsigned short, padding, pointer
    header = (len(program) // 8).to_bytes(8, "little") + ctypes.addressof(code).to_bytes(8, "little")
    _must(ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, 0, 0), "the filter")


def _must(result: int, what: str) -> None:
    if result != 0:
        raise OSError(f"{what} could not be set")


def _system_call() -> Callable[..., int]:
    """libc's `syscall`, by the module under ctypes: the package around it takes 5 ms to import."""
    foreign: Any = _ctypes

    class Long(foreign._SimpleCData):  # type: ignore[misc]
        _type_ = "l"

    class Function(foreign.CFuncPtr):  # type: ignore[misc]
        _flags_ = foreign.FUNCFLAG_CDECL | foreign.FUNCFLAG_USE_ERRNO
        _restype_ = Long

    function: Any = Function(foreign.dlsym(foreign.dlopen(None, posix.RTLD_NOW), "syscall"))

    def call(number: int, *arguments: int | bytes) -> int:
        result: int = function(*(Long(value) if isinstance(value, int) else value for value in (number, *arguments)))
        if result < 0:
            code = foreign.get_errno()
            raise OSError(code, f"system call {number}: {posix.strerror(code)}")
        return result

    return call


def _fail(reason: str) -> NoReturn:
    posix.write(2, f"boot: {reason}\n".encode("utf-8", "replace"))
    posix._exit(FAILED)
