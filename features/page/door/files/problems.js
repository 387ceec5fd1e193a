// What is wrong with the swarm and what to do about it, the most urgent first. Pure.
import { count, duration } from "./format.js";

/** From when on a wait is one that somebody should look at (ms). Tools, other agents and people may take long. */
const LONG_MS = { model: 60e3, extension: 30e3, place: 60e3, process: 30e3, jail: 30e3 };
/** For how long what is over is worth a line (ms). */
const RECENT_MS = 5 * 60e3;

/**
 * @typedef {{text: string, todo: string, href: string}} Trouble what is so, what to do, and where
 * @typedef {Record<string, any>} Seen what the door has said last, as health.js keeps it
 */

/** What a row of /api/v1/waits waits for. @param {any} row */
export function waitsFor(row) {
  if (row.text) return row.text.replace(/^waits for /, "");
  const tools = row.tools?.join(", ");
  if (row.host === false) return `a tool host that runs ${tools}`;
  switch (row.kind) {
    case "answer": return `the answer of ${row.target}/${row.targetKey}`;
    case "tool": return tools;
    case "jail": return `a jail for ${tools}`;
    case "model": return `its model ${row.model}${row.message ? `, which said: ${row.message}` : ""}`;
    case "extension": return `the extension ${row.extension} at ${row.point}`;
    case "turn": return "the turn before";
    case "place": return "a place: as many turns run as may";
    case "process": return row.leaving ? "its old process to end" : "its process to start";
    default: return row.kind;
  }
}

/** The limits of a budget of which nothing is left. @param {any} budget as /api/v1/budgets has it */
export const spent = (budget) => Object.keys(budget.limits).filter((name) => budget.spent[name] >= budget.limits[name]);

/** Where a run is shown. @param {string} id a message, turn or trace */
export const runOf = (id) => `#/run/${encodeURIComponent(id)}`;

const who = (row) => `${row.agent}/${row.instanceKey}`;

function* ofKernel({ error, processes }) {
  if (error?.code === "E_KERNEL_NOT_RUNNING") yield ["No kernel runs the bundle of this page", "start it with: gdn run"];
  else if (error) yield [error.message, error.suggestion || "look at the log of the door"];
  for (const row of processes ?? []) {
    if (row.status !== "crash-loop") continue;
    const why = row.lastExit ? `, the last time by ${row.lastExit}` : "";
    yield [`${row.name} ends again and again${why}`, `look at its log: gdn logs --role ${row.role === "agent" ? `agent-${row.name}` : row.role}`];
  }
}

function* ofWaits({ waits }) {
  const rows = waits?.waits ?? [], among = (/** @type {string[]} */ names) => [...names, names[0]].join(" → ");
  if (rows.some((row) => row.kind === "disk")) yield ["The kernel waits for its disk, which is slow or full", "make room"];
  for (const circle of waits?.cycles ?? []) yield [`They wait for each other: ${among(circle)}`, "stop one of them"];
  for (const row of waits?.stuck ?? []) yield [`${who(row)} has said nothing for ${duration(row.forMs)}`, "restart the agent"];
  for (const row of rows) {
    const todo = row.host === false ? "look at its log: gdn logs --role toolhost" : "look at its run, or stop it";
    if (row.host !== false && !(row.forMs >= LONG_MS[row.kind])) continue;
    yield [`${who(row)} has waited ${duration(row.forMs)} for ${waitsFor(row)}`, todo, row.eventId && runOf(row.eventId)];
  }
}

function* ofServers({ servers, learned }) {
  for (const row of learned ?? []) {
    if (row.refusingMs > 0) yield [`A model server has refused everything for ${duration(row.refusingMs)}: ${row.text}`, "wait, or use another"];
  }
  for (const row of servers ?? []) {
    if (row.state === "login") yield [`The MCP server ${row.server} wants a login`, `gdn auth login mcp:${row.server}`];
    else if (row.lastError) yield [`The MCP server ${row.server} has failed: ${row.lastError}`, "try it with: gdn mcp inspect"];
  }
}

function* ofWork({ dead, budgets, processes, at }) {
  const letters = dead?.events ?? [], all = letters.length + (dead?.more ?? 0);
  if (all === 1) yield [`A message to ${who(letters[0])} was given up: ${letters[0].cause}`, "send it again, or drop it"];
  else if (all) yield [`${count(all)} messages were given up`, "send them again, or drop them"];
  for (const tree of budgets?.trees ?? []) {
    for (const budget of tree.endedMs === null || at - tree.endedMs < RECENT_MS ? tree.budgets : []) {
      const over = spent(budget).map((name) => `${count(budget.limits[name])} ${name}`).join(", ");
      if (over) yield [`The budget of ${budget.agent} is spent: ${over}`, "send another message, or raise it in the bundle", runOf(tree.rootEvent)];
    }
  }
  for (const row of processes ?? []) {
    const again = row.restarts > 0 && row.status !== "crash-loop" && at - Date.parse(row.since) < RECENT_MS;
    if (again) yield [`${row.name} was started again${row.lastExit ? `: ${row.lastExit}` : ""}`, "nothing: its work goes on"];
  }
}

/**
 * Everything that is wrong, the most urgent first.
 * @param {Seen} seen
 * @returns {Trouble[]}
 */
export function problems(seen) {
  const found = [...ofKernel(seen), ...ofWaits(seen), ...ofServers(seen), ...ofWork(seen)];
  return found.map(([text, todo, href]) => ({ text, todo, href: href || "#/now" }));
}
