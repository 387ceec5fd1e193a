"""What the tool host and its programs say to the supervisor and to commands, besides results, and the record of write
exposures.

- the log lines of tools, one JSON object a line on standard error;
- `WorkerNews`, one JSON object a line on the status descriptor;
- what `python -m goondan.toolhost.survey` has found to be in the way of the full sandbox.

The tool host writes the record of write exposures, and the kernel reads it before it loads a bundle.

`<state root>/workspaces/<digest>/toolhosts/<name>/workdirs.json` is a list of write exposures. The file `lock` beside
it is locked for as long as that tool host lives. While jails do, the list is touched every second.

A file that a jail has made or changed has a time of change (`st_ctime`, which no program can set) within an exposure of
a folder that it lies in. A place that was read-only there all the time (`kept`) is exempt: others may have changed it.

Source: docs/design/processes.md; docs/design/bundle.md section 5; docs/design/sandbox.md section 2.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct


class LogLine(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One line of a tool, and whose it is as far as the tool host knows."""

    #: Seconds since 1970.
    time: float
    #: The level of the line.
    level: str
    #: Its text.
    message: str
    #: The tool that wrote it.
    tool: str
    #: The agent that it was written for. None: not known.
    agent: str | None = None
    #: The key of the agent's instance. None: not known.
    instance_key: str | None = None
    #: The call that it was written in. None: not known.
    call_id: str | None = None


#: `starting`: it has not said what it offers. `login`: somebody has to log in before it does.
ServerPhase = Literal["starting", "login", "connected", "ended"]


class ServerState(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """How one session of an MCP server is."""

    #: The prefix of its tools.
    server: str
    #: The Extension that offers it.
    extension: str
    #: How it is reached.
    transport: Literal["stdio", "http"]
    #: The agent whose own it is. None: the agents of its instance key share it.
    agent: str | None = None
    #: How far it is.
    state: ServerPhase
    #: The version of the protocol that is spoken with it; "" while that is not known.
    protocol_version: str = ""
    #: How many agent instances are attached.
    attached: int = 0
    #: How many calls run.
    open_calls: int = 0
    #: How many calls there were in all.
    calls: int = 0
    #: Memory of the processes in its jail; of an http server, that of its worker (kB).
    memory_kb: int = 0
    #: The last error that was about the server, and not about what a call asked of it.
    last_error: str | None = None


class WorkerNews(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A worker has started or ended, or a server is not as it was."""

    #: Whether the worker has started or ended, or the state of a server has changed.
    op: Literal["start", "exit", "server"]
    #: The number of the worker's process on the host. Of a server: of its own program in its jail, or of the MCP worker
    #: if it has no jail; 0 while that is not known.
    pid: int
    #: The tool that it runs.
    tool: str = ""
    #: The agent that it works for.
    agent: str | None = None
    #: The key of the agent's instance.
    instance_key: str | None = None
    #: When it started: RFC 3339, UTC.
    since: str = ""
    #: Why it ended.
    cause: str | None = None
    #: Of `server`: how it is.
    server: ServerState | None = None


class Obstacle(Struct, frozen=True):
    """One thing that stands between this host and the full sandbox, and the exact fix."""

    #: What is missing.
    what: str
    #: What is wrong.
    problem: str
    #: What to do about it.
    fix: str


# --- write exposures --------------------------------------------------------------------------------------------------

#: Below a workspace's state directory.
TOOLHOSTS: Final = "toolhosts"
LOCK: Final = "lock"
EXPOSURES: Final = "workdirs.json"
#: What the tool host has found out about this machine (toolhost/remembered.py).
SURVEY: Final = "survey.json"
#: The times of files come from a clock that ticks every few milliseconds (nanoseconds).
SLACK_NS: Final = 50_000_000
#: A tool host that was killed had its last touch at most so long before its jails ended (seconds): it touches every
#: second, and one that did not for so long was stuck.
MAX_SILENCE_S: Final = 60.0


class GuardedPlace(Struct, frozen=True, array_like=True):
    """A place that stays read-only."""

    #: Its path.
    path: str
    #: The device of its inode.
    device: int
    #: The number of its inode.
    inode: int


class WriteExposure(Struct, frozen=True, omit_defaults=True):
    """A time in which jails could write below a folder."""

    #: The folder.
    folder: str
    #: When it began (nanoseconds since 1970).
    began: int
    #: When it ended (nanoseconds since 1970). None: it has not ended.
    ended: int | None = None
    #: Places in the folder that jails could not write to. When the exposure ended, they were still the same inodes.
    #: Before that, a place counts while its path leads to that inode. The tool host holds the inode open, so no other
    #: file can have its number. When the tool host is gone, a new file has a later time.
    kept: list[GuardedPlace] = []
    #: Empty folders that the tool host put there.
    made: list[str] = []
