/**
 * The waterfall of a run: a trace of the API as flat rows, each with the pieces of its time, and the scale that
 * squeezes gaps in which nothing happens. Pure: no page, no clock. Times are milliseconds since 1970.
 *
 * At each moment a turn works if its own code does or a call of it is at work; else it waits for whatever it has open.
 * The server's sums follow the same rules.
 *
 * Source: docs/traces.md; docs/design/traces.md.
 */

/** What a piece of time was for, and its words in the legend. */
export const KINDS = {
  work: "at work", model: "waits for the model", person: "waits for a person", agents: "waits for agents",
  sandbox: "waits for a jail", place: "waits for a place", queue: "in the queue", lost: "no process", idle: "between tries",
};
const NAMES = Object.keys(KINDS);
/** Of what is open at the same time, the first one counts. */
const ORDER = ["work", "person", "agents", "model", "sandbox", "lost", "queue", "idle"];
const NUMBERS = ORDER.map((kind) => NAMES.indexOf(kind));
/** Something happens in these, so they are no gap. */
const BUSY = new Set(["work", "model", "sandbox"]);
/** An edge is one number: its time, its kind, and whether it begins something. So many fit between two times. */
const ROOM = 32;
/** A gap is drawn as this part of all that is not one, at most; and all gaps together as a quarter of it. */
const GAP = 1 / 20;
/** What is narrower lies beside the view (pixels): a millisecond of a month is wider. */
const LEAST = 1e-7;

/**
 * @typedef {{kind: string, from: number, to: number}} Segment
 * @typedef {object} Row
 * @property {string} id stays the same when the trace is loaded anew; of turns and calls it is their span
 * @property {"turn"|"step"|"model"|"try"|"tool"} kind
 * @property {number} depth how far to the right it stands
 * @property {number} parent the index of the row that it hangs on; -1: none
 * @property {number} end the index behind the last row that hangs on it
 * @property {string} name @property {string} status @property {boolean} open it has no end yet
 * @property {number} from @property {number} to
 * @property {Segment[]} segments in the order of time
 * @property {any} node what the trace has of it @property {any} turn its turn @property {any} step its step, or null
 */

/**
 * The rows of a trace, or of a turn with all that hangs on it; each before those that hang on it.
 * @param {any} found a Trace or a TraceTree @param {number} now the end of what is still open @returns {Row[]}
 */
export function rowsOf(found, now) {
  const rows = [];
  for (const turn of found.turnId ? [found] : (found.turns ?? [])) addTurn(rows, turn, -1, now);
  return rows;
}

const moment = (text) => Date.parse(text) || 0;
const ended = (from, ms, until) => (ms === null || ms === undefined ? until : from + ms);

function add(rows, id, kind, parent, name, node, turn, step, from, to) {
  const depth = parent < 0 ? 0 : rows[parent].depth + 1;
  const status = node.status ?? "";
  const open = status === "running";
  const until = Math.max(from, to);
  const row = { id, kind, depth, parent, end: 0, name, status, open, from, to: until, segments: [], node, turn, step };
  rows.push(row);
  return row;
}

function addTurn(rows, turn, parent, now) {
  const at = rows.length;
  const began = moment(turn.startedAt);
  const { queueMs = 0, placeMs = 0 } = turn.waits ?? {};
  const from = began - placeMs - queueMs;
  const last = turn.endedAt ?? (turn.status === "running" ? null : turn.lastAt);
  const row = add(rows, turn.spanId, "turn", parent, turn.agent, turn, turn, null, from, last ? moment(last) : now);
  const edges = [];
  const resumed = (turn.resumedAt ?? []).map(moment);
  (turn.lostAt ?? []).forEach((text, index) => edge(edges, "lost", moment(text), resumed[index] ?? 0));
  for (const step of turn.steps ?? []) addStep(rows, step, turn, at, row.to, resumed, now, edges);
  for (const other of turn.turns ?? []) {
    const asked = addTurn(rows, other, at, now);
    if (other.awaited) edge(edges, "agents", asked.from, asked.to);
  }
  if (queueMs) row.segments.push({ kind: "queue", from, to: from + queueMs });
  if (placeMs) row.segments.push({ kind: "place", from: from + queueMs, to: began });
  row.segments = row.segments.concat(swept(edges, began, row.to, "work"));
  row.end = rows.length;
  return row;
}

function addStep(rows, step, turn, parent, until, resumed, now, edges) {
  const at = rows.length;
  const from = moment(step.startedAt);
  const name = step.model ? `step ${step.step}` : "operator call";
  const to = ended(from, step.durationMs, until);
  const row = add(rows, `${turn.spanId}.${step.step}`, "step", parent, name, step, turn, step, from, to);
  row.open = to === until && turn.status === "running";
  if (step.error) row.status = "failed";
  const own = [];
  if (step.model) addModel(rows, step, turn, at, until, own);
  for (const call of step.tools ?? []) addTool(rows, call, step, turn, at, until, resumed, now, own);
  row.segments = swept(own, from, row.to, "work");
  row.end = rows.length;
  for (const each of own) edges.push(each);
}

