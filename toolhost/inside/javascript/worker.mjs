/**
 * The JavaScript worker: the program in a jail. It speaks schemas/WORKER.md on descriptor 3 and runs a tool's handlers,
 * under Node (22.18 or newer) and under Bun.
 *
 * Rules.
 * - One thread runs everything: handlers take turns at each `await`. What computes for long holds up the others.
 * - What these files need of the language is taken before the tool is loaded, so that a tool which changes prototypes
 *   breaks itself and no frame.
 * - When the last running call ends, every process that it left behind is killed before its result is sent.
 * - Nothing here is a wall: tool code runs in this process and can change all of it. The walls are around the jail. The
 *   host believes no frame from here.
 *
 * Source: docs/design/sandbox.md section 5; schemas/WORKER.md, section 12 for what is JavaScript's own.
 */
import { AsyncLocalStorage } from "node:async_hooks";
import fs from "node:fs";
import module from "node:module";
import process from "node:process";
import { pathToFileURL } from "node:url";
import util from "node:util";

import { offerBun, waitForExit } from "./bun.mjs";
import { BadValue, TooLong, decode, encode, encodeResult, methodOf, uncurried } from "./codec.mjs";
import { Call, MAX_LINE, ToolContext } from "./context.mjs";
import * as core from "./core/index.mjs";
import { MAX_ERROR, errorOf, shown, where } from "./failures.mjs";
import { enable, sweep } from "./orphans.mjs";

const PROTOCOL = 1;
const FD = 3;
/** One frame from the host (bytes). */
const MAX_FRAME = 8 << 20;
/** Messages kept for later calls, oldest out first; the host counts along. */
const MAX_MESSAGES = 8;
/** Log lines at once and per second; what is over is dropped and counted. */
const LOG_BURST = 1000;
const LOG_PER_S = 200;
/** One question to the bus as it travels (bytes). The host refuses more. */
const MAX_ASK = 256 << 10;
/** How much is read at once (bytes). */
const READ_BYTES = 256 << 10;
/** When to try again to write to a socket that was full, where nothing tells that it has room (milliseconds). */
const AGAIN_MS = 1;

const { AgentError, Pending } = core;
const { apply } = Reflect;
const { assign, create, defineProperty, getOwnPropertyDescriptor, keys } = Object;
const { format, inspect, types } = util;
const { writeSync } = fs;
const { isArray } = Array;
const { min } = Math;
const NativePromise = Promise;
const then = uncurried(Promise.prototype.then);
const includes = uncurried(Array.prototype.includes);
const join = uncurried(Array.prototype.join);
const push = uncurried(Array.prototype.push);
const shift = uncurried(Array.prototype.shift);
const sort = uncurried(Array.prototype.sort);
const replace = uncurried(String.prototype.replace);
const slice = uncurried(String.prototype.slice);
const split = uncurried(String.prototype.split);
const setBytes = uncurried(Uint8Array.prototype.set);
const subarray = uncurried(Uint8Array.prototype.subarray);
const toText = uncurried(Buffer.prototype.utf8Slice);
const allocate = Buffer.allocUnsafeSlow.bind(Buffer);
const now = performance.now.bind(performance);
const exit = process.exit.bind(process);
const nextTick = process.nextTick.bind(process);
const later = setTimeout;
const storage = new AsyncLocalStorage();
const within = storage.run.bind(storage);
const currentCall = storage.getStore.bind(storage);

/** The tool's functions by the names of their exports, and the object that they stand in. */
const handlers = create(null);
let handlersObject;
/** Calls that run, by their ids, and how many they are. */
const running = create(null);
let open = 0;
/** Calls that came before the module was loaded; undefined after that. */
let early = [];
/** The bytes of `message` frames by their ids, and the ids in their order. */
const messages = create(null);
const messageIds = [];
/** Questions without an answer: [resolve, reject] by their numbers. */
const asked = create(null);
let lastAsk = 0;
/** The tool was granted no network. */
let offline = false;
/** What contexts of calls ask of this module. */
const worker = { outputLimit: 1 << 20, mayAsk: false, send, ask, logMethods };

// --- sending

/** Puts bytes that the socket has no room for into a queue; set with the channel. `queued`: how many are in it. */
let writeLater;
let queued = 0;

function send(frame) {
  write(encode(frame));
}

function write(bytes) {
  let sent = 0;
  try {
    while (queued === 0 && sent < bytes.length) sent += writeSync(FD, bytes, sent, bytes.length - sent);
  } catch (error) {
    if (error.code !== "EAGAIN") leave(); // the host is gone, or the tool closed the channel
  }
  if (sent === bytes.length) return;
  queued += bytes.length - sent;
  writeLater(copyOf(bytes, sent, bytes.length));
}

