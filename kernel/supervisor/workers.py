"""The tool host's news about its jailed workers, on its status descriptor: one JSON object a line.

`{"op":"start","pid":…,"tool":…,"agent":…,"instanceKey":…,"since":…}` and `{"op":"exit","pid":…,"cause":…}`; `pid` is
the number on the host. Only `gdn ps` uses this news, so invalid lines are skipped.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

from kernel.supervisor_client import ProcessInfo
from schemas.tool_host_reports import WorkerNews

#: The longest line (bytes). Longer ones are skipped.
MAX_LINE: Final = 65536
#: The most workers that are kept: more than any tool host may have. News of others is dropped.
MAX_WORKERS: Final = 65536


class Workers:
    """The workers of one tool host."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = -1
        self._data = b""
        self._running: dict[int, WorkerNews] = {}

    def listen(self, fd: int) -> None:
        """Read the news of a new tool host from `fd`. It is closed here at its end. The workers of the earlier tool
        host are gone.
        """
        self.close()
        self._fd = fd
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """The tool host is gone."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._data = b""
        self._running.clear()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        lines = (self._data + chunk).split(b"\n")
        self._data = lines.pop()[-MAX_LINE:]
        for line in lines:
            self.hear(line)

    def hear(self, line: bytes) -> None:
        """Handle one line of news."""
        try:
            news = msgspec.json.decode(line, type=WorkerNews)
        except msgspec.DecodeError:
            return
        if news.op == "exit":
            self._running.pop(news.pid, None)
        elif len(self._running) < MAX_WORKERS:
            self._running[news.pid] = news

    def processes(self) -> list[ProcessInfo]:
        """The workers, for `ps`."""
        return [
            ProcessInfo(
                role="worker",
                name=news.tool,
                instance_key=news.instance_key,
                pid=news.pid,
                status="running",
                since=news.since,
                restarts=0,
                last_exit=None,
            )
            for news in self._running.values()
        ]
