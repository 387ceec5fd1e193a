/**
 * Payloads and pictures that lie in the broker's folder, and the place where a running kernel is found.
 *
 * Source: PROTOCOL.md "Large payloads", "Find a running kernel", "Transport".
 */

import { randomBytes } from "node:crypto";
import { constants, lstatSync, readFileSync, realpathSync, statSync } from "node:fs";
import { open as openFile, readFile, unlink, utimes, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";

import { digestOf } from "./codec.mjs";
import { GoondanError } from "./errors.mjs";

/** @typedef {import("./wire.d.ts").Blob} Blob */
/** @typedef {import("./index.mjs").Attachment} Attachment */

/** The largest payload by reference (bytes). */
const MAX_BLOB = 67_371_008;
/** Files of one message: how many, how large each, and all of them (bytes). */
const [MAX_FILES, MAX_FILE, MAX_FILES_BYTES] = [16, 16 << 20, 20 << 20];
/** How a kind of file begins. @type {[string, RegExp][]} */
const KINDS = [
  ["image/png", /^\x89PNG\r\n\x1a\n/], ["image/jpeg", /^\xff\xd8\xff/], ["image/gif", /^GIF8[79]a/],
  ["image/webp", /^RIFF[^]{4}WEBP/], ["application/pdf", /^%PDF-/],
];

/**
 * Write bytes into the folder, under a new name.
 *
 * @param {string} folder @param {Uint8Array} data @param {boolean} durable they must survive a loss of power
 * @returns {Promise<Blob>} Raises GoondanError E_DISK_FULL.
 */
export async function writeBlob(folder, data, durable) {
  const file = randomBytes(16).toString("hex");
  const path = join(folder, file);
  const flag = constants.O_WRONLY | constants.O_CREAT | constants.O_EXCL | constants.O_NOFOLLOW;
  try {
    await writeFile(path, data, /** @type {any} */ ({ flag, mode: 0o600, flush: durable }));
    if (durable) {
      const above = await openFile(folder, constants.O_RDONLY | constants.O_DIRECTORY);
      await above.sync().finally(() => above.close());
    }
  } catch (error) {
    await removeBlob(folder, file);
    throw new GoondanError("E_DISK_FULL", `a payload cannot be written: ${/** @type {Error} */ (error).message}`);
  }
  return { file, digest: digestOf(data), size: data.length };
}

/** @param {string} folder @param {string} file */
export const removeBlob = (folder, file) => unlink(join(folder, file)).catch(() => {});

/** No sweep takes the file of a frame that goes out again. @param {string} folder @param {string} file */
export const touchBlob = (folder, file) => utimes(join(folder, file), new Date(), new Date()).catch(() => {});

/** @param {import("./codec.mjs").Frame} frame Raises GoondanError unless its reference is one. */
export function checkReference(frame) {
  const { type, payload, blob } = frame;
  const { file, digest, size } = /** @type {Blob} */ (blob);
  const named = /^[0-9a-f]{32}$/.test(file) && /^[0-9a-f]{64}$/.test(digest);
  const types = ["event", "ack", "tool.call", "tool.result", "tool.answer", "tool.completed"];
  if (!named || size < 1 || (payload !== undefined && payload !== null) || !types.includes(type))
    throw new GoondanError("E_BLOB_INVALID", "the reference to a payload is none");
  if (size > MAX_BLOB) throw new GoondanError("E_FRAME_TOO_LARGE", `a payload of ${size} bytes, limit ${MAX_BLOB}`);
}

/**
 * The bytes that a frame refers to. The file stays: those of answers are the broker's.
 *
 * @param {string | null | undefined} folder @param {import("./codec.mjs").Frame} frame
 * @returns {Promise<Buffer>} Raises GoondanError E_BLOB_INVALID, E_BLOB_MISSING, E_BLOB_MISMATCH, E_BLOB_UNAVAILABLE.
 */
export async function readBlob(folder, frame) {
  checkReference(frame);
  const { file, digest, size } = /** @type {Blob} */ (frame.blob);
  if (!folder) throw new GoondanError("E_BLOB_UNAVAILABLE", "this client has no access to large payloads");
  const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants;
  const missing = new GoondanError("E_BLOB_MISSING", "the file of a payload is not there");
  const opened = await openFile(join(folder, file), O_RDONLY | O_NOFOLLOW | O_NONBLOCK).catch(() => Promise.reject(missing));
  try {
    const state = await opened.stat();
    if (!state.isFile()) throw missing;
    const data = Buffer.alloc(size);
    const { bytesRead } = state.size === size ? await opened.read(data, 0, size, 0) : { bytesRead: -1 };
    if (bytesRead !== size || digestOf(data) !== digest)
      throw new GoondanError("E_BLOB_MISMATCH", "the file of a payload holds something else");
    return data;
  } finally {
    await opened.close();
  }
}

/**
 * Pictures and PDFs for a message.
 *
 * @param {readonly Attachment[]} given
 * @returns {Promise<{ data: Buffer, mediaType: string, name: string | undefined }[]>} Raises GoondanError E_FILE_INVALID.
 */
export async function readAttachments(given) {
  /** @param {string} why @returns {never} */
  const refuse = (why) => {
    throw new GoondanError("E_FILE_INVALID", why);
  };
  if (given.length > MAX_FILES) refuse(`${given.length} files with one message, limit ${MAX_FILES}`);
  const found = [];
  let total = 0;
  for (const one of given) {
    const { data: source, name } = typeof one === "string" || one instanceof Uint8Array ? { data: one, name: undefined } : one;
    const path = typeof source === "string" ? source : undefined;
    const data = Buffer.from(typeof source === "string" ? await readFile(source).catch((error) => refuse(error.message)) : source);
    const head = data.toString("latin1", 0, 16);
    const mediaType = KINDS.find(([, begins]) => begins.test(head))?.[0] ?? refuse(`${name ?? path ?? "a file"} is no PNG, JPEG, GIF, WebP or PDF`);
    total += data.length;
    if (data.length > MAX_FILE || total > MAX_FILES_BYTES) refuse(`files of over ${MAX_FILE} bytes, or ${MAX_FILES_BYTES} in all`);
    found.push({ data, mediaType, name: name ?? (path && basename(path)) });
  }
  return found;
}

/**
 * The runtime directory of a running kernel: the one that was named, else that of the bundle that was named, else `GOONDAN_RUN_DIR`, else
 * that of the bundle in the folder that the program stands in.
 *
 * @param {{ bundle?: string, runDir?: string }} named
 * @returns {string} Raises GoondanError E_KERNEL_NOT_RUNNING.
 */
export function findRunDir({ bundle, runDir }) {
  const given = runDir ?? (bundle === undefined ? process.env.GOONDAN_RUN_DIR : undefined);
  if (given) return resolve(given);
  try {
    let path = realpathSync(bundle ?? process.cwd());
    if (statSync(path).isFile() && basename(path) === "goondan.yaml") path = dirname(path);
    const digest = digestOf(Buffer.from(path)).slice(0, 16);
    const root = process.env.GOONDAN_STATE_ROOT || join(homedir(), ".goondan");
    const record = JSON.parse(readFileSync(join(root, "workspaces", digest, "kernel", "kernel.json"), "utf8"));
    if (typeof record.runDir === "string") return record.runDir;
  } catch {
    // no bundle, no record, or one that is none
  }
  throw notRunning(`no kernel runs ${bundle ?? process.cwd()}`);
}

export const notRunning = (/** @type {string} */ why) =>
  new GoondanError("E_KERNEL_NOT_RUNNING", why, { suggestion: "Start it with `gdn run --detach`, or name its runDir." });

/**
 * The operator's token of a runtime directory, when nobody but its owner and root could have made what is there.
 *
 * @param {string} runDir
 * @returns {string | undefined} undefined while there is none. Raises GoondanError E_BROKER_UNTRUSTED.
 */
export function readToken(runDir) {
  const allowed = new Set([0, process.geteuid?.()]);
  try {
    const path = realpathSync(runDir);
    const owner = lstatSync(path).uid;
    if (process.geteuid?.() === 0) allowed.add(owner);
    for (let place = join(path, "clients.sock"); ; place = dirname(place)) {
      const { uid, mode } = lstatSync(place);
      // Node cannot read an access control list, whose mask a group's bits may be. So no group counts as ours alone.
      const isOpen = (mode & 0o022) !== 0 && (mode & 0o1000) === 0 && !place.endsWith(".sock");
      if (!allowed.has(uid) || isOpen) throw new GoondanError("E_BROKER_UNTRUSTED", `others may change ${place}`);
      if (place === dirname(place)) break;
    }
    return readFileSync(join(path, "client.token"), "utf8").trim() || undefined;
  } catch (error) {
    if (error instanceof GoondanError) throw error;
    return undefined;
  }
}
