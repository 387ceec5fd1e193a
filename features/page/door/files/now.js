// Now: who works, who waits for whom, what is left undone, what it runs in and what it may use.
import { get, post } from "./api.js";
import { ago, bytes, count, duration } from "./format.js";
import { seen, soon, useClose, wrong } from "./health.js";
import { useKey } from "./keys.js";
import { on } from "./live.js";
import { runOf, waitsFor } from "./problems.js";
import { Json, visible, Wrong } from "./text.js";
import { html, useEffect, useLoaded, useState } from "./view.js";

/** Rows of a table that are drawn, and of those that ask more about each. */
const MOST = 100, FEW = 20;
/** The turns whose mean tells how long one takes. */
const LAST = 5;

/** How long a button waits for a second press (ms). */
const SURE_MS = 5000;

/** How long something has lasted: whole seconds of the first minute, then whole minutes. What is old is drawn seldom. */
const lasted = (ms) => (ms < 60000 ? `${Math.max(0, Math.floor(ms / 1000))} s` : duration(ms - (ms % 60000)).replace(" 0 s", ""));
const who = (row) => `${row.agent}/${row.instanceKey}`;
const talkTo = (row) => `#/talk/${encodeURIComponent(row.agent)}/${encodeURIComponent(row.instanceKey)}`;

/** The time, each second while somebody looks. */
function useClock() {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => document.visibilityState !== "hidden" && setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

/** What turns were heard to do last, by message; drawn with the clock. @returns {Map<string, {step: number, text: string}>} */
function useDoings() {
  const [doings] = useState(() => new Map());
  useEffect(() => on((events) => {
    if (!events || doings.size > 10000) return doings.clear();
    for (const { kind, eventId, step, toolName } of events) {
      if (kind === "event.ended") doings.delete(eventId);
      else if (kind === "step.started") doings.set(eventId, { step, text: "asks its model" });
      else if (kind === "text" || kind === "reasoning") doings.set(eventId, { step, text: kind === "text" ? "writes" : "thinks" });
      else if (kind === "tool.called") doings.set(eventId, { step, text: `calls ${toolName}` });
    }
  }), []);
  return doings;
}

/** Something that a person may do here. `done` hears the answer. `sure`: what the button asks before it cannot be undone. */
function Do({ path, body, label, title, done, sure, children }) {
  const [state, set] = useState({});
  const act = async () => {
    if (sure && !state.asked) {
      setTimeout(() => set((old) => (old.asked ? {} : old)), SURE_MS);
      return set({ asked: true });
    }
    set({ busy: true });
    try {
      const answer = await post(path, body);
      set({});
      done?.(answer);
    } catch (problem) {
      set({ problem });
    }
    soon();
  };
  return html`<button disabled=${state.busy} aria-label=${label} title=${title} onClick=${act}>${state.busy ? "…" : state.asked ? sure : children}</button>
    <${Wrong} problem=${state.problem} />`;
}

/** A part of the view: a heading, and a table that says when nothing is in it. */
function Part({ title, head, rows, most = MOST, none, row }) {
  if (!rows?.length && !none) return null;
  return html`<section class="now-part" aria-label=${title}><h2>${title} ${rows?.length > 0 && html`<small>${count(rows.length)}</small>`}</h2>
    ${rows?.length ? html`<div class="now-wide" tabindex="0" role="group" aria-label=${title}><table>
      <thead><tr>${head.map((name) => html`<th key=${name} scope="col" class=${/^(Messages|Memory|Restarts|Calls|Step)$/.test(name) ? "number" : ""}>${name}</th>`)}</tr></thead>
      <tbody>${rows.slice(0, most).map(row)}</tbody></table></div>` : html`<p class="soft">${none}</p>`}
    ${rows?.length > most && html`<p class="soft">and ${count(rows.length - most)} more</p>`}</section>`;
}

/** That all is well, or what is wrong beside what stands below the navigation. */
function Health() {
  const found = wrong.value, { at, waits } = seen.value;
  if (!at) return html`<p class="soft" role="status">Asking…</p>`;
  if (!found.length) return html`<p class="now-well good" role="status">All is well. ${waits?.turns ? `${count(waits.turns.length)} at work, ${count(waits.waits.length)} wait.` : ""}</p>`;
  return found.length > 1 && html`<ul class="now-wrong" aria-label="What else is wrong">${found.slice(1, FEW).map((one) => html`<li key=${one.text}>
    <b>${visible(one.text)}</b>: <a href=${one.href}>${visible(one.todo)}</a></li>`)}</ul>`;
}

/** Turns that run, each with what it waits for. */
function Work({ clock }) {
  const { waits, at } = seen.value, doings = useDoings(), late = clock - at;
  return html`<${Part} title="At work" none="No turn runs." head=${["Who", "For", "Step", "Does or waits for", ""]} rows=${waits?.turns} row=${(turn) => {
    const heard = doings.get(turn.eventId), own = waits.waits.filter((row) => row.eventId === turn.eventId && row.kind !== "turn");
    return html`<tr key=${turn.eventId}><th scope="row"><a href=${runOf(turn.eventId)}>${visible(who(turn))}</a></th>
      <td>${lasted(turn.forMs + late)}</td><td class="number">${Math.max(turn.step, heard?.step ?? 0) || "–"}</td>
      <td>${own.length ? own.map((row) => html`<div class="now-waits" key=${row.kind + row.targetEventId}>waits for
          ${row.kind === "answer" ? html` the answer of <a href=${runOf(row.targetEventId)}>${visible(`${row.target}/${row.targetKey}`)}</a>`
    : row.kind === "approval" ? html` <a href=${`#/inbox/${encodeURIComponent(row.items[0])}`}>${visible(waitsFor(row))}</a>` : ` ${visible(waitsFor(row))}`}
          <small> for ${lasted(row.forMs + late)}</small></div>`) : visible(heard?.text ?? "works")}</td>
      <td><${Do} path=${`/api/v1/messages/${encodeURIComponent(turn.eventId)}/cancel`} label=${`Stop ${visible(who(turn))}`}>Stop<//></td></tr>`;
  }} />`;
}

/** Turns that are parked until a person has said something. */
function Persons({ clock }) {
  return html`<${Part} title="Wait for a person" head=${["Who", "For", "What"]} rows=${seen.value.approvals?.items} row=${(item) => html`<tr key=${item.code}>
    <th scope="row"><a href=${runOf(item.eventId)}>${visible(who(item))}</a></th><td>${lasted(clock - item.askedMs)}</td>
    <td>${item.kind === "question" ? "an answer to" : "a yes or no to"} <a href=${`#/inbox/${encodeURIComponent(item.code)}`}>${visible(item.tool)}</a></td></tr>`} />`;
}

