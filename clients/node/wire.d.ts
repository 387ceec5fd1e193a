// Made by `python -m scripts.typescript_types` from schemas/json. Do not edit.

/** The specification's AgentEvent. */
export interface AgentEvent {
  /** The id of the event. */
  id: string;
  /** The type of the event. */
  type: string;
  /** When it was made: RFC 3339 in UTC. */
  createdAt: string;
  /** What it says. Its shape depends on the type. */
  input?: unknown;
  /** The instance that it is for. */
  instanceKey?: string | null;
  /** Who caused it. */
  source?: Source | null;
  /** On whose behalf it was sent. */
  auth?: unknown;
  /** Where its answer goes. None: nobody waits for one. */
  replyTo?: ReplyTo | null;
  /** Anything else that its sender wrote. */
  metadata?: { [key: string]: unknown } | null;
  /** Of an event that answers a request: how the turn that was asked for ended. */
  answer?: Answer | null;
}

/** How a turn ended. */
export interface Answer {
  /** The turn. */
  turnId: string;
  /** Whether it ended with a response or with an error. */
  status: "completed" | "failed";
  /** The text of the model's last message. */
  response?: string | null;
  /** Why the model ended its last message. */
  finishReason?: string | null;
  /** Why the turn failed. */
  error?: ErrorPayload | null;
  /** Of the operator's events (`operator.call` and its like): the ToolResult, as the agent encoded it. */
  output?: unknown;
  /** How many steps the turn took. */
  steps?: number;
  /** The trace of the turn. */
  traceId?: string | null;
  /** The model that answered last, as `provider/name`; None: no model was asked. */
  model?: string | null;
  /** What the model calls of the turn have used; None: no model was asked, or only the console. */
  usage?: Usage | null;
  /** Whether the response ends where the model reached its limit of tokens. */
  cutOff?: boolean;
  /** The reasoning of the model's last message. It is no part of the response. */
  reasoning?: string | null;
  /** Of an agent with an output schema: the value that the response is. It fits the schema. */
  object?: unknown;
}

/** One decision, as `gdn approve list --answered` gets it: who decided what, and when. An answer is not kept. */
export interface ApprovalDecided {
  /** The short name of the item. */
  code: string;
  /** The callId. */
  id: string;
  /** A call that waited for approval, or a question. */
  kind: "approval" | "question";
  /** The agent that asked. */
  agent: string;
  /** The instance that asked. */
  instanceKey: string;
  /** The event whose turn asked. */
  eventId: string;
  /** Full name of the tool. */
  tool: string;
  /** As in ApprovalItem. */
  digest: string;
  /** The beginning of the call's arguments as JSON, or of the question. Keys of models are taken out. */
  what: string;
  /** When it was asked (milliseconds since 1970). */
  askedMs: number;
  /** When it was decided (milliseconds since 1970). */
  decidedMs: number;
  /** How it was decided. */
  how: "answered" | "approved" | "denied";
  /** As in ApprovalItem. */
  uid?: number | null;
  /** What the person said about the decision. */
  reason?: string | null;
  /** The code of the lasting yes that came with it. */
  always?: string;
}

/** One item as `gdn approve` and `gdn run` get it. */
export interface ApprovalItem {
  /** The callId. */
  id: string;
  /** A short name of the item, for people. */
  code: string;
  /** A call that waits for approval, or a question. */
  kind: "approval" | "question";
  /** The agent that asks. */
  agent: string;
  /** The instance that asks. */
  instanceKey: string;
  /** The event whose turn asks. */
  eventId: string;
  /** Full name of the tool. */
  tool: string;
  /** SHA-256 of tool, working directory and arguments, in hexadecimal digits. */
  digest: string;
  /** When it was asked (milliseconds since 1970). */
  askedMs: number;
  /** It waits, or how it was decided. */
  state: "answered" | "approved" | "denied" | "started" | "waits";
  /** The event that all this work began with. */
  rootEvent?: string | null;
  /** The instances that wait for this turn: each waits for the next one, and the last one waits for this turn. */
  waitedForBy?: string[];
  /** The working directory of the call. */
  workdir?: string | null;
  /** The final arguments. None when they are too large for a list. */
  args?: unknown;
  /** The size of the arguments, when they are too large for a list. */
  argsBytes?: number;
  /** Of a question: its text. */
  message?: string | null;
  /** Of a question: the JSON Schema of its answer. */
  schema?: unknown;
  /** Why a rule wants a person to decide. */
  reason?: string | null;
  /** When it ends without a decision (milliseconds since 1970). */
  expiresMs?: number | null;
  /**
   * The user whose token decided. -1: the token names no user. None: the kernel decided, because the time was over.
   */
  uid?: number | null;
  /** When it was decided (milliseconds since 1970). */
  decidedMs?: number | null;
  /** What the person said about the decision. */
  decidedReason?: string | null;
  /** Of a call that a script of code mode makes: the script. None when it is too large for a list. */
  script?: string | null;
  /** How many calls of this tool in the script a yes is for, this one included. 0: this call alone. */
  covers?: number;
  /** The code of the lasting yes that has answered it, or that came with its yes. */
  always?: string;
}

