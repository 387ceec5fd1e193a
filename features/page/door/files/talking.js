// Messages on their way. Each tab follows one at a time: the first of the conversation that it shows, and only while
// somebody looks, since a browser has six connections to a door. What was told stays, and a stream goes on at its last id.
import { post, stream } from "./api.js";
import { signal } from "./view.js";

/** The waits before a stream is opened again (ms). */
const WAIT_MS = 300, MOST_WAIT_MS = 8000;
/** An answer of the door with which the same request may be made again. */
const AGAIN = new Set([0, 401, 408, 429, 502, 503, 504]);

/** @type {Map<string, Run[]>} by conversation: those that work or wait, in their order */
const runs = new Map();
/** Counts up when something of a run has changed, once a frame at most; and when runs come or go. */
export const beat = signal(0), listed = signal(0);
let shown = "", load = async () => {}, due = 0, wake = () => {}, awake = new Promise((resolve) => { wake = resolve; });

export const placeOf = (agent, instance) => `${agent}/${instance}`;

const changed = () => { due ||= requestAnimationFrame(() => { due = 0, beat.value += 1; }); };

/**
 * One message, and what its turn has told so far. `steps`: text, reasoning and calls of each. `waits`: what it waits for,
 * in words. `asks`: the ids of calls that a person has to allow. `lost`: the connection is. `answer`: its turn is over.
 */
export class Run {
  key = crypto.randomUUID();
  #last = "";
  #ending = new AbortController();

  constructor(agent, instance, text, files = []) {
    Object.assign(this, { agent, instance, text, files, place: placeOf(agent, instance), eventId: "", turnId: "", steps: [], waits: "", asks: new Set(), lost: false, answer: null });
  }

  #address(what) {
    return `/api/v1/messages/${encodeURIComponent(this.eventId)}/${what}?${new URLSearchParams({ agent: this.agent, instance: this.instance })}`;
  }

  get first() { return runsOf(this.place)[0] === this; }

  /** Whether it is followed now. One that is not sent yet is sent in any case. */
  get #followed() { return !this.eventId || (this.first && this.place === shown && !document.hidden); }

  /** Let the stream go if it is not to be followed, or open it `again`. */
  review(again) {
    if (again ? this.eventId : !this.#followed) this.#ending.abort();
  }

  /** End its turn. */
  stop() { return post(this.#address("cancel")); }

  /** Until the turn is over and in the conversation. Rejects with what the door says to a message that it does not take. */
  async follow() {
    list(this.place, [...runsOf(this.place), this]);
    try {
      for (let wait = WAIT_MS; !this.answer; wait = Math.min(2 * wait, MOST_WAIT_MS)) {
        while (!this.#followed) await awake;
        if (await this.#read()) wait = WAIT_MS / 2;
        if (this.answer || !this.#followed) continue;
        this.lost = !this.#ending.signal.aborted;
        changed();
        await new Promise((resolve) => setTimeout(resolve, this.lost ? wait : 0));
      }
      await load();
    } finally {
      this.#ending.abort();
      list(this.place, runsOf(this.place).filter((one) => one !== this));
      review();
    }
  }

  /** Reads its stream, or sends it and reads the answer. @returns {Promise<boolean>} whether anything has come */
  async #read() {
    this.#ending = new AbortController();
    const { signal } = this.#ending, headers = this.#last ? { "last-event-id": this.#last } : {};
    const { agent, instance, text } = this, files = this.files.map(({ data, name }) => ({ data, name }));
    const sent = { method: "POST", body: { agent, instance, text, files }, headers: { "idempotency-key": this.key }, signal };
    let heard = false;
    try {
      for await (const { event, id, data } of this.eventId ? stream(this.#address("stream"), { headers, signal }) : stream("/api/v1/messages", sent)) {
        heard = true, this.lost = false;
        if (id) this.#last = id;
        this.#take(event, JSON.parse(data));
        changed();
        this.review();
        if (this.answer || signal.aborted) break;
      }
    } catch (problem) {
      if (problem.code === "cancelled" || (problem.status && !AGAIN.has(problem.status))) throw problem;
    }
    return heard;
  }

  #take(kind, said) {
    if (kind === "accepted") this.eventId = said.eventId;
    if (kind === "answer") this.answer = said;
    if (kind === "tool.waits") this.asks.add(said.toolCallId);
    else if (kind === "tool.completed" || kind === "tool.failed") this.asks.delete(said.toolCallId);
    this.waits = kind === "model.waits" || kind === "extension.waits" ? waitText(said) : "";
    if (!said.step) return;
    const step = (this.steps[said.step - 1] ??= { text: "", reasoning: "", calls: [] });
    const call = step.calls.find(({ id }) => id === said.toolCallId);
    if (kind === "text") step.text += said.text;
    else if (kind === "text.again") step.text = "";
    else if (kind === "reasoning") step.reasoning = (said.at ? step.reasoning : "") + said.text;
    else if (kind === "gap") step.gap = true;
    else if (kind === "tool.called") step.calls.push({ id: said.toolCallId, name: said.toolName, line: said.arguments ?? "", state: "works" });
    else if (kind === "tool.progress" && call) call.progress = `${said.done}${said.total ? ` of ${said.total}` : ""} ${said.message ?? ""}`;
    else if (call && (kind === "tool.completed" || kind === "tool.failed")) call.state = kind === "tool.completed" ? "done" : said.code ?? "failed";
  }
}

function waitText({ kind, wait = {}, message }) {
  if (kind === "extension.waits") return `the extension ${wait.extension}`;
  return `the model ${wait.model ?? ""}${wait.before == null ? "" : `, ${wait.before} before it`}${message ? `, after: ${message}` : ""}`;
}

/** Streams go that are not to be followed, and others come. `again`: all are opened again where they were, because one may
 * be dead without a word. */
export function review(again = false) {
  for (const run of [...runs.values()].flat()) run.review(again);
  wake();
  awake = new Promise((resolve) => { wake = resolve; });
  changed();
}

document.addEventListener("visibilitychange", () => review());

/** The conversation that is shown from now on, and what loads it. */
export function show(place, loads) {
  shown = place, load = loads;
  review();
}

const list = (place, all) => { runs.set(place, all), listed.value += 1; };

/** Those of a conversation that work or wait. To be read beside `listed`. @returns {Run[]} */
export const runsOf = (place) => runs.get(place) ?? [];

/** The turns of others that run and are not known here. @returns {Run[]} */
export function found(agent, instance, traces) {
  const known = runsOf(placeOf(agent, instance)).map(({ eventId }) => eventId);
  const others = traces.filter(({ status, eventId }) => status === "running" && !known.includes(eventId));
  return others.map(({ eventId, turnId, message = "" }) => Object.assign(new Run(agent, instance, message), { eventId, turnId }));
}
