// What happens in the swarm, as it happens, for the views of this tab.
import { effect, signal } from "@preact/signals";
import { Feed } from "./feed.js";
import * as session from "./session.js";

/** "live", "lost" (opened again soon), or "asleep" (nobody looks at this tab). */
export const connection = signal("lost");
/** @type {Set<(events: object[] | null) => void>} */
const listeners = new Set();

/**
 * Hear what happens: an array of events, or null when some may be missing, and everything is to be loaded anew.
 * @param {(events: object[] | null) => void} listener
 * @returns {() => void} ends it
 */
export function on(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(events) {
  for (const listener of [...listeners]) {
    try {
      listener(events);
    } catch (error) {
      console.error(error); // the others hear it all the same
    }
  }
}

function hear({ state, events, gap, token, refused }) {
  if (state && connection.value !== "asleep") connection.value = state;
  if (refused) session.forget(refused);
  if (token) session.look(token, true);
  if (gap) tell(null);
  if (events) tell(events);
}

/** The one policy of the page: it makes the address of the worker, and no other. */
const policy = globalThis.trustedTypes?.createPolicy("goondan", { createScriptURL: () => "live_worker.js" });

/** A worker for all tabs, or where there is none, a stream of this tab. */
function shared() {
  const worker = new SharedWorker(policy ? policy.createScriptURL("") : "live_worker.js", { type: "module", name: "live" });
  worker.port.onmessage = ({ data }) => hear(data);
  worker.port.start();
  return (said) => worker.port.postMessage(said);
}

function alone() {
  const feed = new Feed(hear);
  let token = "", awake = true;
  return (said) => {
    token = said.token ?? token;
    awake = said.awake ?? awake;
    if (said.kind !== "refused") feed.use(awake ? token : "");
  };
}

/** Begin to hear. */
export function begin() {
  const post = globalThis.SharedWorker ? shared() : alone();
  let before = session.looking.value;
  post({ kind: "hello", token: before, handed: session.handed });
  effect(() => {
    const token = session.looking.value;
    if (token === before) return;
    post(token ? { kind: "token", token, handed: session.handed } : { kind: "refused", token: before });
    before = token;
  });
  const wake = (awake) => {
    connection.value = awake ? "lost" : "asleep";
    post({ kind: "awake", awake });
  };
  document.addEventListener("visibilitychange", () => wake(!document.hidden));
  if (document.hidden) wake(false);
  addEventListener("pagehide", (event) => post(event.persisted ? { kind: "awake", awake: false } : { kind: "bye", awake: false }));
  addEventListener("pageshow", (event) => event.persisted && wake(true));
}