/** An agent instance that is attached to an MCP server of a tool host. */
export interface AttachedServer {
  /** The server's prefix. */
  server: string;
  /** Name of the agent. */
  agent: string;
  /** Key of the instance. */
  instanceKey: string;
}

/** A large payload that lies in a file of the workspace's `blobs` folder (schemas/wire/blobs.py has the rules). */
export interface Blob {
  /** Name of the file: 32 hexadecimal digits in lower case, chosen at random. */
  file: string;
  /** SHA-256 of its bytes, in hexadecimal digits in lower case. */
  digest: string;
  /** How many bytes it has. */
  size: number;
}

/** A new credit window: how many new `event` and `tool.call` frames may be unanswered at once. */
export interface Credit {
  /** How many frames may be unanswered at once. */
  window: number;
}

/** The payload of an `error` frame. It is also the error of an answer. */
export interface ErrorPayload {
  /** The stable code, as in docs/errors.md. */
  code: string;
  /** What is wrong, in one sentence. */
  message: string;
  /** What to do about it. */
  suggestion?: string | null;
  /** Where more is said about it. */
  helpUrl?: string | null;
  /** After how many milliseconds to try again. Only with E_OVERLOADED. */
  retryAfterMs?: number | null;
  /** Name of the exception's class, where an exception was the cause. */
  name?: string | null;
}

/** A picture or a PDF beside a text. Its bytes lie in a file; schemas/wire/blobs.py has the rules. */
export interface FilePart {
  type: "file";
  blob: Blob;
  mediaType: string;
  name?: string | null;
}

