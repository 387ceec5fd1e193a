/**
 * msgpack for the jailed worker: exactly what the protocol allows. `encode` is at the same time the check that a handler
 * returned JSON. What it needs of the language is taken before a tool is loaded, so that changed prototypes change no frame.
 *
 * Source: docs/design/wire.md section 2; schemas/WORKER.md sections 2 and 12.
 */

/** Levels of maps and arrays in one value; deeper values (and cycles) are refused. */
const MAX_DEPTH = 60;
/** What the buffer for frames begins with, and what it is cut back to when it has grown beyond (bytes). */
const FIRST_BYTES = 64 << 10;
const KEPT_BYTES = 1 << 20;

/**
 * Neither this nor `process` is imported anywhere: an import looks at the values of all exports, and process.stdout among them makes
 * descriptors 1 and 2 non-blocking, so that who writes much there gets EAGAIN. It also costs each start some milliseconds.
 */
export const util = process.getBuiltinModule("node:util");

/** Methods of a prototype as functions whose first argument is the object. */
export const taken = (prototype, ...names) => names.map((name) => Function.prototype.call.bind(prototype[name]));

/** What `act` gives, or `otherwise` when it throws. */
export function attempt(act, otherwise) {
  try {
    return act();
  } catch {
    return otherwise;
  }
}

const { apply, get } = Reflect;
const { assign, create, defineProperty, getPrototypeOf, hasOwn, keys } = Object;
const { isFinite, isSafeInteger } = Number;
const { types } = util;
const { stringify } = JSON;
const [{ isArray }, { isView }, { max }] = [Array, ArrayBuffer, Math];
const [number, Big, View] = [Number, BigInt, DataView];
const [charCodeAt, slice] = taken(String.prototype, "charCodeAt", "slice");
const [toISOString, getTime] = taken(Date.prototype, "toISOString", "getTime");
const [utf8Write, utf8Slice] = taken(Buffer.prototype, "utf8Write", "utf8Slice");
const [copyWithin, setBytes, subarray] = taken(Uint8Array.prototype, "copyWithin", "set", "subarray");
const [setFloat64, setBigInt64, setBigUint64] = taken(View.prototype, "setFloat64", "setBigInt64", "setBigUint64");
const byteLength = Buffer.byteLength.bind(Buffer);
export const allocate = Buffer.allocUnsafeSlow.bind(Buffer);
const OBJECT = Object.prototype;
const BUILT_IN = [OBJECT, Array.prototype, Date.prototype, Buffer.prototype, Function.prototype];
/** What is no JSON value, and what to return in its place. */
const REFUSED = [
  [(value) => isView(value) || types.isAnyArrayBuffer(value), "binary data is no JSON value; say it as text, as buffer.toString('base64')"],
  [types.isMap, "a Map is no JSON value; return Object.fromEntries(map)"],
  [types.isSet, "a Set is no JSON value; return [...set]"],
  [types.isPromise, "a Promise is no JSON value; await it"],
  [types.isNativeError, "an Error is no JSON value; throw it, or return its message"],
  [(value) => types.isRegExp(value) || types.isWeakMap(value) || types.isWeakSet(value), "a RegExp or a weak collection is no JSON value"],
];

/** A name as an error shows it. */
export const quoted = (name) => `'${slice(stringify(slice(name, 0, 60)), 1, -1)}'`;

/** A property of an object, unless it stands on a prototype of the language's own; else undefined. */
export function ownOf(value, name) {
  for (let holder = value; holder !== null; holder = getPrototypeOf(holder)) {
    for (let i = 0; i < BUILT_IN.length; i++) if (holder === BUILT_IN[i]) return undefined;
    if (hasOwn(holder, name)) return get(holder, name, value);
  }
  return undefined;
}

/** The same of a function. */
export function methodOf(value, name) {
  const method = ownOf(value, name);
  return typeof method === "function" ? method : undefined;
}

// --- value to bytes

/** Thrown for a value that is not JSON: `reason`, and the `path` that leads to it, as it will be shown. */
export class BadValue {}

/** Thrown for a value that is longer than allowed, with its `size` in bytes. */
export class TooLong {}

const bad = (reason) => assign(new BadValue(), { reason, path: "" });

/** What is written, and where the next byte goes. */
let out = allocate(FIRST_BYTES);
let view = new View(out.buffer);
let at = 0;
/** Where the value begins whose length is limited, its limit, and how much of it was counted but not kept. */
let base = 0;
let limit = 0;
let uncounted = 0;
let busy = false;

/**
 * A frame of JSON values, with its length before it. The bytes hold until the next call. Throws BadValue, TooLong when the
 * frame, or its `output` if it has one, is longer than `most` bytes, and what the tool's own code throws (getters, toJSON).
 */
