"""System calls by their numbers, for what Python has no function for; without the package ctypes, which takes 5 ms.

Source: docs/design/sandbox.md section 5.
"""

from __future__ import annotations

import _ctypes
import posix

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
