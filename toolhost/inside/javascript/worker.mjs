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
import { pathToFileURL } from "node:url";

import { offerBun, waitForExit } from "./bun.mjs";
import { BadValue, TooLong, allocate, attempt, decode, encode, methodOf, quoted, taken, util } from "./codec.mjs";
import { MAX_LINE, ToolContext, callOf, cancel } from "./context.mjs";
import * as core from "./core/index.mjs";
import { MAX_ERROR, errorOf, shown, where } from "./failures.mjs";
import { enable, sweep } from "./orphans.mjs";

const PROTOCOL = 1;
const [FD, F_SETFD, FD_CLOEXEC] = [3, 2, 1];
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

const { AgentError, Pending } = core;
const { apply } = Reflect;
const { assign, create, defineProperty, keys } = Object;
const { types } = util;
const { writeSync } = fs;
const { min } = Math;
const NativePromise = Promise;
const [then] = taken(Promise.prototype, "then");
const [includes, join, push, shift, sort] = taken(Array.prototype, "includes", "join", "push", "shift", "sort");
const [replace, slice, split] = taken(String.prototype, "replace", "slice", "split");
const [copyOf, subarray] = taken(Uint8Array.prototype, "slice", "subarray");
const [toText] = taken(Buffer.prototype, "utf8Slice");
const concat = Buffer.concat.bind(Buffer);
const now = performance.now.bind(performance);
const exit = process.exit.bind(process);
const builtin = process.getBuiltinModule;
const storage = new AsyncLocalStorage();
const within = storage.run.bind(storage);
const currentCall = storage.getStore.bind(storage);

/** The tool's functions by the names of their exports, and the object that they stand in. */
const handlers = create(null);
let handlersObject;
/** Calls that run, by their ids, how many they are, and how many there ever were. */
const running = create(null);
let [open, begun] = [0, 0];
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
const send = (frame) => write(encode(frame));
/** What contexts of calls ask of this module. */
const worker = { outputLimit: 1 << 20, mayAsk: false, send, ask, logMethods };

// --- sending

/** Node's socket, and how many bytes wait in it because descriptor 3 had no room for them. Under Bun a write waits. */
let put;
let queued = 0;

function write(bytes) {
  let sent = 0;
  try {
    while (queued === 0 && sent < bytes.length) sent += writeSync(FD, bytes, sent, bytes.length - sent);
  } catch (error) {
    if (error.code !== "EAGAIN") leave(); // the host is gone, or the tool closed the channel
  }
  if (sent === bytes.length) return;
  const rest = copyOf(bytes, sent, bytes.length);
  queued += rest.length;
  put(rest, () => (queued -= rest.length));
}

