/**
 * `Bun` for tools that were written for it. Under Node it is made here: of its answers those that the specification's own
 * tools use. Under Bun its own `spawn` is made to tell the exit code in time.
 *
 * Source: docs/design/sandbox.md section 9; schemas/WORKER.md section 12.
 */
import { attempt } from "./codec.mjs";

/** Let what a program says end only when the program has: whoever has read it all finds `exitCode` set. */
const endsWith = (stream, exited) => stream.pipeThrough(new TransformStream({ flush: () => exited }));

/** Under Bun: the streams of `Bun.spawn` end after the program's end. */
export function waitForExit(bun) {
  const { spawn } = bun;
  bun.spawn = (...args) => {
    const program = spawn(...args);
    for (const name of ["stdout", "stderr"]) {
      const stream = program[name];
      if (!(stream instanceof ReadableStream)) continue;
      let value;
      const get = () => (value ??= endsWith(stream, program.exited));
      Object.defineProperty(program, name, { get, configurable: true, enumerable: true });
    }
    return program;
  };
}

/** Under Node: the global `Bun`, made when a tool first looks at it. */
export function offerBun() {
  let made;
  const get = () => (made ??= new Proxy(bunOf(process.getBuiltinModule), { get: known }));
  Object.defineProperty(globalThis, "Bun", { get, configurable: true });
}

function known(bun, name) {
  if (typeof name !== "string" || Object.hasOwn(bun, name)) return bun[name];
  const advice = "under Node a tool has Bun.file, Bun.spawn and Bun.write. sandbox.javascript: bun runs it under Bun";
  throw new TypeError(`Bun.${name} is Bun's own; ${advice}`);
}

function bunOf(builtin) {
  const { promises, statSync } = builtin("node:fs");
  const { Readable } = builtin("node:stream");

  class File {
    constructor(path) {
      this.name = path;
    }

    get size() { return attempt(() => statSync(this.name).size, 0); }
    async exists() { return attempt(() => statSync(this.name).isFile(), false); }
    /** Read as UTF-8; a byte order mark at its beginning is no part of it. */
    async text() { return new TextDecoder().decode(await promises.readFile(this.name)); }
  }

  async function write(target, content) {
    const path = target instanceof File ? target.name : target;
    await promises.mkdir(builtin("node:path").dirname(path), { recursive: true });
    await promises.writeFile(path, content);
    return Buffer.byteLength(content);
  }

  function spawn([program, ...args], { cwd, env, stdout = "pipe", stderr = "inherit" } = {}) {
    const child = builtin("node:child_process").spawn(program, args, { cwd, env, stdio: ["ignore", stdout, stderr] });
    const ended = builtin("node:events").once(child, "exit"); // or it fails with the child's `error`
    const exited = ended.then(([code, signal]) => code ?? 128 + builtin("node:os").constants.signals[signal]);
    exited.catch(() => {}); // whoever waits for it is told
    if (child.pid === undefined)
      throw Object.assign(new Error(`${program} cannot be started: no such program or folder`), { code: "ENOENT" });
    const shown = (stream) => (stream ? endsWith(Readable.toWeb(stream), exited) : undefined);
    return Object.assign(child, { stdout: shown(child.stdout), stderr: shown(child.stderr), exited });
  }

  return { file: (path) => new File(path), spawn, write };
}
