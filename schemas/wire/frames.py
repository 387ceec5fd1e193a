"""The frames of the bus: one header struct, and one struct for each payload.

Rules.
- One ZeroMQ part is one frame: a msgpack map with the header's fields in camelCase. The header has everything that the
  broker decides on. `payload` is opaque to the broker and travels as the sender encoded it.
- New fields come last and have a default. A receiver skips fields that it does not know.
- The struct here is mutable on purpose: a sender may not decide some fields (`from`, `instanceKey`, `source`, `chain`,
  `auth`, `workdir`). The broker overwrites them before it encodes the header again.

Source: docs/design/wire.md section 1; PROTOCOL.md; requirements IPC-01 to IPC-08.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Raw, Struct, field

from goondan.schemas.wire.usage import Usage

if TYPE_CHECKING:
    OptionalRaw = Raw | None
else:
    # msgspec takes Raw out of a union and would then accept nothing but nil; the default stays None.
    OptionalRaw = Raw

PROTOCOL_VERSION: Final = 1
#: msgpack nil: the payload of a frame that carries none.
NO_PAYLOAD: Final = Raw(b"\xc0")
#: The reserved address of the kernel itself (IPC-03); no agent may have this name.
ORCHESTRATOR: Final = "orchestrator"
#: The built-in agent behind `gdn call`: its catalog is every tool. The leading underscore keeps it out of bundles.
OPERATOR_AGENT: Final = "_operator"
#: The event type by which an operator has an agent make one tool call (input: OperatorCall).
OPERATOR_CALL: Final = "operator.call"
#: The event type by which an operator asks an agent which tools a step of it could call now.
OPERATOR_TOOLS: Final = "operator.tools"
#: The event type by which an operator takes the last turn of a conversation back (input: {turnId}, or nothing).
OPERATOR_UNDO: Final = "operator.undo"
#: The event type by which an operator removes every message of a conversation.
OPERATOR_RESET: Final = "operator.reset"
#: The event type by which an operator has an instance begin with the messages of another one of its agent (input:
#: {from, turnId?, step?}).
OPERATOR_FORK: Final = "operator.fork"
#: The types of events that only an operator may send.
OPERATOR_TYPES: Final = frozenset({OPERATOR_CALL, OPERATOR_TOOLS, OPERATOR_UNDO, OPERATOR_RESET, OPERATOR_FORK})

#: The event type by which a tool host tells an agent instance what pending work came to (input: Completion).
TOOL_COMPLETED: Final = "tool.completed"

#: The types of the frames of the core. Those of a feature are `FRAMES` of its `wire.py`.
FrameType = Literal[
    "hello",
    "welcome",
    "ping",
    "pong",
    "bye",
    "event",
    "shutdown",
    "shutdown_ack",
    "ack",
    "credit",
    "tool.call",
    "tool.result",
    "tool.progress",
    "tool.completed",
    "tool.cancel",
    "tool.ask",
    "tool.answer",
    "instance.end",
    "agents.spawn",
    "agents.list",
    "agents.catalog",
    "restart",
    "config.changed",
    "admin",
    "reply",
    "runtime.event",
    "observed",
    "listen",
    "clock",
    "log",
    "error",
]
#: `accepted`: journaled. `renew`: the holder still works. `done`, `failed`: the turn ended, the payload is its answer.
#: `release`: the holder gives the event back unfinished. `result`: the agent has stored these tool results (`calls`).
#: `park`: as `release`, because every open call of its step waits for a person.
AckStage = Literal["accepted", "renew", "done", "failed", "release", "result", "park"]
#: Of a `clock` frame: time stands still for a turn or a request, or goes on.
ClockStage = Literal["held", "runs"]
#: Of a `tool.result`: the tool host has answered the question that the call was made for with its output.
PASSED_ON: Final = "passed on"


class ReplyTo(Struct, frozen=True, rename="camel"):
    """Where the answer to a request goes. `target` is an agent name or a client address."""

    #: The agent or the client address.
    target: str
    #: What the asker calls its request.
    correlation_id: str


class Source(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Who caused an event. The broker sets it and never believes what a sender wrote."""

    #: What it is.
    kind: Literal["agent", "connector", "client", "tool"]
    #: Its name.
    name: str
    #: Which instance of an agent. None for everything else.
    instance_key: str | None = None


#: The `source` of what a client of an operator sends.
OPERATOR: Final = Source("client", "operator")


class Blob(Struct, frozen=True):
    """A large payload that lies in a file of the workspace's `blobs` folder (schemas/wire/blobs.py has the rules)."""

    #: Name of the file: 32 hexadecimal digits in lower case, chosen at random.
    file: str
    #: SHA-256 of its bytes, in hexadecimal digits in lower case.
    digest: str
    #: How many bytes it has.
    size: int


