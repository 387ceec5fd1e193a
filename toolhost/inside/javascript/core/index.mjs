/** `@goondan/core` as a tool finds it at run time. Its types: index.d.ts. Source: schemas/WORKER.md section 12. */

/** Nothing, under the names of the types: Node looks for what a tool imports without saying `type`. */
export let
  AgentAnswer, AgentsCatalog, AgentsListed, ErrorOptions, JsonArray, JsonObject, JsonPrimitive, JsonValue,
  ListedAgent, Message, MessageSource, RequestOptions, Runtime, RuntimeAnswer, SendOptions, SentEvent, SpawnedAgent,
  ToolContext, ToolHandler, ToolOutput;

/** An error with its own code and advice. Any thrown error will do; this one only saves setting properties. */
export class ToolError extends Error {
  constructor(message, { code, suggestion, helpUrl, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
    Object.assign(this, { code, suggestion, helpUrl });
  }
}

/** What was asked through `ctx.runtime` failed; `code` says how, for example E_AGENT_TIMEOUT. */
export class AgentError extends ToolError {}

/**
 * Return it from a handler: the result of the call is `pending`, and the work goes on. `work` is a promise, or a function
 * that is called without arguments; what it comes to is the final result. Without it the work goes on somewhere else.
 */
export class Pending {
  constructor(handle, work) {
    if (typeof handle !== "string" || handle.length > 1024 || !/^[^\p{C}\p{Zl}\p{Zp}]+$/u.test(handle))
      throw new TypeError("a Pending needs a handle: 1 to 1,024 characters, without controls and ends of lines");
    if (work != null && typeof work !== "function" && typeof work.then !== "function")
      throw new TypeError("the work of a Pending is a promise, or a function without arguments");
    this.handle = handle;
    this.work = work ?? undefined;
    Object.freeze(this);
  }
}
