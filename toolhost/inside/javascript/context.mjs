/**
 * What a handler gets: ToolContext, and what hangs on it. All of it is read-only.
 *
 * Source: schemas/WORKER.md sections 4 (`ask`, `progress`) and 12.
 */
import { decode, taken } from "./codec.mjs";
import { AgentError } from "./core/index.mjs";

/** Two progress reports of a call are at least this far apart (milliseconds). */
const PROGRESS_MS = 50;
/** Longer waits are cut to this (milliseconds): no call lasts that long. */
const MAX_TIMEOUT_MS = 2 ** 31;
/** The text of a progress report, and one log line (characters). */
export const MAX_LINE = 8192;
/** What an argument of a question must be: what is of another type ends the jail. */
const KINDS = {
  __proto__: null, target: "string", instanceKey: "string", eventType: "string", cwd: "string", timeoutMs: "number", metadata: "object",
};

const { assign, create, freeze, keys } = Object;
const { isFinite } = Number;
const { isArray } = Array;
const { floor, max, min } = Math;
const [slice] = taken(String.prototype, "slice");
const [abort] = taken(AbortController.prototype, "abort");
const [Controller, Time] = [AbortController, Date];
const now = performance.now.bind(performance);

/**
 * One call while a worker runs it, by its `call` frame. `message` is the bytes of the `message` frame that it names, `worker` what
 * contexts ask of the worker.
 */
export const callOf = (frame, message, worker) => ({
  id: frame.callId, frame, message, worker, started: now(), controller: new Controller(), progressAt: -PROGRESS_MS,
  done: false, // its last result is sent
  pending: false, // its `pending` result is sent; the result of its work will follow
});

/** The caller gave up. */
export const cancel = (call) => abort(call.controller);

/** The assistant message that made the call. Only the content of `metadata` may be changed; it is a copy. */
function messageOf(bytes) {
  const { id, data, metadata, createdAt, source } = decode(bytes, 0, bytes.length).message;
  return freeze({ id, data, metadata: metadata ?? {}, createdAt: new Time(createdAt), source });
}

export class ToolContext {
  #call;
  #message;
  #logger;

  constructor(call) {
    this.#call = call;
    freeze(this);
  }

  get agentName() { return this.#call.frame.agentName; }
  get instanceKey() { return this.#call.frame.instanceKey; }
  get turnId() { return this.#call.frame.turnId; }
  get toolCallId() { return this.#call.frame.toolCallId; }
  get workdir() { return this.#call.frame.workdir; }
  get outputLimit() { return this.#call.worker.outputLimit; }
  get signal() { return this.#call.controller.signal; }

  get message() {
    const bytes = this.#call.message;
    return (this.#message ??= bytes === undefined ? null : messageOf(bytes));
  }

  get logger() {
    return (this.#logger ??= freeze(assign(create(globalThis.console), this.#call.worker.logMethods(() => this.#call))));
  }

  get remainingMs() {
    const { frame, started } = this.#call;
    return frame.deadlineMs == null ? null : max(0, floor(frame.deadlineMs - (now() - started)));
  }

  get runtime() {
    return this.#call.worker.mayAsk ? runtimeOf(this.#call) : null;
  }

  progress(done, total, message) {
    const call = this.#call;
    if (typeof done !== "number" || !isFinite(done) || (total != null && (typeof total !== "number" || !isFinite(total))))
      throw new TypeError("ctx.progress: done and total are numbers");
    const time = now();
    if (call.done || (time - call.progressAt < PROGRESS_MS && done !== total)) return;
    call.progressAt = time;
    const said = message == null ? undefined : slice(`${message}`, 0, MAX_LINE);
    call.worker.send({ type: "progress", callId: call.id, done, total: total ?? undefined, message: said });
  }
}
freeze(ToolContext.prototype);

/** Other agents, for tools with `permissions: [agents]`. All of it ends with the call. */
const runtimeOf = (call) => freeze({
  request(target, input = null, { instanceKey, eventType, timeoutMs, metadata, async } = {}) {
    const wait = typeof timeoutMs === "number" ? max(0, min(floor(timeoutMs), MAX_TIMEOUT_MS)) : timeoutMs;
    const more = { timeoutMs: wait, metadata, async: async ? true : undefined };
    return ask(call, "request", { target, input, instanceKey, eventType, ...more });
  },
  send: (target, input = null, { instanceKey, eventType, metadata } = {}) =>
    ask(call, "send", { target, input, instanceKey, eventType, metadata }),
  spawn: (target, { instanceKey, cwd } = {}) => ask(call, "spawn", { target, instanceKey, cwd }),
  list: ({ includeAll = false } = {}) => ask(call, "list", { includeAll: includeAll === true }),
  catalog: () => ask(call, "catalog", {}),
});

/** A promise of what the bus answers. It rejects with AgentError, and with TypeError for what cannot be asked. */
async function ask(call, op, fields) {
  if (call.done || call.pending) throw new AgentError("the call has ended, and what it may ask with it", { code: "E_CALL_ENDED" });
  const names = keys(fields);
  for (let i = 0; i < names.length; i++) {
    const [kind, value] = [KINDS[names[i]], fields[names[i]]];
    if (value === null && kind !== undefined) fields[names[i]] = undefined;
    else if (kind !== undefined && value !== undefined && (typeof value !== kind || value !== value || isArray(value)))
      throw new TypeError(`ctx.runtime: ${names[i]} is no ${kind}`);
  }
  return call.worker.ask(call, op, fields);
}
