// How a turn of a conversation is read and drawn: what was asked, what the model thought, called and said.
import { bytes, time } from "./format.js";
import { Folded, Json, Kept, visible } from "./text.js";
import { html, useState } from "./view.js";

/** A longer text is folded, and has no paragraphs (characters). */
const LONG = 1 << 15;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const OWN = /^(t[0-9a-f]{20}(?:-\d+)?)\.(.*)$/;

/**
 * A text as paragraphs and blocks of code, which stand between fences.
 * @param {string} text
 * @returns {{code: boolean, text: string}[]}
 */
export function blocks(text) {
  const found = [];
  let lines = [], fence = "";
  const end = (code) => {
    const whole = lines.join("\n");
    if (code) found.push({ code, text: whole });
    else found.push(...whole.split(/\n[ \t]*\n/).filter((one) => one.trim()).map((one) => ({ code, text: one.replace(/^\n+|\n+$/g, "") })));
    lines = [];
  };
  for (const line of text.split(/\r?\n/)) {
    const [, mark, rest] = FENCE.exec(line) ?? [];
    if (!fence && mark && !(mark[0] === "`" && rest.includes("`"))) end(false), fence = mark;
    else if (fence && mark?.startsWith(fence) && !rest.trim()) end(true), fence = "";
    else lines.push(line);
  }
  end(Boolean(fence));
  return found;
}

/**
 * The turns of messages as they are stored, in order. A turn has `id`, `items` and `whole`: its first message is among
 * them, so its steps can be counted. Each file gets its `place`.
 * @param {any[]} messages
 * @param {{agent: string, instance: string}} of the conversation
 */
export function turnsOf(messages, of) {
  const turns = [], placed = (files) => (files ?? []).map((file) => ({ ...file, place: of }));
  for (const { id, data = {}, source = {}, metadata = {}, createdAt } of messages) {
    const [, name, place] = OWN.exec(id) ?? [];
    let turn = turns.at(-1);
    if (!turn || (name && name !== turn.id)) turns.push(turn = { id: name ?? "", items: [], whole: place === "0", steps: 0, at: createdAt });
    if (data.role === "tool") {
      for (const { toolCallId, toolName, result = {}, files } of data.content ?? []) {
        const call = turn.items.flatMap(({ calls = [] }) => calls).findLast((one) => one.id === toolCallId && !one.state);
        const state = result.status === "ok" ? "done" : result.error?.code ?? "failed", told = { state, result, files: placed(files) };
        if (call) Object.assign(call, told);
        else turn.items.push({ id, calls: [{ id: toolCallId, name: toolName, ...told }] });
      }
    } else if (data.role === "assistant") {
      const parts = Array.isArray(data.content) ? data.content : [];
      const calls = parts.filter(({ type }) => type === "tool-call").map((one) => ({ id: one.toolCallId, name: one.toolName, args: one.args }));
      turn.items.push({
        id, calls, step: /^\d+$/.test(place) ? ++turn.steps : 0, reasoning: metadata.reasoning, cutOff: metadata.cutOff,
        text: parts.filter(({ type }) => type === "text").map(({ text }) => text).join(""),
      });
    } else turn.items.push({ id, asked: true, text: String(data.content ?? ""), files: placed(data.files), by: source.type === "user" ? "" : source.name ?? source.type });
  }
  return turns;
}

/** A text with its paragraphs and blocks of code. */
export function Prose({ text }) {
  if (text.length > LONG) return html`<${Folded} text=${text} lines=${40} />`;
  return blocks(text).map((one, index) => (one.code
    ? html`<pre key=${index} class="talk-code" tabindex="0">${visible(one.text)}</pre>`
    : html`<p key=${index} dir="auto">${visible(one.text)}</p>`));
}

/** A file that is stored, or one that is on its way. */
function File({ file }) {
  if (file.blob) return html`<${Kept} file=${file} ...${file.place} />`;
  const told = `${visible(file.name)}, ${visible(file.type)}, ${bytes(file.size)}`;
  return /^image\//.test(file.type) ? html`<img class="picture" src=${file.url} alt=${told} />` : html`<small>📎 ${told}</small>`;
}

/** What somebody has said to the agent. */
export function Asked({ text, files = [], by = "" }) {
  return html`<div class="talk-asked">${by && html`<small>${visible(by)}</small>`}<${Prose} text=${text} />
    ${files.map((file, index) => html`<${File} key=${index} file=${file} />`)}</div>`;
}

function Call({ name, args, line, state = "no result", progress, result, files = [] }) {
  const [open, setOpen] = useState(false);
  const good = state === "done" || state === "works", value = result && (result.status === "ok" ? result.output : result.error);
  return html`<details class="talk-call" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><b class="mono">${visible(name)}</b> <span class=${good ? "soft" : "bad"}>${visible(state).slice(0, 80)}</span>
      ${progress && html` <span class="soft">${visible(progress).slice(0, 200)}</span>`} <span class="soft mono">${visible(line ?? JSON.stringify(args) ?? "").slice(0, 300)}</span></summary>
    ${open && html`${args !== undefined && html`<h3>Arguments</h3><${Json} value=${args} />`}
      ${value !== undefined && html`<h3>${result.status === "ok" ? "Result" : "Error"}</h3><${Json} value=${value} />`}
      ${files.map((file, index) => html`<${File} key=${index} file=${file} />`)}
      ${!result && html`<p class="soft">The result stands here when the turn is over.</p>`}`}</details>`;
}

/** What the model has thought, said and called in one step. `thinks`: it does so now, and the thought is open. */
export function Said({ text = "", reasoning = "", calls = [], cutOff, gap, thinks = false }) {
  return html`<div class="talk-said">${reasoning && html`<details class="talk-thought" open=${thinks}><summary class="soft">Thought</summary><${Folded} text=${reasoning} lines=${thinks ? 400 : 12} /></details>`}
    <${Prose} text=${text} />${(gap || cutOff) && html`<p class="warn">${gap ? "Some of this text was lost on the way." : "The model reached its limit of tokens here."}</p>`}
    ${calls.map((call) => html`<${Call} key=${call.id} ...${call} />`)}</div>`;
}

/** A turn that is over. `fork(step)` begins another conversation before a step of it. */
export function Turn({ turn, trace, fork, undo }) {
  return html`<article class="talk-turn">${turn.items.map((item) => (item.asked
    ? html`<${Asked} key=${item.id} ...${item} />`
    : html`<div key=${item.id} class="talk-step"><${Said} ...${item} />
      ${turn.whole && item.step > 1 && html`<button class="talk-from" onClick=${() => fork(item.step)} title="Another conversation that ends before this step">Fork before this step</button>`}</div>`))}
    ${trace?.error && html`<p class="wrong">${visible(`${trace.error.code}: ${trace.error.message}`).slice(0, 2000)}</p>`}
    <footer><small>${time(turn.at)}</small>${turn.id && html` <a href="#/run/${encodeURIComponent(turn.id)}">Run</a>
      ${turn.whole && html`<button onClick=${() => fork(1)} title="Another conversation that ends before this message">Fork before this</button>`}`}
      ${undo && html`<button onClick=${undo}>Take back</button>`}</footer></article>`;
}
