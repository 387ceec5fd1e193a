// A person talks to an agent: the conversations there are, one of them, and what is written to it.
import { get, post, Problem, save } from "./api.js";
import { ago, bytes } from "./format.js";
import { useKey } from "./keys.js";
import { on, useClosely } from "./live.js";
import { acting, askToAct } from "./session.js";
import { Asked, Said, Turn, turnsOf } from "./talk_turn.js";
import { beat, found, listed, placeOf, review, Run, runsOf, show } from "./talking.js";
import { visible, Wrong } from "./text.js";
import { Rows } from "./virtual.js";
import { html, useEffect, useLoaded, useMemo, useRef, useState } from "./view.js";

const PAGE = 50, TRACES = 20, MAX_FILES = 16, MAX_BYTES = 20 << 20;
const KINDS = ["image/png", "image/jpeg", "image/gif", "image/webp", "application/pdf"];
/** What gdn ui prints: it opens the page, and no model is to see it. */
const CODE = /^[a-z2-9]{4}(-[a-z2-9]{4}){2}$/;
/** So long after something was heard of a turn of others it is looked for; and after the end of one, the list (ms). */
const SOON_MS = 200, LIST_MS = 1000;
/** What is written and not sent: text and files, by conversation. @type {Map<string, {text: string, files: any[]}>} */
const drafts = new Map(), NOTHING = { text: "", files: [] };
/** Write a text, and do not send it. */
export const draft = (agent, instance, text) => drafts.set(placeOf(agent, instance), { text, files: [] });

const hash = (agent, instance) => `#/talk/${encodeURIComponent(agent)}/${encodeURIComponent(instance)}`;

/** A key that no instance has: the time. */
const newKey = () => new Date().toISOString().slice(0, 19).replaceAll(":", "-");

/** The agents, each with its instances. */
function List({ chosen, loaded }) {
  const [wanted, want] = useState("");
  const { agents = [], instances = [] } = loaded.value ?? {};
  const rows = agents.flatMap(({ agent }) => [{ agent }, ...instances.filter((one) => one.agent === agent && one.instanceKey !== null && `${agent}/${one.instanceKey}`.includes(wanted))]);
  const row = (index) => {
    const { agent, instanceKey: key, status, written } = rows[index];
    if (key === undefined) return html`<div class="talk-agent"><b>${visible(agent)}</b> <a href=${hash(agent, newKey())} aria-label="New conversation with ${agent}">New</a></div>`;
    return html`<a class="talk-key" href=${hash(agent, key)} aria-current=${placeOf(agent, key) === chosen ? "page" : undefined}>${visible(key)} <small>${status === "running" ? "in memory" : ago(written)}</small></a>`;
  };
  return html`<section class="talk-list" aria-label="Conversations"><input type="search" placeholder="Find a conversation" aria-label="Find a conversation" value=${wanted} onInput=${(event) => want(event.currentTarget.value)} />
    <${Wrong} problem=${loaded.problem} /><${Rows} count=${rows.length} height=${34} row=${row} label="Conversations"
      onEnter=${(index) => { location.hash = hash(rows[index].agent, rows[index].instanceKey ?? newKey()); }} /></section>`;
}

/** The stored messages of a conversation and the traces of its last turns. */
function useConversation(agent, instance) {
  const [state, setState] = useState({ messages: [], before: null, traces: [], problem: null, loaded: false });
  const last = useRef(0);
  const load = async (before) => {
    const mine = ++last.current, path = `/api/v1/agents/${encodeURIComponent(agent)}/conversation`;
    try {
      const [page, { traces }] = await Promise.all([get(path, { instance, before, limit: PAGE }), get("/api/v1/traces", { agent, instance, limit: TRACES })]);
      if (mine !== last.current) return;
      setState((old) => {
        const at = page.messages.length ? old.messages.findIndex(({ id }) => id === page.messages[0].id) : -1;
        const messages = before ? [...page.messages, ...old.messages] : [...old.messages.slice(0, Math.max(0, at)), ...page.messages];
        return { messages, before: !before && at > 0 ? old.before : page.before, traces, problem: null, loaded: true };
      });
      for (const run of before ? [] : found(agent, instance, traces)) run.follow().catch((problem) => setState((old) => ({ ...old, problem })));
    } catch (problem) {
      if (mine === last.current) setState((old) => ({ ...old, problem, loaded: true }));
    }
  };
  return { ...state, load };
}

