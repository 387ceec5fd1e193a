"""What a tool host says beside results: lines for the log, and news of workers."""

from __future__ import annotations

import msgspec


class LogLine(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One line of a tool, and whose it is as far as the host knows. `time` is seconds since 1970."""

    time: float
    level: str
    message: str
    tool: str
    agent: str | None = None
    instance_key: str | None = None
    call_id: str | None = None


class WorkerNews(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One line on the status descriptor: a worker has started or ended. `since`: RFC 3339, UTC."""

    op: str
    pid: int
    tool: str
    agent: str | None = None
    instance_key: str | None = None
    since: str | None = None
    cause: str | None = None
