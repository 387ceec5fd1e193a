// The runs, newest first. What is filtered stands in the address.
import { get, read } from "./api.js";
import { count, duration, money, time, tokens } from "./format.js";
import { askedIn } from "./health.js";
import { useKey } from "./keys.js";
import { on } from "./live.js";
import { visible, Wrong } from "./text.js";
import { html, signal, useEffect, useMemo, useRef, useState } from "./view.js";
import { Rows } from "./virtual.js";

/** Rows of the index that are asked for at once, and turns that a filter gives at once. */
const PAGE = 5000, FOUND = 100;
/** Rows that are looked through for new ones; as many below those that are drawn have the next page asked for. */
const NEWEST = 50;
/** Turns of a run whose cost the door adds up. */
const ADDED = 250;
/** Details that are asked for at once, and how long rows are gathered for it (ms). */
const DETAILS = 60, GATHER_MS = 30;
/** How often the list is looked at while something happens (ms), how soon behind the first news, and after so many times
 * of what looking took. */
const LOOK_MS = 2000, SOON_MS = 200, SHARE = 5;
const HEIGHT = 46;
const STATES = ["running", "completed", "failed", "interrupted", "abandoned"];
/** What the index does not know: these go through the turns themselves. */
const FILTERS = ["state", "tool", "error", "minCost", "text"];
/** What is looked for most. */
const QUICK = { all: {}, running: { state: "running" }, failed: { state: "failed" }, "denied by the sandbox": { error: "E_SANDBOX_DENIED" } };
/** What changes the list, and how a turn is of which nothing more comes. */
const MOVES = new Set(["event.accepted", "turn.started", "turn.completed", "turn.failed", "event.ended"]), OVER = new Set(["completed", "failed", "abandoned"]);

/** Runs as far as they are looked at: rows of the index, or the turns that a filter lets pass. */
class Listing {
  rows = []; total = 0; loaded = false; problem = null; changed = signal(0);
  /** Where the next page begins; null: there is none. */
  #before;
  #busy = false;
  /** @type {Map<string, any>} what is known of turns */
  #details = new Map();
  /** The turns that were asked for. */
  #asked = new Set();
  #wanted = [];
  /** How many new ones the last look has found. */
  #came = 0;

  constructor(query) {
    this.query = query;
    this.filtered = FILTERS.some((name) => query[name]);
    this.more();
  }

  /** The next page. */
  async more() {
    if (this.#busy || this.#before === null || this.problem) return;
    this.#busy = true;
    try {
      const { rows, total, before } = await this.#page(this.#before, this.filtered ? FOUND : PAGE);
      this.rows = this.rows.concat(rows);
      this.#before = before;
      this.total = total;
      this.loaded = true;
    } catch (problem) {
      this.problem = problem;
    }
    this.#busy = false;
    if (this.filtered && this.rows.length < FOUND) this.more(); // a page may be empty and not the last one
    this.changed.value++;
  }

  async #page(before, limit) {
    const { agent } = this.query;
    if (!this.filtered) {
      const page = await get("/page/api/runs", { agent, before, limit });
      return { ...page, rows: page.rows.map(([, at, traceId, turnId, eventId, agent, instance]) => ({ at, id: traceId, turnId, eventId, agent, instance })) };
    }
    const page = await get("/api/v1/traces", { ...this.query, before, limit });
    for (const turn of page.traces) this.#details.set(turn.turnId, turn), this.#asked.add(turn.turnId);
    const rows = page.traces.map((turn) => ({ at: turn.startedAt, id: turn.turnId, turnId: turn.turnId, eventId: turn.eventId, agent: turn.agent, instance: turn.instanceKey }));
    return { rows, before: page.before, total: this.rows.length + rows.length };
  }

