"""The powers of a tool host that root has started: the privileged helper and the launcher stay root and act for it.

Requests to the privileged helper (launcher/privileged_helper.py) are sent here, and the answer is waited for. Any
thread may ask; the loop's thread must not ask for what takes long. A lost helper cannot be started again, because
nobody is root any more: the tool host ends (powers.Powers.lifeline), and its supervisor starts the next.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from goondan.toolhost.launcher.allow_list import AllowList
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.privileges.tree import Tree
from goondan.toolhost.privileges.uids import Uids

#: Longest wait for one operation (seconds): a mkdir takes microseconds, and longer on a file system that is gone.
ANSWER_S: Final = 30.0
_MAX_ANSWER: Final = 65536
#: Sockets of one process that are asked about: more than a jail may open, and few enough for one request.
_MANY_SOCKETS: Final = 4096


class _Helper(NamedTuple):
    """The privileged helper that runs."""

    #: Our end of its socket.
    channel: socket.socket
    #: Its process number.
    pid: int


class Rooted(Powers):
    """See powers.Powers. If the privileged helper did not start, everything is refused."""

    def __init__(self, uids: Uids, tree: Tree | None) -> None:
        """Call `start` after this, while this process is still root."""
        super().__init__(0, self._make_launcher, uids)
        self.tree = tree
        self._helper: _Helper | None = None
        self._lock = threading.Lock()

    def start(self, channel: socket.socket, pid: int, allowed: AllowList) -> None:
        """Take this process as the helper. It waits for its allow-list at the other end of the socket."""
        channel.settimeout(ANSWER_S)
        channel.send(json.dumps(allowed).encode())
        self._helper, self.lifeline = _Helper(channel, pid), pid
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the groups of this process, and end the helper."""
        with suppress(OSError):
            self.do("remove_groups")
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.channel.close()
            with suppress(ChildProcessError):
                os.waitpid(helper.pid, 0)

    def do(self, operation: str, *arguments: Any) -> Any:
        """Ask for a privileged operation with arguments that are JSON. Returns what it returns."""
        return self._ask(operation, *arguments)[0]

    def _ask(self, operation: str, *arguments: Any) -> tuple[Any, list[int]]:
        with self._lock:
            helper = self._helper
            if helper is None:
                raise OSError(0, "the privileged helper of this tool host is gone")
            try:
                helper.channel.send(json.dumps({"operation": operation, "with": arguments}).encode())
                data, fds, _, _ = socket.recv_fds(helper.channel, _MAX_ANSWER, 1, socket.MSG_CMSG_CLOEXEC)
                if not data:
                    raise ConnectionResetError(0, "the privileged helper of this tool host is gone")
            except OSError:
                # A later answer could be for another question; and without the helper nothing goes on.
                self._helper = None
                helper.channel.close()
                with suppress(OSError):
                    os.kill(helper.pid, signal.SIGKILL)
                raise
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer["done"], fds

    def _make_launcher(self) -> tuple[socket.socket, int]:
        pid, fds = self._ask("make_launcher")
        return socket.socket(fileno=fds[0]), int(pid)

    def settle(self, enclosed: bool) -> None:
        if self.lifeline is not None:  # else there is no jail to be made
            self.do("settle", enclosed)

    def claim_state(self, state_dir: str, above: str, name: str) -> None:
        self.do("claim_state", state_dir, above, name)

    def make_workdir(self, path: str, state_dir: str) -> None:
        try:
            missing = os.stat(path).st_mode & stat.S_IRWXU != stat.S_IRWXU
        except OSError:
            missing = True
        if missing:
            self.do("make_workdir", path[len(state_dir) + 1 :])

    def make_placeholders(self, folder: str, names: Sequence[str]) -> list[str]:
        return list(self.do("make_placeholders", folder))  # the allow-list has the names

    def remove_placeholder(self, path: str) -> None:
        self.do("remove_placeholder", path)

    def make_group(self, number: int, path: str) -> None:
        self.do("make_group", number)

    def remove_group(self, number: int, path: str) -> None:
        self.do("remove_group", number)

    def set_niceness(self, pid: int, niceness: int) -> None:
        self.do("set_niceness", pid, niceness)

    def held_by(self, pid: int, numbers: list[int]) -> int:
        return int(self.do("held_by", pid, numbers[:_MANY_SOCKETS]))
