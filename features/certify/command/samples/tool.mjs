/** The tool that a worker is certified with, in JavaScript. docs/certify.md says what each export does. */
import { Pending } from "@goondan/core";

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

const bad = {
  function: () => () => 1,
  cycle: () => { const loop = []; loop.push(loop); return loop; },
  nan: () => NaN,
  bytes: () => new Uint8Array(1),
  lone: () => "\ud800",
};

export const handlers = {
  echo: (ctx, input) => input.value,
  repeat: (ctx, input) => input.text.repeat(input.times),
  size: (ctx, input) => input.text.length,
  wait: async (ctx, input) => { await sleep(input.ms); return "waited"; },
  fail: (ctx, input) => {
    throw Object.assign(new RangeError(input.message), { code: "E_SAMPLE", suggestion: "try another one" });
  },
  bad: (ctx, input) => bad[input.kind](),
  log: (ctx, input) => { for (let i = 0; i < input.times; i++) ctx.logger.info(input.text); },
  say: (ctx, input) => { console.log(input.text); },
  progress: (ctx) => { ctx.progress(1, 2, "half"); },
  message: (ctx) => ctx.message && { id: ctx.message.id, data: ctx.message.data },
  context: ({ agentName, instanceKey, turnId, toolCallId, workdir, runtime }) =>
    ({ agentName, instanceKey, turnId, toolCallId, workdir, runtime: runtime !== null }),
  variable: (ctx, input) => process.env[input.name] ?? null,
  ask: async (ctx, input) => (await ctx.runtime.request(input.target, "hi")).response,
  stopped: async (ctx) => { while (!ctx.signal.aborted) await sleep(10); return "stopped"; },
  pending: (ctx, input) => new Pending("a-handle", sleep(input.ms).then(() => "done")),
};
