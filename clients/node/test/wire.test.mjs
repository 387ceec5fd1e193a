/** Every recorded frame and every sequence of schemas/vectors, played to the codec and to the machine. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { decodeFrame, decodePayload, encodeFrame, encodeValue, open } from "../codec.mjs";
import { GoondanError } from "../errors.mjs";
import { checkReference } from "../files.mjs";
import { Entry, GRACE_MS, Peer } from "../peer.mjs";

const VECTORS = new URL("../../../schemas/vectors/", import.meta.url);
const read = (name) => JSON.parse(readFileSync(new URL(name, VECTORS), "utf8"));
const { valid, bad } = read("frames.json");
const { sequences } = read("sequences.json");
/** How often the link looks at the time (ms). What the sequences say of times are multiples of it. */
const TICK_MS = 100;

const bytes = (vector) => {
  const { prefix, unit, times, suffix } = vector.repeat ?? { prefix: vector.bytes, unit: "", times: 0, suffix: "" };
  return Buffer.from(prefix + unit.repeat(times) + suffix, "hex");
};
const wide = (key, value) => (value !== null && typeof value === "object" && "$int" in value ? BigInt(value.$int) : value);
const meant = (value) => JSON.parse(JSON.stringify(value), wide);
const oneZero = (value) => JSON.parse(JSON.stringify(value, (key, item) => (typeof item === "bigint" ? { $int: `${item}` } : item)), wide);
const given = (frame) => Object.fromEntries(Object.entries(frame).filter(([, value]) => value !== null));

for (const vector of valid)
  test(`read: ${vector.name}`, () => {
    const frame = meant(vector.frame);
    for (const data of [vector.bytes, vector.canonical ?? vector.bytes]) {
      const found = decodeFrame(Buffer.from(data, "hex"));
      assert.equal(found.fault, undefined);
      const { payload = null, ...header } = found;
      const { payload: wanted = null, ...fields } = frame;
      assert.deepEqual(oneZero(payload), wanted); // JSON has one zero
      for (const [name, value] of Object.entries(given(fields))) assert.deepEqual(header[name], value, name);
    }
    const { payload, ...header } = frame;
    const again = decodeFrame(Buffer.from(encodeFrame(header, payload === undefined ? payload : encodeValue(payload))));
    assert.deepEqual(given(again), given(frame));
    if (vector.file) decodePayload(Buffer.from(vector.file, "hex"));
  });

for (const vector of bad.filter((one) => one.refusedBy.includes("client") || one.stage === "frame"))
  test(`refuse: ${vector.name}`, (context) => {
    const refused = (act) => assert.throws(act, (error) => error instanceof GoondanError && (!act.code || error.code === act.code));
    if (!vector.refusedBy.includes("client")) {
      // What is no frame comes to the broker only. Whatever a client says of it, it says it, and goes on.
      try {
        decodeFrame(bytes(vector));
      } catch (error) {
        assert.ok(error instanceof GoondanError, String(error));
      }
      return context.diagnostic("the broker's");
    }
    const frame = decodeFrame(bytes(vector));
    const look = () => {
      if (vector.stage === "reference") return checkReference(frame);
      if (frame.fault) throw frame.fault;
      if (vector.payloadKind !== "any") open(vector.payloadKind, frame.payload);
    };
    look.code = vector.code;
    refused(look);
  });

/** A machine that is played a sequence: it sends and tells what the steps say, and nothing else. */
class Player {
  peer = new Peer("inc", {
    send: (data) => this.send(data),
    greet: () => this.peer.hello("token", this.now),
    reconnect: () => (this.anew = true),
    over: (error) => (this.over = error.code),
    settle: (...given) => this.told.push(this.say(...given)),
    welcomed: () => {},
    touch: () => {},
  });
  now = 0;
  sent = [];
  told = [];
  over;
  anew = false;
  isPinged = false;
  names = new Map();

  play(step, following) {
    this.pingIsNamed = following?.client?.type === "ping";
    if (step.broker) this.hear(this.filled(step.broker));
    else if (step.client) {
      assert.ok(this.sent.length, `nothing was sent in place of ${JSON.stringify(step.client)}`);
      this.match(step.client, decodeFrame(Buffer.from(this.sent.shift())));
    } else if (step.passes) {
      assert.deepEqual([this.sent.length, this.anew], [0, false]);
      for (let left = step.passes; left > 0; left -= TICK_MS) {
        this.now += TICK_MS;
        this.peer.tick(this.now);
        if (this.isPinged) this.hear({ type: "pong" });
        this.isPinged = false;
      }
    } else if (step.lost) this.peer.lost();
    else if (step.anew) {
      assert.ok(this.anew);
      this.anew = false;
    } else if (step.told) assert.deepEqual(this.told.shift(), step.told);
    else if (step.over) assert.equal(this.over, step.over);
    else this.do(step);
  }

