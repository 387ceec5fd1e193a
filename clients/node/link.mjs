/**
 * The shell of a Peer: a DEALER socket, the clock, and the files of large payloads.
 *
 * One loop reads, one writes. A socket that has been silent for too long is closed and replaced: npm's zeromq may lose
 * a wake-up after a reconnect, and then its promises never settle.
 *
 * Source: PROTOCOL.md "Transport", "Silence", "Large payloads".
 */

import { randomBytes } from "node:crypto";

import { Dealer } from "zeromq";

import { MAX_RELAYED, decodeFrame, decodePayload, digestOf, encodeValue } from "./codec.mjs";
import { GoondanError } from "./errors.mjs";
import { findRunDir, notRunning, readAttachments, readBlob, readToken, removeBlob, touchBlob, writeBlob } from "./files.mjs";
import { INLINE, Peer } from "./peer.mjs";

/**
 * @typedef {import("./peer.mjs").Entry} Entry
 * @typedef {import("./peer.mjs").Shell} Shell
 */

/** How often time is looked at (ms). */
const TICK_MS = 100;
/** How long an orderly end waits for what was sent (ms). */
const LINGER_MS = 500;

/** Nothing waits in the socket but what is on its way: what cannot go out at once finds no connection. */
const OPTIONS = Object.freeze({
  immediate: true, probeRouter: true, reconnectInterval: 20, maxMessageSize: MAX_RELAYED, linger: 0,
  sendHighWaterMark: 0, receiveHighWaterMark: 0, sendTimeout: 0,
});

const now = () => performance.now();

/** @implements {Shell} */
export class Link {
  #named;
  #runDir;
  #peer = new Peer(randomBytes(6).toString("hex"), this);
  /** @type {Dealer | undefined} */
  #socket;
  /** @type {Uint8Array[]} */
  #outgoing = [];
  /** @type {NodeJS.Timeout | undefined} */
  #timer;
  /** @type {{ resolve: () => void, reject: (error: Error) => void } | undefined} */
  #opening;

  /** @param {{ bundle?: string, runDir?: string }} named Raises GoondanError E_KERNEL_NOT_RUNNING. */
  constructor(named) {
    this.#named = named;
    this.#runDir = findRunDir(named);
  }