/** How long so many messages will take an instance, from how long its last turns took: those are asked for again when
 * the messages have doubled or halved. How long the turn that runs will take is not known. */
function Clears({ row }) {
  const query = { agent: row.agent, instance: row.instanceKey, state: "completed", limit: LAST };
  const { value } = useLoaded(() => get("/api/v1/traces", query), [row.agent, row.instanceKey, Math.floor(Math.log2(row.messages))]);
  const took = (value?.traces ?? []).map((turn) => turn.durationMs).filter((ms) => ms != null);
  if (!took.length) return html`<span class="soft">${value ? "no turn of it has ended yet" : "…"}</span>`;
  const mean = took.reduce((sum, ms) => sum + ms, 0) / took.length;
  return html`${row.kind === "turn" && "after its turn "}about ${duration(mean * row.messages)} <small>${count(row.messages)} × ${duration(mean)}, the mean of its last ${took.length}</small>`;
}

/** Messages that wait for their instance. */
function Backlog({ clock }) {
  const { waits, at } = seen.value, rows = (waits?.waits ?? []).filter((row) => row.messages > 0);
  return html`<${Part} title="Mailboxes with messages that wait" head=${["Mailbox", "Messages", "Oldest for", "Until clear", "Wait for"]} rows=${rows} most=${FEW}
    row=${(row) => html`<tr key=${who(row)}><th scope="row"><a href=${talkTo(row)}>${visible(who(row))}</a></th><td class="number">${count(row.messages)}</td>
      <td>${lasted(row.forMs + clock - at)}</td><td><${Clears} row=${row} /></td><td>${visible(waitsFor(row))}</td></tr>`} />`;
}

