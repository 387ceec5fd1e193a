/**
 * How what a tool has thrown is put into words. Anything can be thrown, and each look at it can throw again.
 *
 * Source: schemas/WORKER.md sections 4 and 12; docs/design/sandbox.md section 6.
 */

import { attempt, ownOf, taken, util } from "./codec.mjs";

/** An error's message (characters). */
export const MAX_ERROR = 16384;
/** Errors looked at behind the one that was thrown; a chain can be a ring. */
const DEPTH = 16;
const UNREACHABLE =
  /^(ENETUNREACH|EHOSTUNREACH|EADDRNOTAVAIL|EAFNOSUPPORT|ECONNREFUSED|ENOTFOUND|EAI_\w+|ConnectionRefused|FailedToOpenSocket)$/;
const OF_SOCKETS = /^(socket|connect|bind|listen|getaddrinfo)$/;
/** Bun's words for a socket that it may not make; no code tells. */
const OF_BUN = /^(EPERM: Was there a typo in the url or port\?|Failed to listen at )/;

/** A line of a stack that names a file. */
const PLACE = /^(?:[^\S\n]+at (?:.* \()?)?(?:file:\/\/)?(\/[^()\n]*?:\d+)(?::\d+)?\)?$/m;

const { isArray } = Array;
const [slice] = taken(String.prototype, "slice");
const [find] = taken(RegExp.prototype, "exec");

/** A property of an object or a function; undefined when it cannot be read. */
const property = (value, name) => attempt(() => (value == null ? undefined : ownOf(value, name)));

/** Anything as a text of at most `most` characters. */
export const shown = (value, most) =>
  attempt(() => slice(typeof value === "string" ? value : util.inspect(value), 0, most), `something of type ${typeof value}`);

const textOf = (value) => (typeof value === "string" && value !== "" ? slice(value, 0, MAX_ERROR) : undefined);

/** The `error` of a result, for what was thrown. `offline`: the tool was granted no network. */
export function errorOf(thrown, offline) {
  if ((typeof thrown !== "object" && typeof thrown !== "function") || thrown === null)
    return { name: "Error", message: textOf(thrown) ?? `${shown(thrown, MAX_ERROR)} was thrown` };
  const name = textOf(property(thrown, "name")) ?? textOf(property(property(thrown, "constructor"), "name")) ?? "Error";
  const message = property(thrown, "message");
  return {
    name,
    message: textOf(message) ?? (message === undefined ? shown(thrown, MAX_ERROR) : name),
    code: offline && isOffline(thrown, 0) ? "ENETUNREACH" : textOf(property(thrown, "code")), // the host knows why
    suggestion: textOf(property(thrown, "suggestion")),
    helpUrl: textOf(property(thrown, "helpUrl")),
  };
}

/** Whether an error, or one behind it, comes from a missing network. */
function isOffline(error, depth) {
  if (depth > DEPTH || typeof error !== "object" || error === null) return false;
  const code = property(error, "code");
  if (find(UNREACHABLE, textOf(code))) return true;
  if ((code === "EPERM" || code === "EACCES") && find(OF_SOCKETS, textOf(property(error, "syscall")))) return true;
  if (find(OF_BUN, textOf(property(error, "message")))) return true;
  const several = property(error, "errors");
  return isOffline(property(error, "cause"), depth + 1) || (isArray(several) && isOffline(several[0], depth + 1));
}

/** " at FILE:LINE", where an error was made; nothing when that is not known. */
export function where(error) {
  const stack = property(error, "stack");
  const place = typeof stack === "string" ? find(PLACE, stack) : null;
  if (place !== null) return ` at ${place[1]}`;
  const position = property(error, "position"); // what Bun cannot build has no stack
  return position == null ? "" : ` at ${position.file}:${position.line}`;
}
