/**
 * Frames and payloads to bytes and back, with the checks of a receiver. Pure.
 *
 * A payload that is bad spoils nothing but itself: the frame comes with `fault`, so whoever waits for it can be told.
 *
 * Source: PROTOCOL.md "Frames", "What a receiver checks itself"; replayed from schemas/vectors/.
 */

import { isUtf8 } from "node:buffer";
import { createHash } from "node:crypto";

import { Encoder } from "@msgpack/msgpack";

import { GoondanError } from "./errors.mjs";

/** @typedef {import("./wire.d.ts").Frame & { fault?: GoondanError }} Frame what `decodeFrame` gives */

/** The largest frame that is sent (bytes). */
export const MAX_FRAME = 1 << 20;
/** The largest frame that arrives: the broker adds to the header (bytes). */
export const MAX_RELAYED = MAX_FRAME + (64 << 10);
/** How deep maps and lists of a payload nest. */
const MAX_DEPTH = 64;
/** The most values of a payload by reference, keys included: as many as a frame could hold. */
const MAX_VALUES = 1 << 20;
/** How many bytes follow the heads 0xc0 to 0xdf; negative: they hold how much more follows. */
const FOLLOW = [0, 0, 0, 0, -1, -2, -4, -1, -2, -4, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17, -1, -2, -4, -2, -4, -2, -4];
/** Texts of smaller messages are cut out of one text of the whole message; of larger ones they would keep it alive (bytes). */
const SMALL = 4096;

const encoder = new Encoder({ useBigInt64: true, ignoreUndefined: true });

/** @param {string} what @returns {never} */
function refuse(what) {
  throw new GoondanError("E_FRAME_INVALID", what);
}

/**
 * Values out of bytes, one after the other. What no payload may have is refused where it is met. npm's decoder makes
 * every 64-bit integer a bigint, takes what is no UTF-8, and refuses a key `__proto__`, which a tool's output may have.
 */
class Reader {
  at = 0;
  /** Values that are here, or were announced. */
  #values = 1;
  #limit;
  #data;
  #all;

  /** What is wrong with the value of `apart`. @type {GoondanError | undefined} */
  fault;

  /** @param {Buffer} data @param {string} [apart] a key of the outermost map: what is bad in its value spoils nothing else @param {number} [limit] of values */
  constructor(data, apart, limit = Infinity) {
    this.#data = data;
    this.#limit = limit;
    this.apart = apart;
    this.#all = data.length <= SMALL ? data.toString("latin1") : undefined;
  }