/** One frame: the header, and the payload as it travels. */
export interface Frame {
  /** What it is about (FrameType). */
  type: "hello" | "welcome" | "ping" | "pong" | "bye" | "event" | "shutdown" | "shutdown_ack" | "ack" | "credit" | "tool.call" | "tool.result" | "tool.progress" | "tool.completed" | "tool.cancel" | "tool.ask" | "tool.answer" | "instance.end" | "agents.spawn" | "agents.list" | "agents.catalog" | "restart" | "config.changed" | "admin" | "reply" | "runtime.event" | "observed" | "listen" | "clock" | "log" | "error" | "approval.ask" | "approval.news" | "changeset.open" | "changeset.commit" | "model.permit" | "model.over" | "model.out" | "model.gate" | "model.line" | "config.propose" | "mcp.attach" | "mcp.list" | "mcp.detach" | "mcp.news" | "oauth.token" | "oauth.server" | "oauth.order" | "oauth.granted" | "budget.reserve" | "budget.settle";
  /** Unique for its sender and incarnation. */
  id?: string;
  /** Version of the protocol. */
  v?: number;
  /** Who sends it. The broker sets it, whatever the sender wrote. */
  from?: string | null;
  /** Whom it is for: the name of an agent, or an address. */
  to?: string | null;
  /** Which instance of that agent. */
  instanceKey?: string | null;
  /** The event that it is about. */
  eventId?: string | null;
  /** Full name of a tool: `{tool}__{export}`. */
  tool?: string | null;
  /** The tool call that it is about: `<turnId>/<toolCallId>`. */
  callId?: string | null;
  /** Where the answer to this event goes. Without it nobody waits for one. */
  replyTo?: ReplyTo | null;
  /**
   * The `id` of the frame that this one answers. Of an answering event: the correlation id of its request. Of a
   * `tool.call` with `within`: the `tool.ask` that the tool host may answer with the call's output.
   */
  inReplyTo?: string | null;
  /** The instances (`agent/instanceKey`) that wait for this. Each waits for the next one. The broker sets it. */
  chain?: string[] | null;
  /** Which holder of the event speaks, or is spoken to. */
  epoch?: number | null;
  /**
   * Of an `ack`: what has happened (AckStage). Of a `clock`: whether time stands still (ClockStage). Of a
   * `runtime.event`, `tool.progress`: the turn, or the call, waits (`waits`), or goes on (`over`). Of a
   * `tool.result`: PASSED_ON. Of `observed`: pieces of news were missed (`gap`).
   */
  stage?: "accepted" | "renew" | "done" | "failed" | "release" | "result" | "park" | null;
  /** Names everything that one message set going (schemas/wire/spans.py). */
  traceId?: string | null;
  /** Names what the frame is about. */
  spanId?: string | null;
  /** Names what that is a part of. */
  parentSpanId?: string | null;
  /** Milliseconds that are left, counted from when the frame is sent. */
  deadlineMs?: number | null;
  /** Who caused the event. The broker sets it. */
  source?: Source | null;
  /** On whose behalf. It is taken from an operator only; an agent's frames carry that of its event. */
  auth?: unknown;
  /** Where the tool works. Only an operator may name one; else the broker sets it. */
  workdir?: string | null;
  /** callIds that an `ack` or a piece of news is about. */
  calls?: string[] | null;
  /**
   * `tool.call` only: CLOCK_BOOTTIME in milliseconds when the call was sent for the first time. A repeat of a call
   * that is older than both the broker and the tool host has an unknown outcome; any other may run.
   */
  firstSentMs?: number | null;
  /** What the frame carries, as its sender encoded it. The broker never opens what is for others. */
  payload?: unknown;
  /**
   * `event`: the asker, or an observer, wants to hear of the turn while it runs. `listen`: somebody does from now
   * on.
   */
  live?: boolean;
  /** Stands for a payload that is too large for a frame; `payload` is nil then. */
  blob?: Blob | null;
  /** The event that all this began with. The broker sets it on everything that agents and tools ask and send. */
  rootEvent?: string | null;
  /**
   * `event` only: what its sender says of its content. Another event under a known id is refused when it differs.
   */
  digest?: string | null;
  /**
   * `tool.call` and `ack` of stage `renew`: how many messages of the turn are stored. `observed`: the number of the
   * piece of news, or of the last one that was missed; of a client, up to which number it has read.
   */
  position?: number | null;
  /** `ack` of stage `release`: a higher epoch that the instance's file holds. */
  seenEpoch?: number | null;
  /**
   * `event` with `replyTo`: its sender does not wait. The answer comes as an event of its own, which says the same
   * and names the request in `inReplyTo`.
   */
  async?: boolean;
  /** `event` to an agent: how long ago the broker accepted it (milliseconds). */
  waitedMs?: number | null;
  /**
   * `tool.call` only: the folder that `workdir` is or lies in. Beneath it no link may be followed on the way there.
   */
  workdirBase?: string | null;
  /** For how much of `waitedMs` its turn waited for a place. */
  placeMs?: number | null;
  /** `event` to an agent: its model calls, and tool calls that it runs itself, are reserved (PROTOCOL.md). */
  budget?: boolean;
  /** `tool.call` only: the call was started before. A tool host that does not know it does not start it. */
  attach?: boolean;
  /**
   * `tool.call`, questions of a call: the callId of the script that makes this call, an open call of the same turn.
   */
  within?: string | null;
  /** `event` of an operator only: the files of its message. The broker keeps them until the event has ended. */
  files?: FilePart[] | null;
  /** `ack` of stage `failed`: why, where the message is not to blame. The event is kept as a dead letter. */
  cause?: string | null;
  /** `tool.call` only: the number of its step, from 1. */
  step?: number | null;
  /**
   * `tool.result` to an agent: when the broker had the call, and when it had this result (CLOCK_BOOTTIME,
   * microseconds). The broker sets it.
   */
  passedUs?: number[] | null;
}

