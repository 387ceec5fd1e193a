/** The link with a broker that is played here: a socket that stays silent is replaced, and rubbish spoils nothing. */

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readdirSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { after, test } from "node:test";

import { Dealer, Router } from "zeromq";

import { decodeFrame, digestOf, encodeFrame, encodeValue } from "../codec.mjs";
import { findRunDir } from "../files.mjs";
import { connect } from "../index.mjs";

/** How much faster time runs here. */
const FASTER = 10;
const real = performance.now.bind(performance);
performance.now = () => FASTER * real();

const runDir = mkdtempSync("/tmp/gn");
writeFileSync(`${runDir}/client.token`, "token\n", { mode: 0o600 });
after(() => rmSync(runDir, { recursive: true }));

const frame = ({ payload, ...header }) => encodeFrame(header, payload && encodeValue(payload));
const HELLO = { type: "error", payload: { code: "E_HELLO_REQUIRED", message: "say hello" } };
const WELCOME = { version: 1, principal: "client/1", broker: "b", credit: 4, maxFrame: 1 << 20 };

/** A broker that greets, and does with other frames what `act` says. Its `frames` are what came, connection by connection. */
class Broker {
  router = new Router({ linger: 0 });
  /** @type {Map<string, any[]>} */
  frames = new Map();

  constructor(act) {
    this.act = act;
  }

  async start() {
    await this.router.bind(`ipc://${runDir}/clients.sock`);
    void this.serve();
    return this;
  }

  async serve() {
    for await (const [from, data] of this.router) {
      this.say = (...parts) => this.router.send([from, ...parts.map((part) => (Buffer.isBuffer(part) ? part : frame(part)))]);
      if (data.length === 0) await this.say(HELLO);
      else {
        const found = decodeFrame(data);
        const name = from.toString("hex");
        if (!this.frames.has(name)) this.frames.set(name, []);
        this.frames.get(name).push(found);
        if (found.type === "hello") await this.say({ type: "welcome", inReplyTo: found.id, payload: { ...WELCOME, blobs: this.blobs } });
        else await this.act(found, this.frames.size, this);
      }
    }
  }

  async answer({ eventId, replyTo }, response) {
    const answer = { turnId: "t", status: "completed", response };
    const payload = { id: `${eventId}:answer`, type: "agent.response", createdAt: "2026-11-24T09:30:08Z", answer };
    await this.say({ type: "event", id: "b.1", inReplyTo: replyTo.correlationId, eventId: `${eventId}:answer`, payload });
  }

  /** What came, without hello: on a machine that is busy it is said more than once. */
  types() {
    return [...this.frames.values()].map((frames) => frames.map((one) => one.type).filter((type) => type !== "hello"));
  }
}

/** Asks once. The broker is there until it has had `acks` acknowledgements on one connection. */
async function asks(act, acks = 1) {
  const broker = await new Broker(act).start();
  const gdn = await connect({ runDir });
  try {
    assert.equal((await gdn.ask("a", "hi")).text, "here");
  } finally {
    await gdn.close();
    const acknowledged = () => broker.types().some((types) => types.filter((type) => type === "ack").length >= acks);
    while (!acknowledged()) await new Promise((resolve) => setTimeout(resolve, 5)); // it was sent, and lingers
    broker.router.close();
  }
  return broker;
}

test("a silent link is pinged, and then replaced; the same event goes out again", async () => {
  const broker = await asks(async (found, connection, self) => {
    if (found.type === "event" && connection === 2) await self.answer(found, "here");
  });
  assert.deepEqual(broker.types().map((types) => types.slice(0, 2)), [["event", "ping"], ["event", "ack"]]);
  const [first, second] = [...broker.frames.values()].map((frames) => frames.find((one) => one.type === "event"));
  assert.deepEqual([second.id, second.eventId, second.payload], [first.id, first.eventId, first.payload]);
  assert.ok(second.deadlineMs < first.deadlineMs);
});

