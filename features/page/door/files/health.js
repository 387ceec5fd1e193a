// What the door says of the whole swarm, for the navigation and the view Now: asked for when something has happened, and
// seldom when nothing has. A hidden tab asks nothing.
import { get } from "./api.js";
import { connection, on } from "./live.js";
import { problems } from "./problems.js";
import { looking } from "./session.js";
import { computed, effect, signal, useEffect } from "./view.js";

/** News come in bursts: after the first one it is asked so soon, and then so often at most (ms). When nothing is heard, it
 * is asked for so often. The second numbers are for who looks closely. */
const SOON_MS = 200, BETWEEN_MS = [3000, 1000], QUIET_MS = [30000, 10000];
/** What says nothing of who works or waits. */
const SMALL = new Set(["text", "reasoning", "tool.progress"]);
const PATHS = {
  waits: "/api/v1/waits", approvals: "/api/v1/approvals", dead: "/api/v1/dead-letters", budgets: "/api/v1/budgets",
  processes: "/api/v1/processes", status: "/page/api/status",
};

/** What was said last: by PATHS, `at` (ms since the epoch), and `error` when the door or the kernel does not answer.
 * @type {import("@preact/signals").Signal<Record<string, any>>} */
export const seen = signal({ at: 0 });
/** How many approvals wait. */
export const waiting = computed(() => seen.value.approvals?.items.length ?? 0);
const patience = signal(false);
/** Everything that is wrong. */
export const wrong = computed(() => {
  if (patience.value) return [{ text: "Nothing is heard from the door", todo: "if it was stopped, start it: gdn ui", href: "#/now" }];
  return problems(seen.value);
});
/** The one line, or null. */
export const trouble = computed(() => {
  const [first, ...more] = looking.value ? wrong.value : [];
  return first && { text: `${first.text}: ${first.todo}${more.length ? ` (and ${more.length} more)` : ""}`, href: first.href };
});

let close = 0, due = 0, timer = 0;

async function ask() {
  timer = 0;
  if (!looking.value || document.visibilityState === "hidden") return;
  due = Date.now() + BETWEEN_MS[+(close > 0)];
  const names = Object.keys(PATHS), said = { error: null };
  await Promise.all(names.map((name) => get(PATHS[name]).then(
    (value) => { said[name] = value; },
    (error) => { if (error.code !== "E_FEATURE_MISSING" && error.status !== 401) said.error ??= error; },
  )));
  seen.value = { ...said, at: Date.now() };
}

/** Ask soon. */
export function soon() {
  timer ||= setTimeout(ask, Math.max(seen.value.at ? SOON_MS : 0, due - Date.now()));
}

/** Look closely, while a view is shown. */
export function useClose() {
  useEffect(() => {
    close++;
    due = 0;
    soon();
    return () => { close--; };
  }, []);
}

/** Begin to ask. */
export function begin() {
  on((events) => { if (!events || events.some((one) => !SMALL.has(one.kind))) soon(); });
  setInterval(() => { if (Date.now() - seen.value.at >= QUIET_MS[+(close > 0)]) soon(); }, 2000);
  document.addEventListener("visibilitychange", soon);
  effect(() => { if (looking.value) soon(); });
  effect(() => {
    const lost = connection.value === "lost", late = setTimeout(() => { patience.value = lost; }, lost ? 2000 : 0);
    return () => clearTimeout(late);
  });
}
