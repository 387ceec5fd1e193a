/** Ask the agents of a running Goondan swarm. What is on the wire is declared in `goondan-client/wire`. */

import type { ApprovalItem, Answer as Told, RuntimeEvent, ToolResult, Usage } from "./wire.d.ts";

export type { ApprovalItem, RuntimeEvent, ToolResult, Usage };

/** Everything that goes wrong. `code` is stable and for programs; see docs/errors.md. */
export class GoondanError extends Error {
  constructor(code: string, message: string, more?: { suggestion?: string | null; helpUrl?: string | null; retryAfterMs?: number | null });
  readonly code: string;
  /** What a person may do about it. */
  readonly suggestion: string | undefined;
  readonly helpUrl: string | undefined;
  /** When the same is worth another try (milliseconds). */
  readonly retryAfterMs: number | undefined;
}

export interface ConnectOptions {
  /** The bundle whose running kernel is meant: its folder or file. Default: the folder that the program stands in. */
  bundle?: string;
  /** The kernel's runtime directory. It comes before `bundle`. Default, without either: `GOONDAN_RUN_DIR`, if set. */
  runDir?: string;
  /** How long the kernel may take to answer (milliseconds). Default: 10,000. */
  timeoutMs?: number;
}

/** A picture or a PDF for the model: a path, its bytes, or one of these with a name. */
export type Attachment = string | Uint8Array | { data: string | Uint8Array; name?: string };

export interface AskOptions<T = unknown> {
  /** The conversation with the agent. Default: `default`. */
  instance?: string;
  /** PNG, JPEG, GIF, WebP, PDF: at most 16, 16 MiB each, 20 MiB together. */
  files?: readonly Attachment[];
  /** Makes the answer's `object`; what it throws becomes `E_OUTPUT_INVALID`. */
  schema?: ((object: unknown) => T) | { parse(object: unknown): T };
  /** When it is too late (milliseconds from now). Default: 600,000, of `send` null: never. */
  deadlineMs?: number | null;
  /** Names the question, so that it can be asked again and is worked on once. Default: a random one. */
  eventId?: string;
  /** The working directory of its tools: an absolute path. Default: the instance's own. */
  workdir?: string;
  /** The trace that it belongs to: 32 hexadecimal digits. Default: a new one. */
  traceId?: string;
  /** Gives up the question, and cancels the work on it. */
  signal?: AbortSignal;
}

export interface CallOptions extends Pick<AskOptions, "instance" | "deadlineMs" | "eventId" | "workdir" | "traceId" | "signal"> {
  /** In whose name the tool is called: its rules apply. Default: `_operator`, who may call every tool. */
  agent?: string;
}

/** How a turn ended. A failed one is thrown, so the status is always `completed`. */
export interface Answer<T = unknown> extends Omit<Told, "response" | "error" | "output" | "object" | "steps"> {
  text: string;
  /** Of an agent with an output schema: the value that the text is. Integers beyond 2^53 are bigint. */
  object: T;
  eventId: string;
}

export interface Instance { agent: string; instanceKey: string | null; pid: number | null; startedMs: number | null }

/** Every method may reject with GoondanError. */
export class Goondan implements AsyncDisposable {
  private constructor();
  /** Ask an agent, and wait for its answer. A failed one is thrown. */
  ask<T = unknown>(agent: string, text: string, options?: AskOptions<T>): Promise<Answer<T>>;
  /** The same, hearing of the turn meanwhile; the answer comes last. Who leaves the loop early cancels the question. */
  stream<T = unknown>(agent: string, text: string, options?: AskOptions<T>): AsyncGenerator<RuntimeEvent | ({ kind: "answer" } & Answer<T>), void, void>;
  /** Ask, and wait for nothing but that it is accepted: then it will be worked on. Gives its event id. */
  send(agent: string, text: string, options?: Omit<AskOptions, "schema">): Promise<string>;
  /** Call a tool, by its full name. Its error is thrown. */
  call(tool: string, args?: unknown, options?: CallOptions): Promise<ToolResult>;
  /** Cancel an event, or what an instance works on. Gives how it ended: `cancelled`, `done`, `failed`, `expired`, `dead`. */
  cancel(what: { eventId: string } | { agent: string; instance?: string }): Promise<string>;
  /** What waits for a person, the oldest first. */
  approvals(): Promise<ApprovalItem[]>;
  /** Decide one of these, by its id. Gives its state. */
  decide(id: string, decision: "yes" | "no" | "answer", more?: { reason?: string; answer?: unknown }): Promise<string>;
  /** The instances of agents whose processes run. */
  instances(): Promise<Instance[]>;
  /** What the answers to this program have used so far; money of the first currency only. */
  usage(): Usage;
  /** End orderly. What is unanswered rejects with `E_LINK_CLOSED`. */
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

/** Find a running kernel, connect, and wait for its welcome. */
export function connect(options?: ConnectOptions): Promise<Goondan>;