  /** Connect, and wait for the welcome. @param {number} timeoutMs Raises GoondanError E_KERNEL_NOT_RUNNING, or what hello was answered. */
  async open(timeoutMs) {
    const welcomed = new Promise((resolve, reject) => (this.#opening = { resolve: () => resolve(undefined), reject }));
    const error = notRunning(`no kernel answers in ${this.#runDir}`);
    const patience = setTimeout(() => this.over(error), timeoutMs);
    this.#connect();
    this.#timer = setInterval(() => this.#peer.tick(now()), TICK_MS);
    try {
      await welcomed;
    } finally {
      clearTimeout(patience);
      this.#opening = undefined;
    }
  }

  /** @param {Entry} entry its waiter's `settle` is called once, `live` for each live event */
  submit(entry) {
    this.#peer.submit(entry, now());
  }

  /** Nobody waits for it any more. Whether the broker may have it. @param {Entry} entry */
  giveUp(entry) {
    return this.#peer.giveUp(entry);
  }

  /** End orderly: what is queued goes out, what is unanswered fails. */
  close(error = new GoondanError("E_LINK_CLOSED", "the link was closed before the answer came")) {
    this.#peer.close(error);
    clearInterval(this.#timer);
    this.#drain();
    this.#disconnect(LINGER_MS);
  }

  #connect() {
    const socket = (this.#socket = new Dealer(OPTIONS));
    socket.connect(`ipc://${this.#runDir}/clients.sock`);
    this.#listen(socket).catch(() => {}); // it was closed
  }

  #disconnect(linger = 0) {
    const socket = this.#socket;
    this.#socket = undefined;
    this.#outgoing = [];
    if (socket === undefined) return;
    socket.linger = linger;
    socket.close();
  }

  /** @param {Dealer} socket */
  async #listen(socket) {
    for await (const [data, ...more] of socket) {
      if (socket !== this.#socket) return;
      if (data.length > 0 && more.length === 0) await this.#handle(data, socket);
    }
  }

  /** @param {Buffer} data @param {Dealer} socket */
  async #handle(data, socket) {
    try {
      const frame = decodeFrame(data);
      if (frame.blob && this.#peer.awaits(frame)) await this.#fetch(frame); // later frames wait
      if (socket !== this.#socket) return;
      this.#peer.receive(frame, now());
    } catch {
      // it was none, or one that no client takes
    }
  }

  /** @param {import("./codec.mjs").Frame} frame */
  async #fetch(frame) {
    try {
      frame.payload = decodePayload(await readBlob(this.#peer.welcome?.blobs, frame));
    } catch (error) {
      frame.fault = /** @type {GoondanError} */ (error);
    }
  }

  /** @param {{ token: string | undefined, error: GoondanError }} [refused] */
  greet(refused) {
    this.#outgoing = []; // what must arrive is in the outbox
    try {
      const token = readToken(this.#runDir);
      if (refused && token === refused.token) return this.over(refused.error);
      this.#peer.hello(token, now());
    } catch (error) {
      this.over(/** @type {GoondanError} */ (error));
    }
  }

  welcomed() {
    this.#opening?.resolve();
  }

  /** A new socket, to where the kernel is now. */
  reconnect() {
    try {
      this.#runDir = findRunDir(this.#named);
    } catch {
      // it may come again where it was
    }
    this.#disconnect();
    this.#connect();
  }

  /** @param {GoondanError} error */
  over(error) {
    this.#opening?.reject(error);
    this.close(error);
  }

  /** Frames of one turn leave together: one by one each wakes the broker. @param {Uint8Array} data */
  send(data) {
    if (this.#outgoing.push(data) === 1) setImmediate(() => this.#drain());
  }

  #drain() {
    const socket = this.#socket;
    // There is no connection. What must arrive is in the outbox, and goes out after the next welcome.
    const lost = () => socket === this.#socket && this.#peer.lost();
    for (const data of this.#outgoing.splice(0)) socket?.send(data).catch(lost);
  }

  /** @param {Entry} entry @param {import("./codec.mjs").Frame} [frame] @param {GoondanError} [error] */
  settle(entry, frame, error) {
    if (error && !entry.sent) this.#eachFile(entry, removeBlob); // nobody else does
    entry.waiter.settle(frame, error);
  }

  /** @param {Entry} entry */
  touch(entry) {
    this.#eachFile(entry, touchBlob);
  }

  /** @param {Entry} entry @param {(folder: string, file: string) => Promise<void>} act */
  #eachFile(entry, act) {
    const blobs = [entry.blob, ...(entry.header.files ?? []).map((/** @type {any} */ file) => file.blob)];
    for (const blob of blobs) if (blob) void act(/** @type {string} */ (this.#peer.welcome?.blobs), blob.file);
  }

  /** The payload and the files of an entry go into the folder. @param {Entry} entry */
  async write(entry) {
    const { blobs, durability } = /** @type {import("./wire.d.ts").Welcome} */ (this.#peer.welcome);
    const write = (/** @type {Uint8Array} */ data) => writeBlob(/** @type {string} */ (blobs), data, durability !== "process");
    const { header, payload, files } = entry;
    try {
      if (files.length > 0) header.files = [];
      for (const { data, mediaType, name } of await readAttachments(files))
        header.files.push({ type: "file", blob: await write(data), mediaType, name });
      if (header.digest !== undefined && files.length > 0) {
        const digests = header.files.map((/** @type {any} */ file) => file.blob.digest);
        const { type, input } = decodePayload(Buffer.from(payload));
        header.digest = digestOf(encodeValue([type, input, digests]));
      }
      if (payload.length > INLINE) entry.blob = await write(payload);
      if (!this.#peer.written(entry, now())) this.#eachFile(entry, removeBlob); // given up meanwhile
    } catch (error) {
      this.#peer.fail(entry, /** @type {GoondanError} */ (error));
    }
  }
}
