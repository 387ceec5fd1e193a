// One span beside its run: what was asked and what came, what was refused and what would allow it, its log lines.
import { get, post } from "./api.js";
import { duration, money, time, tokens } from "./format.js";
import { State } from "./runs.js";
import { Folded, Json, Kept, visible, Wrong } from "./text.js";
import { html, useLoaded, useState } from "./view.js";
import { usedBy } from "./waterfall.js";

/** The log lines of a span are looked for so much before and behind it (ms): a step is noted a moment later. */
const AROUND_MS = 50;
/** Words that a shell takes as they are, within quotes. */
const PLAIN = /^[\p{L}\p{N} .,:;?()_/+=-]{1,199}$/u;

function Copy({ text }) {
  const [done, setDone] = useState(false);
  return html`<code>${visible(text)}</code> <button onClick=${() => navigator.clipboard?.writeText(visible(text)).then(() => setDone(true))}>${done ? "Copied" : "Copy"}</button>`;
}

/** Names and what is said of each, without those of which nothing is said. */
function Facts({ of }) {
  const said = of.filter(([, value]) => value);
  return said.length > 0 && html`<dl class="run-facts">${said.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${typeof value === "string" ? visible(value) : value}</dd></div>`)}</dl>`;
}

function Part({ name, children }) {
  return html`<details open><summary>${name}</summary>${children}</details>`;
}

/** What a trace has of a value: JSON, or its beginning. */
function Short({ text }) {
  let value = text;
  try { value = JSON.parse(text); } catch { /* it was cut */ }
  return typeof value === "string" ? html`<${Folded} text=${value} />` : html`<${Json} value=${value} />`;
}

const Files = ({ files = [], turn }) => files.map((file) => html`<${Kept} key=${file.blob.file} file=${file} agent=${turn.agent} instance=${turn.instanceKey} />`);

/** The messages of a turn that a span shows, as they are stored; none while they cannot be had. */
function useMessages({ turn, status }, which = {}) {
  const { agent, instanceKey: instance, eventId: event } = turn;
  const { value } = useLoaded(() => get("/page/api/messages", { agent, instance, event, ...which }), [event, status, turn.steps.length]);
  return value?.messages?.map(({ data, ...message }) => ({ ...message, ...data })) ?? [];
}

const textIn = (message) => (message?.content ?? []).map((part) => (part.type === "text" ? part.text : "")).join("");

function Turn({ row }) {
  const { turn } = row, messages = useMessages(row), asked = messages.find((message) => message.role === "user");
  const answer = messages.find((message) => message.role === "assistant");
  const { waits = {} } = turn, used = usedBy(row), told = (ms) => ms > 0 && duration(ms);
  return html`<${Facts} of=${[["Instance", `${turn.agent}/${turn.instanceKey ?? "…"}`], ["Turn", turn.turnId], ["Event", turn.eventId], ["Attempt", turn.attempt > 1 && turn.attempt],
      ["At work", told(turn.workMs)], ["In the queue", told(waits.queueMs)], ["For a place", told(waits.placeMs)], ["For the model", told(waits.modelMs)], ["For agents", told(waits.agentsMs)],
      ["For jails", told(waits.sandboxMs)], ["No process", told(waits.lostMs)], ["For a person", told(waits.personMs)], ["Tokens", tokens(used)], ["Money", money(used.costs)],
      ...(turn.resumedAt ?? []).map((at) => ["Taken up again", time(at)]), ...(turn.hangs ?? []).map((one) => ["Hung", `Extension ${one.extension} at ${one.point}, ${duration(one.durationMs)}`])]} />
    <${Wrong} problem=${turn.error} />
    <${Part} name="Message"><${Folded} text=${asked?.content ?? turn.message ?? ""} /><${Files} files=${asked?.files} turn=${turn} /><//>
    ${answer && html`<${Part} name="Answer"><${Folded} text=${textIn(answer)} /><//>`}
    ${row.depth === 0 && html`<p class="soft">A recorded run can be replayed: <${Copy} text=${`gdn record run.jsonl '${PLAIN.test(turn.message ?? "") ? turn.message : "MESSAGE"}'`} />, then <${Copy} text="gdn replay run.jsonl" /></p>`}`;
}

function Model({ row, text }) {
  const { node } = row, number = row.turn.steps.filter((one) => one.model?.status === "answered").indexOf(row.step);
  const [answer] = useMessages(row, { answer: Math.max(0, number) }), reasoning = answer?.metadata?.reasoning;
  return html`<${Facts} of=${[["Model", node.model], ["Asked for", node.asked], ["Tokens", tokens(node)], ["From the cache", node.cachedTokens], ["Into the cache", node.cacheWriteTokens],
      ["Of reasoning", node.reasoningTokens], ["Money", money(node.costs)], ["Tries", node.attempts > 1 && node.attempts], ["Between tries", node.pausedMs && duration(node.pausedMs)],
      ["For others", node.waitedMs && duration(node.waitedMs)], ["Ended", node.cutOff ? "cut off: the limit of tokens was reached" : node.finishReason],
      ["Left out", node.leftOut && `${node.leftOut} messages that did not fit`], ["Shortened", node.shortened && `${node.shortened} results`],
      ...(node.tries ?? []).map((failed, index) => [`Try ${index + 1}`, `${failed.error}${failed.waitedMs ? `; the next ${duration(failed.waitedMs)} later` : ""}`])]} />
    <${Part} name="Text"><${Folded} text=${text ?? (number < 0 ? "" : textIn(answer))} /><//>${reasoning && html`<${Part} name="Reasoning"><${Folded} text=${reasoning} /><//>`}`;
}

