// One run: its waterfall over agents, live, and what is known of one span beside it.
import { get, post } from "./api.js";
import { count, duration, money, tokens } from "./format.js";
import { askedIn } from "./health.js";
import { useKey } from "./keys.js";
import { on, useClosely } from "./live.js";
import { State, WaitsForYou } from "./runs.js";
import { Span } from "./span.js";
import { visible, Wrong } from "./text.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./view.js";
import { Rows } from "./virtual.js";
import { barsOf, KINDS, rowsOf, scaleOf, shownOf, timesOf, usedBy } from "./waterfall.js";

/** A run that goes on is loaded at most so often (ms), and a large one after so many times of what loading it took. */
const LOAD_MS = 500, SHARE = 5;
/** How often bars of what is open grow (ms), in a run of at most so many rows. */
const GROW_MS = 1000, GROWS = 5000;
/** The bars are laid out on so many places, of which one is the narrowest. */
const WIDTH = 1000, HEIGHT = 26;
/** How much of a text that streams stands in its row (characters); all of it stands beside its span. */
const TAIL = 120, MOST_TEXT = 1 << 18;
const SIGNS = { turn: "◆", step: "▫", model: "✦", try: "↻", tool: "⚙" };
const MARKS = 5, DEEP = 14;

/** The texts that stream, by event and step. When a step is over, its text is in the conversation. */
function heard(texts, events) {
  for (const { kind, eventId, step, text, place, again } of events) {
    const key = `${eventId}/${step}`;
    if (again || kind === "step.completed" || kind === "step.failed") texts.delete(key);
    if (kind === "text" && text) texts.set(key, ((texts.get(key) ?? (place ? "…" : "")) + text).slice(-MOST_TEXT));
  }
}

/** A run, loaded again while it goes on and nobody has paused it. */
function useRun(id, paused) {
  const [state, setState] = useState({ found: null, problem: null, now: 0, news: 0 });
  const live = useRef({ texts: new Map() });
  const again = useRef(() => {});
  useEffect(() => {
    const mine = live.current = { texts: new Map(), timer: 0, took: 0, paused, due: false };
    let gone = false;
    const load = async () => {
      const began = performance.now();
      try {
        const found = await get(`/api/v1/traces/${encodeURIComponent(id)}`);
        if (gone) return;
        setState({ found, problem: null, now: Date.now(), news: 0 });
      } catch (problem) {
        if (!gone) setState((old) => ({ ...old, problem }));
      }
      mine.took = performance.now() - began;
      mine.timer = setTimeout(() => { mine.timer = 0; if (mine.due) want(); }, Math.max(LOAD_MS, SHARE * mine.took));
    };
    const want = () => {
      mine.due = true;
      if (mine.paused) return setState((old) => ({ ...old, news: old.news + 1 }));
      if (mine.timer) return;
      mine.timer = -1, mine.due = false;
      load();
    };
    again.current = want;
    want();
    const off = on((events) => {
      const own = events?.filter((one) => one.traceId === (mine.trace ?? id) || one.eventId === id);
      if (own && !own.length) return;
      heard(mine.texts, own ?? []);
      if (!own || own.some((one) => one.kind !== "text" && one.kind !== "reasoning")) want();
      else if (!mine.paused) setState((old) => ({ ...old }));
    });
    return () => { gone = true; off(); clearTimeout(mine.timer); };
  }, [id]);
  useEffect(() => {
    live.current.paused = paused;
    if (!paused && live.current.due) again.current();
  }, [paused, id]);
  useClosely(state.found?.status === "running");
  live.current.trace = state.found?.traceId;
  return { ...state, texts: live.current.texts, grow: () => setState((old) => ({ ...old, now: Date.now() })) };
}

/** The part of the axis that is seen, from 0 to 1, of times. */
function part(scale, zoom) {
  const [from, to] = zoom ? zoom.map(scale.at) : [0, 1];
  return to > from ? [from, to] : [0, 1];
}

function Axis({ scale, view, onZoom }) {
  const [begun, setBegun] = useState(null);
  const place = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    return scale.back(view[0] + ((event.clientX - box.left) / box.width) * (view[1] - view[0]));
  };
  const end = (event) => {
    const zoom = [begun, place(event)].sort((a, b) => a - b);
    setBegun(null);
    if (zoom[1] > zoom[0]) onZoom(zoom);
  };
  const at = (ms) => `${((scale.at(ms) - view[0]) / (view[1] - view[0])) * 100}%`;
  const marks = Array.from({ length: MARKS }, (_, index) => index / MARKS);
  return html`<div class="run-axis" onPointerDown=${(event) => setBegun(place(event))} onPointerUp=${end} title="Drag to zoom">
    ${marks.map((mark) => html`<span key=${mark} style=${{ left: `${mark * 100}%` }}>+${duration(scale.back(view[0] + mark * (view[1] - view[0])) - scale.from)}</span>`)}
    ${scale.gaps.map((gap) => html`<i key=${gap.from} style=${{ left: at(gap.from), right: `calc(100% - ${at(gap.to)})` }} title="squeezed: ${duration(gap.to - gap.from)}"></i>`)}</div>`;
}