class FilePart(Struct, frozen=True, tag_field="type", tag="file", rename="camel", omit_defaults=True):
    """A picture or a PDF beside a text. Its bytes lie in a file; schemas/wire/blobs.py has the rules."""

    #: Where its bytes are: in an event in the folder of large payloads, in a conversation in the instance's own.
    blob: Blob
    #: What the bytes are: `image/png`, `image/jpeg`, `image/gif`, `image/webp` or `application/pdf`.
    media_type: str
    #: The name that its sender gave it.
    name: str | None = None


class Frame(Struct, rename={"from_": "from"}, omit_defaults=True, gc=False):
    """One frame: the header, and the payload as it travels."""

    #: What it is about (FrameType).
    type: str
    #: Unique for its sender and incarnation.
    id: str = ""
    #: Version of the protocol.
    v: int = PROTOCOL_VERSION
    #: Who sends it. The broker sets it, whatever the sender wrote.
    from_: str | None = None
    #: Whom it is for: the name of an agent, or an address.
    to: str | None = None
    #: Which instance of that agent.
    instance_key: str | None = field(default=None, name="instanceKey")
    #: The event that it is about.
    event_id: str | None = field(default=None, name="eventId")
    #: Full name of a tool: `{tool}__{export}`.
    tool: str | None = None
    #: The tool call that it is about: `<turnId>/<toolCallId>`.
    call_id: str | None = field(default=None, name="callId")
    #: Where the answer to this event goes. Without it nobody waits for one.
    reply_to: ReplyTo | None = field(default=None, name="replyTo")
    #: The `id` of the frame that this one answers. Of an answering event: the correlation id of its request. Of a
    #: `tool.call` with `within`: the `tool.ask` that the tool host may answer with the call's output.
    in_reply_to: str | None = field(default=None, name="inReplyTo")
    #: The instances (`agent/instanceKey`) that wait for this. Each waits for the next one. The broker sets it.
    chain: list[str] | None = None
    #: Which holder of the event speaks, or is spoken to.
    epoch: int | None = None
    #: Of an `ack`: what has happened (AckStage). Of a `clock`: whether time stands still (ClockStage). Of a
    #: `runtime.event`, `tool.progress`: the turn, or the call, waits (`waits`), or goes on (`over`). Of a
    #: `tool.result`: PASSED_ON. Of `observed`: pieces of news were missed (`gap`).
    stage: str | None = None
    #: Names everything that one message set going (schemas/wire/spans.py).
    trace_id: str | None = field(default=None, name="traceId")
    #: Names what the frame is about.
    span_id: str | None = field(default=None, name="spanId")
    #: Names what that is a part of.
    parent_span_id: str | None = field(default=None, name="parentSpanId")
    #: Milliseconds that are left, counted from when the frame is sent.
    deadline_ms: int | None = field(default=None, name="deadlineMs")
    #: Who caused the event. The broker sets it.
    source: Source | None = None
    #: On whose behalf. It is taken from an operator only; an agent's frames carry that of its event.
    auth: OptionalRaw = None
    #: Where the tool works. Only an operator may name one; else the broker sets it.
    workdir: str | None = None
    #: callIds that an `ack` or a piece of news is about.
    calls: list[str] | None = None
    #: `tool.call` only: CLOCK_BOOTTIME in milliseconds when the call was sent for the first time. A repeat of a call
    #: that is older than both the broker and the tool host has an unknown outcome; any other may run.
    first_sent_ms: int | None = field(default=None, name="firstSentMs")
    #: What the frame carries, as its sender encoded it. The broker never opens what is for others.
    payload: Raw = NO_PAYLOAD
    #: `event`: the asker, or an observer, wants to hear of the turn while it runs. `listen`: somebody does from now on.
    live: bool = False
    #: Stands for a payload that is too large for a frame; `payload` is nil then.
    blob: Blob | None = None
    #: The event that all this began with. The broker sets it on everything that agents and tools ask and send.
    root_event: str | None = field(default=None, name="rootEvent")
    #: `event` only: what its sender says of its content. Another event under a known id is refused when it differs.
    digest: str | None = None
    #: `tool.call` and `ack` of stage `renew`: how many messages of the turn are stored. `observed`: the number of the
    #: piece of news, or of the last one that was missed; of a client, up to which number it has read.
    position: int | None = None
    #: `ack` of stage `release`: a higher epoch that the instance's file holds.
    seen_epoch: int | None = field(default=None, name="seenEpoch")
    #: `event` with `replyTo`: its sender does not wait. The answer comes as an event of its own, which says the same
    #: and names the request in `inReplyTo`.
    asynchronous: bool = field(default=False, name="async")
    #: `event` to an agent: how long ago the broker accepted it (milliseconds).
    waited_ms: int | None = field(default=None, name="waitedMs")
    #: `tool.call` only: the folder that `workdir` is or lies in. Beneath it no link may be followed on the way there.
    workdir_base: str | None = field(default=None, name="workdirBase")
    #: For how much of `waitedMs` its turn waited for a place.
    place_ms: int | None = field(default=None, name="placeMs")
    #: `event` to an agent: its model calls, and tool calls that it runs itself, are reserved (PROTOCOL.md).
    budget: bool = False
    #: `tool.call` only: the call was started before. A tool host that does not know it does not start it.
    attach: bool = False
    #: `tool.call`, questions of a call: the callId of the script that makes this call, an open call of the same turn.
    within: str | None = None
    #: `event` of an operator only: the files of its message. The broker keeps them until the event has ended.
    files: list[FilePart] | None = None
    #: `ack` of stage `failed`: why, where the message is not to blame. The event is kept as a dead letter.
    cause: str | None = None
    #: `tool.call` only: the number of its step, from 1.
    step: int | None = None
    #: `tool.result` to an agent: when the broker had the call, and when it had this result (CLOCK_BOOTTIME,
    #: microseconds). The broker sets it.
    passed_us: list[int] | None = field(default=None, name="passedUs")


