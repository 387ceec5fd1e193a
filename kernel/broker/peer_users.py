"""Which users of this machine may connect to the broker's sockets.

The transport asks the system for the user of a connection (SO_PEERCRED) when it accepts it, and closes the connections
of other users before it reads a byte. So another user cannot use a stolen token.
"""

from __future__ import annotations

import os
from typing import Final

from goondan.schemas.system.users import TOOLHOST_UID
from goondan.schemas.wire.tokens import TokenClass

#: Root of this machine, or of this user namespace. It can become any user, so refusing it would keep nobody out.
_ROOT: Final = 0


def users_of(cls: TokenClass) -> frozenset[int]:
    """The users that may connect to the socket of a class: our own user and root. For tool hosts also the user that
    they become.
    """
    users = {_ROOT, os.geteuid()}
    return frozenset(users | {TOOLHOST_UID} if cls == "toolhost" else users)
