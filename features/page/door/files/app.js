// The page: routes, navigation, the list of keys, and a wall around each view.
import { get } from "./api.js";
import { visible, Wrong } from "./text.js";
import { begin as beginHealth, trouble, waiting } from "./health.js";
import { keys, useKey } from "./keys.js";
import { begin as beginLive } from "./live.js";
import * as session from "./session.js";
import { Component, effect, html, render, signal, useEffect, useRef, useState } from "./view.js";

/** The views by the first part of a route. Those with a label stand in the navigation. */
const VIEWS = {
  now: { label: "Now", load: () => import("./now.js") },
  runs: { label: "Runs", load: () => import("./runs.js") },
  inbox: { label: "Inbox", load: () => import("./inbox.js") },
  talk: { label: "Talk", load: () => import("./talk.js") },
  cost: { label: "Cost", load: () => import("./cost.js") },
  run: { part: "runs", label: "Run", load: () => import("./run.js") },
};
const LISTED = Object.keys(VIEWS).filter((name) => !VIEWS[name].part);

/** A route of the fragment: `#/run/ID?query`. */
function parse(fragment) {
  const [path, query] = fragment.replace(/^#?\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  return { name: Object.hasOwn(VIEWS, name) ? name : "now", path: rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

const route = signal(parse(""));
const problem = signal(null);
/** The path of the bundle, by which a person tells tabs of two swarms from each other. */
const bundle = signal("");
effect(() => { if (session.looking.value) get("/page/api/swarm").then((said) => { bundle.value = visible(said.bundle); }, () => {}); });
/** Its folder, and its file if that has a name of its own. */
const nameOf = (path) => path.split("/").filter(Boolean).slice(-2).join("/").replace(/\/goondan\.ya?ml$/, "");

/** An error of a view: one line, and the rest works. */
class Wall extends Component {
  state = { error: null };
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }
  render() {
    if (!this.state.error) return this.props.children;
    return html`<${Wrong} problem=${{ message: `This view has failed: ${this.state.error.message}.`, suggestion: "Load the page again." }} />`;
  }
}

function View({ name, path, query }) {
  const [state, setState] = useState({});
  useEffect(() => {
    VIEWS[name].load().then((module) => setState({ view: module.default }), (error) => setState({ error }));
  }, []);
  if (state.error) throw state.error;
  return state.view ? html`<${state.view} path=${path} query=${query} />` : null;
}

function Navigation() {
  const { name } = route.value, here = VIEWS[name].part ?? name;
  return html`<nav aria-label="Views"><ul>${LISTED.map((one, index) => html`<li key=${one}>
    <${Link} name=${one} number=${index + 1} current=${one === here} /></li>`)}</ul>
    ${bundle.value && html`<b class="swarm" title=${bundle.value}>${nameOf(bundle.value)}</b>`}
    <button class="keys" aria-label="Keys" title="Keys" onClick=${() => { listed.value = true; }}>?</button></nav>`;
}

function Link({ name, number, current }) {
  const { label } = VIEWS[name];
  useKey(String(number), `Go to ${label}`, () => { location.hash = `#/${name}`; });
  return html`<a href=${`#/${name}`} aria-current=${current ? "page" : undefined}>${label}
    ${name === "inbox" && waiting.value > 0 && html`<b class="count" aria-label="${waiting.value} wait">${waiting.value}</b>`}</a>`;
}

/** A dialog in front of the page, until `onClose`. */
function Dialog({ label, onClose, children }) {
  const box = useRef(null);
  useEffect(() => box.current.showModal(), []);
  return html`<dialog ref=${box} aria-label=${label} onClose=${onClose}>${children}</dialog>`;
}

const listed = signal(false);

function Keys() {
  useKey("?", "This list", () => { listed.value = true; });
  if (!listed.value) return null;
  const name = (key) => (key === " " ? "Space" : key);
  return html`<${Dialog} label="Keys" onClose=${() => { listed.value = false; }}><h2>Keys</h2>
    <dl class="keylist">${[...keys.value].map(([key, { what }]) => html`<div key=${key}><dt><kbd>${name(key)}</kbd></dt><dd>${what}</dd></div>`)}
    <div><dt><kbd>Esc</kbd></dt><dd>Close</dd></div></dl>
    <form method="dialog"><button>Close</button></form><//>`;
}

/** Takes a code or a token. */
function Code({ act, onDone }) {
  const [wrong, setWrong] = useState(null), used = useRef("");
  const submit = (event) => {
    event.preventDefault();
    const code = new FormData(event.currentTarget).get("code").trim();
    if (!code || code === used.current) return; // pasted, and Enter behind it: it is good once
    used.current = code;
    session.open(code, act).then(onDone, setWrong);
  };
  const pasted = ({ inputType, currentTarget: { form } }) => inputType === "insertFromPaste" && form.requestSubmit();
  return html`<form class="code" onSubmit=${submit}><label>Code <input name="code" required autofocus autocomplete="off" spellcheck=${false} onInput=${pasted} /></label>
    <button>${act ? "Act" : "Look"}</button><${Wrong} problem=${wrong} /></form>`;
}

function Act() {
  const asked = session.wanted.value;
  if (!asked) return null;
  return html`<${Dialog} key=${asked} label="A code to act" onClose=${() => session.wanted.value?.cancel()}><h2>This tab only looks</h2>
    <p>To act, it needs a code. The command <code>gdn ui --act</code> prints one. It is good once, for this tab, until 30 minutes without use.</p>
    <${Code} act onDone=${() => (session.acting.value ? asked.done() : null)} />
    <button onClick=${asked.cancel}>Cancel</button><//>`;
}

function Door() {
  return html`<main class="door"><h1>Goondan</h1><p>The command <code>gdn ui</code> opens this page. Or paste its code here:</p>
    <${Code} onDone=${() => { problem.value = null; }} /><${Wrong} problem=${problem.value} /></main>`;
}

function Page() {
  const { name, path, query } = route.value, main = useRef(null);
  if (!session.looking.value) return html`<${Door} />`;
  return html`<a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to content</a>
    <header><${Navigation} />${trouble.value && html`<p class="trouble" role="status"><a href=${trouble.value.href ?? "#/now"}>${visible(trouble.value.text)}</a></p>`}</header>
    <main id="content" tabindex="-1" ref=${main} class="view-${name}"><h1 class="unseen">${VIEWS[name].label}</h1>
      <${Wall} key=${name}><${View} name=${name} path=${path} query=${query} /><//></main>
    <${Keys} /><${Act} />`;
}

async function follow() {
  if (location.hash.startsWith("#code=")) await session.begin().catch((error) => { problem.value = error; });
  route.value = parse(location.hash);
}

addEventListener("hashchange", follow);
session.begin().catch((error) => { problem.value = error; }).then(() => {
  route.value = parse(location.hash);
  beginLive();
  beginHealth();
  effect(() => {
    const name = bundle.value && `${nameOf(bundle.value)} · `;
    document.title = `${waiting.value ? `(${waiting.value}) ` : ""}${VIEWS[route.value.name].label} · ${name}Goondan`;
  });
  render(html`<${Page} />`, document.body);
});