export function encode(frame, most = Infinity) {
  // The tool's own code may have a frame sent while one is made: that one has a buffer to itself.
  const outer = busy ? [out, view, at, base, limit, uncounted] : undefined;
  if (busy || out.length > KEPT_BYTES) enlarge(allocate(FIRST_BYTES));
  [busy, at, base, limit, uncounted] = [true, 4, 4, most, 0];
  try {
    pack(frame, -1);
    const size = at - base + uncounted;
    if (size > most) throw assign(new TooLong(), { size });
    for (let i = 0; i < 4; i++) out[i] = (at - 4) >>> (i * 8);
    return subarray(out, 0, at);
  } finally {
    busy = outer !== undefined;
    if (busy) [out, view, at, base, limit, uncounted] = outer;
  }
}

function enlarge(larger) {
  out = larger;
  view = new View(out.buffer);
}

/** Make room for so many bytes more. What is over the limit anyway is only counted. */
function room(count) {
  if (at + count <= out.length) return;
  if (at - base > limit) {
    uncounted += at - base;
    at = base;
    if (at + count <= out.length) return;
  }
  const larger = allocate(max(out.length * 2, at + count));
  setBytes(larger, subarray(out, 0, at), 0);
  enlarge(larger);
}

function packUint(value, bytes) {
  for (let shift = (bytes - 1) * 8; shift >= 0; shift -= 8) out[at++] = value >>> shift;
}

/** The head of a map or an array; `wide` is the first byte when `fixed` has no room for the count. */
function packCount(count, fixed, wide) {
  room(5);
  if (count < 16) out[at++] = fixed + count;
  else {
    out[at++] = count < 65536 ? wide : wide + 1;
    packUint(count, count < 65536 ? 2 : 4);
  }
}

const headOf = (size) => (size < 32 ? 1 : size < 256 ? 2 : size < 65536 ? 3 : 5);

/** A string; lone surrogates become U+FFFD. */
function packString(value) {
  const { length } = value;
  let head = headOf(length);
  let size = 0;
  const bytes = length < 4096 ? length * 3 : byteLength(value);
  if (at - base + bytes > limit && length >= 4096) return void (uncounted += bytes + 5);
  room(bytes + 5);
  if (length < 24) {
    for (let code; size < length && (code = charCodeAt(value, size)) < 128; size++) out[at + head + size] = code;
  }
  if (size < length) {
    size = utf8Write(out, value, at + head, out.length - at - head);
    const needed = headOf(size);
    if (needed !== head) copyWithin(out, at + needed, at + head, at + head + size);
    head = needed;
  }
  out[at++] = head === 1 ? 0xa0 + size : head === 2 ? 0xd9 : head === 3 ? 0xda : 0xdb;
  packUint(size, head - 1);
  at += size;
}

function packNumber(value) {
  room(9);
  if (!isFinite(value)) throw bad(`${value} is no JSON number`);
  if (!isSafeInteger(value)) return packDouble(value);
  if (value >= -32 && value < 128) out[at++] = value & 255;
  else if (value > 0 && value < 4294967296) {
    out[at++] = 0xce;
    packUint(value, 4);
  } else packBigInt(Big(value));
}

function packDouble(value) {
  out[at] = 0xcb;
  setFloat64(view, at + 1, value);
  at += 9;
}

const LEAST = -(2n ** 63n);
const MOST = 2n ** 64n - 1n;

function packBigInt(value) {
  room(9);
  if (value < LEAST || value > MOST) {
    if (!isFinite(number(value))) throw bad("an integer is larger than any double");
    return packDouble(number(value));
  }
  out[at] = value < 0n ? 0xd3 : 0xcf;
  (value < 0n ? setBigInt64 : setBigUint64)(view, at + 1, value);
  at += 9;
}

function packByte(byte) {
  room(1);
  out[at++] = byte;
}

function pack(value, depth) {
  switch (typeof value) {
    case "string": return packString(value);
    case "number": return packNumber(value);
    case "boolean": return packByte(value ? 0xc3 : 0xc2);
    case "undefined": return packByte(0xc0);
    case "bigint": return packBigInt(value);
    case "object":
      if (value === null) return packByte(0xc0);
      if (depth >= MAX_DEPTH) throw bad(`nested deeper than ${MAX_DEPTH}, or contains itself`);
      return isArray(value) ? packArray(value, depth) : packObject(value, depth, true);
    default: throw bad(`a ${typeof value} is no JSON value`);
  }
}

function packArray(value, depth) {
  const count = value.length;
  let i = 0;
  try {
    for (packCount(count, 0x90, 0xdc); i < count; i++) pack(value[i], depth + 1);
  } catch (error) {
    if (error instanceof BadValue) error.path = `[${i}]${error.path}`;
    throw error;
  }
}