function copyOf(bytes, from, to) {
  const copy = allocate(to - from);
  setBytes(copy, subarray(bytes, from, to), 0);
  return copy;
}

/** A promise of what the bus answers. */
function ask(call, op, fields) {
  const frame = assign({ type: "ask", callId: call.id, askId: ++lastAsk, op }, fields);
  let bytes;
  try {
    bytes = encode(frame, MAX_ASK);
  } catch (error) {
    if (error instanceof BadValue) throw new TypeError(`ctx.runtime${error.path}: ${error.reason}`);
    if (!(error instanceof TooLong)) throw error;
    const suggestion = "Write it to a file, and say where.";
    throw new AgentError(`what is asked has ${error.size} bytes, limit ${MAX_ASK}`, { code: "E_TOOL_LIMIT", suggestion });
  }
  return new NativePromise((resolve, reject) => {
    asked[frame.askId] = [resolve, reject];
    write(bytes);
  });
}

function answered({ askId, value, error }) {
  const waiting = asked[askId];
  if (waiting === undefined) return;
  delete asked[askId];
  if (error == null) waiting[0](value ?? null);
  else waiting[1](new AgentError(error.message, error));
}

// --- log

let logTokens = LOG_BURST;
let logAt = 0;
let logDropped = 0;

/** Send a log line, within the budget. */
function log(level, line, call) {
  const time = now();
  logTokens = min(LOG_BURST, logTokens + ((time - logAt) / 1000) * LOG_PER_S);
  logAt = time;
  if (logTokens < 1) return void logDropped++;
  logTokens--;
  const dropped = logDropped;
  logDropped = 0;
  if (dropped > 0) send({ type: "log", level: "warn", message: `${dropped} log lines were dropped` });
  send({ type: "log", level, message: line.length > MAX_LINE ? `${slice(line, 0, MAX_LINE)}…` : line, callId: call?.id });
}

/** The methods of a console that log, each for the call that `callOf` names. */
function logMethods(callOf) {
  const method = (level) => (...values) => {
    let line;
    try {
      line = apply(format, undefined, values);
    } catch (error) {
      line = `what was logged cannot be shown: ${shown(error, 200)}`;
    }
    log(level, line, callOf());
  };
  const info = method("info");
  return { debug: method("debug"), log: info, info, warn: method("warn"), error: method("error") };
}

/** process.stdout or process.stderr: each line that is written becomes a log line of the call that wrote it. */
function capturePrinted(name, level) {
  const found = getOwnPropertyDescriptor(process, name);
  let stream;
  let partial = "";
  function print(chunk, encoding, done) {
    const lines = split(partial + (typeof chunk === "string" ? chunk : toText(chunk, 0, chunk.length)), "\n");
    partial = lines[lines.length - 1];
    for (let i = 0; i < lines.length - 1; i++) log(level, lines[i], currentCall());
    if (partial.length > MAX_LINE) {
      log(level, partial, currentCall());
      partial = "";
    }
    const told = typeof encoding === "function" ? encoding : done;
    if (typeof told === "function") nextTick(told);
    return true;
  }
  const get = () => (stream ??= assign(found.get === undefined ? found.value : apply(found.get, process, []), { write: print }));
  defineProperty(process, name, { __proto__: null, get, configurable: true, enumerable: true });
}

// --- calls

function start(frame) {
  const call = new Call(frame, frame.messageId == null ? undefined : messages[frame.messageId], worker);
  running[call.id] = call;
  open++;
  if (early === undefined) within(call, run, call);
  else push(early, call);
}

function run(call) {
  const name = call.frame.export;
  const handler = handlers[name];
  if (handler === undefined) {
    const message = `the tool has no handler ${inspect(name)}; it has: ${join(sort(keys(handlers)), ", ") || "none"}`;
    return fail(call, { name: "LookupError", message, code: "E_TOOL_NOT_FOUND" });
  }
  follow(call, () => apply(handler, handlersObject, [new ToolContext(call), call.frame.input]));
}

/** Answer with what `produce` gives; if that is something to wait for, with what it comes to. */
function follow(call, produce) {
  try {
    let value = produce();
    if (typeof value === "object" && value !== null && !types.isPromise(value)) {
      const method = methodOf(value, "then");
      if (method !== undefined) value = new NativePromise((ok, bad) => apply(method, value, [ok, bad]));
    }
    if (types.isPromise(value)) then(value, (result) => succeed(call, result), (error) => failWith(call, error));
    else succeed(call, value);
  } catch (error) {
    failWith(call, error);
  }
}

