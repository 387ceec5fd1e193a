"""What a tool host that runs as root does not keep of root's powers.

It is not the one that makes jails: the launcher does, which is started before. What is left lets it end processes of
other users, look at what they use, and open the folders that jails get, wherever these lie. Its own children (another
launcher, the egress proxy before it becomes somebody else) can have what the bounding set leaves; nobody has the rest.

Source: sandbox.md section 3, item 1; capabilities(7); docs/decisions/035.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

#: What it keeps: to make and remove what stands for `.git` in a workdir and to give it the workdir's owner; to reach
#: what lies in closed folders; to end jails; to look at their memory and their file systems through /proc.
KEPT: Final = {"CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "KILL": 5, "SYS_PTRACE": 19}
#: What its children can have besides: users, namespaces, mounts and idmaps, the addresses inside a jail's network and
#: the connections that it refused, limits, the counter of processor time.
FOR_CHILDREN: Final = {
    "SETGID": 6, "SETUID": 7, "SETPCAP": 8, "NET_BIND_SERVICE": 10, "NET_ADMIN": 12, "NET_RAW": 13, "SYS_ADMIN": 21,
    "SYS_NICE": 23, "SYS_RESOURCE": 24, "SETFCAP": 31, "PERFMON": 38,
}  # fmt: skip
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 23, 24, 47, 4
#: More than any kernel has; the last one is found by asking.
_MOST: Final = 64
_VERSION_3: Final = 0x20080522


def give_up() -> None:
    """Give up the rest, if this process is root. Call it before there are threads: each has powers of its own.

    Raises OSError when the system refuses.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    bounding = {*KEPT.values(), *FOR_CHILDREN.values()}
    for number in range(_MOST):
        if libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1 and number not in bounding:
            _check(libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0))
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", _VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    _check(libc.capget(header, held))
    permitted = struct.unpack("=6I", held.raw)[1]  # all of ours are among the first 32
    kept = permitted & sum(1 << number for number in KEPT.values())
    _check(libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