/** A turn that runs, or waits for those before it. */
function Running({ run, drawn }) {
  const [problem, setProblem] = useState(null);
  beat.value; // a run changes in its place
  useEffect(drawn);
  const { steps, eventId, asks, answer } = run, last = steps.at(-1);
  const waits = !eventId ? "the door" : !run.first ? "the messages before it" : asks.size ? "a person to allow a call" : run.waits;
  const told = run.lost ? "The connection is lost. It goes on when the door answers again." : waits ? `Waits for ${waits}.` : "Works …";
  return html`<article class="talk-turn talk-running" aria-live="off"><${Asked} text=${run.text} files=${run.files} />
    ${steps.map((step, index) => html`<${Said} key=${index} ...${step} calls=${step.calls.map((call) => (asks.has(call.id) ? { ...call, state: "waits for a person" } : call))} thinks=${step === last && !step.text && !step.calls.length} />`)}
    <${Wrong} problem=${answer?.error ?? problem} />
    <footer role="status">${visible(told)} ${asks.size > 0 && html`<a href="#/inbox">Inbox</a> `}${run.turnId && html`<a href="#/run/${run.turnId}">Run</a> `}
      ${eventId && html`<button onClick=${() => run.stop().catch(setProblem)}>Stop</button>`}</footer></article>`;
}

/** A file that a person gives, as the door takes it. @param {File} file */
async function opened(file) {
  const { name, type, size } = file;
  if (!KINDS.includes(type)) throw new Problem({ detail: `${name} is no picture and no PDF`, suggestion: "png, jpeg, gif, webp and PDF are taken" });
  const url = await new Promise((done, fail) => {
    const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => fail(new Problem({ detail: `${name} cannot be read` })) });
    reader.readAsDataURL(file);
  });
  return { name: name.slice(-200), type, size, url, data: url.slice(url.indexOf(",") + 1) };
}

/** Where a person writes. */
function Composer({ agent, instance, send, notice }) {
  const place = placeOf(agent, instance), box = useRef(null), field = useRef(null);
  const [, redraw] = useState(0), [problem, setProblem] = useState(null);
  const draft = drafts.get(place) ?? NOTHING;
  const write = (more) => {
    drafts.set(place, { ...(drafts.get(place) ?? NOTHING), ...more });
    redraw((old) => old + 1);
  };
  useKey("w", "Write to the agent", () => box.current.focus());
  const add = async (list) => {
    setProblem(null);
    try {
      const files = [...draft.files, ...await Promise.all([...list].map(opened))];
      if (files.length > MAX_FILES || files.reduce((sum, { size }) => sum + size, 0) > MAX_BYTES) throw new Problem({ detail: `a message has at most ${MAX_FILES} files and 20 MiB` });
      write({ files });
    } catch (error) { setProblem(error); }
  };
  const submit = async (event) => {
    event.preventDefault();
    if (!draft.text.trim() && !draft.files.length) return;
    if (CODE.test(draft.text.trim())) {
      write({ text: "" });
      setProblem(new Problem({ detail: "This is a code, so it was not sent to the agent", suggestion: "a code goes into the dialog that asks for it; with a word beside it, it is a message" }));
      return acting.value ? undefined : askToAct();
    }
    setProblem(null), write(NOTHING);
    await send(draft).catch((error) => (setProblem(error), write(draft)));
  };
  const take = (event, data) => data?.files.length && (event.preventDefault(), add(data.files));
  return html`<form class="talk-write" onSubmit=${submit} onDragOver=${(event) => event.preventDefault()} onDrop=${(event) => take(event, event.dataTransfer)}>
    ${notice && html`<p role="status">${notice}</p>`}<${Wrong} problem=${problem} />
    ${draft.files.length > 0 && html`<ul class="talk-files" aria-label="Attached">${draft.files.map((file, index) => html`<li key=${index}>${file.type !== "application/pdf" && html`<img src=${file.url} alt="" />`} ${visible(file.name)}, ${bytes(file.size)}
      <button type="button" aria-label="Remove ${visible(file.name)}" onClick=${() => write({ files: draft.files.filter((one) => one !== file) })}>×</button></li>`)}</ul>`}
    <textarea ref=${box} rows="3" dir="auto" aria-label="Message to ${agent}" placeholder=${acting.value ? "Enter sends, Shift+Enter is a new line" : "Enter sends; this tab then asks for a code"} value=${draft.text}
      onInput=${(event) => write({ text: event.currentTarget.value })} onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && submit(event)} onPaste=${(event) => take(event, event.clipboardData)}></textarea>
    <input ref=${field} type="file" hidden multiple accept=${KINDS.join()} onChange=${(event) => { add(event.currentTarget.files); event.currentTarget.value = ""; }} />
    <button type="button" onClick=${() => field.current.click()}>Attach</button> <button class="main">Send</button></form>`;
}