/** Who refuses, in words; of others there is the name of the feature. */
const REFUSED = {
  grant: "Refused by the sandbox, because nobody has granted this to the tool", catalog: "Refused, because the tool is not among those of this step",
  rule: "Refused by a rule of the bundle", person: "Refused by a person", extension: "Refused by an extension",
};

/** What was refused, and the line that would allow it. Which package a tool is of is in no trace: the person says it. */
function Refused({ refused, tool }) {
  const [state, setState] = useState({});
  const grant = (event) => {
    event.preventDefault();
    post("/page/api/grants", { tool: event.currentTarget.elements.tool.value.trim() }).then((granted) => setState({ granted }), (problem) => setState({ problem }));
  };
  return html`<div class="run-refused"><b>${Object.hasOwn(REFUSED, refused.by) ? REFUSED[refused.by] : `Refused by ${visible(refused.by)}`}</b>: ${visible(refused.message)}<p>To allow it: <${Copy} text=${refused.allow} /></p>
    ${refused.by === "grant" && html`<form onSubmit=${grant}><label>A tool of a package gets what it asks for: <input name="tool" required placeholder=${`@owner/package/${tool.split("__")[0]}`} /></label>
      <button>Grant</button> <span role="status">${state.granted && `${visible(state.granted.tool)} gets it from the next start on`}</span></form>`}<${Wrong} problem=${state.problem} /></div>`;
}

