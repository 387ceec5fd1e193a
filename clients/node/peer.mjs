/**
 * One end of a link as a state machine: no socket, no clock, no files (link.mjs is its shell).
 *
 * States: `absent` (no welcome yet, or the broker was lost) -> `greeting` (hello sent) -> `ready` -> `closed`.
 * What is to be done it has its shell do, at once. Times are milliseconds of any steady clock.
 *
 * - What must arrive is an entry of the outbox until it is answered. After each welcome all of them go out again,
 *   oldest first, with the ids and payloads that they had.
 * - An event costs credit until it is accepted. Events wait behind an overloaded one for the same instance; an `admin`
 *   waits for itself alone, and costs none.
 * - A payload that is too large for a frame gets a file first; later events for the same instance wait for it.
 *
 * Source: PROTOCOL.md "Hello", "Sending until answered", "Silence", "Credit and overload", "Deadlines".
 */

import { MAX_FRAME, encodeFrame, encodeValue, fits, open } from "./codec.mjs";
import { GoondanError } from "./errors.mjs";

/**
 * @typedef {import("./codec.mjs").Frame} Frame
 * @typedef {import("./wire.d.ts").Blob} Blob
 */

/** How much longer than its deadline an asker waits for the broker to say so. */
export const GRACE_MS = 1000;
/** How soon hello is said again without an answer. */
const HELLO_AGAIN_MS = 500;
/** How long a silent link is left alone, and how long it has to answer a ping. */
const SILENCE_MS = 5000;
/** How long another process of the same principal may take to end. */
const BUSY_MS = 10_000;
/** How long an overloaded target is left alone when the error names no time. */
const HOLD_MS = 1000;
/** The largest frame whose payload goes along; a larger one has a file. */
export const INLINE = 512 << 10;
/** The largest payload of an event to an agent, in a file. */
const MAX_PAYLOAD = 16 << 20;

/** One frame that must be answered. */
export class Entry {
  /** @type {Blob | undefined} the reference that goes in place of the payload */
  blob;
  /** Which one it is of this link. */
  at = 0;
  /** When the asker gives up. */
  expires = Infinity;
  /** Since when its time stands still. @type {number | undefined} */
  heldSince;
  /** The broker may have it: it went out, and was not refused. */
  sent = false;
  /** Nobody waits for it any more: when it is refused, it is over. */
  isGivenUp = false;
  holdsCredit = false; writing = false;

  /**
   * @param {{ [field: string]: any }} header
   * @param {Uint8Array} payload
   * @param {readonly import("./index.mjs").Attachment[]} files of the message
   * @param {number} patienceMs how long the asker waits, from `submit`
   * @param {any} waiter the shell's
   */
  constructor(header, payload, files, patienceMs, waiter) {
    this.header = header;
    this.payload = payload;
    this.files = files;
    this.patienceMs = patienceMs;
    this.waiter = waiter;
    this.unwritten = files.length > 0 || payload.length > INLINE;
    this.isEvent = header.type === "event";
    this.correlation = header.replyTo?.correlationId;
    /** What waits with it when it meets overload: all of the same target. An `admin` is the only one of its own. @type {unknown} */
    this.target = this.isEvent ? `${header.to}\0${header.instanceKey}` : this;
  }
}

/**
 * What a machine needs others for.
 *
 * @typedef {object} Shell
 * @property {(data: Uint8Array) => void} send
 * @property {(refused?: { token: string | undefined, error: GoondanError }) => void} greet say hello; with another token than the one that was refused
 * @property {() => void} reconnect
 * @property {(entry: Entry) => void} write the payload and the files of an entry, and say `written`
 * @property {(entry: Entry) => void} touch these files
 * @property {(entry: Entry, frame?: Frame, error?: GoondanError) => void} settle
 * @property {() => void} welcomed
 * @property {(error: GoondanError) => void} over
 */