/** What a message that was given up had asked. */
function Letter({ id }) {
  const [open, setOpen] = useState(false);
  const { value, problem } = useLoaded(() => (open ? get(`/api/v1/dead-letters/${encodeURIComponent(id)}`) : Promise.resolve()), [open]);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>its content</summary>
    ${open && value && html`<${Json} value=${value.event ?? `${bytes(value.large)} in a file`} />`}<${Wrong} problem=${problem} /></details>`;
}

function Dead({ clock }) {
  const { dead } = seen.value, [again, setAgain] = useState(null);
  const path = (row, what) => `/api/v1/dead-letters/${encodeURIComponent(row.eventId)}/${what}`;
  return html`${again && html`<p role="status">It waits again: <a href=${runOf(again)}>its new run</a></p>`}
    <${Part} title="Messages that were given up" head=${["To", "When", "Why", ""]} rows=${dead?.events}
    row=${(row) => html`<tr key=${row.eventId}><th scope="row"><a href=${runOf(row.eventId)}>${visible(who(row))}</a></th><td>${ago(row.endedMs, clock)}</td>
      <td>${visible(row.cause)}<${Letter} id=${row.eventId} /></td>
      <td class="now-acts"><${Do} path=${path(row, "requeue")} label=${`Send again to ${visible(who(row))}`} done=${(answer) => setAgain(answer.newEventId)}>Send again<//>
        <${Do} path=${path(row, "drop")} sure="Drop it for good" label=${`Drop the message to ${visible(who(row))}`}>Drop<//></td></tr>`} />`;
}

function Budgets() {
  const trees = seen.value.budgets?.trees ?? [];
  const rows = trees.slice(0, FEW).flatMap((tree) => tree.budgets.flatMap((budget) => Object.entries(budget.limits).map(([name, limit]) => ({ tree, budget, name, limit }))));
  return html`<${Part} title="Budgets" head=${["Of", "Message", "Spent", "Limit"]} rows=${rows} row=${({ tree, budget, name, limit }) => {
    const used = budget.spent[name], held = budget.held[name], unit = name === "money" ? budget.currency : name;
    return html`<tr key=${tree.rootEvent + budget.agent + name}><th scope="row">${visible(budget.agent)}</th>
      <td><a href=${runOf(tree.rootEvent)}>${tree.endedMs === null ? "is worked on" : "is over"}</a></td>
      <td><meter min="0" max=${limit} value=${Math.min(used, limit)} low=${limit * 0.8} high=${limit * 0.999} optimum="0" aria-label=${`${name} of ${visible(budget.agent)}`} /></td>
      <td class=${used >= limit ? "bad" : ""}>${amount(used)} of ${amount(limit)} ${visible(unit)}${used >= limit && ", spent"}${held > 0 && ` (${amount(held)} held)`}</td></tr>`;
  }} />`;
}

const amount = (number) => number.toLocaleString(undefined, { maximumFractionDigits: 4 });

function Processes({ clock }) {
  const { processes } = seen.value;
  return html`<${Part} title="Processes and jails" none="No process runs." head=${["Name", "Kind", "State", "For", "Memory", "Restarts", "Last end", ""]} rows=${processes}
    row=${(row) => html`<tr key=${row.role + row.name + row.instanceKey + row.pid}><th scope="row">${visible(row.instanceKey ? `${row.name}/${row.instanceKey}` : row.name)}</th>
      <td>${row.role === "worker" ? "jail" : visible(row.role)}</td><td class=${row.status === "crash-loop" ? "bad" : ""}>${visible(row.status)}</td>
      <td>${lasted(clock - Date.parse(row.since))}</td><td class="number">${row.memory ? bytes(row.memory) : "–"}</td>
      <td class="number">${count(row.restarts)}</td><td>${visible(row.lastExit ?? "")}</td>
      <td>${row.role === "agent" && html`<${Do} path=${`/api/v1/agents/${encodeURIComponent(row.name)}/restart`} label=${`Restart ${visible(row.name)}`}
        title="Its processes begin anew, each at the end of its step">Restart<//>`}</td></tr>`} />`;
}

function Servers({ clock }) {
  const { servers, learned } = seen.value;
  return html`<${Part} title="MCP servers" head=${["Server", "Instance", "State", "For", "Calls", "Memory", "Last error"]} rows=${servers}
    row=${(row) => html`<tr key=${row.server + row.agent + row.instanceKey}><th scope="row">${visible(row.server)}</th>
      <td>${visible(row.agent ? `${row.agent}/${row.instanceKey}` : row.instanceKey ?? "")}</td><td class=${row.state === "login" ? "warn" : ""}>${visible(row.state)}</td>
      <td>${row.since ? lasted(clock - Date.parse(row.since)) : "–"}</td><td class="number">${count(row.calls ?? 0)}${row.openCalls > 0 && ` (${count(row.openCalls)} open)`}</td>
      <td class="number">${row.memoryKb ? bytes(row.memoryKb * 1024) : "–"}</td><td class="bad">${visible(row.lastError ?? "")}</td></tr>`} />
    <${Part} title="Learned of servers" head=${["About", "What"]} rows=${learned}
    row=${(row) => html`<tr key=${row.text}><th scope="row">${visible(row.about)}</th><td>${visible(row.text)}</td></tr>`} />`;
}

export default function Now() {
  useClose();
  useKey("r", "Look again", () => soon());
  const clock = useClock();
  return html`<div class="now"><${Health} /><${Persons} clock=${clock} /><${Work} clock=${clock} /><${Backlog} clock=${clock} /><${Dead} clock=${clock} />
    <${Budgets} /><${Processes} clock=${clock} /><${Servers} clock=${clock} /></div>`;
}
