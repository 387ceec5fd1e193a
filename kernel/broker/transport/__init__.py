"""The broker's sockets, behind one small interface: what moves bytes between the router and its peers.

There are two: `libzmq` (the default), and `native`, which speaks ZMTP itself. GOONDAN_TRANSPORT chooses. To a peer both
are a ROUTER. What each of them promises stands side by side in docs/design/wire.md section 6.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

#: Bytes that may wait for one peer, and for all: an agent or a host that stops reading must not grow the broker.
MAX_WAITING_PEER: Final = 32 << 20
MAX_WAITING_ALL: Final = 256 << 20


class Transport(Protocol):
    """The sockets of a broker, one for each class of peers. Use it only in the thread that made it.

    A peer is known by its class and the routing id of its connection. No method blocks but `wait` and `close`.
    """

    def listen(self, path: str, users: Collection[int], high_water: int) -> None:
        """Listen for the next class at `path`, which nobody else may use. Processes of `users` only are let in.
        `high_water`: messages that may wait for a peer, and of a peer, where messages are counted.
        """

    @property
    def due(self) -> Sequence[object]:
        """For each class: true while there may be messages that `receive` has not given."""

    def wait(self, seconds: float, now: float) -> bool:
        """Sleep until there is something to do. Whether there was. `now`: the broker's clock before it slept."""

    def receive(self, cls: int, quota: int) -> Sequence[tuple[bytes, bytes]]:
        """At most `quota` messages of a class, each with the routing id of its connection; a message may be empty."""

    def send(self, frames: Sequence[tuple[int, bytes, bytes]]) -> Sequence[tuple[int, bytes]]:
        """Send frames, each with class and routing id of its peer. Gives the peers that are not there, and those that
        were given up since the last time because they take too little.
        """

    def tick(self, now: float) -> None:
        """The work that is done a few times a second."""

    def close(self, linger_s: float) -> None:
        """Accept nobody any more. What waits for peers gets `linger_s` to leave. Then every connection ends."""