/** npm's zeromq may lose a wake-up: of the first socket, a call of `name` after `well` of them never settles, and does nothing. */
for (const [name, well] of [["receive", 2], ["send", 1]])
  test(`a ${name} that never settles is no end`, async () => {
    const original = Dealer.prototype[name];
    let first;
    let left = well;
    const value = function (...given) {
      first ??= this;
      return this !== first || left-- > 0 ? original.apply(this, given) : new Promise(() => {});
    };
    Object.defineProperty(Dealer.prototype, name, { configurable: true, value });
    try {
      const broker = await asks(async (found, connection, self) => {
        if (found.type === "event") await self.answer(found, "here");
      });
      assert.equal(broker.frames.size, 2);
    } finally {
      delete Dealer.prototype[name];
    }
  });

test("several parts, an empty part, rubbish and what is bad inside spoil nothing", async () => {
  const broker = await asks(async (found, connection, self) => {
    if (found.type !== "event") return;
    await self.say({ type: "ping", id: "one" }, { type: "ping", id: "two" });
    await self.say(Buffer.alloc(0));
    await self.say(Buffer.from("rubbish"));
    await self.say({ type: "event", id: "b.0", inReplyTo: "nobody", eventId: "x:answer", payload: { deep: null } });
    await self.say({ type: "credit", payload: { window: "wide" } });
    await self.answer(found, "here");
  }, 2);
  assert.deepEqual(broker.types()[0].sort(), ["ack", "ack", "event"]);
});

test("an answer that is bad is an error to its asker, and acknowledged", async () => {
  const deep = Buffer.concat([Buffer.alloc(70, 0x91), Buffer.of(0x90)]);
  let refused;
  await asks(async (found, connection, self) => {
    if (found.type !== "event" || found.payload.input !== "hi") return;
    if (refused) return self.answer(found, "here");
    const header = { type: "event", id: "b.1", inReplyTo: found.replyTo.correlationId, eventId: "e:answer" };
    refused = true;
    await self.say(Buffer.from(encodeFrame(header, deep)));
  }).then(assert.fail, (error) => assert.equal(error.code, "E_FRAME_INVALID"));
});

test("no token is sent where others may have put the socket", async () => {
  const { chmodSync } = await import("node:fs");
  const broker = await new Broker(() => {}).start();
  chmodSync(runDir, 0o777);
  try {
    await assert.rejects(connect({ runDir }), { code: "E_BROKER_UNTRUSTED" });
  } finally {
    chmodSync(runDir, 0o700);
    broker.router.close();
  }
  assert.equal(broker.frames.size, 0);
});

test("a broker that does not answer is one error, and so is a bundle without a kernel", async () => {
  await assert.rejects(connect({ runDir, timeoutMs: 100 }), { code: "E_KERNEL_NOT_RUNNING", suggestion: /gdn run/ });
  await assert.rejects(connect({ bundle: runDir }), { code: "E_KERNEL_NOT_RUNNING" });
});

/** Do something with a client whose broker does what `act` says. */
async function beside(act, use, blobs) {
  const broker = new Broker(act);
  broker.blobs = blobs;
  await broker.start();
  const gdn = await connect({ runDir });
  try {
    await use(gdn);
  } finally {
    await gdn.close();
    broker.router.close();
  }
}

test("the bundle that is named comes before GOONDAN_RUN_DIR", async () => {
  const [root, bundle] = [`${runDir}/state`, `${runDir}/bundle`];
  mkdirSync(bundle);
  const folder = `${root}/workspaces/${digestOf(Buffer.from(realpathSync(bundle))).slice(0, 16)}/kernel`;
  mkdirSync(folder, { recursive: true });
  writeFileSync(`${folder}/kernel.json`, JSON.stringify({ runDir: "/its/own" }));
  Object.assign(process.env, { GOONDAN_STATE_ROOT: root, GOONDAN_RUN_DIR: "/another" });
  try {
    assert.deepEqual([{ bundle }, { bundle, runDir: "/named" }, {}].map(findRunDir), ["/its/own", "/named", "/another"]);
    assert.throws(() => findRunDir({ bundle: root }), { code: "E_KERNEL_NOT_RUNNING" });
  } finally {
    delete process.env.GOONDAN_STATE_ROOT;
    delete process.env.GOONDAN_RUN_DIR;
  }
});

