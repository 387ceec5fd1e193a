// What the door says of the whole swarm, for the navigation and the view Now: asked for when something has happened, and
// seldom when nothing has. A hidden tab asks nothing.
import { get } from "./api.js";
import { connection, on } from "./live.js";
import { problems } from "./problems.js";
import { looking } from "./session.js";
import { computed, effect, signal, useEffect } from "./view.js";

/** News come in bursts: after the first one it is asked so soon, and then so often at most (ms). When nothing is heard, it
 * is asked so often. What news seldom change is asked so often at most. The second numbers are for who looks closely. */
const SOON_MS = 200, BETWEEN_MS = [3000, 2000], QUIET_MS = [30000, 10000], SELDOM_MS = [15000, 5000];
/** What says nothing of who works or waits. */
const SMALL = new Set(["text", "reasoning", "tool.progress"]);
const OFTEN = { waits: "/api/v1/waits", approvals: "/api/v1/approvals" };
const SELDOM = {
  dead: "/api/v1/dead-letters", budgets: "/api/v1/budgets", processes: "/api/v1/processes", servers: "/api/v1/mcp/servers", learned: "/api/v1/learned",
};

/** What was said last: by these names, `at` (ms since the epoch), and `error` when the door or the kernel does not answer.
 * @type {import("@preact/signals").Signal<Record<string, any>>} */
export const seen = signal({ at: 0 });
/** How many approvals wait. */
export const waiting = computed(() => seen.value.approvals?.items.length ?? 0);
/** What a person is asked by the work of a message. @param {(eventId: string | undefined) => boolean} known whether it is of that work */
export const askedIn = (known) => seen.value.approvals?.items.find(({ eventId, rootEvent }) => known(eventId) || known(rootEvent));
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

let close = 0, due = 0, seldomDue = 0, timer = 0;

async function ask() {
  timer = 0;
  if (!looking.value || document.visibilityState === "hidden") return;
  const now = Date.now(), which = +(close > 0), seldom = now >= seldomDue, said = { error: null };
  due = now + BETWEEN_MS[which];
  if (seldom) seldomDue = now + SELDOM_MS[which];
  await Promise.all(Object.entries(seldom ? { ...OFTEN, ...SELDOM } : OFTEN).map(([name, path]) => get(path).then(
    (value) => { said[name] = value; },
    (error) => {
      said[name] = undefined;
      if (error.code !== "E_FEATURE_MISSING" && error.status !== 401 && error.status !== 404) said.error ??= error; // 404: the door has no such feature
    },
  )));
  seen.value = { ...seen.value, ...said, at: Date.now() };
}

/** Ask soon; everything, after something that may have changed it. */
export function soon(everything = true) {
  if (everything) seldomDue = 0;
  timer ||= setTimeout(ask, Math.max(seen.peek().at ? SOON_MS : 0, due - Date.now()));
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
  on((events) => {
    if (events?.every((one) => SMALL.has(one.kind))) return;
    // A busy swarm is heard of with a gap each second.
    soon(Boolean(events?.some((one) => one.kind === "event.ended" && one.state !== "done")));
  });
  effect(() => { if (connection.value === "live") soon(); });
  setInterval(() => { if (Date.now() - seen.value.at >= QUIET_MS[+(close > 0)]) soon(); }, 2000);
  document.addEventListener("visibilitychange", () => soon());
  effect(() => { if (looking.value) soon(); });
  effect(() => {
    const lost = connection.value === "lost", late = setTimeout(() => { patience.value = lost; }, lost ? 2000 : 0);
    return () => clearTimeout(late);
  });
}
