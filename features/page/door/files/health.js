// What every view says in the navigation: how many approvals wait for a person, and one line when something is wrong.
import { computed, effect, signal } from "@preact/signals";
import { get } from "./api.js";
import { connection, on } from "./live.js";
import { looking } from "./session.js";

/** News come in bursts: it is asked once for each (ms). Besides, what is not heard of is asked for so often (ms). */
const SOON_MS = 300, OFTEN_MS = 30000;
const TELLING = new Set(["tool.waits", "tool.called", "tool.completed", "tool.failed", "event.ended"]);

/** How many approvals wait. */
export const waiting = signal(0);
/** What a view has found to be wrong: text, and where to go. @type {import("@preact/signals").Signal<{text: string, href?: string} | null>} */
export const found = signal(null);
const problem = signal(null);
const patience = signal(false);

/** The one line, or null. */
export const trouble = computed(() => {
  if (!looking.value) return null;
  if (problem.value) return { text: `${problem.value.message} ${problem.value.suggestion}` };
  if (patience.value) return { text: "Nothing is heard from the door. If it was stopped, start it with: gdn ui" };
  return found.value;
});

let asked = 0;

async function ask() {
  asked = 0;
  if (!looking.value) return;
  try {
    waiting.value = (await get("/api/v1/approvals")).items.length;
    problem.value = null;
  } catch (error) {
    problem.value = error.status === 401 ? null : error;
  }
}

const soon = () => { asked ||= setTimeout(ask, SOON_MS); };

/** Begin to ask. */
export function begin() {
  on((events) => { if (!events || events.some((one) => TELLING.has(one.kind))) soon(); });
  setInterval(soon, OFTEN_MS);
  effect(() => { if (looking.value) soon(); });
  effect(() => {
    const lost = connection.value === "lost", timer = setTimeout(() => { patience.value = lost; }, lost ? 2000 : 0);
    return () => clearTimeout(timer);
  });
}
