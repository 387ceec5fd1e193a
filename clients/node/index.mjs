/**
 * Ask the agents of a running Goondan swarm; README.md shows how. What is on the wire is declared in `goondan-client/wire`. The declarations
 * for TypeScript are made from what stands here: `python -m scripts.node_client --types`.
 *
 * Source: PROTOCOL.md, PROTOCOL-OPERATORS.md.
 */

import { randomBytes } from "node:crypto";

import { digestOf, encodeValue, open } from "./codec.mjs";
import { GoondanError } from "./errors.mjs";
import { Link } from "./link.mjs";
import { Entry, GRACE_MS } from "./peer.mjs";

export { GoondanError };

/**
 * @typedef {import("./wire.d.ts").ApprovalItem} ApprovalItem
 * @typedef {import("./wire.d.ts").RuntimeEvent} RuntimeEvent
 * @typedef {import("./wire.d.ts").ToolResult} ToolResult
 * @typedef {import("./wire.d.ts").Usage} Usage
 */

/**
 * @typedef {object} ConnectOptions
 * @property {string} [bundle] The bundle whose running kernel is meant: its folder or file. Default: the folder that the program stands in.
 * @property {string} [runDir] The kernel's runtime directory. It comes before `bundle`. Default, without either: `GOONDAN_RUN_DIR`, if set.
 * @property {number} [timeoutMs] How long the kernel may take to answer (milliseconds). Default: 10,000.
 */

/**
 * A picture or a PDF for the model: a path, its bytes, or one of these with a name.
 *
 * @typedef {string | Uint8Array | { data: string | Uint8Array, name?: string }} Attachment
 */

/**
 * @template [T=unknown]
 * @typedef {object} AskOptions
 * @property {string} [instance] The conversation with the agent. Default: `default`.
 * @property {readonly Attachment[]} [files] PNG, JPEG, GIF, WebP, PDF: at most 16, 16 MiB each, 20 MiB together.
 * @property {((object: unknown) => T) | { parse(object: unknown): T }} [schema] Makes the answer's `object`; what it throws becomes
 *   `E_OUTPUT_INVALID`.
 * @property {number | null} [deadlineMs] When it is too late (milliseconds from now). Default: 600,000, of `send` null: never.
 * @property {string} [eventId] Names the question, so that it can be asked again and is worked on once. Default: a random one.
 * @property {string} [workdir] The working directory of its tools: an absolute path. Default: the instance's own.
 * @property {string} [traceId] The trace that it belongs to: 32 hexadecimal digits. Default: a new one.
 * @property {AbortSignal} [signal] Gives up the question, and cancels the work on it.
 */

/**
 * @typedef {object} OfCall
 * @property {string} [agent] In whose name the tool is called: its rules apply. Default: `_operator`, who may call every tool.
 *
 * @typedef {OfCall & Pick<AskOptions, "instance" | "deadlineMs" | "eventId" | "workdir" | "traceId" | "signal">} CallOptions
 */

/**
 * @template T
 * @typedef {object} OfAnswer
 * @property {string} text
 * @property {T} object Of an agent with an output schema: the value that the text is. Integers beyond 2^53 are bigint.
 * @property {string} eventId
 */

/**
 * How a turn ended. A failed one is thrown, so the status is always `completed`.
 *
 * @template [T=unknown]
 * @typedef {OfAnswer<T> & Omit<import("./wire.d.ts").Answer, "response" | "error" | "output" | "object" | "steps">} Answer
 */

/** @typedef {{ agent: string, instanceKey: string | null, pid: number | null, startedMs: number | null }} Instance */

/** How long an answer may take when nothing else is said (ms). */
const DEADLINE_MS = 600_000;
/** How long the kernel may take to welcome us, and to answer a question about itself (ms). */
const KERNEL_MS = 10_000;
/** The most live events that a reader may leave unread. They are news: what is beyond that is lost. */
const MAX_UNREAD = 4096;

/** Find a running kernel, connect, and wait for its welcome. @param {ConnectOptions} [options] @returns {Promise<Goondan>} */
export async function connect({ bundle, runDir, timeoutMs = KERNEL_MS } = {}) {
  const link = new Link({ bundle, runDir });
  await link.open(timeoutMs);
  return new (/** @type {any} */ (Goondan))(link); // a program makes none by itself
}

/** @param {unknown} info an ErrorPayload, or a ToolError @param {string} fallback its code, if it names none */
function raised(info, fallback) {
  const { code, message, ...more } = /** @type {any} */ (info) ?? {};
  return new GoondanError(code ?? fallback, message ?? "it failed without a word", more);
}