  do(step) {
    const { eventId } = step;
    const replyTo = { target: "client", correlationId: step.correlationId };
    const header =
      step.do === "cancel"
        ? { type: "admin" }
        : { type: "event", to: step.to, instanceKey: step.instanceKey, eventId, replyTo, live: step.live, deadlineMs: step.deadlineMs };
    const event = { id: eventId, type: "user.message", createdAt: "2026-11-24T09:30:00Z", input: step.text };
    const payload = step.do === "cancel" ? { op: "cancel", eventId } : event;
    const patienceMs = step.deadlineMs === undefined ? Infinity : step.deadlineMs + GRACE_MS;
    this.peer.submit(new Entry(header, encodeValue(payload), [], patienceMs, step.do === "cancel" ? "cancel" : eventId), this.now);
  }

  hear(frame) {
    const { payload, ...header } = frame;
    this.peer.receive(decodeFrame(Buffer.from(encodeFrame(header, payload && encodeValue(payload)))), this.now);
  }

  send(data) {
    // A ping that no step names is answered; what else is unanswered may stay so.
    if (!this.pingIsNamed && decodeFrame(Buffer.from(data)).type === "ping") this.isPinged = true;
    else this.sent.push(data);
  }

  say(entry, frame, error) {
    if (error) return { eventId: entry.waiter, error: error.code };
    if (frame.type !== "event") return { eventId: entry.waiter, state: frame.payload.state };
    const { answer } = frame.payload;
    return { eventId: entry.waiter, ...(answer.error ? { failed: answer.error.code } : { response: answer.response }) };
  }

  filled(value) {
    if (typeof value === "string" && value.startsWith("$")) return this.names.get(value);
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, this.filled(item)]));
  }

  match(wanted, got) {
    if (wanted === null) assert.ok(got === undefined || got === null);
    else if (typeof wanted === "string" && wanted.startsWith("$")) {
      if (!this.names.has(wanted)) this.names.set(wanted, got);
      assert.equal(got, this.names.get(wanted));
    } else if (typeof wanted === "object" && !Array.isArray(wanted)) for (const key in wanted) this.match(wanted[key], got?.[key]);
    else assert.deepEqual(got, wanted);
  }
}

for (const { name, steps } of sequences)
  test(`keep: ${name}`, () => {
    const player = new Player();
    steps.forEach((step, at) => player.play(step, steps[at + 1]));
    assert.deepEqual([player.sent.length, player.told, player.anew], [0, [], false], "more was sent or said than the sequence has");
  });

test("integers beyond 2^53 are bigint both ways, and others are numbers", () => {
  const value = { low: -(2n ** 63n), high: 2n ** 64n - 1n, time: 1764000000000, small: 7, safe: Number.MAX_SAFE_INTEGER };
  assert.deepEqual(decodePayload(Buffer.from(encodeValue(value))), value);
  assert.deepEqual(decodePayload(Buffer.from(encodeValue({ small: 5n }))), { small: 5 });
  for (const beyond of [2n ** 64n, -(2n ** 63n) - 1n]) assert.throws(() => encodeValue(beyond), { code: "E_FRAME_INVALID" });
});

test("a key __proto__ is a key", () => {
  const value = JSON.parse('{"__proto__": {"polluted": 1}, "a": [{"__proto__": 2}]}');
  const found = decodePayload(Buffer.from(encodeValue(value)));
  assert.deepEqual(Object.entries(found), Object.entries(value));
  assert.equal({}.polluted, undefined);
});

test("what is no JSON is refused where it is sent", () => {
  const cyclic = {};
  cyclic.self = cyclic;
  for (const value of [NaN, Infinity, cyclic, () => 0, Symbol("x"), new Map(), Buffer.from("x"), { deep: [NaN] }])
    assert.throws(() => encodeValue(value), { code: "E_FRAME_INVALID" });
  const sent = decodePayload(Buffer.from(encodeValue({ at: new Date(0), none: undefined, list: [undefined], lone: "a\ud800" })));
  assert.deepEqual(sent, { at: "1970-01-01T00:00:00.000Z", list: [null], lone: "a\ufffd" });
});

test("a length is read before anything is allocated", () => {
  for (const claim of ["dfffffffff", "ddffffffff", "dbffffffff", "de", "dd0000"])
    assert.throws(() => decodePayload(Buffer.from(claim, "hex")), { code: "E_FRAME_INVALID" });
});

test("values are counted before they are made, keys included", () => {
  const zeros = Buffer.alloc(4 << 20);
  zeros.writeUInt8(0xdd);
  zeros.writeUInt32BE(zeros.length - 5, 1);
  const before = process.memoryUsage().rss;
  assert.throws(() => decodePayload(zeros), { code: "E_FRAME_INVALID" });
  assert.ok(process.memoryUsage().rss - before < 16 << 20);
  const list = (size) => Buffer.concat([Buffer.of(0xdd), Buffer.from([size >>> 24, (size >> 16) & 255, (size >> 8) & 255, size & 255]), Buffer.alloc(size)]);
  assert.equal(decodePayload(list((1 << 20) - 1)).length, (1 << 20) - 1);
  assert.throws(() => decodePayload(list(1 << 20)), { code: "E_FRAME_INVALID" });
});