/** The first frame of every connection. Leases and calls survive a reconnect. */
export interface Hello {
  /** Says for whom the connection speaks (schemas/wire/tokens.py). */
  token: string;
  /** Random, one for each life of a process. */
  incarnation: string;
  /** Versions of the protocol that it speaks. */
  versions?: number[];
  /** Of an agent process: what it holds. */
  leases?: Lease[];
  /** Of a tool host: calls that run, and results that nobody has acknowledged. */
  calls?: string[];
  /** Correlation ids of the answers that it waits for. */
  awaiting?: string[];
  /** Its process. */
  pid?: number | null;
  /** CLOCK_BOOTTIME in milliseconds when the process began, to be compared with `firstSentMs`. */
  startedMs?: number | null;
  /** Of a tool host: who is attached to its MCP servers. */
  attached?: AttachedServer[];
  /** Of an agent process: its requests to models that are out. The feature that has them says what each is. */
  permits?: unknown[];
  /** Of an agent process: the last state of each gate that it was given. The same. */
  gates?: unknown[];
}

/** An event that an agent process holds. */
export interface Lease {
  /** The event. */
  eventId: string;
  /** The epoch with which the event was handed over. */
  epoch: number;
  /** The instance that the event is for. */
  instanceKey: string;
  /** The `rootEvent` with which it was handed over. */
  rootEvent?: string | null;
}

/** Where the answer to a request goes. `target` is an agent name or a client address. */
export interface ReplyTo {
  /** The agent or the client address. */
  target: string;
  /** What the asker calls its request. */
  correlationId: string;
}

/** Payload of `runtime.event` from an agent: news of a turn that runs. Any of them may be lost. */
export interface RuntimeEvent {
  /**
   * What happened. `tool.waits`: the call waits for a person. `model.waits`: the step's request to the model waits.
   * `extension.waits`: a layer of an extension is not done. `waits.over`: the turn goes on, of which the last two
   * had told.
   */
  kind: "event.accepted" | "event.ended" | "extension.waits" | "model.waits" | "reasoning" | "step.completed" | "step.failed" | "step.started" | "text" | "tool.called" | "tool.completed" | "tool.failed" | "tool.progress" | "tool.waits" | "turn.completed" | "turn.failed" | "turn.started" | "waits.over";
  /** The number of the step, from 1. */
  step?: number;
  /** A piece of the model's text, or of its reasoning. */
  text?: string | null;
  /**
   * Where the piece stands in its step's text, or in its step's reasoning, in characters (code points). When this
   * is not the length of what was heard of it so far, something was lost.
   */
  at?: number;
  /**
   * Of a step: the text and the reasoning of it that were heard before are void. Of `turn.started`: the turn was
   * begun before, by an incarnation that is gone.
   */
  again?: boolean;
  /** The model's id of the call. */
  toolCallId?: string | null;
  /** Full name of the tool. */
  toolName?: string | null;
  /** Of `tool.failed`: the code of the error. */
  code?: string | null;
  /** Of `tool.called`, for an operator: the arguments in one short line (`argument_line`). */
  arguments?: string | null;
  /** Of `tool.progress`: how much is done, as the handler says. */
  done?: number | null;
  /** Of `tool.progress`: how much there is in all, as the handler says. */
  total?: number | null;
  /** Of `tool.progress`: the handler's own words. Of `model.waits`: why the last try failed. */
  message?: string | null;
  /** Of `turn.failed` and `step.failed`: why it failed. */
  error?: ErrorPayload | null;
  /** Of `model.waits` and `extension.waits`: what is waited for. */
  wait?: Wait | null;
  /** Of `event.ended`: how (`done`, `failed`, `expired`, `dead`, `cancelled`). */
  state?: string | null;
}

/**
 * Payload of `shutdown`: finish or give up within `grace_period_ms`, then answer `shutdown_ack` (IPC-07). None: an
 * agent's running step takes its own time, within the deadlines that it has.
 */