function Tool({ row }) {
  const { node, turn } = row, id = node.toolCallId;
  const parts = useMessages(row, { call: id }).flatMap((message) => message.content).filter((part) => part.toolCallId === id);
  const asked = parts.find((part) => part.args), came = parts.find((part) => part.result);
  const { jail, call } = node.receipt ?? {};
  return html`<${Facts} of=${[["Call", id], ["Code", node.code], ["Work", node.workMs && duration(node.workMs)], ["Policy", node.direct && "not in the catalog, by policy"], ["Script", node.script],
      ["Waits", row.open && node.askedAt && html`for a person: <a href="#/inbox">Inbox</a>`]]} />
    ${node.refused && html`<${Refused} refused=${node.refused} tool=${node.toolName} />`}
    ${(asked || node.args) && html`<${Part} name="Arguments">${asked ? html`<${Json} value=${asked.args} />` : html`<${Short} text=${node.args} />`}<//>`}
    ${(came || node.output || node.message) && html`<${Part} name="Result">${came ? html`<${Json} value=${came.result.error ?? came.result.output} />` : html`<${Short} text=${node.output ?? node.message} />`}
      <${Files} files=${came?.files} turn=${turn} /><//>`}
    ${jail && html`<${Part} name="Receipt"><${Facts} of=${[["Denied", call.denied?.join(" ") || jail.denied?.join(" ")], ["Reached", jail.reached?.join(" ")], ["Jail", `${jail.tier}: ${jail.walls.join(", ")}`],
      ["Peak memory", `${((jail.peakMemoryKb ?? 0) / 1024).toFixed(1)} MiB`], ["Processor", duration(jail.cpuMs ?? 0)], ["In the jail", duration(call.wallMs)], ["Its handler", call.handlerMs && duration(call.handlerMs)],
      ["Ended", call.exit ?? jail.exit]]} /><//>`}`;
}

const Step = ({ row }) => html`<${Wrong} problem=${row.step.error} />`;
const Try = ({ row }) => html`<${Facts} of=${[["Why", row.node.message ?? row.node.code], ["Time", "when it began is not noted: the tries share the time between the pauses"]]} />`;
const KINDS = { turn: Turn, step: Step, model: Model, tool: Tool, try: Try };

function Logs({ row }) {
  const [open, setOpen] = useState(false);
  const { agent, instanceKey: instance } = row.turn;
  const ask = () => (open ? get("/page/api/logs", { agent, instance, from: Math.floor(row.from - AROUND_MS), to: Math.ceil(row.to + AROUND_MS) }) : Promise.resolve());
  const { value, problem } = useLoaded(ask, [open, row.id, row.to]);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>Log lines</summary><${Wrong} problem=${problem} />
    ${value && (value.length ? html`<${Folded} lines=${40} text=${value.map((line) => `${time(line.at)} ${line.role}: ${line.text}`).join("\n")} />` : html`<p class="soft">none</p>`)}</details>`;
}

/** Go on in a copy of the conversation that ends before this turn or step. */
function Repeat({ row }) {
  const [problem, setProblem] = useState(null);
  const { agent, instanceKey: instance, turnId: turn } = row.turn;
  const go = async () => {
    try {
      const made = await post(`/api/v1/agents/${encodeURIComponent(agent)}/conversation/fork`, { instance, turn, step: row.step?.step || undefined });
      (await import("./talk.js")).draft(agent, made.instance, made.message ?? "Go on.");
      location.hash = `#/talk/${encodeURIComponent(agent)}/${encodeURIComponent(made.instance)}`;
    } catch (error) {
      setProblem(error);
    }
  };
  return html`<button onClick=${go}>Repeat from here</button><${Wrong} problem=${problem} />`;
}

/** @param {{row?: any, scale: any, text?: string, close: string}} props `text`: what streams of it */
export function Span({ row, scale, text, close }) {
  if (!row) return html`<aside class="run-panel"><a href=${close}>Close</a><p>This span is not in the run.</p></aside>`;
  return html`<aside class="run-panel" aria-label="Span"><div class="run-tools"><h2>${visible(row.name)}</h2><a href=${close} title="Escape">Close</a></div>
    <p>${row.status && html`<${State} status=${row.status} code=${row.node.code} /> `}${duration(row.to - row.from)}, +${duration(row.from - scale.from)} · ${time(row.from)}</p>
    <${KINDS[row.kind]} row=${row} text=${text} /><${Logs} row=${row} />
    ${row.kind !== "try" && row.kind !== "model" && html`<p><${Repeat} row=${row} /> <a href=${`#/talk/${encodeURIComponent(row.turn.agent)}/${encodeURIComponent(row.turn.instanceKey ?? "")}`}>Conversation</a></p>`}</aside>`;
}
