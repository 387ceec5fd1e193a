"""The tool host's side of its steward (launcher/steward.py): what only root can do, asked for and waited for.

There is one where root has started the tool host (rooted.py). Any thread may ask; what takes long is another thread's
affair than the loop's. A steward that is lost cannot be started again, as nobody is root any more: the tool host ends
(powers.Powers.lifeline), and its supervisor starts the next.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any, Final

from toolhost.launcher.terms import Terms

#: For one deed (seconds): a mkdir takes microseconds, longer on a file system that has gone away.
ANSWER_S: Final = 30.0
_MAX_ANSWER: Final = 65536


class Steward:
    """The steward of this process. Methods raise OSError for what is refused or failed."""

    def __init__(self) -> None:
        self.pid = 0
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, channel: socket.socket, pid: int, terms: Terms) -> None:
        """Take this process for it, which waits for its terms at the other end of the socket."""
        channel.settimeout(ANSWER_S)
        channel.send(json.dumps(terms).encode())
        self._channel, self.pid = channel, pid
        atexit.register(self.close)

    def close(self) -> None:
        """End it, after the groups of this process."""
        with suppress(OSError):
            self.remove_groups()
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def launcher(self) -> tuple[socket.socket, int]:
        """A new launcher: our end of its socket, and its number."""
        answer, fds = self._ask({"launcher": True})
        return socket.socket(fileno=fds[0]), int(answer["pid"])

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        """Have the folder `above`/`name` in the state, and those beside it of tool hosts that are gone."""
        self._do("state", state_dir, above, name)

    def settle(self, enclosed: bool) -> None:
        """Say, before there is a jail of a tool, whether bubblewrap has to run as root here."""
        self._do("settle", enclosed)

    def make_trial(self) -> str:
        """Make the folder in which it is tried whether workdirs can have file systems of their own; its path."""
        return str(self._do("trial", os.getpid()))

    def remove_trial(self) -> None:
        """Remove it, which is empty again."""
        self._do("remove_trial", os.getpid())

    def make_workdir(self, place: str) -> None:
        """Make an instance's folder; `place` is its path in the state."""
        self._do("workdir", place)

    def make_placeholders(self, folder: str) -> list[str]:
        """Make the missing guarded names in a folder; those that were made."""
        return list(self._do("placeholders", folder))

    def remove_placeholder(self, path: str) -> None:
        """Remove an empty one that nobody guards."""
        self._do("remove_placeholder", path)

    def make_group(self, number: int) -> None:
        """Make a jail's control group beside ours."""
        self._do("group", number)

    def remove_group(self, number: int) -> None:
        """Remove it."""
        self._do("remove_group", number)

    def remove_groups(self) -> None:
        """Remove all groups of this process that are empty."""
        self._do("remove_groups")

    def set_niceness(self, pid: int, niceness: int) -> None:
        """Set that of the session of a jail's process."""
        self._do("niceness", pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        """What these sockets of a jail's process hold (bytes)."""
        return int(self._do("sockets", pid, numbers))

    def _do(self, deed: str, *arguments: Any) -> Any:
        answer, _ = self._ask({"deed": deed, "with": arguments})
        return answer["done"]

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            channel = self._channel
            if channel is None:
                raise OSError(0, "the steward of this tool host is gone")
            try:
                channel.send(json.dumps(request).encode())
                data, fds, _, _ = socket.recv_fds(channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    raise ConnectionResetError(0, "the steward of this tool host is gone")
            except OSError:
                # What comes now could be the answer to another question; and without it nothing goes on.
                self._channel = None
                channel.close()
                with suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)
                raise
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer, fds