/** A promise of what the bus answers. */
function ask(call, op, fields) {
  const frame = { type: "ask", callId: call.id, askId: ++lastAsk, op, ...fields };
  let bytes;
  try {
    bytes = encode(frame, MAX_ASK);
  } catch (error) {
    if (error instanceof BadValue) throw new TypeError(`ctx.runtime: ${error.path}: ${error.reason}`);
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

/** The methods of a console that log, each for the call that `whose` names. */
function logMethods(whose) {
  const lineOf = (values) => attempt(() => apply(util.format, undefined, values), "what was logged cannot be shown");
  const isText = (values) => values.length === 1 && typeof values[0] === "string"; // Bun takes its time to load util.format
  const method = (level) => (...values) => log(level, isText(values) ? values[0] : lineOf(values), whose());
  const info = method("info");
  return { debug: method("debug"), log: info, info, warn: method("warn"), error: method("error") };
}

/**
 * process.stdout or process.stderr: each line of what is written becomes a log line of its call. The runtime's own stream is not
 * even looked at, since a look makes it, and that takes milliseconds.
 */
function capturePrinted(name, level, fd) {
  let stream;
  function write(chunk, encoding, done) {
    const lines = split(typeof chunk === "string" ? chunk : toText(chunk, 0, chunk.length), "\n");
    for (let i = 0; i < lines.length; i++) if (i < lines.length - 1 || lines[i] !== "") log(level, lines[i], currentCall());
    done();
  }
  const get = () => (stream ??= assign(new (builtin("node:stream").Writable)({ decodeStrings: false, write }), { fd }));
  attempt(() => (process[name] = undefined)); // or Bun makes its stream first; Node refuses, and needs none
  defineProperty(process, name, { __proto__: null, get, configurable: true, enumerable: true });
}

// --- calls

function start(frame) {
  const call = callOf(frame, frame.messageId == null ? undefined : messages[frame.messageId], worker);
  running[call.id] = call;
  open++;
  begun++;
  if (early === undefined) within(call, run, call);
  else push(early, call);
}

function run(call) {
  const name = call.frame.export;
  const handler = handlers[name];
  if (handler === undefined) {
    const message = `the tool has no handler ${quoted(name)}; it has: ${join(sort(keys(handlers)), ", ") || "none"}`;
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
  let bytes;
  try {
    if (value instanceof Pending) return goOn(call, value);
    bytes = encode({ type: "result", callId: call.id, status: "ok", output: value }, worker.outputLimit);
  } catch (error) {
    if (error instanceof BadValue)
      return fail(call, { name: "TypeError", message: `${error.path}: ${error.reason}`, code: "E_TOOL_BAD_OUTPUT" });
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
  finish(call, encode({ type: "result", callId: call.id, status: "error", error }));
}

/** Send the last result of a call. What it left behind ends before. */
function finish(call, bytes) {
  if (call.done) return; // code of its value has ended it meanwhile
  call.done = true;
  // Without a descriptor it fails: the next call looks again.
  if (open === 1) attempt(() => sweep(call.frame.background === true));
  delete running[call.id];
  open--;
  write(bytes);
}

/**
 * An exception that no handler waits for: the error of the call that it belongs to, else a line of the log. Where the runtime does
 * not tell the call, it may come from one that has ended, and only of the first call that is not so.
 */
function stray(thrown) {
  const call = currentCall() ?? (begun === 1 ? running[keys(running)[0]] : undefined);
  if (call !== undefined && !call.done) return failWith(call, thrown);
  const { name, message } = errorOf(thrown, offline);
  log("error", `uncaught ${name}: ${message}${where(thrown)}`, call);
}

/** process.exit of a tool: an error of its call, at once, whatever becomes of what is thrown. */
function refuseExit(code) {
  const message = `process.exit(${code === undefined ? "" : shown(code, 100)}) was called`;
  const error = assign(new Error(message), { name: "ExitError", code: "E_TOOL" });
  const call = currentCall();
  if (call !== undefined) failWith(call, error);
  throw error;
}

// --- frames from the host

function handle(bytes, from, to) {
  const frame = attempt(() => decode(bytes, from, to)) ?? leave("a bad frame from the host");
  switch (frame.type) {
    case "call": return start(frame);
    case "message": return remember(frame.messageId, copyOf(bytes, from, to));
    case "cancel": return running[frame.callId] && within(running[frame.callId], cancel, running[frame.callId]);
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
  worker.mayAsk = includes(init.permissions ?? [], "agents");
  offline = init.offline === true;
  assign(process.env, init.env);
  try {
    const loaded = await import(pathToFileURL(init.entry).href);
    handlersObject = loaded.handlers ?? loaded.default?.handlers;
    if (typeof handlersObject !== "object" || handlersObject === null)
      refuse(`NoHandlers: ${init.entry} exports no \`handlers\`, an object from export names to functions`);
    const names = keys(handlersObject);
    for (let i = 0; i < names.length; i++) {
      handlers[names[i]] = handlersObject[names[i]];
      if (typeof handlers[names[i]] !== "function")
        refuse(`NoHandlers: ${init.entry}: handlers[${quoted(names[i])}] is no function`);
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

/** The beginning of a frame that has not come whole. */
let held = allocate(0);

/** Take bytes from the host, and handle each frame that is whole. */
function feed(chunk) {
  const bytes = held.length > 0 ? concat([held, chunk]) : chunk;
  let at = 0;
  for (let size; bytes.length - at >= 4 && bytes.length - at - 4 >= (size = sizeAt(bytes, at)); at += 4 + size)
    handle(bytes, at + 4, at + 4 + size);
  held = copyOf(bytes, at, bytes.length);
}

function sizeAt(bytes, i) {
  const size = bytes[i] + bytes[i + 1] * 256 + bytes[i + 2] * 65536 + bytes[i + 3] * 16777216;
  if (size < 1 || size > MAX_FRAME) leave(`a frame has ${size} bytes, limit ${MAX_FRAME}`);
  return size;
}

/** End this process; the jail ends with it. */
function leave(reason) {
  if (reason !== undefined) attempt(() => writeSync(2, `worker: ${reason}\n`));
  exit(reason === undefined ? 0 : 1);
}

/** Node reads quickest by a socket of its own, whose buffer is used again and again. */
async function readSocket() {
  const { Socket } = await import("node:net");
  const onread = { buffer: allocate(READ_BYTES), callback: (count, buffer) => (feed(subarray(buffer, 0, count)), true) };
  const socket = new Socket({ fd: FD, readable: true, writable: true, onread });
  put = socket.write.bind(socket);
  socket.on("end", () => leave()); // an error is one that nobody waits for: what is written of it finds the host gone
}

/** Bun cannot adopt descriptor 3 as a socket, but reads it as a stream. It does not mark it close-on-exec, as Node does at its start. */
async function readStream() {
  const { dlopen } = await import("bun:ffi");
  attempt(() => dlopen("libc.so.6", { fcntl: { args: ["i32", "i32", "i32"], returns: "i32" } }).symbols.fcntl(FD, F_SETFD, FD_CLOEXEC));
  for await (const chunk of globalThis.Bun.file(FD).stream()) feed(chunk);
  leave();
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
  capturePrinted("stdout", "info", 1);
  capturePrinted("stderr", "warn", 2);
  process.exit = refuseExit;
  process.on("uncaughtException", stray);
  process.on("unhandledRejection", stray);
  module.syncBuiltinESMExports();
}

const onBun = process.versions.bun !== undefined;
prepare(onBun);
await (onBun ? readStream() : readSocket());
