"""`python listen.py PID FD`: listening sockets inside the network namespace of a process, made from outside.

It is a short-lived program of its own: only a process with one thread can enter a user namespace, and such a process
should do nothing else. The jail's interpreter and its seccomp filter take no part. Ports below 1024 need no privilege
in there.

It reads one JSON list of [address, port] from the socket FD, and answers `{"error": null, "made": [true, …]}` with the
descriptors: the listening sockets that could be made, in that order, then sockets that see each connection that the
namespace refused. On a machine without IPv6 its sockets are not made. Any other failure is the error. Every address is
made local to the namespace, so a connection to any of them ends here, where it can be seen, instead of having no route.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

#: ioctl on a namespace's descriptor: the user namespace that owns it (linux/nsfs.h).
_NS_GET_USERNS: Final = 0xB701
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 1
#: bubblewrap brings the loopback interface up within a millisecond of naming its process (seconds).
_UP_S: Final = 5.0
_UP_POLL_S: Final = 0.0005
_BACKLOG: Final = 64
_SO_ATTACH_FILTER: Final = 26
_RTM_NEWROUTE: Final = 24
_NLM_F: Final = 0x1 | 0x4 | 0x100 | 0x400  # request, acknowledge, replace, create
_RT_TABLE_LOCAL: Final = 255
_RTPROT_BOOT: Final = 3
_RT_SCOPE_HOST: Final = 254
_RTN_LOCAL: Final = 2
_RTA_OIF: Final = 4
_MAX_REQUEST: Final = 65536
#: Room for refused connections that nobody has looked at yet (bytes).
_WATCH_BUFFER: Final = 65536


def main(arguments: list[str]) -> int:
    """Serve one request. 0 even when it failed: the answer says so."""
    pid, channel = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    wanted = json.loads(channel.recv(_MAX_REQUEST))
    made: list[socket.socket | None] = []
    watching: list[socket.socket | None] = []
    error: str | None = None
    try:
        _enter(pid)
        _wait_until_up()
        _make_everything_local()
        made = [_listen(str(address), int(port)) for address, port in wanted]
        watching = [_watch(family) for family in _OFFSETS]
    except OSError as problem:
        error = f"{problem.strerror or problem}"
    fds = [] if error else [item.detach() for item in made + watching if item is not None]
    answer = json.dumps({"error": error, "made": [item is not None for item in made]}).encode()
    channel.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    return 0


def _enter(pid: int) -> None:
    """Into the network namespace of a process, through the user namespace that owns it."""
    libc = ctypes.CDLL(None, use_errno=True)
    net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(net), os.stat("/proc/self/ns/net")):
        raise OSError(0, "the jail has no network namespace of its own")
    owner = fcntl.ioctl(net, _NS_GET_USERNS)
    steps = [(net, _CLONE_NEWNET)]
    if not os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user")):
        steps.insert(0, (owner, _CLONE_NEWUSER))
    for fd, kind in steps:
        if libc.setns(fd, kind) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"entering a namespace of the jail: {os.strerror(number)}")


def _wait_until_up() -> None:
    until = time.monotonic() + _UP_S
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        while True:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
            if struct.unpack_from("H", answer, 16)[0] & _IFF_UP:
                return
            if time.monotonic() > until:
                raise OSError(0, "the jail's loopback interface did not come up")
            time.sleep(_UP_POLL_S)


def _make_everything_local() -> None:
    index = socket.if_nametoindex("lo")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            route = struct.pack(
                "BBBBBBBBI", family, 0, 0, 0, _RT_TABLE_LOCAL, _RTPROT_BOOT, _RT_SCOPE_HOST, _RTN_LOCAL, 0
            )
            body = route + struct.pack("HHI", 8, _RTA_OIF, index)
            netlink.send(struct.pack("IHHII", 16 + len(body), _RTM_NEWROUTE, _NLM_F, 1, 0) + body)
            problem = -struct.unpack_from("i", netlink.recv(4096), 16)[0]
            # A machine without IPv6 has nothing to route there.
            if problem and family == socket.AF_INET:
                raise OSError(problem, f"a route in the jail: {os.strerror(problem)}")


def _made(family: int, kind: int, prepare: Callable[[socket.socket], None], protocol: int = 0) -> socket.socket | None:
    """A socket of this namespace; None on a machine without IPv6. Raises OSError."""
    try:
        made = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        prepare(made)
    except OSError:
        if family == socket.AF_INET6:
            return None
        raise
    return made


def _listen(address: str, port: int) -> socket.socket | None:
    def prepare(made: socket.socket) -> None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(_BACKLOG)

    return _made(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, prepare)


# Classic BPF: accept segments that refuse a connection (RST and ACK set, sequence number 0), 64 bytes of each.
_LDXB_IP_LENGTH: Final = (0xB1, 0, 0, 0)
_LDX_0: Final = (0x01, 0, 0, 0)
_LDB_X: Final = 0x50
_LD_X: Final = 0x40
_AND: Final = 0x54
_JEQ: Final = 0x15
_RET: Final = 0x06
#: IPv4 raw sockets begin with the IP header, IPv6 ones with the segment.
_OFFSETS: Final = {socket.AF_INET: _LDXB_IP_LENGTH, socket.AF_INET6: _LDX_0}


def _watch(family: socket.AddressFamily) -> socket.socket | None:
    program = [
        _OFFSETS[family],
        (_LDB_X, 0, 0, 13), (_AND, 0, 0, 0x14), (_JEQ, 0, 3, 0x14),
        (_LD_X, 0, 0, 4), (_JEQ, 0, 1, 0),
        (_RET, 0, 0, 64), (_RET, 0, 0, 0),
    ]  # fmt: skip
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    attached = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))

    def prepare(made: socket.socket) -> None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WATCH_BUFFER)
        made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)

    return _made(family, socket.SOCK_RAW, prepare, socket.IPPROTO_TCP)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
