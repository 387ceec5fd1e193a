"""Is it the broker? What a peer looks at before it says hello, and again at the welcome.

A token is worth what it is only to the broker, and a welcome says what code is loaded. So before a peer says hello it
looks at the place of the socket: every directory on the way, and the owner of the socket. And the first frames on a
connection, up to the welcome, must come from a process of the broker's user, as the system says (SO_PEERCRED).

Which user that is the launch says (`--broker-uid`, ForkRequest); without a word it is the user of this process.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from typing import Final

from goondan.schemas.system import directories, users
from goondan.schemas.wire.errors import GoondanError, fail

_IPC: Final = "ipc://"
#: What SO_PEERCRED gives: pid, uid, gid.
_PEER: Final = struct.Struct("3i")


class BrokerIdentity:
    """The broker that is expected behind an endpoint. `uid` is its user; None is the user of this process."""

    def __init__(self, endpoint: str, uid: int | None = None) -> None:
        self._path = endpoint.removeprefix(_IPC) if endpoint.startswith(_IPC) else None
        self.uid = os.geteuid() if uid is None else uid

    def is_there(self) -> bool:
        """Whether there is a socket that may be talked to; False without one.

        Raises GoondanError E_BROKER_UNTRUSTED when others could have put it there.
        """
        if self._path is None:
            return True
        folder, name = os.path.split(self._path)
        try:
            with directories.open_directory(folder, owners=(self.uid, os.geteuid())) as directory:
                state = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except directories.DirectoryRefused as refused:
            raise fail("E_BROKER_UNTRUSTED", str(refused), suggestion=refused.fix) from None
        except OSError as error:
            raise fail("E_BROKER_UNTRUSTED", f"{error.filename or self._path}: {error.strerror}") from None
        if not stat.S_ISSOCK(state.st_mode):
            raise fail("E_BROKER_UNTRUSTED", f"{self._path} is no socket")
        # Root's broker gives the socket of tool hosts to the user that they become.
        if state.st_uid not in (self.uid, os.geteuid(), users.TOOLHOST_UID):
            raise self._foreign(f"{self._path} belongs to uid {state.st_uid}")
        return True

    def speaks(self, fd: int) -> bool:
        """Whether the broker is at the other end of the connection `fd`; False for one that is gone already.

        Raises GoondanError E_BROKER_UNTRUSTED for another user's process.
        """
        if self._path is None:
            return True
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        except OSError:
            return False
        # An uid above 2**31 comes as a negative number.
        if uid & 0xFFFFFFFF != self.uid:
            raise self._foreign(f"a process of uid {uid & 0xFFFFFFFF} listens on {self._path}")
        return True

    def _foreign(self, found: str) -> GoondanError:
        return fail("E_BROKER_UNTRUSTED", f"{found}, and the broker is expected to be of uid {self.uid}")
