// Who looks and who acts. The token that looks lives in this tab's sessionStorage and in the shared worker; the one that
// acts is in the memory of this tab alone, and nowhere else.
import { signal } from "@preact/signals";
import { Problem } from "./problem.js";

const KEY = "goondan.look";
/** The door forgets an acting token after so long without use (ms). */
const ACTING_MS = 30 * 60 * 1000;
const CODE = /^[0-9a-z]{4}-[0-9a-z]{4}-[0-9a-z]{4}$/i;

/** The token that looks; "": there is none. */
export const looking = signal("");
/** Whether this tab may act. */
export const acting = signal(false);
/** "look", "operate", or "" before there is a token. */
export const role = signal("");
/** Somebody waits for a code that acts. @type {import("@preact/signals").Signal<{done: () => void, cancel: () => void} | null>} */
export const wanted = signal(null);
/** Whether the token that looks may be handed to other tabs: it does nothing but look. */
export let handed = false;

let actingToken = "", timer = 0;

/** Take a token that looks. A pasted one may do more than look: it is not kept. */
export function look(token, keep) {
  handed = keep;
  if (keep) sessionStorage.setItem(KEY, token);
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
 * Use a code of `gdn ui`, once, or a token as it is.
 * @param {string} code
 * @param {boolean} [act] what is pasted is meant to act
 */
export async function open(code, act = false) {
  let token = code, may = act ? "operate" : "look";
  const once = CODE.test(code);
  if (once) {
    const headers = { authorization: `Bearer ${code}` };
    const answer = await fetch("api/session", { method: "POST", headers, cache: "no-store" });
    if (!answer.ok) throw await Problem.of(answer);
    ({ token, role: may } = await answer.json());
  }
  if (may === "look") return look(token, once);
  actingToken = token, acting.value = true, role.value = "operate";
  toAct();
}

/** Begin: a code in the fragment leaves it at once, else the token of the tab's last life is used. */
export async function begin() {
  const code = /^#code=([^&]+)/.exec(location.hash)?.[1];
  if (!code) return look(sessionStorage.getItem(KEY) ?? "", true);
  history.replaceState(null, "", location.pathname);
  await open(decodeURIComponent(code));
}