export class Peer {
  /** @type {"absent" | "greeting" | "ready" | "closed"} */
  phase = "absent";
  /** The newest welcome. @type {import("./wire.d.ts").Welcome | undefined} */
  welcome;
  #count = 0;
  #window = 1;
  #inUse = 0;
  /** @type {Map<string, Entry>} by frame id, oldest first */
  #outbox = new Map();
  /** @type {Map<string, Entry>} those that wait for an answer, by correlation id */
  #asks = new Map();
  /** @type {Entry[]} events that go out when there is credit, oldest first; some of them may be over */
  #waiting = [];
  /** @type {Entry[]} what costs no credit, and goes out next */
  #admins = [];
  /** @type {Map<unknown, { until: number, entries: Entry[] }>} targets that get nothing for now: until when, and what waits */
  #held = new Map();
  #helloId = "";
  #helloAt = 0;
  /** When the broker was heard last, or something began to be due. */
  #quietSince = 0;
  #pinged = false;
  /** What was said with the last hello. @type {string | undefined} */
  #token;
  /** @type {number | undefined} */
  #busySince;

  /** @param {string} incarnation random for each process @param {Shell} shell */
  constructor(incarnation, shell) {
    this.incarnation = incarnation;
    this.shell = shell;
  }

  /** Whether an answer is due, also one to hello. */
  get isDue() {
    return this.#outbox.size > 0 || this.phase === "greeting";
  }

  /** An id for a frame. */
  nextId() {
    return `${this.incarnation}.${++this.#count}`;
  }

