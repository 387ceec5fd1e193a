/**
 * Orphans: processes that a call left behind. Noticing that there are none costs one read of /proc.
 *
 * Source: schemas/WORKER.md section 6.
 */
import fs from "node:fs";

import { attempt, taken } from "./codec.mjs";

const { openSync, readdirSync, readFileSync, readSync } = fs;
const kill = process.kill.bind(process);
const [lastIndexOf, slice, split] = taken(String.prototype, "lastIndexOf", "slice", "split");
const [toString] = taken(Buffer.prototype, "latin1Slice");

/** Whether this is a jail: elsewhere kill(-1) would hit every process of the user. */
let enabled = false;
/** The newest process id when nobody but init and this process was there; empty when that is not known. */
let newest = "";
/** What calls of exports with `background` left behind on purpose. */
let kept = [];
const loadavg = Buffer.alloc(128);
let descriptor = -1;

/** Begin, if the process ids agree that this is a jail. */
export function enable() {
  enabled = process.pid === 2 && process.ppid === 1;
  newest = newestPid();
}

/** A call has ended and no other runs: kill every process but this one and init; `keep` spares them for good. */
export function sweep(keep) {
  if (!enabled) return;
  const newer = newestPid();
  if (newer !== "" && newer === newest) return; // no process and no thread was started since
  if (!alone()) {
    if (keep) kept = others();
    else if (kept.length > 0) kept = killOthers();
    else end(-1); // looks at every process of the host, so it is not what is done first
  }
  newest = newestPid();
}

/** Equal to what it said before if and only if no process or thread was started since; empty if unknown. */
function newestPid() {
  try {
    if (descriptor < 0) descriptor = openSync("/proc/loadavg", "r");
    return split(toString(loadavg, 0, readSync(descriptor, loadavg, 0, 128, 0)), " ")[4];
  } catch {
    descriptor = -1; // the tool closed it
    return "";
  }
}

const read = (path) => attempt(() => readFileSync(path, "latin1"), "");
const end = (pid) => attempt(() => kill(pid, "SIGKILL"));

/** Whether neither init nor a thread of this process has another child. */
function alone() {
  if (read("/proc/1/task/1/children") !== "2 ") return false;
  const threads = readdirSync("/proc/2/task");
  for (let i = 0; i < threads.length; i++) if (read(`/proc/2/task/${threads[i]}/children`) !== "") return false;
  return true;
}

function others() {
  const pids = [];
  const names = readdirSync("/proc");
  for (let i = 0; i < names.length; i++) if (+names[i] > 2) pids[pids.length] = +names[i];
  return pids;
}

/**
 * Kill all but the kept ones and their descendants, until there are no others: one that is killed may have begun a process since
 * they were listed. Which of the kept ones still live.
 */
function killOthers() {
  const spared = { __proto__: null };
  for (let i = 0; i < kept.length; i++) spared[kept[i]] = true;
  for (let live = [], killed = 0; ; live = [], killed = 0) {
    const pids = others();
    for (let i = 0; i < pids.length; i++) {
      const stat = read(`/proc/${pids[i]}/stat`); // the name, which the process chose, may have a ")" in it
      const [state, parent] = split(slice(stat, lastIndexOf(stat, ")") + 2), " ");
      if (state === "Z" || parent === undefined) continue;
      if ((spared[pids[i]] ||= spared[parent])) live[live.length] = pids[i];
      else killed += end(pids[i]) ? 1 : 0;
    }
    if (killed === 0) return live;
  }
}
