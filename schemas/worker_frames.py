"""The worker protocol: tool host to jailed worker and back, over one inherited stream socket (fd 3).

Each frame is a 4-byte little-endian length and that many bytes of msgpack: a map with a `type`. WORKER.md is the
contract for other languages. Frames from a worker are hostile: the host checks length and depth before it decodes,
forwards `output` as it came, and ends the jail at the first frame that breaks a rule.

Source: docs/design/sandbox.md section 5.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw, Struct, field

if TYPE_CHECKING:
    OptionalRaw = Raw | None
else:
    # msgspec takes Raw out of a union and would then accept nothing but nil; the default stays None.
    OptionalRaw = Raw

WORKER_PROTOCOL: Final = 1
#: Descriptor on which a worker finds its socket.
WORKER_FD: Final = 3
#: One frame to a worker. What comes from one is bounded by its `outputLimit`.
MAX_WORKER_FRAME: Final = 8 << 20


class WorkerError(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """An exception: its class name and message, and what the attributes of the same names carried."""

    name: str
    message: str
    code: str | None = None
    suggestion: str | None = None
    help_url: str | None = None


# --- host to worker -------------------------------------------------------------------------------------------------


class Init(Struct, frozen=True, tag="init", rename="camel", omit_defaults=True):
    """First frame: load the module at `entry`, report `ready` with the exports found. `env` joins the environment.

    `import_paths` are folders of modules the tool may import, first first. `output_limit` is how many bytes a result's
    `output` may have. `jailed`: the worker has a pid namespace to itself, so it may end what its calls leave behind.
    `offline`: no network was granted, so no socket can be made; an error of that kind should say so. `permissions`:
    what its handlers may ask of the bus; with `agents`, `ask` frames.
    """

    protocol: int
    tool: str
    entry: str
    env: dict[str, str]
    import_paths: list[str] = []
    output_limit: int = 1 << 20
    jailed: bool = False
    offline: bool = False
    permissions: list[str] = []


class Message(Struct, frozen=True, tag="message", rename="camel"):
    """The assistant message that later calls name by `messageId`; sent once per jail and message."""

    message_id: str
    message: Raw


class Call(Struct, frozen=True, tag="call", rename="camel", omit_defaults=True, kw_only=True):
    """Run one export. `deadline_ms` is what is left; the host ends the jail when it passes.

    `call_id` is the host's name for the call in this jail, unique there; `tool_call_id` is the model's. `background`:
    processes that the call leaves behind may live on.
    """

    call_id: str
    export: str
    input: Raw
    agent_name: str
    instance_key: str
    turn_id: str
    tool_call_id: str
    workdir: str
    message_id: str | None = None
    deadline_ms: int | None = None
    background: bool = False


class Cancel(Struct, frozen=True, tag="cancel", rename="camel"):
    """The caller gave up: stop the call if it can be stopped. A result may still follow."""

    call_id: str


class Answer(Struct, frozen=True, tag="answer", rename="camel", omit_defaults=True, kw_only=True):
    """What came of an `ask`: a value, or an error."""

    call_id: str
    ask_id: int
    value: OptionalRaw = None
    error: WorkerError | None = None


class Exit(Struct, frozen=True, tag="exit"):
    """No more calls: leave."""


class Fork(Struct, frozen=True, tag="fork"):
    """To a fork server: make the worker of a call, in namespaces of its own. `cell` is the host's number for it.

    Two descriptors come along: the worker's socket, and a pipe for its standard output and error.
    """

    cell: int


class Kill(Struct, frozen=True, tag="kill"):
    """To a fork server: end every process of this cell, if there is one."""

    cell: int


HostFrame = Init | Message | Call | Cancel | Answer | Exit | Fork | Kill


# --- worker to host -------------------------------------------------------------------------------------------------


class Ready(Struct, frozen=True, tag="ready"):
    """The module is loaded; `exports` are the names in its `handlers`."""

    protocol: int
    exports: list[str]


class LoadFailed(Struct, frozen=True, tag="load_failed"):
    """The module could not be loaded or has no `handlers`; the worker exits."""

    message: str


class Result(Struct, frozen=True, tag="result", rename="camel", omit_defaults=True, kw_only=True):
    """The one result of a call. When it is `pending` and `continues`, a second one tells what the work came to."""

    call_id: str
    status: Literal["ok", "error", "pending"]
    output: OptionalRaw = None
    handle: str | None = None
    continues: bool = False
    error: WorkerError | None = None


class Log(Struct, frozen=True, tag="log", rename="camel", omit_defaults=True, kw_only=True):
    """One line of ctx.logger, or of what the tool printed. `call_id` is None outside a call."""

    level: Literal["debug", "info", "warn", "error"]
    message: str
    call_id: str | None = None


class Progress(Struct, frozen=True, tag="progress", rename="camel", omit_defaults=True, kw_only=True):
    """Lossy news of a running call."""

    call_id: str
    done: float
    total: float | None = None
    message: str | None = None


class Ask(Struct, frozen=True, tag="ask", rename="camel", omit_defaults=True, kw_only=True):
    """A handler asks something of the bus, in the name of its running call; one `answer` with its `ask_id` follows.

    `op` says what: `request` (a turn of another agent, and its answer), `send` (a turn that nobody waits for), `spawn`,
    `list`, `catalog`. The other fields are arguments of one or some of them. `asynchronous` (`request` only): the
    agent's answer becomes a message to the agent that made the call; this is answered as soon as it cannot get lost.
    """

    call_id: str
    ask_id: int
    op: Literal["request", "send", "spawn", "list", "catalog"]
    target: str | None = None
    input: OptionalRaw = None
    instance_key: str | None = None
    event_type: str | None = None
    timeout_ms: int | None = None
    metadata: OptionalRaw = None
    cwd: str | None = None
    include_all: bool = False
    asynchronous: bool = field(default=False, name="async")


class Forked(Struct, frozen=True, tag="forked"):
    """From a fork server: the cell is there, and `pid` is its first process, by its number in the jail."""

    cell: int
    pid: int


class Ended(Struct, frozen=True, tag="ended", omit_defaults=True):
    """From a fork server: the last process of a cell is gone. `status`: as a shell has it, 128 and above for signals.

    `message`: why it could not even be made.
    """

    cell: int
    status: int
    message: str | None = None


WorkerFrame = Ready | LoadFailed | Result | Log | Progress | Ask | Forked | Ended
AnyFrame = HostFrame | WorkerFrame
Payload = Any