# --- payloads -------------------------------------------------------------------------------------------------------


class Lease(Struct, frozen=True, rename="camel", omit_defaults=True):
    """An event that an agent process holds."""

    #: The event.
    event_id: str
    #: The epoch with which the event was handed over.
    epoch: int
    #: The instance that the event is for.
    instance_key: str
    #: The `rootEvent` with which it was handed over.
    root_event: str | None = None


class AttachedServer(Struct, frozen=True, rename="camel"):
    """An agent instance that is attached to an MCP server of a tool host."""

    #: The server's prefix.
    server: str
    #: Name of the agent.
    agent: str
    #: Key of the instance.
    instance_key: str


class Hello(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The first frame of every connection. Leases and calls survive a reconnect."""

    #: Says for whom the connection speaks (schemas/wire/tokens.py).
    token: str
    #: Random, one for each life of a process.
    incarnation: str
    #: Versions of the protocol that it speaks.
    versions: list[int] = field(default_factory=lambda: [PROTOCOL_VERSION])
    #: Of an agent process: what it holds.
    leases: list[Lease] = []
    #: Of a tool host: calls that run, and results that nobody has acknowledged.
    calls: list[str] = []
    #: Correlation ids of the answers that it waits for.
    awaiting: list[str] = []
    #: Its process.
    pid: int | None = None
    #: CLOCK_BOOTTIME in milliseconds when the process began, to be compared with `firstSentMs`.
    started_ms: int | None = None
    #: Of a tool host: who is attached to its MCP servers.
    attached: list[AttachedServer] = []
    #: Of an agent process: its requests to models that are out. The feature that has them says what each is.
    permits: list[Any] = []
    #: Of an agent process: the last state of each gate that it was given. The same.
    gates: list[Any] = []


class Welcome(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The broker's answer to `hello`."""

    #: The version of the protocol that both speak.
    version: int
    #: The address that the broker knows this connection by.
    principal: str
    #: The incarnation of the broker.
    broker: str
    #: How many new `event` and `tool.call` frames may be unanswered at once.
    credit: int
    #: The limit of a frame (bytes).
    max_frame: int
    #: Of an agent: its instance.
    instance_key: str | None = None
    #: Of an agent: where its tools work.
    workdir: str | None = None
    #: Of an agent: the epoch of its instance.
    epoch: int | None = None
    #: Names the content of the bundle.
    revision: str | None = None
    #: The launch specification that the token entitles to (AgentSpec or ToolHostSpec, msgpack); nil for clients.
    spec: Raw = NO_PAYLOAD
    #: The folder of large payloads: an absolute path on the broker's machine.
    blobs: str | None = None
    #: The promise of `accepted`: the event survives a loss of power, or only the end of a process.
    durability: Literal["power", "process"] = "power"
    #: The number of an agent's conversations. One that was begun under a lower number begins again.
    generation: int = 0
    #: Changes of its configuration that are in force for an agent (bundle.effective_config.LiveChanges); nil: none.
    config: Raw = NO_PAYLOAD
    #: Of an agent: the names of its Model documents whose requests have to ask ("": its own model).
    limited: list[str] = []


class Credit(Struct, frozen=True):
    """A new credit window: how many new `event` and `tool.call` frames may be unanswered at once."""

    #: How many frames may be unanswered at once.
    window: int


class ErrorPayload(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The payload of an `error` frame. It is also the error of an answer."""

    #: The stable code, as in docs/errors.md.
    code: str
    #: What is wrong, in one sentence.
    message: str
    #: What to do about it.
    suggestion: str | None = None
    #: Where more is said about it.
    help_url: str | None = None
    #: After how many milliseconds to try again. Only with E_OVERLOADED.
    retry_after_ms: int | None = None
    #: Name of the exception's class, where an exception was the cause.
    name: str | None = None


class Answer(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """How a turn ended."""

    #: The turn.
    turn_id: str
    #: Whether it ended with a response or with an error.
    status: Literal["completed", "failed"]
    #: The text of the model's last message.
    response: str | None = None
    #: Why the model ended its last message.
    finish_reason: str | None = None
    #: Why the turn failed.
    error: ErrorPayload | None = None
    #: Of the operator's events (`operator.call` and its like): the ToolResult, as the agent encoded it.
    output: OptionalRaw = None
    #: How many steps the turn took.
    steps: int = 0
    #: The trace of the turn.
    trace_id: str | None = None
    #: The model that answered last, as `provider/name`; None: no model was asked.
    model: str | None = None
    #: What the model calls of the turn have used; None: no model was asked, or only the console.
    usage: Usage | None = None
    #: Whether the response ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: The reasoning of the model's last message. It is no part of the response.
    reasoning: str | None = None
    #: Of an agent with an output schema: the value that the response is. It fits the schema.
    object: OptionalRaw = None


class AgentEvent(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """The specification's AgentEvent."""

    #: The id of the event.
    id: str
    #: The type of the event.
    type: str
    #: When it was made: RFC 3339 in UTC.
    created_at: str
    #: What it says. Its shape depends on the type.
    input: Any = None
    #: The instance that it is for.
    instance_key: str | None = None
    #: Who caused it.
    source: Source | None = None
    #: On whose behalf it was sent.
    auth: Any = None
    #: Where its answer goes. None: nobody waits for one.
    reply_to: ReplyTo | None = None
    #: Anything else that its sender wrote.
    metadata: dict[str, Any] | None = None
    #: Of an event that answers a request: how the turn that was asked for ended.
    answer: Answer | None = None


class OperatorCall(Struct, rename="camel", omit_defaults=True):
    """`input` of an `operator.call` event: one tool call, made through the catalog of the agent that is asked."""

    #: The name of the tool.
    tool: str
    #: The arguments.
    args: Any


class OperatorTool(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool in the result of an `operator.tools` event, whose output is a list of these."""

    #: Its full name.
    name: str
    #: What it does, for a model.
    description: str | None = None
    #: The JSON Schema of its arguments. None: anything fits.
    parameters: dict[str, Any] | None = None
    #: Twice is as good as once.
    idempotent: bool = False
    #: The model is not shown it.
    deferred: bool = False


class ConversationEdited(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The output of the result of an `operator.undo` or `operator.reset` event."""

    #: How many messages were removed.
    removed: int
    #: How many are left.
    left: int
    #: Of `operator.undo`: the turn that was taken back.
    turn_id: str | None = None
    #: Of `operator.undo`: how the turn's first message began.
    said: str | None = None


class RestartRequest(Struct, frozen=True):
    """Payload of `restart`: why the kernel is to restart."""

    #: Why the kernel is to restart.
    reason: str


class RestartAnswer(Struct, frozen=True):
    """The `reply` to `restart`. `comes`: the kernel restarts when the turn has left its event, which it is to release
    at the end of its step; false for a wish that was fulfilled before.
    """

    #: Whether the kernel restarts; false: it has done so already.
    comes: bool


class AgentsSpawn(Struct, frozen=True, omit_defaults=True):
    """Payload of `agents.spawn`, which names agent and instance in `to` and `instanceKey`. `cwd`: see PROTOCOL.md."""

    #: Where the new instance works (PROTOCOL.md). None: in a directory of its own.
    cwd: str | None = None


class AgentsList(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `agents.list`: every instance, or only those that the asker has spawned."""

    #: Every instance, not only those that the asker has spawned.
    include_all: bool = False


class SpawnedAgent(Struct, frozen=True, rename="camel"):
    """The `reply` to `agents.spawn` (AGENTS-23)."""

    #: Name of the agent.
    target: str
    #: Key of the instance.
    instance_key: str
    #: False when the instance existed before.
    spawned: bool
    #: The folder that the instance works in.
    cwd: str | None


class ListedAgent(Struct, frozen=True, rename="camel"):
    """One instance in the `reply` to `agents.list` (AGENTS-26)."""

    #: Name of the agent.
    target: str
    #: Key of the instance.
    instance_key: str
    #: The agent that spawned it. None when nobody spawned it.
    owner_agent: str | None
    #: The instance that spawned it. None when nobody spawned it.
    owner_instance_key: str | None
    #: When it was made: RFC 3339 in UTC.
    created_at: str
    #: The folder that it works in.
    cwd: str | None


class AgentsListed(Struct, frozen=True):
    """The `reply` to `agents.list`. `count` is the number of entries in `agents` (AGENTS-26)."""

    #: The number of entries in `agents`.
    count: int
    #: The instances.
    agents: list[ListedAgent]


class AgentsCatalog(Struct, frozen=True, rename="camel"):
    """The `reply` to `agents.catalog` (AGENTS-29, AGENTS-30)."""

    #: Name of the Swarm.
    swarm_name: str
    #: Name of the agent that clients talk to by default.
    entry_agent: str
    #: Name of the agent that asks.
    self_agent: str
    #: How many names are in `available_agents`.
    available_count: int
    #: How many names are in `callable_agents`.
    callable_count: int
    #: All agents of the Swarm.
    available_agents: list[str]
    #: The agents that the asker may call: all but itself.
    callable_agents: list[str]


class ToolCallPayload(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `tool.call`."""

    #: The arguments: a JSON object. Only the tool host and the handler open it.
    args: Raw
    #: The turn that makes the call.
    turn_id: str
    #: The model's id of the call.
    tool_call_id: str
    #: The id of the assistant message that made the call.
    message_id: str | None = None
    #: That message. It is sent once for each tool host. Later calls of the same message have only `message_id`.
    message: OptionalRaw = None
    #: The folder that the call works in, which its jail shows read-only: for tools that take one (skills). An absolute
    #: path in the workdir, or in a place that the tool was granted.
    folder: str | None = None


class ToolError(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """`error` of a ToolResult (RESULT-05)."""

    #: What went wrong.
    message: str
    #: Name of the exception's class.
    name: str | None = None
    #: The stable code, where there is one.
    code: str | None = None
    #: What to do about it.
    suggestion: str | None = None
    #: Where more is said about it.
    help_url: str | None = None


class ToolResult(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `tool.result` (RESULT-01)."""

    #: `pending`: the work goes on after this result.
    status: Literal["ok", "error", "pending"]
    #: The handler's value. With `ok` it is always present, and may be nil.
    output: OptionalRaw = None
    #: With `pending`: the name of the work that goes on.
    handle: str | None = None
    #: Why the call failed.
    error: ToolError | None = None
    #: A Receipt (worker/receipts.py), present when a jail had the call. It is for operators and never for a model.
    receipt: OptionalRaw = None


class Completion(Struct, frozen=True, rename="camel", kw_only=True):
    """`input` of a `tool.completed` event (RESULT-04): pending work has ended."""

    #: The handle of the work, as the call was answered with it.
    handle: str
    #: Full name of the tool.
    tool_name: str
    #: The call that began the work, in an earlier step or turn.
    tool_call_id: str
    #: The turn of that call.
    turn_id: str
    #: A ToolResult with `ok` or `error`.
    result: Raw


class InstanceEnd(Struct, frozen=True, omit_defaults=True):
    """Payload of `instance.end`: the instance in `to` and `instanceKey` is to be deleted. End its jails; with `force`
    also those in which something runs, and say nothing of that to anybody.
    """

    #: End jails in which something runs as well.
    force: bool = False


class InstanceEnded(Struct, frozen=True, omit_defaults=True):
    """The `reply` to `instance.end`, sent when the instance's jails are gone, or at once when something runs there and
    was not to be ended by force: `work` names it then, by callId and handle.
    """

    #: What still runs, by callId and handle.
    work: list[str] = []


#: Why a process is told to leave. `idle`: it has nothing to do, and another one needs its place.
ShutdownReason = Literal["restart", "config_change", "orchestrator_shutdown", "idle"]


class Shutdown(Struct, frozen=True, rename="camel"):
    """Payload of `shutdown`: finish or give up within `grace_period_ms`, then answer `shutdown_ack` (IPC-07). None: an
    agent's running step takes its own time, within the deadlines that it has.
    """

    #: The time to finish (milliseconds). None: the time that a running step takes.
    grace_period_ms: int | None
    #: Why.
    reason: ShutdownReason