/** A model call and its tries. When a try began is not noted: they share the time that is left beside the pauses. */
function addModel(rows, step, turn, parent, until, edges) {
  const call = step.model;
  const at = rows.length;
  const from = moment(call.startedAt);
  const id = `${turn.spanId}.${step.step}.model`;
  const to = ended(from, call.durationMs, until);
  const row = add(rows, id, "model", parent, call.model ?? "model", call, turn, step, from, to);
  edge(edges, "model", from, row.to);
  const own = [];
  const tries = call.tries ?? [];
  const count = Math.max(call.attempts ?? 1, tries.length + 1);
  let begun = Math.min(row.to, from + (call.waitedMs ?? 0));
  edge(own, "queue", from, begun);
  const each = Math.round(Math.max(0, row.to - begun - (call.pausedMs ?? 0)) / count);
  const addTry = (number, node, until) => {
    const found = add(rows, `${id}.${number}`, "try", at, `try ${number}`, node, turn, step, begun, until);
    found.segments.push({ kind: "model", from: begun, to: found.to });
    found.end = rows.length;
  };
  tries.forEach((failed, index) => {
    const over = Math.min(row.to, begun + each);
    addTry(index + 1, { status: "failed", message: failed.error, durationMs: over - begun }, over);
    begun = Math.min(row.to, over + (failed.waitedMs ?? 0));
    edge(own, "idle", over, begun);
  });
  if (tries.length) addTry(count, { status: call.status, code: call.code, durationMs: row.to - begun }, row.to);
  row.segments = swept(own, from, row.to, "model");
  row.end = rows.length;
}

function addTool(rows, call, step, turn, parent, until, resumed, now, edges) {
  const at = rows.length;
  const from = moment(call.startedAt);
  const id = call.spanId ?? `${turn.spanId}/${call.toolCallId}`;
  const to = ended(from, call.durationMs, until);
  const row = add(rows, id, "tool", parent, call.toolName, call, turn, step, from, to);
  const own = [];
  const seen = call.receipt && to !== until;
  const jail = seen ? Math.max(from, to - Math.round(call.receipt.call.wallMs)) : row.to;
  if (seen) edge(own, "sandbox", from, jail);
  for (const text of call.askedAt ?? []) {
    const asked = moment(text);
    edge(own, "person", asked, Math.min(jail, resumed.find((time) => time >= asked) ?? row.to));
  }
  for (const other of call.turns ?? []) {
    const below = addTurn(rows, other, at, now);
    edge(own, "agents", below.from, below.to);
  }
  for (const inner of call.calls ?? []) addTool(rows, inner, step, turn, at, until, resumed, now, edges);
  row.segments = swept(own, from, row.to, "work");
  for (const piece of row.segments) edge(edges, piece.kind, piece.from, piece.to);
  row.end = rows.length;
}

function edge(edges, kind, from, to) {
  if (to <= from) return;
  const name = NAMES.indexOf(kind) * 2;
  edges.push(from * ROOM + name + 1, to * ROOM + name);
}

/** The pieces between two times: of what is open the first kind of ORDER, and `base` where nothing is. */
function swept(edges, from, to, base) {
  const found = [];
  if (!edges.length) return to > from ? [{ kind: base, from, to }] : found;
  const open = new Int32Array(NAMES.length);
  let at = from;
  let kind = base;
  const upTo = (time) => {
    if (time <= at) return;
    const last = found[found.length - 1];
    if (last?.kind === kind) last.to = time;
    else found.push({ kind, from: at, to: time });
    at = time;
  };
  for (const each of edges.length > 2 ? new Float64Array(edges).sort() : edges) {
    const time = Math.floor(each / ROOM);
    upTo(Math.min(time, to));
    const about = each - time * ROOM;
    open[about >> 1] += about & 1 || -1;
    let first = 0;
    while (first < NUMBERS.length && open[NUMBERS[first]] <= 0) first++;
    kind = ORDER[first] ?? base;
  }
  upTo(to);
  return found;
}

/**
 * Where times lie on an axis on which long gaps are short.
 * @param {Row[]} rows
 * @returns {{from: number, to: number, at: (ms: number) => number, back: (place: number) => number,
 *   gaps: {from: number, to: number}[]}} `at` gives a place from 0 to 1, `back` the time there
 */