function Bar({ row, scale, view }) {
  return useMemo(() => {
    const bars = barsOf(row.segments, scale, view, WIDTH).map(({ kind, left, width }) => ({ kind, left: (left / WIDTH) * 100, width: (width / WIDTH) * 100 }));
    const used = usedBy(row), first = bars[0], last = bars[bars.length - 1];
    const words = [duration(row.to - row.from), tokens(used), money(used?.costs)].filter(Boolean).join(" · ");
    const end = last ? last.left + last.width : 0;
    const over = end >= 60 && first.left <= 40; // there is no room beside the bar
    const place = over ? { left: `${first.left}%` } : end < 60 ? { left: `${end}%` } : { right: `${100 - first.left}%` };
    return html`<span class="run-bar run-${row.kind} ${over ? "run-over" : ""}">${bars.map(({ kind, left, width }) => html`<i class="run-${kind}" key=${left}
      style=${{ left: `${left}%`, width: `${width}%` }}></i>`)}<small style=${place}>${words}</small></span>`;
  }, [row, scale, ...view]);
}

function Line({ row, more, folded, onFold, onOpen, text, children }) {
  const bad = row.status && !["completed", "answered", "ok", "running"].includes(row.status);
  return html`<div class="run-span" onClick=${onOpen}><span class="run-name" style=${{ paddingLeft: `${Math.min(row.depth, DEEP) * 0.8}em` }}>
    ${more ? html`<button tabindex="-1" aria-label=${folded ? "Unfold" : "Fold"} onClick=${(event) => { event.stopPropagation(); onFold(); }}>${folded ? "▸" : "▾"}</button>` : html`<i></i>`}
    <span class=${bad ? "bad" : ""}>${SIGNS[row.kind]} ${visible(row.name)}${bad && ` ${visible(row.node.code ?? row.status)}`}</span>
    <small class=${text ? "run-text" : ""}> ${visible(text?.slice(-TAIL) ?? (row.kind === "turn" ? row.node.message : "") ?? "")}</small></span>${children}</div>`;
}

function Legend({ rows }) {
  const times = useMemo(() => timesOf(rows), [rows]);
  return html`<ul class="run-legend" aria-label="Where the time went">${Object.entries(KINDS).map(([kind, words]) => times[kind] > 0 && html`<li key=${kind}>
    <i class="run-${kind}"></i>${words} ${duration(times[kind])}</li>`)}</ul>`;
}

function Head({ found, rows }) {
  const [problem, setProblem] = useState(null);
  const first = found.turnId ? found : (found.turns?.[0] ?? {}), { total } = found;
  const events = useMemo(() => new Set(rows.flatMap(({ kind, node }) => (kind === "turn" ? [node.eventId] : []))), [rows]);
  const open = found.status === "running", asked = open && askedIn((id) => events.has(id)), from = rows[0]?.from ?? 0, to = rows[0]?.to ?? 0;
  const told = [duration(found.durationMs ?? to - from), total?.turns > 1 && `${count(total.turns)} turns of ${total.agents.join(", ")}`, tokens(total), money(total?.costs)];
  return html`<div class="run-head"><h2>${visible(first.agent)}: ${visible(first.message ?? "")}</h2>
    <p>${asked ? html`<${WaitsForYou} item=${asked} />` : html`<${State} status=${found.status} code=${found.error?.code} />`} ${visible(told.filter(Boolean).join(" · "))}
    ${found.leftOut > 0 && html` <b class="warn">${count(found.leftOut)} more turns are not shown</b>`}
    ${found.turnId && found.parentSpanId && html` <a href=${`#/run/${found.traceId}`}>The whole run</a>`}
    ${open && html` <button onClick=${() => stop(first).catch(setProblem)}>Stop</button>`}</p><${Wrong} problem=${problem} /><${Legend} rows=${rows} /></div>`;
}

const stop = ({ eventId, agent, instanceKey }) =>
  post(`/api/v1/messages/${encodeURIComponent(eventId)}/cancel?${new URLSearchParams({ agent, instance: instanceKey })}`);

/** The rows of what was found, those that are shown, and the scale of their bars. */
function useRows(found, now, folded, words) {
  const rows = useMemo(() => (found ? rowsOf(found, now) : []), [found, now]);
  const scale = useMemo(() => scaleOf(rows), [rows]);
  const shown = useMemo(() => shownOf(rows, folded, words), [rows, folded, words]);
  return { rows, scale, shown };
}

/** Keeps what a reader looks at where it is while rows come above it; with `follow` it goes to what is open. */
function useAnchor(box, rows, shown, follow, go) {
  const top = useRef(null);
  const before = top.current;
  useLayoutEffect(() => {
    const handle = box.current;
    const at = handle && before ? shown.findIndex((index) => rows[index].id === before) : -1;
    if (at >= 0 && at !== handle.first) handle.shift(at - handle.first);
    if (follow) {
      const open = shown.findLastIndex((index) => rows[index].open);
      if (open >= 0) go(open);
    }
  }, [rows, shown, follow]);
  top.current = rows[shown[box.current?.first ?? 0]]?.id;
}

