/** Everything that the client promises, against a running kernel (GOONDAN_RUN_DIR). tests/process/test_node_client.py starts it. */

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { after, before, test as each } from "node:test";

import { GoondanError, connect } from "../index.mjs";

/** The smallest picture. */
const PNG = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");

const test = (name, act) => each(name, { timeout: 20_000 }, act);

let gdn;
before(async () => (gdn = await connect()));
after(() => gdn.close());
const blobs = () => readdirSync(process.env.BLOBS);

test("ask", async () => {
  const answer = await gdn.ask("main", '/bash__exec {"command": "echo $((6*7))"}', { instance: "a" });
  assert.deepEqual([answer.text, answer.status, answer.cutOff], ["42", "completed", false]);
  assert.match(answer.traceId, /^[0-9a-f]{32}$/);
});

test("many questions at a time, each with its own answer", async () => {
  const ask = async (at) => (await gdn.ask("main", `/bash__exec {"command": "echo ${at}"}`, { instance: `m${at % 4}` })).text;
  const numbers = [...Array(24).keys()];
  assert.deepEqual(await Promise.all(numbers.map(ask)), numbers.map(String));
});

test("stream: live events, and the answer at the end", async () => {
  const kinds = [];
  for await (const event of gdn.stream("main", '/bash__exec {"command": "echo hi"}', { instance: "a" }))
    kinds.push(event.kind === "answer" ? event.text : event.kind);
  assert.deepEqual(kinds.slice(0, 2), ["turn.started", "step.started"]);
  assert.ok(kinds.includes("tool.completed"));
  assert.equal(kinds.at(-1), "hi");
});

test("send, and the same question again under its id", async () => {
  const eventId = await gdn.send("main", "hi", { instance: "s", eventId: "question-1" });
  assert.equal(eventId, "question-1");
  const asked = gdn.ask("main", "hi", { instance: "s", eventId });
  await assert.rejects(gdn.ask("main", "hi", { instance: "s", eventId }), { code: "E_FRAME_INVALID" });
  const { turnId } = await asked;
  const other = await connect(); // as after this program's death
  const again = await other.ask("main", "hi", { instance: "s", eventId });
  await other.close();
  assert.deepEqual([again.turnId, again.eventId], [turnId, eventId]);
  await assert.rejects(gdn.send("main", "something else", { instance: "s", eventId }), { code: "E_FRAME_INVALID" });
});

test("call a tool; integers beyond 2^53 come back as they were", async () => {
  const args = { wide: 2n ** 63n, low: -(2n ** 60n), small: 7, text: "é", list: [1.5, null, true] };
  const result = await gdn.call("echo__back", { value: args });
  assert.deepEqual([result.status, result.output], ["ok", args]);
  await assert.rejects(gdn.call("echo__fail", {}), (error) => error instanceof GoondanError && /on purpose/.test(error.message));
  await assert.rejects(gdn.call("nothing__here", {}), { name: "GoondanError" });
});

test("errors have their code and their advice", async () => {
  const refused = await gdn.ask("nobody", "hi").catch((error) => error);
  assert.ok(refused instanceof GoondanError);
  assert.equal(refused.code, "E_AGENT_NOT_FOUND");
  assert.match(refused.suggestion, /validate/);
});

test("an AbortSignal gives up the question and its work", async () => {
  const signal = AbortSignal.timeout(400);
  const asked = gdn.ask("main", '/bash__exec {"command": "sleep 30"}', { instance: "b", signal });
  await assert.rejects(asked, { name: "TimeoutError" });
  assert.equal((await gdn.ask("main", '/bash__exec {"command": "echo free"}', { instance: "b", deadlineMs: 15_000 })).text, "free");
  await assert.rejects(gdn.ask("main", "hi", { signal: AbortSignal.abort() }), { name: "AbortError" });
  for await (const event of gdn.stream("main", '/bash__exec {"command": "sleep 30"}', { instance: "b" })) if (event.kind === "tool.called") break;
  assert.equal((await gdn.ask("main", '/bash__exec {"command": "echo left"}', { instance: "b", deadlineMs: 15_000 })).text, "left");
});

test("cancel what an instance works on", async () => {
  const asked = gdn.ask("main", '/bash__exec {"command": "sleep 30"}', { instance: "c" }).catch((error) => error);
  const [state] = await Promise.all([
    (async () => {
      for (;;) {
        const state = await gdn.cancel({ agent: "main", instance: "c" }).catch((error) => error);
        if (!(state instanceof Error && state.code === "E_EVENT_NOT_FOUND")) return state;
      }
    })(),
    asked,
  ]);
  assert.deepEqual([state, (await asked).code], ["cancelled", "E_CANCELLED"]);
});

test("what is large goes through files, in the order in which it was asked", async () => {
  const large = "x".repeat(700_000);
  const turns = await Promise.all([large, "hi", large].map((text) => gdn.ask("main", text, { instance: "l" })));
  assert.equal(new Set(turns.map((answer) => answer.turnId)).size, 3);
  const { output } = await gdn.call("echo__back", { value: { large } });
  assert.equal(output.large, large);
  const before = new Set(blobs());
  await assert.rejects(gdn.ask("nobody", large), { code: "E_AGENT_NOT_FOUND" });
  while (blobs().some((file) => !before.has(file))) await gdn.instances(); // nobody else removes the file of what was refused
  await assert.rejects(gdn.ask("main", "x".repeat(17 << 20)), { code: "E_FRAME_TOO_LARGE" });
});

test("files of a message", async () => {
  const seen = gdn.ask("main", "look", { instance: "f", files: [{ data: PNG, name: "dot.png" }] });
  assert.equal(typeof (await seen).text, "string");
  await assert.rejects(gdn.ask("main", "look", { files: [Buffer.from("no picture")] }), { code: "E_FILE_INVALID" });
  await assert.rejects(gdn.ask("main", "look", { files: ["/nowhere/a.png"] }), { code: "E_FILE_INVALID" });
});

test("a person decides", async () => {
  const asked = gdn.ask("careful", '/bash__exec {"command": "echo allowed"}');
  let waiting;
  do waiting = await gdn.approvals();
  while (waiting.length === 0);
  assert.deepEqual([waiting[0].agent, waiting[0].tool, waiting[0].state], ["careful", "bash__exec", "waits"]);
  await gdn.decide(waiting[0].id, "yes", { reason: "fine" });
  assert.equal((await asked).text, "allowed");
});

test("what is wanted of an object", async () => {
  await assert.rejects(gdn.ask("main", "hi", { schema: (value) => value }), { code: "E_OUTPUT_INVALID" });
});

test("instances, and what was used", async () => {
  const found = await gdn.instances();
  assert.ok(found.some(({ agent, instanceKey }) => agent === "main" && instanceKey === "a"));
  assert.equal(typeof gdn.usage().inputTokens, "number");
});

test("after the end nothing can be asked", async () => {
  const other = await connect();
  const asked = other.ask("main", '/bash__exec {"command": "sleep 5"}', { instance: "e" }).catch((error) => error);
  await new Promise((resolve) => setTimeout(resolve, 100));
  await other.close();
  assert.equal((await asked).code, "E_LINK_CLOSED");
  await assert.rejects(other.ask("main", "hi"), { code: "E_LINK_CLOSED" });
});
