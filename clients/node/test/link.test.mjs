/** The link with a broker that is played here: a socket that stays silent is replaced, and rubbish spoils nothing. */

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { after, test } from "node:test";

import { Dealer, Router } from "zeromq";

import { decodeFrame, encodeFrame, encodeValue } from "../codec.mjs";
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
        if (found.type === "hello") await this.say({ type: "welcome", inReplyTo: found.id, payload: WELCOME });
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

async function asks(act) {
  const broker = await new Broker(act).start();
  const gdn = await connect({ runDir });
  try {
    assert.equal((await gdn.ask("a", "hi")).text, "here");
  } finally {
    await gdn.close();
    const acknowledged = () => [...broker.frames.values()].some((frames) => frames.at(-1)?.type === "ack");
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
  });
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
  await assert.rejects(connect({ runDir, timeoutMs: 100 }), { code: "E_KERNEL_LOST" });
  await assert.rejects(connect({ bundle: runDir }), { code: "E_KERNEL_NOT_RUNNING" });
});