  /** The value here. @param {number} depth of what holds it @returns {any} Raises GoondanError E_FRAME_INVALID. */
  value(depth) {
    const data = this.#data;
    const head = data[this.at++];
    if (head < 0x80) return head;
    if (head >= 0xe0) return head - 0x100;
    if (head < 0x90) return this.#map(head & 15, depth + 1);
    if (head < 0xa0) return this.#list(head & 15, depth + 1);
    if (head < 0xc0) return this.#text(head & 31);
    if (head === 0xc0) return null;
    if (head === 0xc2 || head === 0xc3) return head === 0xc3;
    if (head === 0xca) return finite(data.readFloatBE(this.#pass(4)));
    if (head === 0xcb) return finite(data.readDoubleBE(this.#pass(8)));
    if (head === 0xcf) return safe(data.readBigUInt64BE(this.#pass(8)));
    if (head === 0xd3) return safe(data.readBigInt64BE(this.#pass(8)));
    if (head >= 0xcc && head <= 0xce) return this.#length(1 << (head - 0xcc));
    if (head >= 0xd0 && head <= 0xd2) return data.readIntBE(this.#pass(1 << (head - 0xd0)), 1 << (head - 0xd0));
    if (head >= 0xd9 && head <= 0xdb) return this.#text(this.#length(1 << (head - 0xd9)));
    if (head === 0xdc || head === 0xdd) return this.#list(this.#length(head === 0xdc ? 2 : 4), depth + 1);
    if (head === 0xde || head === 0xdf) return this.#map(this.#length(head === 0xde ? 2 : 4), depth + 1);
    return refuse(head === undefined ? "it ends too early" : "bytes and extensions are no JSON");
  }

  /** A key of a map. @returns {string} */
  key() {
    const key = this.value(0);
    return typeof key === "string" ? key : refuse("a key is no text");
  }

  /** Pass over the value here, whatever it holds. */
  skip() {
    for (let left = 1; left > 0; left--) {
      const head = this.#data[this.#pass(1)];
      if (head >= 0x80 && head < 0xa0) left += (head & 15) * (head < 0x90 ? 2 : 1);
      else if (head >= 0xa0 && head < 0xc0) this.#pass(head & 31);
      else if (head >= 0xc0 && head < 0xe0) {
        const follow = FOLLOW[head - 0xc0];
        const more = follow < 0 ? this.#length(-follow) : follow;
        if (head >= 0xdc) left += more * (head >= 0xde ? 2 : 1);
        else this.#pass(more + Number(head >= 0xc7 && head <= 0xc9));
      }
    }
  }

  /** Where `size` bytes begin, which are behind us then. @param {number} size */
  #pass(size) {
    const at = this.at;
    if ((this.at += size) > this.#data.length) refuse("it ends too early");
    return at;
  }

  /** @param {number} size of an unsigned integer */
  #length(size) {
    return this.#data.readUIntBE(this.#pass(size), size);
  }

  /** Lengths are looked at before anything is made. @param {number} size @param {number} depth */
  #holds(size, depth) {
    if (size > this.#data.length - this.at) refuse("it claims more values than it has");
    if ((this.#values += size) > this.#limit) refuse(`it has more than ${this.#limit} values`);
    if (depth > MAX_DEPTH) refuse(`it nests deeper than ${MAX_DEPTH}`);
  }

  /** @param {number} size @param {number} depth */
  #list(size, depth) {
    this.#holds(size, depth);
    const list = [];
    for (let left = size; left > 0; left--) list.push(this.value(depth));
    return list;
  }

  /** @param {number} size @param {number} depth */
  #map(size, depth) {
    this.#holds(2 * size, depth);
    /** @type {{ [key: string]: unknown }} */
    const map = {};
    for (let left = size; left > 0; left--) {
      const key = this.key();
      put(map, key, depth === 0 && key === this.apart ? this.#apart() : this.value(depth));
    }
    return map;
  }

  #apart() {
    const { at } = this;
    try {
      return this.value(0);
    } catch (error) {
      [this.fault, this.at] = [/** @type {GoondanError} */ (error), at];
      this.skip();
    }
  }

  /** @param {number} size */
  #text(size) {
    const data = this.#data;
    const at = this.#pass(size);
    const end = this.at;
    let byte = at;
    if (size <= SMALL) while (byte < end && data[byte] < 0x80) byte++;
    if (byte === end) return this.#all ? this.#all.slice(at, end) : data.toString("latin1", at, end);
    return isUtf8(data.subarray(at, end)) ? data.toString("utf8", at, end) : refuse("a text is no UTF-8");
  }
}

/** @param {{ [key: string]: unknown }} map @param {string} key @param {unknown} value */
function put(map, key, value) {
  if (key !== "__proto__") map[key] = value;
  else Object.defineProperty(map, key, { value, writable: true, enumerable: true, configurable: true });
}

const finite = (/** @type {number} */ value) => (Number.isFinite(value) ? value : refuse("a number is not finite"));
const safe = (/** @type {bigint} */ value) => (Number.isSafeInteger(Number(value)) ? Number(value) : value);

/**
 * One message part as a frame. Its payload is decoded as well; `fault` says why it cannot be.
 *
 * @param {Buffer} data
 * @returns {Frame} Raises GoondanError E_FRAME_TOO_LARGE, E_FRAME_INVALID for what is no frame.
 */
export function decodeFrame(data) {
  if (data.length > MAX_RELAYED) throw new GoondanError("E_FRAME_TOO_LARGE", `a frame of ${data.length} bytes`);
  const reader = new Reader(data, "payload");
  const frame = open("Frame", reader.value(-1)); // the payload's own depth counts
  if (reader.at !== data.length) refuse("something follows the frame");
  if (reader.fault) frame.fault = reader.fault;
  return frame;
}

/** A payload from a file. @param {Buffer} data @returns {any} Raises GoondanError E_FRAME_INVALID. */
export function decodePayload(data) {
  const reader = new Reader(data, undefined, MAX_VALUES);
  const value = reader.value(0);
  if (reader.at !== data.length) refuse("something follows the payload");
  return value;
}

/**
 * A JSON value as msgpack: `bigint` is an integer, `undefined` in a map is left out, `toJSON` is asked.
 *
 * @param {unknown} value
 * @returns {Uint8Array} Raises GoondanError E_FRAME_INVALID for what no frame can carry.
 */
export function encodeValue(value) {
  return encoder.encode(plain(value, 0));
}

/** @param {any} value @param {number} depth @returns {unknown} */
function plain(value, depth) {
  if (typeof value === "string") return value.toWellFormed();
  if (value === null || value === undefined) return null;
  if (typeof value === "boolean") return value;
  if (typeof value === "number") return Number.isFinite(value) ? value : refuse(`${value} is no JSON`);
  if (typeof value === "bigint")
    return value >= -(2n ** 63n) && value < 2n ** 64n ? value : refuse(`${value} is beyond 64 bits`);
  if (typeof value !== "object" || ArrayBuffer.isView(value) || value instanceof Map || value instanceof Set)
    return refuse(`${typeof value === "object" ? value.constructor.name : `a ${typeof value}`} is no JSON`);
  if (typeof value.toJSON === "function") return plain(value.toJSON(), depth);
  if (++depth > MAX_DEPTH) refuse(`it nests deeper than ${MAX_DEPTH}, or holds itself`);
  if (Array.isArray(value)) return value.map((item) => plain(item, depth));
  /** @type {{ [key: string]: unknown }} */
  const given = {};
  for (const key of Object.keys(value)) if (value[key] !== undefined) put(given, key.toWellFormed(), plain(value[key], depth));
  return given;
}

/**
 * A frame to send. The bytes of the payload stay as they are, in each repeat.
 *
 * @param {{ [field: string]: unknown }} header
 * @param {Uint8Array} [payload]
 */
export function encodeFrame(header, payload) {
  if (payload === undefined) return encoder.encode(header);
  const head = encoder.encodeSharedRef({ ...header, payload: null });
  return Buffer.concat([head.subarray(0, -1), payload]); // in the place of nil
}

/** SHA-256, in hexadecimal digits. @param {Uint8Array} data */
export const digestOf = (data) => createHash("sha256").update(data).digest("hex");

const text = (/** @type {unknown} */ value) => typeof value === "string";
const integer = (/** @type {unknown} */ value) => Number.isSafeInteger(value);
const map = (/** @type {unknown} */ value) => typeof value === "object" && value !== null && !Array.isArray(value);
const one = (/** @type {string[]} */ ...names) => (/** @type {any} */ value) => names.includes(value);
const like = (/** @type {string} */ kind) => (/** @type {unknown} */ value) => fits(kind, value);

/** @typedef {{ [name: string]: (value: unknown) => boolean }} Shape */
/** What a client opens: fields that are there, and fields that may be absent or nil. @type {{ [kind: string]: [Shape, Shape?] }} */
const SHAPES = {
  Frame: [{ type: text }, { id: text, eventId: text, inReplyTo: text, stage: text, deadlineMs: integer, blob: like("Blob") }],
  Blob: [{ file: text, digest: text, size: integer }],
  ErrorPayload: [{ code: text, message: text }, { suggestion: text, helpUrl: text, retryAfterMs: integer }],
  Welcome: [{ version: integer, credit: integer }, { blobs: text, durability: one("power", "process") }],
  Credit: [{ window: integer }],
  Shutdown: [{ reason: one("restart", "config_change", "orchestrator_shutdown", "idle") }, { gracePeriodMs: integer }],
  AgentEvent: [{ id: text, type: text, createdAt: text }, { metadata: map, answer: like("Answer") }],
  Answer: [{ turnId: text, status: one("completed", "failed") }, { response: text, error: like("ErrorPayload"), usage: map }],
  ToolResult: [{ status: one("ok", "error", "pending") }, { handle: text, error: map }],
  RuntimeEvent: [{ kind: text }, { step: integer, text, at: integer, again: (value) => typeof value === "boolean" }],
};

/** Whether a payload is what it is said to be. @param {string} kind @param {any} value */
export function fits(kind, value) {
  if (!map(value)) return false;
  const [there, perhaps = {}] = SHAPES[kind];
  for (const name in there) if (!there[name](value[name])) return false;
  for (const name in perhaps) if (value[name] !== undefined && value[name] !== null && !perhaps[name](value[name])) return false;
  return true;
}

/**
 * A payload as what it is said to be.
 *
 * @param {string} kind name of a struct in schemas/json/payloads.schema.json
 * @param {any} value
 * @returns {any} `value`. Raises GoondanError E_FRAME_INVALID.
 */
export function open(kind, value) {
  return fits(kind, value) ? value : refuse(`that is no ${kind}`);
}
