/**
 * Frames and payloads to bytes and back, with the checks of a receiver. Pure.
 *
 * Bytes are walked before they are decoded: without recursion, lengths before allocation. A payload that is bad spoils
 * nothing but itself: the frame comes with `fault`, so whoever waits for it can be told.
 *
 * Source: PROTOCOL.md "Frames", "What a receiver checks itself"; replayed from schemas/vectors/.
 */

import { isUtf8 } from "node:buffer";
import { createHash } from "node:crypto";

import { Decoder, Encoder } from "@msgpack/msgpack";

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
/** Stands for the key `__proto__` until the map is made: no text on the wire can be it. */
const PROTO = "\ud800__proto__";
/** How many bytes follow the heads 0xc4 to 0xdf, or hold the length of what follows (negative). */
const HEADS = [-1, -2, -4, -1, -2, -4, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17, -1, -2, -4, -2, -4, -2, -4];

const encoder = new Encoder({ useBigInt64: true, ignoreUndefined: true });
const decoder = new Decoder({ useBigInt64: true });
/** Gives `__proto__` another name, because the decoder refuses it as a key. A tool's output may have it. */
const guarded = new Decoder({
  useBigInt64: true,
  keyDecoder: {
    canBeCached: () => true,
    decode: (bytes, at, length) => {
      const key = Buffer.from(bytes.buffer, bytes.byteOffset + at, length).toString();
      return key === "__proto__" ? PROTO : key;
    },
  },
});

/** @param {string} what @returns {never} */
function refuse(what) {
  throw new GoondanError("E_FRAME_INVALID", what);
}

/**
 * What a walk over one value has found: where it ends, how many values it has, whether its integers may be wide or a
 * key is `__proto__`, and the first thing that no payload may have.
 */
class Walk {
  end = 0;
  values = 0;
  special = false;
  fault = "";

  /** @param {Buffer} data @param {number} at Raises E_FRAME_INVALID when the value has no end. */
  over(data, at) {
    const left = [1];
    const keyed = [false];
    for (let depth = 0; depth >= 0; ) {
      if (left[depth] === 0) {
        depth--;
        continue;
      }
      const isKey = keyed[depth] && left[depth] % 2 === 0;
      left[depth]--;
      this.values++;
      if (at >= data.length) refuse("it ends too early");
      const head = data[at++];
      let size = 0;
      let inside = -1;
      let isMap = false;
      let isText = false;
      if (head >= 0xa0 && head < 0xc0) [size, isText] = [head & 31, true];
      else if (head >= 0x80 && head < 0xa0) [inside, isMap] = [head & 15, head < 0x90];
      else if (head >= 0xc4 && head < 0xe0) {
        size = HEADS[head - 0xc4];
        if (size < 0) {
          if (at - size > data.length) refuse("it ends too early");
          const length = data.readUIntBE(at, -size);
          at -= size;
          if (head >= 0xdc) [inside, isMap, size] = [length, head >= 0xde, 0];
          else size = length + Number(head >= 0xc7 && head <= 0xc9);
          isText = head >= 0xd9 && head < 0xdc;
        }
        if (head < 0xca || (head >= 0xd4 && head <= 0xd8)) this.fault ||= "bytes and extensions are no JSON";
        if (head === 0xcf || head === 0xd3) this.special = true;
      } else if (head === 0xc1) refuse("a byte that nothing begins with");
      if (at + size > data.length) refuse("it ends too early");
      if (isText) this.#text(data, at, size, isKey);
      else if (isKey) this.fault ||= "a key is no text";
      else if (head === 0xcb || head === 0xca)
        if (!Number.isFinite(head === 0xcb ? data.readDoubleBE(at) : data.readFloatBE(at)))
          this.fault ||= "a number is not finite";
      at += size;
      if (inside < 0) continue;
      if (inside > data.length - at) refuse("it claims more values than it has");
      if (depth + 1 > MAX_DEPTH) this.fault ||= `it nests deeper than ${MAX_DEPTH}`;
      depth++;
      left[depth] = isMap ? 2 * inside : inside;
      keyed[depth] = isMap;
    }
    this.end = at;
    return this;
  }

  /** @param {Buffer} data @param {number} at @param {number} size @param {boolean} isKey */
  #text(data, at, size, isKey) {
    for (let byte = at; byte < at + size; byte++)
      if (data[byte] > 0x7f) {
        if (!isUtf8(data.subarray(at, at + size))) this.fault ||= "a text is no UTF-8";
        return;
      }
    if (isKey && size === 9 && data[at] === 0x5f) this.special ||= data.toString("latin1", at, at + size) === "__proto__";
  }

  /** The value, once there is no fault. @param {Uint8Array} data @returns {any} */
  decode(data) {
    return this.special ? narrow(guarded.decode(data)) : decoder.decode(data);
  }
}

/** Integers that fit a number are numbers; `__proto__` is a key as any other. @param {any} value @returns {any} */
function narrow(value) {
  if (typeof value === "bigint") return BigInt(Number(value)) === value && Number.isSafeInteger(Number(value)) ? Number(value) : value;
  if (typeof value !== "object" || value === null) return value;
  if (Array.isArray(value)) return value.map(narrow);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key === PROTO ? "__proto__" : key, narrow(item)]));
}

