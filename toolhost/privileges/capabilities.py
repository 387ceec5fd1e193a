"""What a tool host that root has started becomes: a user of its own with three powers, which can come by no other.

The privileged helper and the launcher (launcher/), which were started before, do what it cannot do any more. With what
is left it reads folders that are closed to others, looks at what jails use, and ends their processes. Root that has no
number for it, as in some containers, stays root, with what it had of the powers that it needs.

Source: docs/design/sandbox.md section 3.1; capabilities(7); docs/decisions/039.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress
from typing import Final

from schemas.system.own_users import TOOLHOST_UID

#: What it keeps: to reach what lies in closed folders, to end jails, to look at their memory and their files in /proc.
KEPT: Final = {"DAC_READ_SEARCH": 2, "KILL": 5, "SYS_PTRACE": 19}
#: What it has besides where it must stay root: with these root opens what is not its own.
OF_ROOT: Final = {"DAC_OVERRIDE": 1}
#: Without these it cannot become another user, or could not work as one.
_NEEDED: Final = {"CHOWN": 0, "DAC_READ_SEARCH": 2, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 4, 8
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 23, 24, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC = 1, 1
#: struct sock_filter (bytes).
_INSTRUCTION: Final = 8
#: More than any kernel has; the last one is found by asking.
_MOST: Final = 64
_VERSION_3: Final = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def future_user() -> int:
    """Who this process, which is root, will be: TOOLHOST_UID, or 0 where that cannot be."""
    held = _held()
    able = all(held >> number & 1 for number in _NEEDED.values())
    return TOOLHOST_UID if able and _is_mapped("uid_map") and _is_mapped("gid_map") else 0


def _is_mapped(name: str) -> bool:
    with suppress(OSError, ValueError), open(f"/proc/self/{name}", encoding="ascii") as source:
        for line in source:
            first, _, count = map(int, line.split())
            if first <= TOOLHOST_UID < first + count:
                return True
    return False


def give_up(user: int, filter_program: bytes | None) -> None:
    """Become `user` (see `future_user`) and give up the rest, for good. Call it before there are threads: each has
    powers of its own. `filter_program` is for this process and all of its threads; None on a machine without one.

    Raises OSError when the system refuses.
    """
    held = _held()
    wanted = KEPT if user else KEPT | OF_ROOT
    kept = held & sum(1 << number for number in wanted.values())
    for number in range(_MOST):
        if _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1 and held >> 8 & 1:  # SETPCAP
            _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))  # else a change of user leaves nothing to keep
        os.setresuid(user, user, user)
        _check(_libc.prctl(_PR_SET_KEEPCAPS, 0, 0, 0, 0))
        # Others of this user, tool hosts of other kernels, may not look into us.
        _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    header = struct.pack("=Ii", _VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)))  # all of ours are among the first 32
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if filter_program is not None:
        _install(filter_program)


def _install(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // _INSTRUCTION, ctypes.addressof(buffer))
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    try:
        _check(_libc.syscall(number, ctypes.c_long(_SECCOMP_SET_MODE_FILTER), ctypes.c_long(_SECCOMP_TSYNC), header))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        # A kernel that has none, or an emulated machine. No jail can be made there either, and the probe says so.


def _held() -> int:
    """The capabilities that are permitted, of the first 32."""
    header = struct.pack("=Ii", _VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, held))
    return int(struct.unpack("=6I", held.raw)[1])


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
