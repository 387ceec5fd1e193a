// What waits for a person: calls to agree to and questions to answer; and what a person has agreed to for always.
// Everything in an item may be a model's words. A yes is only for what was shown, and for what was shown long enough.
import { get, post } from "./api.js";
import { ago, duration, time } from "./format.js";
import { seen, soon, useClose } from "./health.js";
import { useKey } from "./keys.js";
import { Folded, visible, Wrong } from "./text.js";
import { html, useEffect, useLoaded, useRef, useState } from "./view.js";
import { Rows } from "./virtual.js";

/** Of a longer text the beginning is shown at first (lines); and so many arguments. */
const LINES = 40, ENTRIES = 50;
/** What has just come under a key is not answered by it (ms): it was meant for what stood there before. */
const SETTLE_MS = 400;

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
const isCut = (text) => text.length > 160 * LINES || text.split("\n", LINES + 1).length > LINES;

/** Whether an item is more than is shown of it at first. */
function isLong({ args, script, message }) {
  const values = Object.values(args ?? {});
  return values.length > ENTRIES || [...values.map(asText), script ?? "", message ?? ""].some(isCut);
}

export default function Inbox({ path }) {
  const listed = seen.value.approvals, [gone] = useState(() => new Set());
  const items = (listed?.items ?? []).filter((one) => !gone.has(one.code));
  const [code, setCode] = useState(path[0]);
  const [said, setSaid] = useState("");
  const last = useRef(0);
  const found = items.findIndex((one) => one.code === code);
  const at = last.current = found < 0 ? Math.max(0, Math.min(last.current, items.length - 1)) : found;
  const item = items[at], always = useLoaded(() => get("/api/v1/approvals", { always: true }), [listed]);
  useClose();
  useEffect(() => setCode(path[0]), [path[0]]);
  useEffect(() => { if (item) setCode((old) => (items.some((one) => one.code === old) ? old : item.code)); }, [item?.code]);
  const move = (index) => { // keys may be faster than what is drawn
    if (!items[index]) return;
    last.current = index;
    setCode(items[index].code);
  };
  const done = (text, decided) => { gone.add(decided); setSaid(text); soon(false); always.again(); };
  useKey("j", "The next one", () => move(last.current + 1));
  useKey("k", "The one before", () => move(last.current - 1));
  return html`<p class="inbox-said" role="status">${visible(said)}</p>
    ${items.length ? html`<div class="inbox">
      <div class="inbox-list"><${Rows} count=${items.length} height=${50} label="What waits" active=${at} onActive=${move} row=${(index) => html`<${Row} item=${items[index]} />`} />
        ${listed.more > 0 && html`<small>and ${listed.more} more</small>`}</div>
      <${Item} key=${item.code} code=${item.code} onDone=${done} /></div>` : listed && html`<p>Nothing waits for a person.</p>`}
    <${Standing} loaded=${always} onDone=${done} />`;
}

function Row({ item }) {
  const what = item.message ?? (item.args == null ? "…" : JSON.stringify(item.args));
  return html`<div class="inbox-row"><span><b>${visible(item.tool)}</b> <small>${visible(`${item.agent}/${item.instanceKey}`)}, ${ago(item.askedMs)}</small></span>
    <code>${visible(what.slice(0, 300))}</code></div>`;
}