test("the file of an event that the broker may have stays; that of a refused one goes", async () => {
  const blobs = `${runDir}/blobs`;
  mkdirSync(blobs);
  const large = "x".repeat(600_000);
  let came;
  const arrived = new Promise((resolve) => (came = resolve));
  await beside((found) => found.type === "event" && came(), async (gdn) => {
    const asked = gdn.ask("a", large).catch((error) => error);
    await arrived;
    await gdn.close();
    assert.equal((await asked).code, "E_LINK_CLOSED");
    assert.equal(readdirSync(blobs).length, 1);
  }, blobs);
  const late = (found, _, self) => found.payload?.op === "cancel" && self.say({ type: "reply", inReplyTo: found.id, payload: {} });
  await beside(late, async (gdn) => {
    await assert.rejects(gdn.ask("a", large, { deadlineMs: 3000 }), { code: "E_AGENT_TIMEOUT" });
    assert.equal(readdirSync(blobs).length, 2);
  }, blobs);
  const refuse = (found, _, self) => self.say({ type: "error", inReplyTo: found.id, payload: { code: "E_AGENT_NOT_FOUND", message: "no" } });
  await beside(refuse, async (gdn) => {
    await assert.rejects(gdn.ask("a", large), { code: "E_AGENT_NOT_FOUND" });
    while (readdirSync(blobs).length > 2) await new Promise((resolve) => setTimeout(resolve, 5));
  }, blobs);
});

test("send waits for as long as it takes, unless it is told otherwise", async () => {
  const events = [];
  const accept = async (found, _, self) => {
    events.push(found);
    await self.say({ type: "ack", stage: "accepted", inReplyTo: found.id });
  };
  await beside(accept, async (gdn) => {
    await gdn.send("a", "hi");
    await gdn.send("a", "hi", { deadlineMs: 9000 });
  });
  assert.equal(events[0].deadlineMs, undefined);
  assert.ok(events[1].deadlineMs > 8000);
});

test("instances, decisions and money are told as in every client", async () => {
  const peers = [{ role: "toolhost", name: "t" }, { role: "agent", name: "main", instanceKey: "a", pid: 7, startedMs: 5 }];
  const costs = [[1, "EUR"], [5, "USD"], [2, "EUR"]];
  const act = async (found, _, self) => {
    const [cost, currency] = found.type === "event" ? costs.shift() : [];
    const usage = { inputTokens: 1, outputTokens: 0, modelCalls: 1, cost, currency };
    const answer = { turnId: "t", status: "completed", response: "here", usage };
    const payload = { id: "x", type: "agent.response", createdAt: "2026-11-24T09:30:08Z", answer };
    if (found.type === "event") await self.say({ type: "event", id: "b.1", inReplyTo: found.replyTo.correlationId, eventId: "x", payload });
    else if (found.type === "admin") await self.say({ type: "reply", inReplyTo: found.id, payload: { peers, state: "approved" } });
  };
  await beside(act, async (gdn) => {
    assert.deepEqual(await gdn.instances(), [{ agent: "main", instanceKey: "a", pid: 7, startedMs: 5 }]);
    assert.equal(await gdn.decide("1", "yes"), "approved");
    for (let left = 3; left > 0; left--) await gdn.ask("a", "hi");
    const { inputTokens, cost, currency } = gdn.usage();
    assert.deepEqual([inputTokens, cost, currency], [3, 3, "EUR"]);
  });
});
