// Who looks and who acts. The token that looks lives in this tab's sessionStorage and in the shared worker; the one that
// acts is in the memory of this tab alone, and nowhere else.
import { signal } from "@preact/signals";
import { Problem } from "./problem.js";

const KEY = "goondan.look";
/** The door forgets an acting token after so long without use (ms). */
const ACTING_MS = 30 * 60 * 1000;

/** The token that looks; "": there is none. */
export const looking = signal("");
/** Whether this tab may act. */
export const acting = signal(false);
/** What may be done at most: "look", "talk", "operate", or "" before there is a token. */
export const role = signal("");
/** Somebody waits for a code that acts. @type {import("@preact/signals").Signal<{done: () => void, cancel: () => void} | null>} */
export const wanted = signal(null);
/** Whether the token that looks may be handed to other tabs: it does nothing but look. */
export let handed = false;

let actingToken = "", timer = 0;

/** Take a token that looks. `keep`: it does no more than that, so reloads and other tabs may have it, too. */
export function look(token, keep) {
  handed = keep;
  if (keep && token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
  looking.value = token;
  role.value = token && (role.value || "look");
}

/** The door knows this token no more. */
export function forget(token) {
  if (token === looking.value) look("", false);
  if (token === actingToken) stopActing();
}

/** The token that acts; its 30 minutes begin anew. "": there is none. */
export function toAct() {
  clearTimeout(timer);
  if (actingToken) timer = setTimeout(stopActing, ACTING_MS);
  return actingToken;
}

export function stopActing() {
  clearTimeout(timer);
  actingToken = "", acting.value = false;
  role.value = looking.value && "look";
}

/** Wait until a person has given a code that acts. @returns {Promise<boolean>} false: the person does not want to */
export function askToAct() {
  return new Promise((resolve) => {
    const before = wanted.value;
    const end = (may) => () => {
      wanted.value = null;
      before?.[may ? "done" : "cancel"]();
      resolve(may);
    };
    wanted.value = { done: end(true), cancel: end(false) };
  });
}

/**
 * Use a code of `gdn ui`, once, or a token as it is. A token that does more than look is in this tab's memory alone.
 * @param {string} code
 * @param {boolean} [act] it is meant to act
 */
export async function open(code, act = false) {
  const headers = { authorization: `Bearer ${code}` };
  const answer = await fetch("api/session", { method: "POST", headers, cache: "no-store" }).catch(() => { throw Problem.gone(); });
  const more = `${act ? "gdn ui --act" : "gdn ui"} prints another one`;
  if (answer.status === 401) throw new Problem({ detail: "This code was used, is too old, or is none:", suggestion: more });
  if (!answer.ok) throw await Problem.of(answer);
  const said = await answer.json(), token = said.token ?? code;
  if (said.role === "look") {
    if (act) throw new Problem({ detail: "This code only looks:", suggestion: more });
    return look(token, true);
  }
  actingToken = token, acting.value = true, role.value = said.role;
  toAct();
  if (!looking.value) look(token, false);
}

/** Begin: a code in the fragment leaves it at once; without one, the token of the tab's last life is used. */
export async function begin() {
  const code = /^#code=([^&]+)/.exec(location.hash)?.[1], kept = sessionStorage.getItem(KEY) ?? "";
  if (!code) return look(kept, true);
  history.replaceState(null, "", location.pathname);
  await open(code).catch((problem) => {
    look(kept, true);
    throw problem;
  });
}