/** One item: what it would do, and what can be said to it. */
function Item({ code, onDone }) {
  const { value: item, problem } = useLoaded(() => get(`/api/v1/approvals/${encodeURIComponent(code)}`), [code]);
  const [wrong, setWrong] = useState(null);
  const [whole, setWhole] = useState(false);
  const [ready, setReady] = useState(false);
  const busy = useRef(false), reason = useRef(null);
  useEffect(() => {
    setReady(false);
    const timer = setTimeout(() => setReady(Boolean(item)), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [item, whole]);
  useEffect(() => { if (problem) soon(false); }, [problem]); // it was decided elsewhere
  const decide = async (decision, rest = {}) => {
    if (busy.current || !item || (decision === "yes" && !ready)) return;
    if (decision !== "no" && !whole && isLong(item)) return setWhole(true);
    busy.current = true;
    setWrong(null);
    await post(`/api/v1/approvals/${encodeURIComponent(code)}`, { decision, ...rest }).then(
      (told) => onDone(`${told.code} (${item.tool}) is ${told.state}${rest.always ? ", for always" : ""}.`, code),
      (refused) => { setWrong(refused); soon(false); });
    busy.current = false;
  };
  const deny = (event) => {
    event.preventDefault();
    decide("no", { reason: reason.current.value.trim() || null });
  };
  useKey("n", "No, with a reason", () => reason.current?.focus());
  if (!item) return html`<section class="inbox-item"><${Wrong} problem=${problem} /></section>`;
  const question = item.kind === "question", Say = question ? Answer : Agree;
  return html`<section class="inbox-item" aria-label=${question ? "The question" : "The call"}>
    <h2>${question ? "A question of " : ""}${visible(item.tool)} <small>${visible(code)}</small></h2>
    ${question ? html`<${Text} text=${item.message ?? ""} whole=${whole} />` : html`<${Arguments} args=${item.args ?? {}} whole=${whole} />`}
    ${item.script != null && html`<h3>The script that makes the call</h3><${Text} text=${item.script} whole=${whole} />`}
    <${Facts} item=${item} />
    <${Wrong} problem=${wrong} />
    ${whole && html`<p class="warn" role="status">This is all of it. What you say now counts.</p>`}
    <${Say} item=${item} decide=${decide} ready=${ready} />
    <form class="inbox-no" onSubmit=${deny}><label>Why not <input ref=${reason} name="reason" maxlength="4000" autocomplete="off" onKeyDown=${(event) => event.key === "Escape" && event.currentTarget.blur()} /></label>
      <button><kbd>n</kbd> No</button></form></section>`;
}

function Text({ text, whole }) {
  return whole ? html`<pre>${visible(text)}</pre>` : html`<${Folded} text=${text} lines=${LINES} />`;
}

function Arguments({ args, whole }) {
  const entries = Object.entries(args);
  if (whole) return html`<pre class="inbox-whole">${visible(JSON.stringify(args, null, 2))}</pre>`;
  return html`<dl class="inbox-args">${entries.slice(0, ENTRIES).map(([name, value]) => html`<dt key=${`t ${name}`}>${visible(name)}${typeof value !== "string" && html` <small>JSON</small>`}</dt>
    <dd key=${`d ${name}`}><${Folded} text=${asText(value)} lines=${LINES} /></dd>`)}
    ${entries.length > ENTRIES && html`<dt>and ${entries.length - ENTRIES} more arguments</dt>`}</dl>`;
}

function Facts({ item }) {
  const who = `${item.agent}/${item.instanceKey}`, asked = (item.waitedForBy ?? []).map(visible);
  const rows = [
    ["Agent", visible(who)],
    ["Asked by", asked.length ? asked.join(" → ") : "the sender of the message"],
    ["Run", html`<a href=${`#/run/${encodeURIComponent(item.id.split("/")[0])}`}>${visible(item.id.split("/")[0])}</a>`],
    ["Works in", item.workdir && html`<code>${visible(item.workdir)}</code>`],
    ...Object.entries(item.files ?? {}).map(([name, digest]) => ["File", html`${visible(name)} <small class="mono">sha256:${digest}</small>`]),
    ["Rule", item.reason && visible(item.reason)],
    ["Covers", item.covers > 0 && `this call, and up to ${item.covers - 1} more of this tool in this script that the rule is about`],
    ["Asked", html`${time(item.askedMs)}${item.expiresMs && html`, <${Left} until=${item.expiresMs} />`}`],
    ["Digest", html`<small class="mono">sha256:${item.digest}</small>`],
  ];
  return html`<dl class="inbox-facts">${rows.map(([name, value], index) => value && html`<div key=${index}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** How long is left, each second. */
function Left({ until }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  const left = until - now;
  return left > 0 ? `denied if not answered in ${duration(Math.max(1000, Math.floor(left / 1000) * 1000))}` : "its time is over";
}

/** Yes to a call: once, or always. */
function Agree({ item, decide, ready }) {
  const [lasting, setLasting] = useState(false);
  useKey("y", "Yes, once", (event) => { if (!event.repeat) decide("yes"); });
  useKey("a", "Yes, always", () => setLasting(true));
  if (lasting) return html`<${Always} item=${item} decide=${decide} onClose=${() => setLasting(false)} />`;
  return html`<p><button class="main" disabled=${!ready} onClick=${() => decide("yes")}><kbd>y</kbd> Yes, once</button> <button onClick=${() => setLasting(true)}><kbd>a</kbd> Always …</button></p>`;
}

/** What a lasting yes would be for, before it is said. */
function Always({ item, decide, onClose }) {
  const [name, setName] = useState(""), [beginning, setBeginning] = useState("");
  const texts = Object.entries(item.args ?? {}).filter(([, value]) => value && typeof value === "string");
  const fits = !name || (beginning && item.args[name].startsWith(beginning)), button = useRef(null);
  useEffect(() => button.current.focus(), []);
  const choose = (chosen) => { setName(chosen); setBeginning(chosen && item.args[chosen].slice(0, 1000)); };
  const agree = (event) => {
    event.preventDefault();
    decide("yes", { always: name ? { [name]: beginning } : {} });
  };
  return html`<form class="inbox-always" aria-label="Always" onSubmit=${agree} onKeyDown=${(event) => event.key === "Escape" && onClose()}>
    <p>Later calls of <b>${visible(item.tool)}</b> by <b>${visible(item.agent)}</b> run without a question, in all of its instances and working directories, until you take this back.</p>
    <label>Their arguments are <select value=${name} onChange=${(event) => choose(event.currentTarget.value)}><option value="">the same as these</option>
      ${texts.map(([one]) => html`<option key=${one} value=${one}>the same, but ${visible(one)} only begins like this</option>`)}</select></label>
    ${name && html`<label>${visible(name)} begins with <textarea rows="2" spellcheck=${false} value=${beginning} onInput=${(event) => setBeginning(event.currentTarget.value)}></textarea></label>
      ${beginning !== visible(beginning) && html`<pre>${visible(beginning)}</pre>`}
      <p class=${fits ? "warn" : "bad"}>${fits ? html`Whatever follows it runs, too: <code>git status; rm -rf .</code> begins with <code>git status</code>.` : "This call does not begin so."}</p>`}
    <p><button class="main" ref=${button} disabled=${!fits}>Yes, always</button> <button type="button" onClick=${onClose}>Cancel</button></p></form>`;
}

/** The fields of an answer. One without a name is the whole answer. */
function fieldsOf(schema) {
  const { type, properties, maxProperties } = schema ?? {};
  const parts = type === "object" && (properties || maxProperties === 0) ? properties ?? {} : { "": schema ?? {} };
  return Object.entries(parts).map(([name, part]) => ({ name, part, kind: Array.isArray(part?.enum) ? "enum" : part?.type }));
}

function valueOf({ part, kind }, field) {
  if (kind === "boolean") return field.checked;
  if (field.value === "") return undefined;
  if (kind === "enum") return part.enum[field.value];
  return kind === "string" ? field.value : JSON.parse(field.value);
}

/** An answer to a question, by the schema that it has. */
function Answer({ item, decide }) {
  const form = useRef(null), fields = fieldsOf(item.schema), [wrong, setWrong] = useState(null);
  useKey("r", "Answer the question", () => form.current.querySelector("input, select, textarea, button").focus());
  const answer = (event) => {
    event.preventDefault();
    try {
      const values = fields.map((one, index) => [one.name, valueOf(one, form.current.elements[`f${index}`])]);
      setWrong(null);
      const whole = values.find(([name]) => !name);
      decide("answer", { answer: whole ? whole[1] ?? null : Object.fromEntries(values.filter(([, value]) => value !== undefined)) });
    } catch {
      setWrong({ message: "A value is no JSON.", suggestion: "A text stands in quotes there." });
    }
  };
  return html`<form class="inbox-answer" ref=${form} onSubmit=${answer}>${fields.map((one, index) => html`<label key=${index}>
    ${visible(one.part?.title ?? (one.name || "Answer"))} <${Field} ...${one} id=${`f${index}`} />${one.part?.description && html` <small>${visible(one.part.description)}</small>`}</label>`)}
    <${Wrong} problem=${wrong} /><p><button class="main">${fields.length ? html`<kbd>r</kbd> Answer` : "Done"}</button></p></form>`;
}

function Field({ part, kind, id }) {
  if (kind === "enum") return html`<select name=${id}><option value="">–</option>${part.enum.map((one, index) => html`<option key=${index} value=${index}>${visible(part.enumNames?.[index] ?? asText(one))}</option>`)}</select>`;
  if (kind === "boolean") return html`<input type="checkbox" name=${id} />`;
  if (kind === "number" || kind === "integer") return html`<input type="number" step="any" name=${id} />`;
  return kind === "string" ? html`<input name=${id} autocomplete="off" />` : html`<textarea name=${id} rows="3" placeholder="JSON" spellcheck=${false}></textarea>`;
}

/** What is agreed to for always, and taking it back. */
function Standing({ loaded, onDone }) {
  const [wrong, setWrong] = useState(null), yeses = loaded.value?.always ?? [];
  const revoke = ({ code, tool }) => post(`/api/v1/approvals/${encodeURIComponent(code)}`, { decision: "revoke" }).then(
    () => { setWrong(null); onDone(`${code} (${tool}) is taken back: such calls ask again.`); }, setWrong);
  return html`<section class="inbox-standing"><${Wrong} problem=${wrong ?? loaded.problem} />${yeses.length > 0 && html`<h2>Agreed for always</h2>
    <ul>${yeses.map((yes) => html`<li key=${yes.code}><button onClick=${() => revoke(yes)} aria-label=${`Take back ${yes.code}`}>Take back</button>
      <span><b>${visible(yes.tool)}</b> of ${visible(yes.agent)} <code>${visible(yes.what)}</code>${yes.argument && html`, but ${visible(yes.argument)} only begins with <code>${visible(yes.prefix)}</code>`}
      <small> ${visible(yes.code)}, ${time(yes.atMs)}, user ${yes.uid}</small>${yes.stale && html` <b class="warn">answers nothing: its rule was changed, or is gone</b>`}</span></li>`)}</ul>`}</section>`;
}