export function scaleOf(rows) {
  const turns = rows.filter((row) => row.kind === "turn");
  const from = turns.reduce((least, row) => Math.min(least, row.from), Infinity);
  const to = turns.reduce((most, row) => Math.max(most, row.to), from);
  const busy = [];
  for (const row of turns) {
    for (const piece of row.segments) {
      if (BUSY.has(piece.kind)) busy.push((piece.from - from) * 2 + 1, (piece.to - from) * 2);
    }
  }
  const gaps = [];
  let open = 0;
  let last = from;
  for (const each of new Float64Array(busy).sort()) {
    const time = from + Math.floor(each / 2);
    if (open === 0 && time > last) gaps.push({ from: last, to: time });
    open += each % 2 || -1;
    last = time;
  }
  if (to > last) gaps.push({ from: last, to });
  const whole = to - from - gaps.reduce((sum, gap) => sum + gap.to - gap.from, 0);
  const most = whole > 0 ? whole * Math.min(GAP, 1 / 4 / gaps.length) : Infinity;
  const long = gaps.filter((gap) => gap.to - gap.from > most);
  const times = [from];
  const places = [0];
  const go = (time, length) => places.push(places[places.length - 1] + length) && times.push(time);
  for (const gap of long) {
    go(gap.from, gap.from - times[times.length - 1]);
    go(gap.to, most);
  }
  go(to, to - times[times.length - 1]);
  const length = places[places.length - 1] || 1;
  return {
    from, to, gaps: long,
    at: (ms) => between(times, places, ms) / length,
    back: (place) => between(places, times, place * length),
  };
}

/** What stands in `there` where `value` stands in `here`, both growing. */
function between(here, there, value) {
  let low = 0;
  let high = here.length - 1;
  if (value <= here[0]) return there[0];
  if (value >= here[high]) return there[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (here[middle] <= value) low = middle;
    else high = middle;
  }
  return there[low] + ((there[high] - there[low]) * (value - here[low])) / (here[high] - here[low]);
}

/**
 * The pieces of a row as bars: at most one for each pixel, in which what took longest counts.
 * @param {Segment[]} segments @param {{at: (ms: number) => number}} scale
 * @param {[number, number]} view the part of the axis that is seen, from 0 to 1 @param {number} width pixels of it
 * @returns {{kind: string, left: number, width: number}[]} in pixels
 */
export function barsOf(segments, scale, view, width) {
  const found = [];
  const pixel = (ms) => ((scale.at(ms) - view[0]) / (view[1] - view[0])) * width;
  let longest = 0;
  let left = pixel(segments[0]?.from);
  for (const piece of segments) {
    const right = pixel(piece.to);
    const begin = Math.max(0, left);
    const size = Math.min(width, right) - begin;
    left = right;
    if (size < LEAST) continue;
    const last = found[found.length - 1];
    if (last && size < 1 && last.width <= 1 && Math.floor(last.left) === Math.floor(begin)) {
      if (size > longest) [longest, last.kind] = [size, piece.kind];
      continue;
    }
    longest = size;
    found.push({ kind: piece.kind, left: begin, width: Math.max(1, size) });
  }
  return found;
}

/**
 * The rows that are shown: not those below a folded one; with words only those that have all of them, and what they
 * hang on.
 * @param {Row[]} rows @param {Set<string>} folded ids of rows @param {string} words
 * @returns {number[]} indexes
 */
export function shownOf(rows, folded, words) {
  const wanted = words.split(/\s+/).filter(Boolean).map((word) => new RegExp(word.replace(/[^\p{L}\p{N}_]/gu, literal), "iu"));
  const found = [];
  if (!wanted.length) {
    for (let at = 0; at < rows.length; at = folded.has(rows[at].id) ? rows[at].end : at + 1) found.push(at);
    return found;
  }
  const marked = new Uint8Array(rows.length);
  for (let at = rows.length - 1; at >= 0; at--) {
    if (!marked[at] && !wanted.every((word) => says(rows[at], word))) continue;
    marked[at] = 1;
    if (rows[at].parent >= 0) marked[rows[at].parent] = 1;
  }
  marked.forEach((mark, at) => mark && found.push(at));
  return found;
}

const literal = (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`;

/** Whether a row has a word: in its name, its state, its errors, its arguments or its result. */
function says({ name, status, node }, word) {
  const has = (text) => text !== undefined && text !== null && word.test(text);
  if (has(name) || has(status) || has(node.args) || has(node.output) || has(node.message) || has(node.code)) return true;
  return has(node.toolCallId) || has(node.turnId) || has(node.error?.code) || has(node.error?.message);
}

/** How long each kind took in the turns that hang on no other (milliseconds): where the time of the run went. */
export function timesOf(rows) {
  const found = {};
  for (const row of rows) {
    if (row.depth > 0) continue;
    for (const piece of row.segments) found[piece.kind] = (found[piece.kind] ?? 0) + piece.to - piece.from;
  }
  return found;
}

/** What the model calls of a row have used, alone and without those of other turns; null: none. */
export function usedBy(row) {
  if (row.kind === "model") return row.node;
  if (row.kind !== "turn") return null;
  const sum = { inputTokens: 0, outputTokens: 0, costs: {} };
  for (const { model } of row.turn.steps ?? []) {
    sum.inputTokens += model?.inputTokens ?? 0;
    sum.outputTokens += model?.outputTokens ?? 0;
    for (const [name, cost] of Object.entries(model?.costs ?? {})) sum.costs[name] = (sum.costs[name] ?? 0) + cost;
  }
  return sum;
}