/** What was folded, searched and zoomed belongs to one run. */
export default function Run({ path: [id = "", , span] }) {
  return html`<${One} key=${id} id=${id} span=${span} />`;
}

function One({ id, span }) {
  const [paused, setPaused] = useState(false), [follow, setFollow] = useState(false);
  const [folded, setFolded] = useState(new Set()), [zoom, setZoom] = useState(null);
  const [words, setWords] = useState(""), [chosen, setChosen] = useState(span);
  const { found, problem, now, news, texts, grow } = useRun(id, paused);
  const { rows, scale, shown } = useRows(found, now, folded, words);
  const box = useRef(null), search = useRef(null);
  const view = part(scale, zoom);
  const active = Math.max(0, shown.findIndex((index) => rows[index].id === chosen));
  const row = rows[shown[active]];
  const move = (index) => setChosen(rows[shown[Math.max(0, Math.min(shown.length - 1, index))]]?.id);
  const base = `#/run/${encodeURIComponent(id)}`;
  const open = (index) => { location.hash = `${base}/span/${encodeURIComponent(rows[shown[index]].id)}`; };
  const fold = (which, shut) => setFolded((old) => { const next = new Set(old); if (shut ?? !next.has(which)) next.add(which); else next.delete(which); return next; });
  const scaled = (factor) => {
    const size = Math.min(1, (view[1] - view[0]) * factor), middle = row ? (scale.at(row.from) + scale.at(row.to)) / 2 : 0.5;
    const begin = Math.max(0, Math.min(1 - size, middle - size / 2));
    setZoom(size < 1 ? [scale.back(begin), scale.back(begin + size)] : null);
  };
  useAnchor(box, rows, shown, follow && !paused, (index) => box.current.to(index));
  const grows = !paused && found?.status === "running" && rows.length < GROWS;
  useEffect(() => {
    const timer = grows && setInterval(grow, GROW_MS);
    return () => clearInterval(timer);
  }, [grows]);
  useKey("j", "The next row", () => box.current?.to(active + 1));
  useKey("k", "The row before", () => box.current?.to(active - 1));
  useKey("Enter", "Show the span", () => row && open(active));
  useKey("Escape", "Close the span", () => { if (span) location.hash = base; });
  useKey("ArrowLeft", "Fold the row", () => row && fold(row.id, true));
  useKey("ArrowRight", "Unfold the row", () => row && fold(row.id, false));
  useKey("f", "Follow what happens", () => setFollow(!follow));
  useKey("p", "Pause", () => setPaused(!paused));
  useKey("+", "Zoom in on the row", () => scaled(0.5));
  useKey("-", "Zoom out", () => scaled(2));
  useKey("0", "See the whole", () => setZoom(null));
  useKey("/", "Search in the run", () => search.current?.focus());
  if (!found) return html`<${Wrong} problem=${problem} />`;
  const line = (index) => {
    const each = rows[shown[index]], more = each.end > shown[index] + 1;
    return html`<${Line} row=${each} more=${more} folded=${folded.has(each.id)} onFold=${() => fold(each.id)} onOpen=${() => open(index)}
      text=${each.kind === "model" && each.open ? texts.get(`${each.turn.eventId}/${each.step.step}`) : undefined}><${Bar} row=${each} scale=${scale} view=${view} /><//>`;
  };
  const beside = span && rows.find((each) => each.id === span);
  return html`<${Head} found=${found} rows=${rows} /><${Wrong} problem=${problem} />
    <div class="run-tools"><input ref=${search} type="search" aria-label="Search in the run" placeholder="Search in the run" value=${words}
      onInput=${(event) => setWords(event.currentTarget.value)} onKeyDown=${(event) => event.key === "Escape" && event.currentTarget.blur()} />
    <button aria-pressed=${follow} onClick=${() => setFollow(!follow)}>Follow</button>
    <button aria-pressed=${paused} onClick=${() => setPaused(!paused)}>Pause${paused && news > 0 && ` (${news} news)`}</button>
    <button aria-label="Zoom out" onClick=${() => scaled(2)}>−</button><button aria-label="Zoom in" onClick=${() => scaled(0.5)}>+</button>
    <button disabled=${!zoom} onClick=${() => setZoom(null)}>Whole</button><small>${count(shown.length)} of ${count(rows.length)} spans</small></div>
    <div class="run-split"><div class="run-rows"><${Axis} scale=${scale} view=${view} onZoom=${setZoom} />
    <${Rows} count=${shown.length} height=${HEIGHT} row=${line} label="Spans" onEnter=${open} active=${active} onActive=${move} handle=${box} /></div>
    ${span && html`<${Span} key=${span} row=${beside} scale=${scale} text=${beside && texts.get(`${beside.turn.eventId}/${beside.step?.step}`)} close=${base} />`}</div>`;
}
