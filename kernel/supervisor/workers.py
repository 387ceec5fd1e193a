"""The tool host's news about its jailed workers and MCP servers, on its status descriptor: one JSON object a line.

`{"op":"start","pid":…,"tool":…,"agent":…,"instanceKey":…,"since":…}` and `{"op":"exit","pid":…,"cause":…}`; `pid` is
the number on the host. `{"op":"server",…}` says how a session of an MCP server is. The last of each is kept, also when
it has ended. Only `gdn ps` and `gdn mcp list` use this news, so invalid lines are skipped.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import msgspec

from goondan.kernel.supervisor_client import ProcessInfo
from goondan.schemas.worker import servers
from goondan.schemas.worker.tool_host_reports import WorkerNews

#: The longest line (bytes). Longer ones are skipped.
MAX_LINE: Final = 65536
#: The most workers that are kept: more than any tool host may have. News of others is dropped.
MAX_WORKERS: Final = 65536
#: Sessions of MCP servers that are remembered; those that have ended longest ago go first.
MAX_SERVERS: Final = 1024


class Workers:
    """The workers of one tool host."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = -1
        self._data = b""
        self._running: dict[int, WorkerNews] = {}
        self._servers: dict[tuple[str, str | None, str | None], WorkerNews] = {}

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
        self._servers.clear()

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
        if news.op == "server":
            self._hear_server(news)
        elif news.op == "exit":
            self._running.pop(news.pid, None)
        elif len(self._running) < MAX_WORKERS:
            self._running[news.pid] = news

    def _hear_server(self, news: WorkerNews) -> None:
        name = (news.tool, news.agent, news.instance_key)
        self._servers.pop(name, None)  # it is the newest now
        self._servers[name] = news
        if len(self._servers) > MAX_SERVERS:
            ended = (name for name, told in self._servers.items() if told.server and told.server.state == "ended")
            del self._servers[next(ended, next(iter(self._servers)))]

    def servers(self) -> list[WorkerNews]:
        """How each session of an MCP server is, or was at its end; in the order of their names."""
        return [self._servers[name] for name in sorted(self._servers, key=lambda name: [part or "" for part in name])]

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
        ] + [
            ProcessInfo(
                role=servers.ROLE,
                name=news.tool,
                instance_key=news.instance_key,
                pid=news.pid or None,
                status=news.server.state,
                since=news.since,
                restarts=0,
                last_exit=None,
            )
            for news in self.servers()
            if news.server is not None and news.server.state != "ended"
        ]