/** `asks`: whether the object may say by `toJSON` what stands for it. */
function packObject(value, depth, asks) {
  const kind = getPrototypeOf(value);
  const plain = kind === OBJECT || kind === null;
  const toJSON = asks && (!plain || hasOwn(value, "toJSON")) ? methodOf(value, "toJSON") : undefined;
  if (toJSON !== undefined) {
    const shown = apply(toJSON, value, [""]);
    const again = typeof shown === "object" && shown !== null && !isArray(shown);
    return again ? packObject(shown, depth, false) : pack(shown, depth);
  }
  const bare = plain ? undefined : bareOf(value);
  if (bare !== undefined) return pack(bare, depth);
  const names = keys(value);
  const items = [];
  let count = 0;
  for (let i = 0; i < names.length; i++) {
    place(items, i, value[names[i]]);
    if (items[i] !== undefined) count++;
  }
  packCount(count, 0x80, 0xde);
  for (let i = 0; i < names.length; i++) {
    if (items[i] === undefined) continue;
    packString(names[i]);
    if (depth < 0 && names[i] === "output") base = at;
    try {
      pack(items[i], depth + 1);
    } catch (error) {
      if (error instanceof BadValue) error.path = (depth < 0 ? names[i] : `[${quoted(names[i])}]`) + error.path;
      throw error;
    }
  }
}

/** What stands for an object of the language's own; undefined for an object like others. Throws BadValue. */
function bareOf(value) {
  if (types.isBoxedPrimitive(value)) return value.valueOf();
  for (let i = 0; i < REFUSED.length; i++) if (REFUSED[i][0](value)) throw bad(REFUSED[i][1]);
  if (!types.isDate(value)) return undefined;
  if (isFinite(getTime(value))) return toISOString(value);
  throw bad("an invalid Date is no JSON value");
}

// --- bytes to value

/** What reads the numbers of the heads 0xca to 0xd3, and how long they are (bytes). */
const READERS = taken(
  View.prototype, "getFloat32", "getFloat64", "getUint8", "getUint16", "getUint32", "getBigUint64", "getInt8", "getInt16",
  "getInt32", "getBigInt64");
const LENGTHS = [4, 8, 1, 2, 4, 8, 1, 2, 4, 8];
let source = out;
let sourceView = view;
let position = 0;
let end = 0;

/**
 * The value that `bytes` has from `from` to `to`. If it is a map, it has no prototype; those in it are ordinary objects.
 * Integers that a number cannot hold are BigInts. Throws RangeError.
 */
export function decode(bytes, from, to) {
  if (bytes !== source) sourceView = new View(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  [source, position, end] = [bytes, from, to];
  const value = unpack(true);
  if (position !== end) throw new RangeError("the frame and its value differ in length");
  return value;
}

function unpack(bare) {
  if (position >= end) throw new RangeError("a value is longer than its frame");
  const first = source[position++];
  if (first < 0x80) return first;
  if (first < 0x90) return unpackMap(first - 0x80, bare);
  if (first < 0xa0) return unpackArray(first - 0x90);
  if (first < 0xc0) return unpackString(first - 0xa0);
  if (first >= 0xe0) return first - 256;
  if (first >= 0xca && first <= 0xd3) return unpackNumber(first);
  switch (first) {
    case 0xc0: return null;
    case 0xc2: return false;
    case 0xc3: return true;
    case 0xd9: case 0xda: case 0xdb: return unpackString(unpackNumber(0xcc + first - 0xd9));
    case 0xdc: case 0xdd: return unpackArray(unpackNumber(0xcd + first - 0xdc));
    case 0xde: case 0xdf: return unpackMap(unpackNumber(0xcd + first - 0xde), bare);
    default: throw new RangeError(`a value begins with the byte ${first}`);
  }
}

/** The number here, as after the byte `head`. */
function unpackNumber(head) {
  const value = READERS[head - 0xca](sourceView, position);
  position += LENGTHS[head - 0xca];
  return typeof value === "bigint" && isSafeInteger(number(value)) ? number(value) : value;
}

function unpackString(size) {
  position += size;
  if (position > end) throw new RangeError("a string is longer than its frame");
  return utf8Slice(source, position - size, position);
}

function unpackArray(count) {
  const items = [];
  for (let i = 0; i < count; i++) place(items, i, unpack(false));
  return items;
}

function unpackMap(count, bare) {
  const map = bare ? create(null) : {};
  for (let i = 0; i < count; i++) {
    const key = unpack(false);
    place(map, key, unpack(false));
  }
  return map;
}

/** Set a property. A name that the prototype has already would call its setter, or be refused. */
function place(object, key, value) {
  if (key in object) defineProperty(object, key, { __proto__: null, value, writable: true, enumerable: true, configurable: true });
  else object[key] = value;
}
