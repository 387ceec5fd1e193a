"""The worker protocol: tool host to jailed worker and back, over one inherited stream socket (fd 3).

Each frame is a 4-byte little-endian length and that many bytes of msgpack: a map with a `type`. WORKER.md is the
contract for other languages. Frames from a worker are hostile: the host checks length and depth before it decodes,
forwards `output` as it came, and ends the jail at the first frame that breaks a rule.

Source: docs/design/sandbox.md section 5.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Raw, Struct, field

from goondan.schemas.worker.servers import NewsKind, ServerInit, ServerListing

if TYPE_CHECKING:
    OptionalRaw = Raw | None
else:
    # msgspec takes Raw out of a union and would then accept nothing but nil; the default stays None.
    OptionalRaw = Raw

WORKER_PROTOCOL: Final = 1
#: Descriptor on which a worker finds its socket.
WORKER_FD: Final = 3
#: What the worker of a server says of one that has gone by itself. How it ended, the host knows better.
SERVER_LEFT: Final = "it has ended, or closed its standard output"
#: One frame to a worker. What comes from one is bounded by its `outputLimit`.
MAX_WORKER_FRAME: Final = 8 << 20


class WorkerError(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """An exception of a handler. `code`, `suggestion` and `help_url` are what the exception's attributes of these names
    held.
    """

    #: Name of its class.
    name: str
    #: Its text.
    message: str
    #: A stable code.
    code: str | None = None
    #: What to do about it.
    suggestion: str | None = None
    #: Where more is said about it.
    help_url: str | None = None


# --- host to worker -------------------------------------------------------------------------------------------------


class Init(Struct, frozen=True, tag="init", rename="camel", omit_defaults=True):
    """The first frame: load the module at `entry`, and answer with `ready` and the exports that were found."""

    #: Version of the protocol.
    protocol: int
    #: Name of the tool.
    tool: str
    #: Path of the module.
    entry: str
    #: Variables that are added to the environment.
    env: dict[str, str]
    #: Folders of modules that the tool may import, in the order in which they are searched.
    import_paths: list[str] = []
    #: How many bytes the `output` of a result may have.
    output_limit: int = 1 << 20
    #: The worker has a pid namespace to itself. So it may end the processes that its calls leave behind.
    jailed: bool = False
    #: No network was granted, so no socket can be made. An error about a socket should say so.
    offline: bool = False
    #: What the handlers may ask of the bus. `agents` allows `ask` frames.
    permissions: list[str] = []
    #: To an MCP worker: the server that it talks to. Then there is no module, and `entry` is empty.
    server: ServerInit | None = None


class Message(Struct, frozen=True, tag="message", rename="camel"):
    """The assistant message that later calls name by `messageId`; sent once per jail and message."""

    #: The id of the message.
    message_id: str
    #: The message, encoded.
    message: Raw


class Call(Struct, frozen=True, tag="call", rename="camel", omit_defaults=True, kw_only=True):
    """Run one export."""

    #: The tool host's name for the call. It is unique in this jail.
    call_id: str
    #: Name of the export.
    export: str
    #: The arguments.
    input: Raw
    #: The agent that calls.
    agent_name: str
    #: Its instance.
    instance_key: str
    #: The turn of the call.
    turn_id: str
    #: The model's id of the call.
    tool_call_id: str
    #: The folder that the call works in.
    workdir: str
    #: The id of the assistant message that made the call.
    message_id: str | None = None
    #: What is left of the call's time (milliseconds). The tool host ends the jail when it is over.
    deadline_ms: int | None = None
    #: Processes that the call leaves behind may live on.
    background: bool = False


class Cancel(Struct, frozen=True, tag="cancel", rename="camel"):
    """The caller gave up: stop the call if it can be stopped. A result may still follow."""

    #: The call.
    call_id: str


class Answer(Struct, frozen=True, tag="answer", rename="camel", omit_defaults=True, kw_only=True):
    """The answer to an `ask`: a value, or an error."""

    #: The call whose handler asked.
    call_id: str
    #: The number of the `ask`.
    ask_id: int
    #: The value. Of `login` it may be a secret.
    value: OptionalRaw = None
    #: Why there is no value.
    error: WorkerError | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the value."""
        return f"Answer(call_id={self.call_id!r}, ask_id={self.ask_id!r}, error={self.error!r})"


class List(Struct, frozen=True, tag="list", rename="camel"):
    """To an MCP worker: ask the server again what it offers. One `listed` with the same number follows."""

    #: The number of the question.
    list_id: int


class Exit(Struct, frozen=True, tag="exit"):
    """No more calls: leave."""


class Fork(Struct, frozen=True, tag="fork"):
    """To a fork server: make the worker of a call, in namespaces of its own. `cell` is the host's number for it.

    Two descriptors come along: the worker's socket, and a pipe for its standard output and error.
    """

    #: The host's number for the cell.
    cell: int


class Kill(Struct, frozen=True, tag="kill"):
    """To a fork server: end every process of this cell, if there is one."""

    #: The host's number for the cell.
    cell: int


HostFrame = Init | Message | Call | Cancel | Answer | List | Exit | Fork | Kill


# --- worker to host -------------------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag="ready"):
    """The module is loaded."""

    #: The version of the protocol that the worker speaks.
    protocol: int
    #: The names in `handlers` of the module.
    exports: list[str]
    #: From an MCP worker: what the server offers.
    listing: ServerListing | None = None