  /**
   * Look for new ones, and at those of the drawn rows that are not known or not over. It is drawn once, with all of it.
   * @param {{first: number, shown: number}} drawn of a list at whose top nobody is, new ones push these rows down
   * @returns {Promise<number | undefined>} how many are new, above the others; undefined: it is to be asked again
   */
  async look({ first, shown }) {
    if (this.problem) {
      this.problem = null;
      await this.more();
    }
    if (this.#busy || this.#before === undefined) return undefined;
    const { fresh, total } = await this.#fresh();
    this.rows = fresh.concat(this.rows);
    this.total = this.filtered ? this.rows.length : total;
    const from = first && first + fresh.length, drawn = this.rows.slice(from, from + shown).map((row) => row.turnId);
    const open = drawn.filter((turnId) => !OVER.has(this.#details.get(turnId)?.status)).slice(0, DETAILS);
    for (const turnId of open) this.#asked.add(turnId);
    if (open.length) await this.#learn(open);
    if (open.length || fresh.length) this.changed.value++;
    return fresh.length;
  }

  async #fresh() {
    const most = this.filtered ? FOUND : PAGE, known = () => rows.findIndex((row) => row.turnId === this.rows[0]?.turnId);
    let { rows, total } = await this.#page(undefined, Math.min(most, NEWEST + 2 * this.#came));
    if (known() < 0 && this.rows.length) { // so many that the old ones do not touch them
      ({ rows, total } = await this.#page(undefined, most));
    }
    const fresh = known() < 0 ? rows : rows.slice(0, known());
    this.#came = fresh.length;
    return { fresh, total };
  }

  /** What is known of a turn; what is not is asked for, with others that are drawn. */
  detail(turnId) {
    if (!this.#asked.has(turnId)) {
      this.#asked.add(turnId);
      if (this.#wanted.push(turnId) === 1) setTimeout(() => this.#gather(), GATHER_MS);
    }
    return this.#details.get(turnId);
  }

  async #gather() {
    const turns = this.#wanted.splice(-DETAILS);
    for (const turnId of this.#wanted.splice(0)) this.#asked.delete(turnId); // they were scrolled past
    await this.#learn(turns);
    this.changed.value++;
  }

  async #learn(turns) {
    try {
      for (const turn of (await read("/page/api/runs/details", { turns, alone: this.filtered })).turns) this.#details.set(turn.turnId, turn);
    } catch (problem) {
      this.problem = problem;
    }
  }
}

const link = (query) => `#/runs?${new URLSearchParams(Object.entries(query).filter(([, value]) => value))}`;

function Filters({ query }) {
  const box = useRef(null);
  const [agents, setAgents] = useState([]);
  useEffect(() => { get("/api/v1/agents").then((rows) => setAgents(rows.map((row) => row.agent)), () => {}); }, []);
  useKey("/", "Filter", () => box.current.elements.text.focus());
  const change = (event) => { location.hash = link({ ...query, [event.target.name]: event.target.value.trim() }); };
  const field = (name, label, more) => html`<label>${label} <input name=${name} value=${query[name] ?? ""} ...${more} /></label>`;
  const choice = (name, label, values) => html`<label>${label} <select name=${name} value=${query[name] ?? ""}><option value="">all</option>
    ${[...new Set([...values, ...(query[name] ? [query[name]] : [])])].map((value) => html`<option key=${value}>${value}</option>`)}</select></label>`;
  return html`<form class="run-filters" ref=${box} onChange=${change} onSubmit=${(event) => event.preventDefault()}
    onKeyDown=${(event) => event.key === "Escape" && event.target.blur()}>
    ${field("text", "Text", { type: "search" })}${choice("agent", "Agent", agents)}${choice("state", "State", STATES)}
    ${field("tool", "Tool", { placeholder: "files__*" })}${field("error", "Error", { placeholder: "E_…" })}
    ${field("minCost", "Cost from", { type: "number", min: 0, step: "any" })}</form>`;
}

/** The state of a turn or a call as a sign and a word. */
export function State({ status, code }) {
  const good = status === "completed" || status === "ok" || status === "answered", open = status === "running" || status === "pending";
  return html`<span class=${good ? "good" : open ? "run-open" : "bad"}>${good ? "✓" : open ? "●" : "✗"} ${visible(code ?? status)}</span>`;
}

/** Instead of the state of what runs: that it waits for who looks. */
export const WaitsForYou = ({ item }) => html`<a class="run-asks" href=${`#/inbox/${encodeURIComponent(item.code)}`}>◷ waits for you</a>`;

function Line({ row, turn, alone }) {
  const asked = turn?.status === "running" && askedIn((id) => id === row.eventId);
  const { total } = turn ?? {}, agents = total?.agents ?? [], part = !alone && total?.turns >= ADDED;
  return html`<a class="run-line" tabindex="-1" href=${`#/run/${encodeURIComponent(row.id)}`}><span>${turn && !asked && html`<${State} status=${turn.status} code=${turn.error?.code} />`}</span>
    <b>${visible(turn?.message ?? "")}</b><span>${turn && duration(turn.durationMs)}</span>
    <small>${time(row.at)} · ${visible(row.agent)}/${visible(row.instance)}${agents.length > 1 && ` with ${agents.length - 1} more`}</small>
    <small title=${alone ? "of this turn" : "of the whole run"}>${part && "at least "}${total && [tokens(total), money(total.costs)].filter(Boolean).join(" · ")}</small></a>${asked && html`<${WaitsForYou} item=${asked} />`}`;
}

export default function Runs({ query }) {
  const list = useMemo(() => new Listing(query), [JSON.stringify(query)]);
  const [active, setActive] = useState(0);
  const rows = useRef(null);
  void list.changed.value;
  useEffect(() => {
    setActive(0);
    rows.current?.to(0);
    let timer = 0, due = false, next = 0, gone = false;
    const soon = () => {
      due = true;
      timer ||= gone || setTimeout(look, Math.max(SOON_MS, next - Date.now()));
    };
    const look = async () => {
      due = false;
      const begun = Date.now();
      const fresh = await list.look(rows.current ?? { first: 0, shown: 0 }).catch(() => 0);
      timer = 0;
      next = Date.now() + Math.max(LOOK_MS, SHARE * (Date.now() - begun));
      if (due || fresh === undefined) soon();
      if (!fresh || !rows.current) return;
      const { first, shift } = rows.current;
      if (first > 0) shift(fresh); // what a reader looks at stays where it is
      if (first > 0 || active > 0) setActive((old) => old + fresh);
    };
    const off = on((events) => { if (!events || events.some((one) => MOVES.has(one.kind))) soon(); });
    return () => { off(); gone = true; clearTimeout(timer); };
  }, [list]);
  const total = Math.max(list.total, list.rows.length);
  const open = (index) => { if (list.rows[index]) location.hash = `#/run/${encodeURIComponent(list.rows[index].id)}`; };
  useKey("j", "The next row", () => rows.current?.to(active + 1));
  useKey("k", "The row before", () => rows.current?.to(active - 1));
  useKey("Enter", "Open the row", () => open(active));
  const row = (index) => {
    const found = list.rows[index];
    if (index > list.rows.length - NEWEST) list.more();
    return found ? html`<${Line} row=${found} turn=${list.detail(found.turnId)} alone=${list.filtered} />` : html`<span class="soft">…</span>`;
  };
  return html`<${Filters} query=${query} /><p class="soft">${list.loaded ? count(total) : "…"} ${list.filtered ? "turns found" : total === 1 ? "run" : "runs"}<span class="run-quick">${Object.entries(QUICK).map(([name, wanted]) => html` <a key=${name} href=${link(wanted)}>${name}</a>`)}</span></p>
    <${Wrong} problem=${list.problem} />
    ${total > 0 && html`<${Rows} count=${total} height=${HEIGHT} row=${row} label="Runs" onEnter=${open} active=${active} onActive=${setActive} handle=${rows} />`}`;
}
