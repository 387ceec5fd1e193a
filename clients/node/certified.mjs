/**
 * The adapter for `gdn certify client -- node clients/node/certified.mjs`: JSON lines on stdin say what to do, JSON lines
 * on stdout say what came of it. The kernel is where GOONDAN_RUN_DIR says.
 *
 * Source: docs/certify.md.
 */

import { randomUUID } from "node:crypto";
import { createInterface } from "node:readline";

import { connect } from "./index.mjs";

const HOURS_MS = 3_600_000;
/** Stands before the digits of an integer that JSON.stringify cannot write. */
const MARK = `${randomUUID()}:`;
const MARKED = new RegExp(`"${MARK}(-?\\d+)"`, "g");
const spelled = (/** @type {string} */ _, /** @type {unknown} */ value) => (typeof value === "bigint" ? MARK + value : value);
const say = (/** @type {object} */ line) => process.stdout.write(JSON.stringify(line, spelled).replace(MARKED, "$1") + "\n");

/** @type {Map<string, AbortController>} what is asked, by ref */
const asked = new Map();
const connecting = connect({ timeoutMs: HOURS_MS });
connecting.catch(({ code, message }) => say({ error: { code, message } }));

/** @param {any} order */
async function obey({ do: what, ref, to, text, tool, args, ...more }) {
  const giveUp = new AbortController();
  asked.set(ref, giveUp);
  const options = { instance: more.instance, deadlineMs: more.deadlineMs, signal: giveUp.signal };
  try {
    const gdn = await connecting;
    if (what === "ask") say({ ref, answer: answered(await gdn.ask(to, text, options)) });
    else if (what === "send") {
      await gdn.send(to, text, options);
      say({ ref, accepted: true });
    } else if (what === "call") say({ ref, result: await gdn.call(tool, args, options) });
    else if (what === "stream") {
      for await (const event of gdn.stream(to, text, options))
        say(event.kind === "answer" ? { ref, answer: answered(event) } : { ref, event });
    } else say({ ref, unsupported: true });
  } catch (error) {
    const { name, code, message, retryAfterMs } = /** @type {any} */ (error);
    say({ ref, error: { code: name === "AbortError" ? "E_CANCELLED" : code, message, retryAfterMs } });
  } finally {
    asked.delete(ref);
  }
}

const answered = (/** @type {any} */ { status, text }) => ({ status, response: text });

say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  if (order.do === "cancel") asked.get(order.ref)?.abort();
  else if (order.do === "close") break;
  else void obey(order);
}
await Promise.race([connecting.then((gdn) => gdn.close(), () => {}), new Promise((resolve) => setTimeout(resolve, 1000))]);
process.exit(0);