  /**
   * Take a frame into the outbox. `deadlineMs` of the header runs from now.
   *
   * @param {Entry} entry @param {number} now
   * Raises GoondanError E_LINK_CLOSED, and E_FRAME_INVALID when an answer to the same event is waited for.
   */
  submit(entry, now) {
    if (this.phase === "closed") throw new GoondanError("E_LINK_CLOSED", "the link is closed");
    if (this.#asks.has(entry.correlation))
      throw new GoondanError("E_FRAME_INVALID", `${entry.correlation} is being asked already`);
    if (!this.isDue) this.#heard(now);
    entry.header.id = this.nextId();
    entry.at = this.#count;
    entry.expires = now + entry.patienceMs;
    this.#outbox.set(entry.header.id, entry);
    if (entry.correlation !== undefined) this.#asks.set(entry.correlation, entry);
    (entry.isEvent ? this.#waiting : this.#admins).push(entry);
    this.#flush(now);
  }

  /** The payload and the files of an entry lie in the folder. @param {Entry} entry @param {number} now */
  written(entry, now) {
    entry.unwritten = entry.writing = false;
    this.#flush(now);
    return this.#isOpen(entry);
  }

  /** Nobody waits for it any more. Whether the broker may have it: then it stays until it is over. @param {Entry} entry */
  giveUp(entry) {
    entry.isGivenUp = true;
    if (!entry.sent) this.fail(entry, new GoondanError("E_CANCELLED", "the asker has given up"));
    return this.#isOpen(entry);
  }

  /** End an entry without an answer. @param {Entry} entry @param {GoondanError} error */
  fail(entry, error) {
    if (this.#remove(entry)) this.shell.settle(entry, undefined, error);
  }

  /** Say hello, or try again soon when there is no token yet. @param {string | undefined} token @param {number} now */
  hello(token, now) {
    this.phase = "greeting";
    this.#helloAt = now;
    if (token === undefined) return;
    this.#token = token;
    this.#helloId ||= this.nextId(); // a welcome may answer an earlier one
    const payload = { token, incarnation: this.incarnation, versions: [1], awaiting: [...this.#asks.keys()] };
    this.#send({ type: "hello", id: this.#helloId }, encodeValue(payload));
  }

  /** The connection is over: what is unanswered goes out again after the next welcome. */
  lost() {
    if (this.phase === "closed") return;
    this.phase = "absent";
    this.#helloId = "";
    this.#inUse = 0;
    this.#held.clear();
    const open = [...this.#outbox.values()];
    for (const entry of open) entry.holdsCredit = false;
    this.#waiting = open.filter((entry) => entry.isEvent);
    this.#admins = open.filter((entry) => !entry.isEvent);
  }

  /** Whether somebody waits for what a frame holds. @param {Frame} frame */
  awaits(frame) {
    return frame.type === "event" && this.#asks.has(frame.inReplyTo ?? "");
  }

  /** @param {Frame} frame with its payload; `fault` when that cannot be had @param {number} now */
  receive(frame, now) {
    this.#heard(now);
    const { type, inReplyTo } = frame;
    try {
      if (type === "event" && inReplyTo) this.#answer(frame, inReplyTo);
      else if (type === "error" && !inReplyTo) {
        if (open("ErrorPayload", frame.payload).code !== "E_HELLO_REQUIRED" || this.phase === "closed") return;
        this.lost();
        this.shell.greet();
      } else if (type === "ack" || type === "reply" || type === "error" || type === "welcome") this.#reply(frame, now);
      else if (type === "ping") this.#send({ type: "pong", id: this.nextId(), inReplyTo: frame.id });
      else if (type === "credit") this.#window = Math.max(1, open("Credit", frame.payload).window);
      else if (type === "clock") this.#clock(frame, now);
      else if (type === "runtime.event" && this.#asks.has(inReplyTo ?? "")) {
        const entry = /** @type {Entry} */ (this.#asks.get(inReplyTo ?? ""));
        entry.waiter.live?.(open("RuntimeEvent", frame.payload));
      }
    } finally {
      this.#flush(now);
    }
  }

  /** Time passes: call it some times a second while something is due. @param {number} now */
  tick(now) {
    for (const entry of this.#outbox.values()) {
      if (entry.expires > now || entry.heldSince !== undefined) continue;
      this.fail(entry, new GoondanError("E_AGENT_TIMEOUT", "no answer within the deadline"));
    }
    this.#flush(now);
    if (this.phase === "greeting" && now - this.#helloAt >= HELLO_AGAIN_MS) this.shell.greet();
    const silent = now - this.#quietSince;
    if (!this.isDue || silent < SILENCE_MS) return;
    if (!this.#pinged) this.#send({ type: "ping" }); // without an id: a broker that does not know us asks for hello
    this.#pinged = true;
    if (silent < 2 * SILENCE_MS) return;
    this.lost();
    this.#heard(now);
    this.shell.reconnect();
  }

  /** End the link: nobody is answered any more. @param {GoondanError} error */
  close(error) {
    this.phase = "closed";
    for (const entry of this.#outbox.values()) this.fail(entry, error);
  }

  /** @param {number} now */
  #heard(now) {
    this.#quietSince = now;
    this.#pinged = false;
  }

  /** @param {{ [field: string]: unknown }} header @param {Uint8Array} [payload] */
  #send(header, payload) {
    this.shell.send(encodeFrame(header, payload));
  }

  /** @param {Frame} frame @param {string} correlation */
  #answer(frame, correlation) {
    this.#send({ type: "ack", id: this.nextId(), stage: "done", eventId: frame.eventId, inReplyTo: frame.id });
    const entry = this.#asks.get(correlation);
    if (entry === undefined || !this.#remove(entry)) return;
    const isBad = !fits("AgentEvent", frame.payload) || !fits("Answer", Object(frame.payload).answer);
    const error = frame.fault ?? (isBad ? new GoondanError("E_FRAME_INVALID", "the answer is none") : undefined);
    this.shell.settle(entry, frame, error);
  }

  /** @param {Frame} frame @param {number} now */
  #reply(frame, now) {
    if (this.#helloId && frame.inReplyTo === this.#helloId) return this.#greeted(frame, now);
    const entry = this.#outbox.get(frame.inReplyTo ?? "");
    if (entry === undefined) return;
    if (frame.type === "error") {
      const error = open("ErrorPayload", frame.payload);
      if (error.code === "E_HELLO_REQUIRED") return;
      entry.sent = false; // nobody has it
      this.#release(entry);
      if (error.code === "E_OVERLOADED" && !entry.isGivenUp) return this.#hold(entry, now + (error.retryAfterMs ?? HOLD_MS));
      return this.fail(entry, new GoondanError(error.code, error.message, error));
    }
    this.#release(entry);
    if (entry.correlation !== undefined || !this.#remove(entry)) return;
    this.shell.settle(entry, frame, frame.fault);
  }

  /** @param {Frame} frame @param {number} now */
  #greeted(frame, now) {
    if (this.phase !== "greeting") return; // it was said twice
    if (frame.type === "error") {
      const { code, message, ...more } = open("ErrorPayload", frame.payload);
      if (code === "E_PRINCIPAL_BUSY" && now - (this.#busySince ??= now) < BUSY_MS) return;
      const error = new GoondanError(code, message, more);
      // A kernel that was started again has made another token.
      if (code === "E_TOKEN_INVALID") this.shell.greet({ token: this.#token, error });
      else this.shell.over(error);
    } else if (frame.type === "welcome") {
      const welcome = open("Welcome", frame.payload);
      this.#busySince = undefined;
      const error = new GoondanError("E_VERSION", `the broker speaks version ${welcome.version}`);
      if (welcome.version !== 1) return this.shell.over(error);
      this.welcome = welcome;
      this.#window = Math.max(1, welcome.credit);
      this.phase = "ready";
      for (const entry of this.#outbox.values()) goOn(entry, now); // the broker says anew what stands still
      this.shell.welcomed();
    }
  }

  /** A person is asked, or has answered. @param {Frame} frame @param {number} now */
  #clock(frame, now) {
    const entry = this.#asks.get(frame.inReplyTo ?? "");
    if (entry === undefined) return;
    if (String(frame.stage) === "held") entry.heldSince ??= now;
    else if (String(frame.stage) === "runs") goOn(entry, now, frame.deadlineMs);
  }

  /** Nothing for its target before `until`. @param {Entry} entry @param {number} until */
  #hold(entry, until) {
    const held = this.#held.get(entry.target) ?? { until, entries: [] };
    held.until = Math.max(until, held.until);
    held.entries.push(entry);
    this.#held.set(entry.target, held);
  }

  /** Send what may go out: events as long as there is credit, and then each `admin`. @param {number} now */
  #flush(now) {
    if (this.phase !== "ready") return;
    for (const [target, { until, entries }] of this.#held) {
      if (until > now || (entries[0].writing && this.#isOpen(entries[0]))) continue;
      this.#held.delete(target);
      if (entries[0].isEvent) this.#waiting = entries.sort((one, other) => one.at - other.at).concat(this.#waiting);
      else this.#admins.push(...entries);
    }
    let at = 0;
    while (at < this.#waiting.length && this.#inUse < this.#window) this.#go(this.#waiting[at++], now);
    this.#waiting.splice(0, at);
    for (const entry of this.#admins.splice(0)) this.#go(entry, now);
  }

  /** @param {Entry} entry @param {number} now */
  #go(entry, now) {
    const held = this.#held.get(entry.target);
    if (!this.#isOpen(entry)) return;
    if (held) held.entries.push(entry);
    else if (entry.unwritten) this.#lay(entry, now);
    else this.#post(entry, now);
  }

  /** Its payload or its files are large: they go into a file first, where there is a folder. @param {Entry} entry @param {number} now */
  #lay(entry, now) {
    const { blobs } = /** @type {import("./wire.d.ts").Welcome} */ (this.welcome);
    const { length } = entry.payload;
    if (blobs && length <= MAX_PAYLOAD) {
      if (!entry.writing) this.shell.write(entry);
      entry.writing = true;
      this.#hold(entry, 0);
    } else if (entry.files.length > 0 || length > MAX_FRAME - 4096) {
      const room = blobs ? `limit ${MAX_PAYLOAD}` : "and there is no folder for files";
      this.fail(entry, new GoondanError("E_FRAME_TOO_LARGE", `a payload of ${length} bytes, ${room}`));
    } else this.#post(entry, now);
  }

  /** @param {Entry} entry @param {number} now */
  #post(entry, now) {
    const { header } = entry;
    if (entry.isEvent) {
      this.#inUse++;
      entry.holdsCredit = true;
      const left = entry.expires - GRACE_MS - (entry.heldSince ?? now);
      if (header.deadlineMs !== undefined) header.deadlineMs = Math.max(1, Math.floor(left));
    }
    if (entry.blob || entry.files.length > 0) this.shell.touch(entry);
    entry.sent = true;
    if (entry.blob) this.#send({ ...header, blob: entry.blob });
    else this.#send(header, entry.payload);
  }

  /** @param {Entry} entry */
  #release(entry) {
    if (entry.holdsCredit) this.#inUse--;
    entry.holdsCredit = false;
  }

  /** @param {Entry} entry */
  #isOpen(entry) {
    return this.#outbox.has(entry.header.id);
  }

  /** Take an entry out of the outbox. False when it is not there. @param {Entry} entry */
  #remove(entry) {
    if (!this.#outbox.delete(entry.header.id)) return false;
    if (entry.correlation !== undefined) this.#asks.delete(entry.correlation);
    this.#release(entry);
    return true;
  }
}

/** Its time runs again. @param {Entry} entry @param {number} now @param {number | null} [left] what the broker says is left of it */
function goOn(entry, now, left) {
  if (typeof left === "number") entry.expires = now + left + GRACE_MS;
  else if (entry.heldSince !== undefined) entry.expires += now - entry.heldSince;
  entry.heldSince = undefined;
}