/** One conversation. */
function Conversation({ agent, instance }) {
  const place = placeOf(agent, instance), log = useRef(null), sticks = useRef(true);
  const { messages, before, traces, problem, loaded, load } = useConversation(agent, instance);
  const [notice, setNotice] = useState(""), [wrong, setWrong] = useState(null);
  listed.value;
  const runs = runsOf(place), turns = useMemo(() => turnsOf(messages, { agent, instance }), [messages]), byTurn = new Map(traces.map((one) => [one.turnId, one]));
  const stick = () => { if (sticks.current) log.current.scrollTop = log.current.scrollHeight; };
  useClosely(true);
  useEffect(() => {
    let soon = 0;
    show(place, load);
    load();
    const off = on((events) => {
      if (!events) return review(true), load();
      const known = runsOf(place).map(({ eventId }) => eventId);
      if (!known.includes("") && events.some((one) => one.agent === agent && one.instance === instance && !known.includes(one.eventId))) soon ||= setTimeout(() => (soon = 0, load()), SOON_MS);
    });
    return () => (off(), clearTimeout(soon), show("", async () => {}));
  }, []);
  useEffect(stick);
  useKey("s", "Stop what the agent does", () => runs[0]?.eventId && runs[0].stop().catch(setWrong));
  const send = ({ text, files }) => {
    const run = new Run(agent, instance, text, files);
    sticks.current = true;
    setNotice("");
    return run.follow().catch((problem) => { if (!run.eventId) throw problem; setWrong(problem); });
  };
  const guarded = (what) => async () => {
    setWrong(null);
    try { await what(); } catch (error) { setWrong(error); }
  };
  const change = (what, said) => post(`/api/v1/agents/${encodeURIComponent(agent)}/conversation/${what}`, { instance, ...said });
  const undo = ({ id, items }) => guarded(async () => {
    if (!confirm("Take the last turn back? Its messages are gone then. What its tools have done stays done.")) return;
    await change("undo", { turn: id });
    const { text, files } = items.find(({ asked }) => asked) ?? NOTHING;
    drafts.set(place, { text, files: [] });
    setNotice(files.length ? `It had ${files.length} files. They have to be attached again.` : "It can be sent again.");
    await load();
  });
  const fork = (said) => guarded(async () => {
    const { instance: key, message } = await change("fork", said);
    draft(agent, key, message ?? (said ? "Go on." : ""));
    location.hash = hash(agent, key);
  });
  const exported = guarded(async () => {
    const messages = [];
    for (let before; before !== null;) {
      const page = await get(`/api/v1/agents/${encodeURIComponent(agent)}/conversation`, { instance, before, limit: 200 });
      messages.unshift(...page.messages);
      before = page.before;
    }
    save(`${agent}-${instance}.json`.replace(/[^\w.-]/g, "_"), "application/json", JSON.stringify({ agent, instanceKey: instance, messages }, null, 1));
  });
  return html`<section class="talk-one" aria-label="Conversation"><div class="talk-head"><a class="talk-back" href="#/talk">All</a> <h2>${visible(agent)} / ${visible(instance)}</h2>
      <button onClick=${fork()} disabled=${!messages.length}>Fork</button> <button onClick=${exported} disabled=${!messages.length}>Export</button></div>
    <div class="talk-log" ref=${log} onScroll=${({ currentTarget: at }) => { sticks.current = at.scrollHeight - at.scrollTop - at.clientHeight < 60; }} onLoadCapture=${stick} tabindex="0" role="log" aria-label="Messages">
      ${before !== null && html`<button onClick=${() => load(before)}>Earlier messages</button>`}
      ${turns.map((turn, index) => html`<${Turn} key=${turn.id || index} turn=${turn} trace=${byTurn.get(turn.id)} fork=${(step) => fork({ turn: turn.id, step })()}
        undo=${index === turns.length - 1 && turn.id && !runs.length ? undo(turn) : null} />`)}
      ${runs.map((run) => html`<${Running} key=${run.key} run=${run} drawn=${stick} />`)}
      ${loaded && !turns.length && !runs.length && !problem && html`<p class="soft">Nothing was said yet.</p>`}
    </div><${Wrong} problem=${problem ?? wrong} /><${Composer} agent=${agent} instance=${instance} send=${send} notice=${notice} /></section>`;
}

export default function Talk({ path: [agent, instance = "default"] }) {
  const loaded = useLoaded(async () => {
    const [agents, instances] = await Promise.all([get("/api/v1/agents"), get("/api/v1/instances")]);
    return { agents, instances };
  }, []);
  useEffect(() => {
    let soon = 0;
    const off = on((events) => { if (!events || events.some(({ kind }) => kind === "event.ended")) soon ||= setTimeout(() => (soon = 0, loaded.again()), LIST_MS); });
    return () => (off(), clearTimeout(soon));
  }, []);
  return html`<div class="talk ${agent ? "talk-chosen" : ""}"><${List} chosen=${agent && placeOf(agent, instance)} loaded=${loaded} />
    ${agent ? html`<${Conversation} key=${placeOf(agent, instance)} agent=${agent} instance=${instance} />` : html`<p class="talk-one soft">Choose a conversation, or begin a new one.</p>`}</div>`;
}
