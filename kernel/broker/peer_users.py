"""Which users of this machine may connect to the broker's sockets.

libzmq asks the system for the user of a connection (SO_PEERCRED) when it accepts it, and closes the connections of
other users before it reads a byte. A later check of the descriptor would have a race. So another user cannot use a
stolen token.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

import zmq

from schemas.errors import fail
from schemas.system.own_users import TOOLHOST_UID
from schemas.tokens import TokenClass

#: Root of this machine, or of this user namespace. It can become any user, so refusing it would keep nobody out.
_ROOT: Final = 0


def users_of(cls: TokenClass) -> frozenset[int]:
    """The users that may connect to the socket of a class: our own user and root. For tool hosts also the user that
    they become.
    """
    users = {_ROOT, os.geteuid()}
    return frozenset(users | {TOOLHOST_UID} if cls == "toolhost" else users)


def admit_only(socket: zmq.Socket[bytes], users: Collection[int]) -> None:
    """Let only processes of these users connect. Call it before `bind`. Raises GoondanError E_INTERNAL."""
    for uid in users:
        try:
            # The option takes four bytes. In pyzmq they are a signed number.
            socket.setsockopt(zmq.IPC_FILTER_UID, uid if uid < 1 << 31 else uid - (1 << 32))
        except zmq.ZMQError as error:
            message = f"this libzmq cannot tell who connects ({error})"
            raise fail("E_INTERNAL", message, suggestion="Install the pyzmq wheel that `make setup` takes.") from None
