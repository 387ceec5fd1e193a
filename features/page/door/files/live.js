// What happens in the swarm, as it happens, for the views of this tab.
import { effect, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
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

let close = 0, hold = () => {};

/** Hear all of it, as soon as it happens, while this is wanted. Else a busy swarm is heard of in pieces, with gaps. */
export function useClosely(wanted) {
  useEffect(() => {
    if (!wanted) return undefined;
    const look = (by) => { close += by; hold(); };
    look(1);
    return () => look(-1);
  }, [wanted]);
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

/** The worker of all tabs: what tells it something. */
function shared() {
  const worker = new SharedWorker(policy ? policy.createScriptURL("") : "live_worker.js", { type: "module", name: "live" });
  worker.port.onmessage = ({ data }) => hear(data);
  return (said) => worker.port.postMessage(said);
}

/** Begin to hear: by the worker of all tabs. Where there is none, and with a token that does more than look, which is
 * this tab's alone, by a stream of this tab. */
export function begin() {
  const own = new Feed(hear), tell = globalThis.SharedWorker && shared();
  let awake = !document.hidden, before = session.looking.value;
  hold = () => {
    const token = session.looking.value, alone = !tell || (token && !session.handed);
    own.use(alone && awake ? token : "", close > 0);
    tell?.({ kind: "awake", awake: awake && !alone, closely: close > 0 });
  };
  const wake = (now) => {
    awake = now;
    connection.value = awake ? "lost" : "asleep";
    hold();
  };
  tell?.({ kind: "hello", token: session.handed ? before : "" });
  effect(() => {
    const token = session.looking.value;
    if (token !== before) {
      if (!token) tell?.({ kind: "refused", token: before });
      else if (session.handed) tell?.({ kind: "token", token });
    }
    before = token;
    hold();
  });
  document.addEventListener("visibilitychange", () => wake(!document.hidden));
  addEventListener("pagehide", (event) => (event.persisted ? wake(false) : tell?.({ kind: "bye" })));
  addEventListener("pageshow", (event) => event.persisted && wake(true));
}