function succeed(call, value) {
  if (call.done) return;
  if (value instanceof Pending) return goOn(call, value);
  let bytes;
  try {
    bytes = encodeResult(call.id, value, worker.outputLimit);
  } catch (error) {
    if (error instanceof BadValue)
      return fail(call, { name: "TypeError", message: `output${error.path}: ${error.reason}`, code: "E_TOOL_BAD_OUTPUT" });
    if (!(error instanceof TooLong)) return failWith(call, error);
    const message = `the output has ${error.size} bytes, limit ${worker.outputLimit} (outputMb)`;
    return fail(call, { name: "OutputTooLarge", message, code: "E_TOOL_LIMIT" });
  }
  finish(call, bytes);
}

/** Send the `pending` result of a call, and go on with its work. */
function goOn(call, { handle, work }) {
  if (call.pending) {
    const message = "pending work returned a Pending; it may only return its final value";
    return fail(call, { name: "TypeError", message, code: "E_TOOL_BAD_OUTPUT" });
  }
  const bytes = encode({ type: "result", callId: call.id, status: "pending", handle, continues: work !== undefined });
  if (work === undefined) return finish(call, bytes);
  call.pending = true;
  write(bytes);
  follow(call, typeof work === "function" ? work : () => work);
}

/** Answer with what the tool's code has thrown; where it came from goes to the log. */
function failWith(call, thrown) {
  if (call.done) return;
  const error = errorOf(thrown, offline);
  log("debug", `${error.name}${where(thrown)}`, call);
  fail(call, error);
}

function fail(call, error) {
  if (!call.done) finish(call, encode({ type: "result", callId: call.id, status: "error", error }));
}

/** Send the last result of a call. What it left behind ends before. */
function finish(call, bytes) {
  call.done = true;
  if (open === 1) sweep(call.frame.background === true);
  delete running[call.id];
  open--;
  write(bytes);
}

/** An exception that no handler waits for: the error of the call that it belongs to, else a line of the log. */
function stray(thrown) {
  const call = currentCall() ?? (open === 1 ? running[keys(running)[0]] : undefined);
  if (call !== undefined && !call.done) return failWith(call, thrown);
  const { name, message } = errorOf(thrown, offline);
  log("error", `uncaught ${name}: ${message}${where(thrown)}`, call);
}

class ExitError extends Error {
  name = "ExitError";
  code = "E_TOOL";
}

/** process.exit of a tool: an error of its call, at once, whatever becomes of what is thrown. */
function refuseExit(code) {
  const error = new ExitError(`process.exit(${code === undefined ? "" : shown(code, 100)}) was called`);
  const call = currentCall();
  if (call !== undefined) failWith(call, error);
  throw error;
}

// --- frames from the host

function handle(bytes, from, to) {
  let frame;
  try {
    frame = decode(bytes, from, to);
  } catch (error) {
    leave(`bad frame from the host: ${error.message}`);
  }
  switch (frame.type) {
    case "call": return start(frame);
    case "message": return remember(frame.messageId, copyOf(bytes, from, to));
    case "cancel": return running[frame.callId] && within(running[frame.callId], () => running[frame.callId].cancel());
    case "answer": return answered(frame);
    case "init": return void load(frame);
    case "exit": return leave();
  }
}

function remember(id, bytes) {
  if (!(id in messages)) push(messageIds, id);
  messages[id] = bytes;
  if (messageIds.length > MAX_MESSAGES) delete messages[shift(messageIds)];
}

async function load(init) {
  if (init.protocol !== PROTOCOL) refuse(`this worker speaks protocol ${PROTOCOL}`);
  worker.outputLimit = init.outputLimit ?? worker.outputLimit;
  worker.mayAsk = isArray(init.permissions) && includes(init.permissions, "agents");
  offline = init.offline === true;
  assign(process.env, init.env);
  try {
    const loaded = await import(pathToFileURL(init.entry).href);
    handlersObject = loaded.handlers ?? loaded.default?.handlers;
    if (typeof handlersObject !== "object" || handlersObject === null)
      refuse(`${init.entry} exports no \`handlers\`, an object from export names to functions`);
    const names = keys(handlersObject);
    for (let i = 0; i < names.length; i++) {
      handlers[names[i]] = handlersObject[names[i]];
      if (typeof handlers[names[i]] !== "function") refuse(`${init.entry}: handlers[${inspect(names[i])}] is no function`);
    }
  } catch (error) {
    const { name, message, code } = errorOf(error, offline);
    const advice = code === "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX" ? "; Node only strips types: sandbox.javascript: bun runs it" : "";
    refuse(`${name}: ${message}${where(error)}${advice}`);
  }
  if (init.jailed === true) enable();
  send({ type: "ready", protocol: PROTOCOL, exports: keys(handlers) });
  const waiting = early;
  early = undefined;
  for (let i = 0; i < waiting.length; i++) within(waiting[i], run, waiting[i]);
}