/** A machine that was welcomed, with so much credit. `done` is what it had its shell do. */
function ready(credit) {
  const done = [];
  const names = ["send", "greet", "reconnect", "write", "touch", "settle", "welcomed", "over"];
  const peer = new Peer("inc", Object.fromEntries(names.map((name) => [name, (given) => done.push({ do: name, given })])));
  peer.hello("token", 0);
  peer.receive({ type: "welcome", inReplyTo: "inc.1", payload: { version: 1, credit, blobs: "/blobs" } }, 0);
  assert.deepEqual(done.splice(0).map((effect) => effect.do), ["send", "welcomed"]);
  return Object.assign(peer, { take: () => done.splice(0) });
}
const event = (eventId, { payload = {}, instanceKey = "i", to = "a" } = {}) =>
  new Entry({ type: "event", to, instanceKey, eventId, replyTo: { target: "client", correlationId: eventId } }, encodeValue(payload), [], 5000, eventId);
const sent = (peer) => peer.take().filter((effect) => effect.do === "send").map(({ given }) => decodeFrame(Buffer.from(given)));
const overloaded = (inReplyTo, retryAfterMs) => ({ type: "error", inReplyTo, payload: { code: "E_OVERLOADED", message: "later", retryAfterMs } });

test("a question that was refused for overload is not sent when it was given up, before or after", () => {
  for (const first of ["refused", "given up"]) {
    const peer = ready(4);
    const entry = event("e");
    peer.submit(entry, 0);
    const [{ id }] = sent(peer);
    const refuse = () => peer.receive(overloaded(id, 100), 0);
    if (first === "refused") refuse();
    assert.equal(peer.giveUp(entry), first === "given up");
    if (first === "given up") refuse();
    peer.tick(1000);
    assert.deepEqual([sent(peer), peer.isDue], [[], false]);
  }
});

test("overload that names no time is a second, and one of no time is none", () => {
  const peer = ready(4);
  peer.submit(event("e"), 0);
  const [{ id }] = sent(peer);
  peer.receive(overloaded(id), 0);
  peer.tick(999);
  assert.deepEqual(sent(peer), []);
  peer.tick(1000);
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["e"]);
  peer.receive(overloaded(id, 0), 1000);
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["e"]);
});

test("what was refused together goes out again in its order, before what is younger", () => {
  const peer = ready(2);
  for (const name of ["e1", "e2", "e3", "e4"]) peer.submit(event(name), 0);
  const [first, second] = sent(peer);
  for (const { id } of [second, first]) peer.receive(overloaded(id, 100), 0);
  peer.submit(event("other", { instanceKey: "j" }), 0);
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["other"]);
  peer.receive({ type: "credit", payload: { window: 9 } }, 100);
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["e1", "e2", "e3", "e4"]);
});

test("who waits for a file holds up its own instance; an admin waits for nobody", () => {
  const peer = ready(3);
  const large = event("large", { payload: "x".repeat(600_000) });
  peer.submit(large, 0);
  assert.deepEqual(peer.take().map((effect) => effect.do), ["write"]);
  for (const [name, instanceKey] of [["same", "i"], ["other", "j"], ["third", "k"], ["fourth", "l"], ["fifth", "m"]]) peer.submit(event(name, { instanceKey }), 0);
  peer.submit(new Entry({ type: "admin" }, encodeValue({ op: "peers" }), [], 5000, "admin"), 0);
  assert.deepEqual(sent(peer).map((one) => one.eventId ?? one.type), ["other", "third", "fourth", "admin"]);
  peer.receive({ type: "credit", payload: { window: 9 } }, 0);
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["fifth"]);
  assert.ok(peer.written(large, 0));
  assert.deepEqual(sent(peer).map((one) => one.eventId), ["large", "same"]);
});

test("a second welcome changes nothing", () => {
  const peer = ready(4);
  peer.submit(event("e"), 0);
  peer.receive({ type: "clock", inReplyTo: "e", stage: "held" }, 0);
  peer.receive({ type: "welcome", inReplyTo: "inc.1", payload: { version: 1, credit: 4 } }, 0);
  peer.tick(60_000); // its clock stands still
  assert.ok(!peer.take().some((effect) => effect.do === "settle" || effect.do === "welcomed"));
});

test("time does not grow with the square of what waits, with credit used up, or with an instance held", () => {
  for (const isHeld of [false, true]) {
    const peer = ready(isHeld ? 9 : 1);
    peer.submit(event("first"), 0);
    if (isHeld) peer.receive(overloaded(sent(peer)[0].id, 1e9), 0);
    const entries = Array.from({ length: 30_000 }, (_, at) => event(`e${at}`));
    const before = process.cpuUsage();
    for (const entry of entries) peer.submit(entry, 0);
    for (let left = 30_000; left > 0; left--) peer.receive({ type: "pong" }, 0);
    const { user, system } = process.cpuUsage(before);
    assert.ok(user + system < 3e6, `${user + system} µs`);
  }
});