export interface Shutdown {
  /** The time to finish (milliseconds). None: the time that a running step takes. */
  gracePeriodMs: number | null;
  /** Why. */
  reason: "config_change" | "idle" | "orchestrator_shutdown" | "restart";
}

/** Who caused an event. The broker sets it and never believes what a sender wrote. */
export interface Source {
  /** What it is. */
  kind: "agent" | "client" | "connector" | "tool";
  /** Its name. */
  name: string;
  /** Which instance of an agent. None for everything else. */
  instanceKey?: string | null;
}

/** `error` of a ToolResult (RESULT-05). */
export interface ToolError {
  /** What went wrong. */
  message: string;
  /** Name of the exception's class. */
  name?: string | null;
  /** The stable code, where there is one. */
  code?: string | null;
  /** What to do about it. */
  suggestion?: string | null;
  /** Where more is said about it. */
  helpUrl?: string | null;
}

/** Payload of `tool.result` (RESULT-01). */
export interface ToolResult {
  /** `pending`: the work goes on after this result. */
  status: "error" | "ok" | "pending";
  /** The handler's value. With `ok` it is always present, and may be nil. */
  output?: unknown;
  /** With `pending`: the name of the work that goes on. */
  handle?: string | null;
  /** Why the call failed. */
  error?: ToolError | null;
  /**
   * A Receipt (worker/receipts.py), present when a jail had the call. It is for operators and never for a model.
   */
  receipt?: unknown;
}

/** What was used, as it is shown: in answers, and by `gdn usage`. */
export interface Usage {
  /** All tokens that models read. */
  inputTokens: number;
  /** All tokens that models wrote. */
  outputTokens: number;
  /** The part of the input that came from the vendor's cache. */
  cachedTokens?: number;
  /** The part of the input that was put into the vendor's cache. */
  cacheWriteTokens?: number;
  /** The part of the output that was reasoning. */
  reasoningTokens?: number;
  /** Model calls that have ended. */
  modelCalls: number;
  /** What the calls of models with a price cost; None: no model has one, or they have several currencies. */
  cost?: number | null;
  /** The currency of `cost`, unless it is USD. */
  currency?: string | null;
}

/** What a turn waits for. */
export interface Wait {
  /** For how long it has waited already (milliseconds). */
  waitedMs?: number;
  /** The model that is asked, and its server. */
  model?: string | null;
  /** Which try it is, from 1; 0: it has not gone out. */
  attempt?: number;
  /** How long it waits at least, before it goes out or is tried again (milliseconds). */
  waitMs?: number | null;
  /** How many requests of others go out before this one. None: it is not in a line. */
  before?: number | null;
  /** The extension whose layer is not done. */
  extension?: string | null;
  /** The point of the layer, or the kind of its middleware. */
  point?: string | null;
}

/** The broker's answer to `hello`. */
export interface Welcome {
  /** The version of the protocol that both speak. */
  version: number;
  /** The address that the broker knows this connection by. */
  principal: string;
  /** The incarnation of the broker. */
  broker: string;
  /** How many new `event` and `tool.call` frames may be unanswered at once. */
  credit: number;
  /** The limit of a frame (bytes). */
  maxFrame: number;
  /** Of an agent: its instance. */
  instanceKey?: string | null;
  /** Of an agent: where its tools work. */
  workdir?: string | null;
  /** Of an agent: the epoch of its instance. */
  epoch?: number | null;
  /** Names the content of the bundle. */
  revision?: string | null;
  /** The launch specification that the token entitles to (AgentSpec or ToolHostSpec, msgpack); nil for clients. */
  spec?: unknown;
  /** The folder of large payloads: an absolute path on the broker's machine. */
  blobs?: string | null;
  /** The promise of `accepted`: the event survives a loss of power, or only the end of a process. */
  durability?: "power" | "process";
  /** The number of an agent's conversations. One that was begun under a lower number begins again. */
  generation?: number;
  /**
   * Changes of its configuration that are in force for an agent (bundle.effective_config.LiveChanges); nil: none.
   */
  config?: unknown;
  /** Of an agent: the names of its Model documents whose requests have to ask ("": its own model). */
  limited?: string[];
}
