// The keys of the page. Each is listed under `?` while what it belongs to is shown.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

/** @type {import("@preact/signals").Signal<Map<string, {what: string, run: {current: (event: KeyboardEvent) => void}}>>} */
export const keys = signal(new Map());

/**
 * A key while a component is shown. Of two with the same key the one that came last has it.
 * @param {string} key as KeyboardEvent.key says it
 * @param {string} what one line for the list
 * @param {(event: KeyboardEvent) => void} action
 */
export function useKey(key, what, action) {
  const run = useRef(action);
  run.current = action;
  useEffect(() => {
    const mine = { what, run }, before = keys.value.get(key);
    keys.value = new Map(keys.value).set(key, mine);
    return () => {
      const left = new Map(keys.value);
      if (left.get(key) !== mine) return;
      left.delete(key);
      if (before) left.set(key, before);
      keys.value = left;
    };
  }, [key, what]);
}

/** Whether a key goes to where a person types. @param {EventTarget | null} target */
function types(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing || event.defaultPrevented) return;
  if (types(event.target) || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && event.target instanceof Element && event.target.closest("a, button, summary")) return;
  const found = keys.value.get(event.key);
  if (!found) return;
  event.preventDefault();
  found.run.current(event);
});