/** Every method may reject with GoondanError. @implements {AsyncDisposable} */
export class Goondan {
  #link;
  /** Random for each connection, and a count: event ids that nobody else uses. */
  #run = randomBytes(8).toString("hex");
  #count = 0;
  /** @type {Usage} */
  #used = { inputTokens: 0, outputTokens: 0, cachedTokens: 0, cacheWriteTokens: 0, reasoningTokens: 0, modelCalls: 0 };

  /** @private @param {Link} link */
  constructor(link) {
    this.#link = link;
  }

  /**
   * Ask an agent, and wait for its answer. A failed one is thrown.
   *
   * @template [T=unknown]
   * @param {string} agent @param {string} text @param {AskOptions<T>} [options]
   * @returns {Promise<Answer<T>>}
   */
  async ask(agent, text, options = {}) {
    return this.#answer(await this.#event(agent, "user.message", text, options, { replies: true }), options);
  }

  /**
   * The same, hearing of the turn meanwhile; the answer comes last. Who leaves the loop early cancels the question.
   *
   * @template [T=unknown]
   * @param {string} agent @param {string} text @param {AskOptions<T>} [options]
   * @returns {AsyncGenerator<RuntimeEvent | ({ kind: "answer" } & Answer<T>), void, void>}
   */
  async *stream(agent, text, options = {}) {
    const leaves = new AbortController();
    const signal = options.signal ? AbortSignal.any([options.signal, leaves.signal]) : leaves.signal;
    /** @type {Promise<any> | undefined} */
    let asked;
    const start = (/** @type {ReadableStreamDefaultController} */ unread) => {
      const live = (/** @type {any} */ event) => Number(unread.desiredSize) > 0 && unread.enqueue(event);
      asked = this.#event(agent, "user.message", text, { ...options, signal }, { replies: true, live });
      const ends = () => unread.close();
      asked.then(ends, ends).catch(() => {}); // the reader has left already
    };
    const cancel = () => leaves.abort(); // the reader has left before the answer
    yield* new ReadableStream({ start, cancel }, { highWaterMark: MAX_UNREAD });
    yield { kind: "answer", ...this.#answer(await asked, options) };
  }

  /**
   * Ask, and wait for nothing but that it is accepted: then it will be worked on. Gives its event id.
   *
   * @param {string} agent @param {string} text @param {Omit<AskOptions, "schema">} [options]
   * @returns {Promise<string>}
   */
  async send(agent, text, { deadlineMs = null, ...options } = {}) {
    return (await this.#event(agent, "user.message", text, { deadlineMs, ...options }, {})).eventId;
  }

  /**
   * Call a tool, by its full name. Its error is thrown.
   *
   * @param {string} tool @param {unknown} [args] @param {CallOptions} [options]
   * @returns {Promise<ToolResult>}
   */
  async call(tool, args = {}, { agent = "_operator", ...options } = {}) {
    const { answer } = await this.#event(agent, "operator.call", { tool, args }, options, { replies: true });
    if (answer.error) throw raised(answer.error, "E_AGENT_FAILED");
    const result = open("ToolResult", answer.output);
    if (result.status === "error") throw raised(result.error, "E_TOOL");
    return result;
  }

  /**
   * Cancel an event, or what an instance works on. Gives how it ended: `cancelled`, `done`, `failed`, `expired`, `dead`.
   *
   * @param {{ eventId: string, agent?: never, instance?: never } | { eventId?: never, agent: string, instance?: string }} what
   * @returns {Promise<string>}
   */
  async cancel({ agent, instance = "default", eventId: named }) {
    /** @type {string | undefined} */
    let eventId = named;
    if (eventId === undefined) {
      const { events } = await this.#admin({ op: "events", agent, instanceKey: instance });
      if (!events.length) throw new GoondanError("E_EVENT_NOT_FOUND", `${agent}/${instance} works on nothing`);
      eventId = events[0].eventId; // what is worked on comes first
    }
    return (await this.#admin({ op: "cancel", eventId }, Infinity)).state; // it is answered when the event has ended
  }

  /** What waits for a person, the oldest first. @returns {Promise<ApprovalItem[]>} */
  async approvals() {
    return (await this.#admin({ op: "approve.list" })).items;
  }

  /**
   * Decide one of these, by its id. Gives its state.
   *
   * @param {string} id @param {"yes" | "no" | "answer"} decision @param {{ reason?: string, answer?: unknown }} [more]
   * @returns {Promise<string>}
   */
  async decide(id, decision, { reason, answer } = {}) {
    return (await this.#admin({ op: "approve.answer", id, decision, reason, answer })).state;
  }

  /** The instances of agents whose processes run. @returns {Promise<Instance[]>} */
  async instances() {
    const { peers } = await this.#admin({ op: "peers" });
    const agents = peers.filter((/** @type {any} */ peer) => peer.role === "agent");
    return agents.map((/** @type {any} */ { role, name, ...peer }) => ({ agent: name, ...peer }));
  }

  /** What the answers to this program have used so far; money of the first currency only. @returns {Usage} */
  usage() {
    return { ...this.#used };
  }

  /** End orderly. What is unanswered rejects with `E_LINK_CLOSED`. */
  async close() {
    this.#link.close();
  }

  [Symbol.asyncDispose]() {
    return this.close();
  }

  /** @param {{ op: string, [field: string]: unknown }} question @returns {Promise<any>} */
  async #admin(question, patienceMs = KERNEL_MS) {
    return (await this.#submit({ type: "admin" }, question, [], { patienceMs })).payload;
  }

  /**
   * Send an event until it is accepted, or answered.
   *
   * @param {string} to @param {string} type @param {unknown} input @param {AskOptions} options
   * @param {{ replies?: boolean, live?: (event: any) => void }} how
   * @returns {Promise<any>} the payload of the answer, with the event's id
   */
  async #event(to, type, input, options, { replies, live }) {
    const { instance = "default", files = [], deadlineMs = DEADLINE_MS, eventId, signal, workdir, traceId } = options;
    const isEndless = deadlineMs === null || deadlineMs === Infinity;
    const id = eventId ?? `${this.#run}-${++this.#count}`;
    const header = {
      type: "event", to, instanceKey: instance, eventId: id, workdir, traceId, live: live && true,
      deadlineMs: isEndless ? undefined : deadlineMs,
      replyTo: replies ? { target: "client", correlationId: id } : undefined,
      // Who names an event may ask it again from another process; then it is made at another time, and means the same.
      digest: eventId && digestOf(encodeValue([type, input, []])),
    };
    const payload = { id, type, createdAt: new Date().toISOString(), input };
    const patienceMs = isEndless ? Infinity : deadlineMs + GRACE_MS;
    const frame = await this.#submit(header, payload, files, { patienceMs, signal, live });
    return { ...Object(frame.payload), eventId: id };
  }

  /**
   * @param {{ [field: string]: unknown }} header @param {unknown} payload @param {AskOptions["files"] & {}} files
   * @param {{ patienceMs: number, signal?: AbortSignal, live?: (event: any) => void }} how
   * @returns {Promise<import("./codec.mjs").Frame>}
   */
  #submit(header, payload, files, { patienceMs, signal, live }) {
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      const settle = (/** @type {any} */ frame, /** @type {Error | undefined} */ error) => {
        signal?.removeEventListener("abort", abort);
        return error ? reject(error) : resolve(frame);
      };
      const entry = new Entry(header, encodeValue(payload), files, patienceMs, { settle, live });
      const abort = () => {
        reject(signal?.reason);
        // It stays in the outbox: what is cancelled must be known, also to a broker that is new.
        if (this.#link.giveUp(entry)) this.#admin({ op: "cancel", eventId: header.eventId }, Infinity).catch(() => {});
      };
      signal?.addEventListener("abort", abort);
      this.#link.submit(entry);
    });
  }

  /** @param {any} event the payload of an answer @param {AskOptions} options */
  #answer({ answer, eventId }, { schema }) {
    this.#use(answer.usage);
    if (answer.status === "failed") throw raised(answer.error, "E_AGENT_FAILED");
    const { response, object, turnId, usage, traceId, model, finishReason, reasoning, cutOff = false } = answer;
    const told = { text: response ?? "", status: answer.status, turnId, eventId, usage, traceId, model, finishReason };
    return { ...told, reasoning, cutOff, object: schema ? parsed(schema, object) : object };
  }

  /** @param {any} usage what the model calls of one answer have used */
  #use(usage) {
    for (const [name, sum] of Object.entries(this.#used).filter(([name]) => name !== "cost"))
      if (typeof usage?.[name] === "number") Object.assign(this.#used, { [name]: sum + usage[name] });
    const { cost, currency = usage?.currency } = this.#used; // the first one only: no sum has two
    if (typeof usage?.cost === "number" && usage.currency === currency) Object.assign(this.#used, { cost: usage.cost + (cost ?? 0), currency });
  }
}

/** @param {NonNullable<AskOptions["schema"]>} schema @param {unknown} object */
function parsed(schema, object) {
  try {
    if (object === undefined || object === null) throw new Error("the answer holds none");
    return typeof schema === "function" ? schema(object) : schema.parse(object);
  } catch (error) {
    throw new GoondanError("E_OUTPUT_INVALID", `the object is not as wanted: ${/** @type {Error} */ (error).message}`);
  }
}
