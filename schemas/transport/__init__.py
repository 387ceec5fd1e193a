"""One end of a link's connection to the broker, behind one small interface.

There are two: `libzmq` (the default), and `native`, which speaks ZMTP itself. GOONDAN_TRANSPORT chooses, for each
process by itself: the bytes between two processes are the same. What each promises stands side by side in
docs/design/wire.md section 5.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio  # which the broker does without
    from collections.abc import Callable

#: The variable that chooses, and what it may say. The first is the default.
VARIABLE: Final = "GOONDAN_TRANSPORT"
TRANSPORTS: Final = ("libzmq", "native")
#: The socket of each class of peers, in the runtime directory.
SOCKETS: Final[dict[str, str]] = {
    "agent": "agents.sock",
    "toolhost": "tools.sock",
    "client": "clients.sock",
    "control": "control.sock",
}
#: The length of the routing ids that links choose at random.
ROUTING_ID_BYTES: Final = 16
_IPC: Final = "ipc://"


class Transport:
    """A connection that is made again and again. Use it in the thread of its loop only.

    What it is made with:
    - `path` is that of the broker's socket, and `max_bytes` the largest message.
    - `admits(fd)`: whether a new connection may be used. It is asked before a message of it is given, and before
      anything but the probe is sent on it.
    - `on_messages()`: `take` may give messages now.
    - `on_writable()`: further messages may be sent.
    - `on_lost()`: the connection is over. What was not sent may be gone.

    The callbacks must neither block nor raise. `close` may be called in each of them.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        *,
        admits: Callable[[int], bool],
        on_messages: Callable[[], None],
        on_writable: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._admits = admits
        self._on_messages = on_messages
        self._on_writable = on_writable
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused = False

    @abstractmethod
    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, now or as soon as there is somebody who listens."""

    @abstractmethod
    def take(self) -> bytes | None:
        """The next message; it may be empty. None: there is none now."""

    @abstractmethod
    def send(self, messages: deque[bytes]) -> None:
        """Send as many of the messages as go out now, and take those out of the queue. `on_writable` is called when
        further ones may be sent. Without a connection, none goes out.
        """

    @abstractmethod
    def pause(self) -> None:
        """Read nothing until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Read again."""

    @abstractmethod
    async def drain(self, messages: deque[bytes]) -> None:
        """Send these messages, and what is left from before. It waits as long as the other side does not read."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, and make no other one. What was not sent is gone. A second call does nothing."""


def chosen(default: str = TRANSPORTS[0]) -> str:
    """The transport that GOONDAN_TRANSPORT names, or else `default`. Raises GoondanError E_USAGE for one that is not
    there.
    """
    name = os.environ.get(VARIABLE) or default
    if name not in TRANSPORTS:
        from goondan.schemas.wire.errors import fail  # a command has no time to import it before it needs it

        raise fail("E_USAGE", f"{VARIABLE} is {name!r}; there are {' and '.join(TRANSPORTS)}")
    return name


def path_of(endpoint: str) -> str:
    """The path of an endpoint, which is `ipc://` and a path. Raises GoondanError E_USAGE."""
    if not endpoint.startswith(_IPC) or "\0" in endpoint:
        from goondan.schemas.wire.errors import fail

        raise fail("E_USAGE", f"{endpoint!r} is no endpoint of a kernel; it begins with {_IPC}")
    return endpoint.removeprefix(_IPC)