function refuse(message) {
  send({ type: "load_failed", message: slice(replace(message, /\s*\n\s*/g, " "), 0, MAX_ERROR) });
  leave();
}

/** A frame that has not come whole, and how much of it there is. */
let held;
let have = 0;

/** Take bytes from the host, and handle each frame that is whole. */
function feed(chunk) {
  for (let i = 0; i < chunk.length; ) {
    if (held === undefined) {
      const size = chunk.length - i < 4 ? 0 : 4 + sizeAt(chunk, i);
      if (size > 0 && chunk.length - i >= size) {
        handle(chunk, i + 4, i + size);
        i += size;
        continue;
      }
      held = allocate(size || 4);
      have = 0;
    }
    const more = min(held.length - have, chunk.length - i);
    setBytes(held, subarray(chunk, i, i + more), have);
    have += more;
    i += more;
    if (have < held.length) continue;
    const whole = held;
    held = undefined;
    const size = 4 + sizeAt(whole, 0);
    if (whole.length === size) handle(whole, 4, size);
    else {
      held = allocate(size);
      setBytes(held, whole, 0);
    }
  }
}

function sizeAt(bytes, i) {
  const size = bytes[i] + bytes[i + 1] * 256 + bytes[i + 2] * 65536 + bytes[i + 3] * 16777216;
  if (size < 1 || size > MAX_FRAME) leave(`a frame has ${size} bytes, limit ${MAX_FRAME}`);
  return size;
}

/** End this process; the jail ends with it. */
function leave(reason) {
  if (reason !== undefined) {
    try {
      writeSync(2, `worker: ${reason}\n`);
    } catch {
      // nobody reads it
    }
  }
  exit(reason === undefined ? 0 : 1);
}

/** Node reads quickest by a socket of its own, whose buffer is used again and again. */
async function openSocket() {
  const { Socket } = await import("node:net");
  const onread = { buffer: allocate(READ_BYTES), callback: (count, buffer) => (feed(subarray(buffer, 0, count)), true) };
  const socket = new Socket({ fd: FD, readable: true, writable: true, onread });
  const put = socket.write.bind(socket);
  writeLater = (bytes) => put(bytes, () => (queued -= bytes.length));
  socket.on("end", () => leave());
  socket.on("error", () => leave());
}

/** Bun cannot adopt descriptor 3 as a socket, but reads it as a stream. */
async function openStream() {
  const waiting = [];
  const again = () => {
    try {
      while (waiting.length > 0) {
        const sent = writeSync(FD, waiting[0], 0, waiting[0].length);
        queued -= sent;
        waiting[0] = subarray(waiting[0], sent, waiting[0].length);
        if (waiting[0].length === 0) shift(waiting);
      }
    } catch (error) {
      if (error.code !== "EAGAIN") leave();
      later(again, AGAIN_MS);
    }
  };
  writeLater = (bytes) => push(waiting, bytes) === 1 && later(again, AGAIN_MS);
  const reader = globalThis.Bun.file(FD).stream().getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) leave();
    feed(value);
  }
}

// --- the world of the tool

function prepare(onBun) {
  if (onBun) {
    const setup = (build) => build.module("@goondan/core", () => ({ exports: core, loader: "object" }));
    globalThis.Bun.plugin({ name: "@goondan/core", setup });
    waitForExit(globalThis.Bun);
  } else {
    const found = { url: new URL("core/index.mjs", import.meta.url).href, format: "module", shortCircuit: true };
    module.registerHooks({ resolve: (name, context, next) => (name === "@goondan/core" ? found : next(name, context)) });
    offerBun();
    const { emitWarning } = process; // Node says of each tool in TypeScript that to strip types is an experiment
    process.emitWarning = (...args) => includes(args, "ExperimentalWarning") || apply(emitWarning, process, args);
  }
  assign(globalThis.console, logMethods(currentCall));
  capturePrinted("stdout", "info");
  capturePrinted("stderr", "warn");
  process.exit = refuseExit;
  process.on("uncaughtException", stray);
  process.on("unhandledRejection", stray);
  module.syncBuiltinESMExports();
}

const onBun = process.versions.bun !== undefined;
prepare(onBun);
await (onBun ? openStream() : openSocket());
