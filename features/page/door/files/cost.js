// What models have used, and what it cost: by day, model, agent, or tree (everything that one message set going).
import { get } from "./api.js";
import { count, money, time } from "./format.js";
import { useKey } from "./keys.js";
import { on } from "./live.js";
import { runOf } from "./problems.js";
import { visible, Wrong } from "./text.js";
import { html, useEffect, useLoaded, useState } from "./view.js";

const BY = { day: "day", model: "model", agent: "agent", tree: "message" };
const SINCE = { "7d": "7 days", "30d": "30 days", all: "always" };
/** Rows that are drawn at first, and with each press of the button. */
const MOST = 100;
/** The door reads every conversation for this: it is asked again after a turn, but only so often (ms), and at most for a
 * twentieth of the time. */
const AGAIN_MS = 10000, SHARE = 20;

/** The amounts of a row, by currency. They are never added. @param {any} row of /api/v1/usage */
export const costs = (row) => row.costs ?? (row.cost == null ? {} : { [row.currency ?? "USD"]: row.cost });

/** The columns of numbers for these rows. @param {any[]} rows @returns {{key: string, label: string, of: (row: any) => number}[]} */
export function columns(rows) {
  const currencies = [...new Set(rows.flatMap((row) => Object.keys(costs(row))))].sort();
  const tokens = { modelCalls: "Calls", inputTokens: "Tokens in", cachedTokens: "of it cached", outputTokens: "Tokens out", reasoningTokens: "of it reasoning" };
  return [
    ...currencies.map((name) => ({ key: name, label: `Cost, ${name}`, of: (row) => costs(row)[name] ?? 0, text: (n) => (n ? money({ [name]: n }) : "–") })),
    ...Object.entries(tokens).map(([key, label]) => ({ key, label, of: (row) => row[key] ?? 0, text: count })),
  ];
}

/** What sorts a row by its name. */
const named = (row, by) => (by === "tree" ? row.startedAt : row[by]);

/** The rows in the order of a column; `up`: the smallest first. @param {any[]} rows */
export function sorted(rows, by, column, up) {
  const of = column ? column.of : (row) => named(row, by), way = up ? 1 : -1;
  return [...rows].sort((a, b) => way * (of(a) < of(b) ? -1 : +(of(a) > of(b))));
}

/** The document of the door; again when turns have ended, while somebody looks. */
function useUsage(by, since) {
  const loaded = useLoaded(async () => {
    const began = Date.now(), value = await get("/api/v1/usage", { by, since: since === "all" ? "" : since });
    return { ...value, next: Date.now() + Math.max(AGAIN_MS, SHARE * (Date.now() - began)) };
  }, [by, since]);
  const { value, again } = loaded;
  useEffect(() => {
    let stale = false;
    const off = on((events) => { stale ||= !events || events.some((one) => one.kind === "event.ended"); });
    const timer = setInterval(() => {
      if (!stale || document.visibilityState === "hidden" || Date.now() < (value?.next ?? 0)) return;
      stale = false;
      again();
    }, 1000);
    return () => { off(); clearInterval(timer); };
  }, [value]);
  return loaded;
}

const address = (query) => `#/cost?${new URLSearchParams(query)}`;

function Choice({ label, name, of, query }) {
  return html`<fieldset><legend>${label}</legend>${Object.entries(of).map(([value, text]) => html`<a key=${value} href=${address({ ...query, [name]: value, sort: "", up: "" })}
    aria-current=${query[name] === value ? "true" : undefined}>${text}</a>`)}</fieldset>`;
}

function Name({ row, by }) {
  if (by !== "tree") return visible(row[by]);
  return html`<a href=${runOf(row.traceId)}>${time(row.startedAt)}</a> <small>${visible(row.agents.join(", "))}, ${count(row.turns)} ${row.turns === 1 ? "turn" : "turns"}</small>`;
}

function Head({ columns, by, query, sort, up }) {
  const cells = [{ key: "name", label: BY[by][0].toUpperCase() + BY[by].slice(1) }, ...columns];
  return html`<tr>${cells.map(({ key, label }) => html`<th key=${key} scope="col" class=${key === "name" ? "" : "number"}
      aria-sort=${key === sort ? (up ? "ascending" : "descending") : undefined}>
    <a href=${address({ ...query, sort: key, up: key === sort && !up ? "1" : "" })}>${label}${key === sort ? (up ? " ▲" : " ▼") : ""}</a></th>`)}</tr>`;
}

function Table({ value, query, shown }) {
  const by = value.by, numbers = columns(value.rows), used = numbers.filter((one) => value.rows.some(one.of));
  const key = query.sort || (by === "day" || by === "tree" ? "name" : used[0]?.key ?? "name"), up = query.up === "1";
  const column = used.find((one) => one.key === key), measure = column ?? used[0];
  const most = measure ? value.rows.reduce((found, row) => Math.max(found, measure.of(row)), 0) : 0;
  return html`<div class="cost-wide" tabindex="0" role="group" aria-label="What was used"><table>
    <thead><${Head} columns=${used} by=${by} query=${query} sort=${column?.key ?? "name"} up=${up} /></thead>
    <tbody>${sorted(value.rows, by, column, up).slice(0, shown).map((row) => html`<tr key=${row.traceId ?? row[by]}>
      <th scope="row"><${Name} row=${row} by=${by} />${most > 0 && html`<span class="cost-bar" title=${measure.label} style=${{ width: `${(100 * measure.of(row)) / most}%` }}></span>`}</th>
      ${used.map((one) => html`<td key=${one.key} class="number">${one.text(one.of(row))}</td>`)}</tr>`)}</tbody>
    <tfoot><tr><th scope="row">Total</th>${used.map((one) => html`<td key=${one.key} class="number">${one.text(one.of(value.total))}</td>`)}</tr></tfoot></table></div>`;
}

export default function Cost({ query }) {
  const by = Object.hasOwn(BY, query.by) ? query.by : "day", since = Object.hasOwn(SINCE, query.since) ? query.since : "7d";
  const whole = { ...query, by, since }, { value, problem } = useUsage(by, since);
  const [shown, show] = useState(MOST);
  for (const [name, text] of Object.entries(BY)) useKey(name[0], `Cost by ${text}`, () => { location.hash = address({ ...whole, by: name, sort: "" }); });
  const rows = value?.rows.length ?? 0;
  return html`<div class="cost"><div class="cost-choices"><${Choice} label="By" name="by" of=${BY} query=${whole} /><${Choice} label="Since" name="since" of=${SINCE} query=${whole} /></div>
    <${Wrong} problem=${problem} />${!value ? html`<p class="soft">${!problem && "Asking…"}</p>` : rows ? html`<${Table} value=${value} query=${whole} shown=${shown} />` : html`<p class="soft">No model was asked in this time.</p>`}
    ${rows > shown && html`<button onClick=${() => show(shown + MOST)}>${count(rows - shown)} more</button>`}
    ${value?.unread?.length > 0 && html`<p class="warn">Not read: ${visible(value.unread.join("; "))}</p>`}</div>`;
}
