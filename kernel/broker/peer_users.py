"""Which users of this machine may connect to the broker's sockets.

libzmq asks the system who connects (SO_PEERCRED) when it accepts, and hangs up on everybody else: before a byte is
read, and without the race that a later question about a descriptor would have. A stolen token is worth nothing then.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

import zmq

from schemas.errors import fail
from schemas.system.own_users import TOOLHOST_UID
from schemas.tokens import TokenClass

#: The root of this machine, or of this user namespace: it can be any user, so refusing it would keep nobody out.
_ROOT: Final = 0


def users_of(cls: TokenClass) -> frozenset[int]:
    """Who may connect to the socket of a class: our own user and root; a tool host also as the user it becomes."""
    users = {_ROOT, os.geteuid()}
    return frozenset(users | {TOOLHOST_UID} if cls == "toolhost" else users)


def admit_only(socket: zmq.Socket[bytes], users: Collection[int]) -> None:
    """Let only processes of these users connect; call it before `bind`. Raises GoondanError E_INTERNAL."""
    for uid in users:
        try:
            # The option takes four bytes; pyzmq knows them as a number with a sign.
            socket.setsockopt(zmq.IPC_FILTER_UID, uid if uid < 1 << 31 else uid - (1 << 32))
        except zmq.ZMQError as error:
            message = f"this libzmq cannot tell who connects ({error})"
            raise fail("E_INTERNAL", message, suggestion="Install the pyzmq wheel that `make setup` takes.") from None
