"""Runs a program on which user namespaces are refused, as a container's system call filter or the system's limit does.

    python no_user_namespaces.py EPERM|ENOSPC PROGRAM [ARGUMENT …]

Nothing of the machine is changed: the filter counts for the program and for all that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_CLONE_NEWUSER = 0x10000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
#: clone and unshare; clone3 has the same number everywhere, and its flags lie in memory.
_CALLS = {"x86_64": (56, 272), "aarch64": (220, 97)}
_CLONE3 = 435


def refuse_user_namespaces(number: int) -> None:
    """From now on, for good: making one fails with that errno. Raises OSError."""
    clone, unshare = _CALLS[platform.machine()]
    code = [
        (_LOAD, 0, 0, 0),
        (_JUMP_EQUAL, 5, 0, _CLONE3),
        (_JUMP_EQUAL, 1, 0, clone),
        (_JUMP_EQUAL, 0, 2, unshare),
        (_LOAD, 0, 0, 16),  # the low half of the first argument, which is the flags of both
        (_JUMP_SET, 2, 0, _CLONE_NEWUSER),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_RETURN, 0, 0, _ERRNO | number),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_user_namespaces(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
