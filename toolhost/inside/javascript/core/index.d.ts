// Made by `python -m scripts.typescript_types` from schemas/json and scripts/goondan_core.ts. Do not edit.

/** Every value that JSON has. */
export type JsonPrimitive = string | number | boolean | null;
export type JsonValue = JsonPrimitive | JsonObject | JsonArray;
export type JsonObject = { [key: string]: JsonValue };
export type JsonArray = JsonValue[];

/** What a handler may return: a value, or a `Pending`. What becomes of other values stands in schemas/WORKER.md. */
export type ToolOutput = JsonValue | bigint | Date | undefined | void | Pending | RuntimeAnswer;

/** What the methods of `ctx.runtime` give. */
export type RuntimeAnswer = AgentAnswer | SentEvent | SpawnedAgent | AgentsListed | AgentsCatalog;

/** One export of a tool. `input` has passed the export's JSON Schema, so a handler may declare it more exactly. */
export type ToolHandler = (ctx: ToolContext, input: any) => ToolOutput | Promise<ToolOutput>;

/** What a handler knows about its call. All of it is read-only. */
export interface ToolContext {
  /** The agent that makes the call. */
  readonly agentName: string;
  /** The instance of that agent. */
  readonly instanceKey: string;
  /** The turn that the call belongs to. */
  readonly turnId: string;
  /** The id that the model gave this call. */
  readonly toolCallId: string;
  /** The assistant message that contains this call; null when an operator made the call by hand. */
  readonly message: Message | null;
  /** The instance's workspace, the only folder of the host that may be written to. The process starts there. */
  readonly workdir: string;
  /** The console of this call: each line reaches the kernel's log with the call's name. */
  readonly logger: Console;
  /** Is aborted when the caller gives up. */
  readonly signal: AbortSignal;
  /** Milliseconds until the host ends this process together with the call; null without a deadline. */
  readonly remainingMs: number | null;
  /** How many bytes the call's output may have as it travels; more is the error E_TOOL_LIMIT. */
  readonly outputLimit: number;
  /** Other agents; null unless the tool was granted `permissions: [agents]`. */
  readonly runtime: Runtime | null;
  /** Tell whoever watches how far the work is. Cheap and lossy: at most some 20 a second are passed on. */
  progress(done: number, total?: number | null, message?: string | null): void;
}

/** A message of a conversation. Only the content of `metadata` may be changed; it is a copy. */
export interface Message {
  readonly id: string;
  /** The model's message: `{role, content}`. */
  readonly data: JsonValue;
  readonly metadata: Record<string, JsonValue>;
  readonly createdAt: Date;
  /** Who made it: `{type: "assistant", …}`. */
  readonly source: MessageSource;
}

export type MessageSource = { readonly type: string; readonly [key: string]: JsonValue };

/** Other agents. All of it ends with the call. Each method rejects with an AgentError. */
export interface Runtime {
  /** Ask an agent, and wait for its answer. With `async` nobody waits: it becomes a message to the calling agent. */
  request(target: string, input: JsonValue, options?: RequestOptions): Promise<AgentAnswer>;
  /** Give an agent something to do; resolves as soon as that cannot get lost. */
  send(target: string, input: JsonValue, options?: SendOptions): Promise<SentEvent>;
  /** Start an instance of an agent. `cwd` gives it a working directory: "." for this call's, or a folder below it. */
  spawn(target: string, options?: { instanceKey?: string; cwd?: string }): Promise<SpawnedAgent>;
  /** The instances that the calling agent has spawned, or all. */
  list(options?: { includeAll?: boolean }): Promise<AgentsListed>;
  /** The agents of the swarm. */
  catalog(): Promise<AgentsCatalog>;
}

export interface SendOptions {
  /** Which instance; the caller's own key when left out. */
  instanceKey?: string;
  eventType?: string;
  metadata?: JsonObject;
}

export interface RequestOptions extends SendOptions {
  /** How long the answer may take (milliseconds, 60,000); never longer than the call. */
  timeoutMs?: number;
  async?: boolean;
}

export interface SentEvent {
  target: string;
  eventId: string;
  accepted: boolean;
}

export interface AgentAnswer extends SentEvent {
  correlationId: string;
  async: boolean;
  /** What the agent says; null with `async`. */
  response: string | null;
}

export interface ErrorOptions {
  /** A stable name of your own; `E_TOOL` when left out. */
  code?: string | null;
  /** How to go on. */
  suggestion?: string | null;
  /** Where to read more. */
  helpUrl?: string | null;
  cause?: unknown;
}

/** An error with its own code and advice. Any thrown error will do; this one only saves setting properties. */
export class ToolError extends Error {
  constructor(message: string, options?: ErrorOptions);
  readonly code?: string | null;
  readonly suggestion?: string | null;
  readonly helpUrl?: string | null;
}

/** What was asked through `ctx.runtime` failed; `code` says how, for example E_AGENT_TIMEOUT. */
export class AgentError extends ToolError {}

/**
 * Return it from a handler: the result of the call is `pending`, and the work goes on. What `work` comes to is the final
 * result. Without it the work goes on somewhere else.
 */
export class Pending {
  /** `handle`: 1 to 1,024 characters, without controls and ends of lines. */
  constructor(handle: string, work?: Promise<ToolOutput> | (() => ToolOutput | Promise<ToolOutput>));
  readonly handle: string;
  readonly work: Promise<ToolOutput> | (() => ToolOutput | Promise<ToolOutput>) | undefined;
}

/** The `reply` to `agents.catalog` (AGENTS-29, AGENTS-30). */
export interface AgentsCatalog {
  /** Name of the Swarm. */
  swarmName: string;
  /** Name of the agent that clients talk to by default. */
  entryAgent: string;
  /** Name of the agent that asks. */
  selfAgent: string;
  /** How many names are in `available_agents`. */
  availableCount: number;
  /** How many names are in `callable_agents`. */
  callableCount: number;
  /** All agents of the Swarm. */
  availableAgents: string[];
  /** The agents that the asker may call: all but itself. */
  callableAgents: string[];
}

/** The `reply` to `agents.list`. `count` is the number of entries in `agents` (AGENTS-26). */
export interface AgentsListed {
  /** The number of entries in `agents`. */
  count: number;
  /** The instances. */
  agents: ListedAgent[];
}

/** One instance in the `reply` to `agents.list` (AGENTS-26). */
export interface ListedAgent {
  /** Name of the agent. */
  target: string;
  /** Key of the instance. */
  instanceKey: string;
  /** The agent that spawned it. None when nobody spawned it. */
  ownerAgent: string | null;
  /** The instance that spawned it. None when nobody spawned it. */
  ownerInstanceKey: string | null;
  /** When it was made: RFC 3339 in UTC. */
  createdAt: string;
  /** The folder that it works in. */
  cwd: string | null;
}

/** The `reply` to `agents.spawn` (AGENTS-23). */
export interface SpawnedAgent {
  /** Name of the agent. */
  target: string;
  /** Key of the instance. */
  instanceKey: string;
  /** False when the instance existed before. */
  spawned: boolean;
  /** The folder that the instance works in. */
  cwd: string | null;
}