class LoadFailed(Struct, frozen=True, tag="load_failed"):
    """The module could not be loaded or has no `handlers`; the worker exits."""

    #: Why it could not be loaded.
    message: str


class Result(Struct, frozen=True, tag="result", rename="camel", omit_defaults=True, kw_only=True):
    """The one result of a call. When it is `pending` and `continues`, a second one tells how the work ended."""

    #: The call.
    call_id: str
    #: `pending`: the work goes on after this result.
    status: Literal["ok", "error", "pending"]
    #: The handler's value.
    output: OptionalRaw = None
    #: With `pending`: the name of the work that goes on.
    handle: str | None = None
    #: With `pending`: this worker sends the second result.
    continues: bool = False
    #: Why the call failed.
    error: WorkerError | None = None
    #: How long the worker had the call (milliseconds); 0: it does not say. Nothing is decided by it.
    handler_ms: float = 0.0


class Log(Struct, frozen=True, tag="log", rename="camel", omit_defaults=True, kw_only=True):
    """One line of ctx.logger, or of the tool's printed output."""

    #: How grave it is.
    level: Literal["debug", "info", "warn", "error"]
    #: The line.
    message: str
    #: The call that wrote it. None outside a call.
    call_id: str | None = None


class Progress(Struct, frozen=True, tag="progress", rename="camel", omit_defaults=True, kw_only=True):
    """How far a running call is. It may be lost."""

    #: The call.
    call_id: str
    #: How much is done.
    done: float
    #: How much there is in all. None: the handler does not know.
    total: float | None = None
    #: The handler's own words.
    message: str | None = None


class Ask(Struct, frozen=True, tag="ask", rename="camel", omit_defaults=True, kw_only=True):
    """A handler asks something of the bus, in the name of its running call. One `answer` with its `ask_id` follows."""

    #: The call whose handler asks. Empty: an MCP worker asks, and in the name of no call.
    call_id: str
    #: The number of this question, unique in its worker.
    ask_id: int
    #: `request`: a turn of another agent, and its answer. `send`: a turn that nobody waits for. `spawn`, `list` and
    #: `catalog`: what the frames `agents.*` of these names do. The others are asked of the agent that made the call
    #: (schemas/wire/questions.py): `tool` and `tools` by code mode, `elicit` and `sample` by MCP workers. `login` is
    #: asked by an MCP worker in the name of no call, about the login to its server. Each field below is an argument of
    #: one or more of them.
    op: Literal["request", "send", "spawn", "list", "catalog", "tool", "tools", "elicit", "sample", "login"]
    #: Name of the agent.
    target: str | None = None
    #: The input of the event.
    input: OptionalRaw = None
    #: Key of the instance.
    instance_key: str | None = None
    #: Type of the event.
    event_type: str | None = None
    #: How long to wait for the answer (milliseconds).
    timeout_ms: int | None = None
    #: Metadata of the event.
    metadata: OptionalRaw = None
    #: The folder that a spawned instance works in.
    cwd: str | None = None
    #: Of `list`: all instances, and not only those that the caller spawned.
    include_all: bool = False
    #: Of `request`: the agent's answer becomes a message to the agent that made the call. This `ask` is answered as
    #: soon as that message cannot get lost.
    asynchronous: bool = field(default=False, name="async")
    #: Of what is asked of the agent that made the call: the value of the `tool.ask`. Of `login`: what is asked. There
    #: may be secrets in it.
    value: OptionalRaw = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without what is asked."""
        return f"Ask(call_id={self.call_id!r}, ask_id={self.ask_id!r}, op={self.op!r})"


class Listed(Struct, frozen=True, tag="listed", rename="camel", omit_defaults=True, kw_only=True):
    """From an MCP worker: what the server offers now, or why that is not known."""

    #: The number of the `list`.
    list_id: int
    #: What it offers.
    listing: ServerListing | None = None
    #: Why that is not known.
    error: WorkerError | None = None


class News(Struct, frozen=True, tag="news", omit_defaults=True, kw_only=True):
    """From an MCP worker: the server says that something of it has changed."""

    #: What has changed.
    kind: NewsKind
    #: Of `resource`: which one.
    uri: str | None = None


class LoginNeeded(Struct, frozen=True, tag="login", omit_defaults=True, kw_only=True):
    """From an MCP worker: the server lets it go on when a person has logged in, and not before."""

    #: What whoever asks for the server is told meanwhile. None: the person has come back.
    error: WorkerError | None = None


class Forked(Struct, frozen=True, tag="forked"):
    """From a fork server: the cell is there, and `pid` is its first process, by its number in the jail."""

    #: The host's number for the cell.
    cell: int
    #: The number of its first process in the jail.
    pid: int


class Ended(Struct, frozen=True, tag="ended", omit_defaults=True):
    """From a fork server: the last process of a call sandbox is gone."""

    #: The number of the call sandbox.
    cell: int
    #: The exit status as a shell has it: 128 and above for signals.
    status: int
    #: Why it could not even be made. None: it was made.
    message: str | None = None


WorkerFrame = Ready | LoadFailed | Result | Log | Progress | Ask | Listed | News | LoginNeeded | Forked | Ended