/**
 * One message part as a frame. Its payload is decoded as well; `fault` says why it cannot be.
 *
 * @param {Buffer} data
 * @returns {Frame} Raises GoondanError E_FRAME_TOO_LARGE, E_FRAME_INVALID for what is no frame.
 */
export function decodeFrame(data) {
  if (data.length > MAX_RELAYED) throw new GoondanError("E_FRAME_TOO_LARGE", `a frame of ${data.length} bytes`);
  const head = data[0];
  const wide = head === 0xde ? 2 : head === 0xdf ? 4 : 0;
  if (!(head >= 0x80 && head < 0x90) && !(wide && data.length > wide)) refuse("a frame is a map");
  const all = new Walk();
  const payload = new Walk();
  let began = 0;
  let at = 1 + wide;
  for (let fields = wide ? data.readUIntBE(1, wide) : head & 15; fields > 0; fields--) {
    const key = at;
    at = all.over(data, at).end;
    if (data[key] !== 0xa7 || data.toString("latin1", key + 1, at) !== "payload") at = all.over(data, at).end;
    else at = payload.over(data, (began = at)).end;
  }
  if (at !== data.length) refuse("something follows the frame");
  if (all.fault) refuse(all.fault);
  all.special ||= payload.special;
  const frame = payload.fault
    ? all.decode(Buffer.concat([data.subarray(0, began), Buffer.of(0xc0), data.subarray(payload.end)]))
    : all.decode(data);
  open("Frame", frame);
  if (payload.fault) frame.fault = new GoondanError("E_FRAME_INVALID", `the payload: ${payload.fault}`);
  return frame;
}

/** A payload from a file. @param {Buffer} data @returns {any} Raises GoondanError E_FRAME_INVALID. */
export function decodePayload(data) {
  const walk = new Walk().over(data, 0);
  if (walk.end !== data.length) refuse("something follows the payload");
  if (walk.values > MAX_VALUES) refuse(`it has more than ${MAX_VALUES} values`);
  return walk.fault ? refuse(walk.fault) : walk.decode(data);
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
  if (typeof value === "string") return value.isWellFormed() ? value : value.toWellFormed();
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
  const given = Object.entries(value).filter(([, item]) => item !== undefined);
  return Object.fromEntries(given.map(([key, item]) => [key.toWellFormed(), plain(item, depth)]));
}

/**
 * A frame to send. The bytes of the payload stay as they are, in each repeat.
 *
 * @param {{ [field: string]: unknown }} header
 * @param {Uint8Array} [payload]
 */
export function encodeFrame(header, payload) {
  if (payload === undefined) return encoder.encode(header);
  return Buffer.concat([encoder.encode({ ...header, payload: null }).subarray(0, -1), payload]);
}

/** SHA-256, in hexadecimal digits. @param {Uint8Array} data */
export const digestOf = (data) => createHash("sha256").update(data).digest("hex");

const text = (/** @type {unknown} */ value) => typeof value === "string";
const integer = (/** @type {unknown} */ value) => Number.isSafeInteger(value);
const flag = (/** @type {unknown} */ value) => typeof value === "boolean";
const map = (/** @type {unknown} */ value) => typeof value === "object" && value !== null && !Array.isArray(value);
const one = (/** @type {string[]} */ ...names) => (/** @type {any} */ value) => names.includes(value);
const like = (/** @type {string} */ kind) => (/** @type {unknown} */ value) => fits(kind, value);

/** What a client opens, field by field. A name with `?` may be absent or nil. @type {Record<string, Record<string, (value: unknown) => boolean>>} */
const SHAPES = {
  Frame: { type: text, "id?": text, "to?": text, "instanceKey?": text, "eventId?": text, "callId?": text,
    "inReplyTo?": text, "stage?": text, "deadlineMs?": integer, "blob?": like("Blob"), "live?": flag },
  Blob: { file: text, digest: text, size: integer },
  ErrorPayload: { code: text, message: text, "suggestion?": text, "helpUrl?": text, "retryAfterMs?": integer, "name?": text },
  Welcome: { version: integer, principal: text, broker: text, credit: integer, maxFrame: integer, "blobs?": text,
    "durability?": one("power", "process"), "revision?": text },
  Credit: { window: integer },
  Shutdown: { "gracePeriodMs?": integer, reason: one("restart", "config_change", "orchestrator_shutdown", "idle") },
  AgentEvent: { id: text, type: text, createdAt: text, "instanceKey?": text, "metadata?": map, "source?": map,
    "replyTo?": map, "answer?": like("Answer") },
  Answer: { turnId: text, status: one("completed", "failed"), "response?": text, "finishReason?": text,
    "error?": like("ErrorPayload"), "steps?": integer, "traceId?": text, "model?": text, "usage?": map, "cutOff?": flag,
    "reasoning?": text },
  ToolResult: { status: one("ok", "error", "pending"), "handle?": text, "error?": map },
  RuntimeEvent: { kind: text, "step?": integer, "text?": text, "at?": integer, "again?": flag, "toolCallId?": text,
    "toolName?": text, "code?": text, "message?": text, "error?": like("ErrorPayload") },
}; // prettier-ignore

/** @param {string} kind @param {any} value */
function fits(kind, value) {
  if (!map(value)) return false;
  for (const name in SHAPES[kind]) {
    const optional = name.endsWith("?");
    const item = value[optional ? name.slice(0, -1) : name];
    if (!(optional && (item === undefined || item === null)) && !SHAPES[kind][name](item)) return false;
  }
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
