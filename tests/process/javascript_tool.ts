// The tool of test_javascript_worker.py.
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import { exit } from "node:process";

import { Pending, ToolError } from "@goondan/core";
import type { ToolContext, ToolHandler } from "@goondan/core";

declare const Bun: any;

const wait = (ms: number): Promise<void> => new Promise((go) => setTimeout(go, ms));
let release: (value?: unknown) => void = () => {};

class OwnError extends Error {
  constructor(message: string) {
    super(message);
    this.name = "OwnError";
  }
}

const failures: Record<string, () => unknown> = {
  tool: () => new ToolError("we do not sell gold", { code: "E_SHOP_GOLD", suggestion: "Ask for tea.", helpUrl: "https://shop.example" }),
  string: () => "only a text",
  undefined: () => undefined,
  null: () => null,
  plain: () => ({ message: "plain", code: "E_PLAIN" }),
  class: () => new OwnError("own"),
  empty: () => new RangeError(),
  long: () => new Error("x".repeat(50_000)),
  hostile: () => new Proxy({}, { get: () => { throw new Error("no look"); }, getPrototypeOf: () => { throw new Error("no look"); } }),
};

export const handlers: Record<string, ToolHandler> = {
  echo: (ctx, input) => input,
  evaluate: (ctx, { expression }) => (0, eval)(`(${expression})`),
  types: (ctx, input) => Object.fromEntries(Object.entries(input).map(([key, value]) => [key, typeof value])),
  polluted: () => ({} as any).x !== undefined,
  context(ctx: ToolContext) {
    const { agentName, instanceKey, turnId, toolCallId, workdir, message, outputLimit, runtime, remainingMs } = ctx;
    const first = message && { id: message.id, data: message.data, metadata: { ...message.metadata }, createdAt: message.createdAt, source: message.source };
    if (message?.metadata) (message.metadata as any).a = 2;
    let frozen = false;
    try {
      (ctx as any).workdir = "/elsewhere";
    } catch {
      frozen = true;
    }
    const more = { frozen, aborted: ctx.signal.aborted, date: message?.createdAt instanceof Date, metadata: message?.metadata ?? null };
    return { agentName, instanceKey, turnId, toolCallId, workdir, message: first, outputLimit, runtime, remainingMs, ...more } as any;
  },
  async prints(ctx) {
    console.log("log", 1, { a: 2 });
    console.debug("d");
    await wait(1);
    console.warn("w");
    console.error("e");
    ctx.logger.info("logger");
    process.stdout.write("raw ");
    process.stdout.write(Buffer.from("one\ntwo\n"));
    process.stderr.write("to stderr\n");
    return null;
  },
  async logs_twice(ctx, { word }) {
    console.log(word);
    await wait(20);
    console.log(word);
    return null;
  },
  progress(ctx) {
    ctx.progress(0, 3, "half");
    ctx.progress(1, 3);
    ctx.progress(3, 3);
    return null;
  },
  progress_of_text(ctx) {
    ctx.progress("1" as any);
    return null;
  },
  fails(ctx, { how }) {
    if (how === "missing") fs.readFileSync("/no-such-file");
    throw failures[String(how)]!();
  },
  async fails_later(ctx, { how }) {
    await wait(1);
    throw failures[String(how)]!();
  },
  hostile_later: async (): Promise<any> => new Proxy({}, { getPrototypeOf: () => { throw new Error("no look"); } }),
  strays(ctx, { how }) {
    if (how === "timer") setTimeout(() => { throw new Error("timer"); }, 5);
    else if (how === "promise") void Promise.reject(new Error("promise"));
    else queueMicrotask(() => { throw new Error("microtask"); });
    return new Promise(() => {});
  },
  strays_after() {
    setTimeout(() => { void Promise.reject(new Error("after")); }, 20);
    return 1;
  },
  exits(ctx, { how }) {
    if (how === "timer") setTimeout(() => process.exit(3), 5);
    else if (how === "named") exit(3);
    else {
      try {
        process.exit(3);
      } catch (error) {
        if (how !== "caught") throw error;
      }
    }
    return how === "timer" ? new Promise<null>(() => {}) : "went on";
  },
  async waits(ctx, { ms }) {
    await wait(Number(ms));
    return "waited";
  },
  never: (ctx) => new Promise((ok, bad) => ctx.signal.addEventListener("abort", () => bad(new Error(`told: ${ctx.signal.reason.name}`)))),
  async looks_late(ctx) {
    await new Promise((go) => { release = go; });
    return ctx.signal.aborted;
  },
  pend(ctx, { how }): any {
    const released = new Promise((go) => { release = go; });
    const works: Record<string, unknown> = {
      promise: released.then(() => 5),
      function: () => released.then(() => 6),
      throws: async () => {
        await released;
        throw new ToolError("late", { code: "E_LATE" });
      },
      nested: async () => {
        await released;
        return new Pending("h-2");
      },
    };
    return new Pending("h-1", works[String(how)] as any);
  },
  pend_with: (ctx, { handle }): any => new Pending(String(handle)),
  release() {
    setTimeout(release, 5);
    return null;
  },
  async descriptors(ctx, { how }) {
    const command = ["sh", "-c", "ls -l /proc/self/fd"];
    if (how === "child_process") return execFileSync(command[0]!, command.slice(1)).toString();
    return new Response(Bun.spawn(command).stdout).text();
  },
  logs_in_getters: (): any => ({
    get a() {
      console.log("getter");
      return "x".repeat(100);
    },
    b: [1, { toJSON() { console.log("toJSON"); return "y".repeat(100); } }],
  }),
  exits_in_getter: (): any => ({
    get a() {
      try {
        process.exit(1);
      } catch {
        return "went on";
      }
    },
  }),
  throws_in_getter: (): any => ({ a: 1, get b() { throw new RangeError("in the getter"); } }),
};
