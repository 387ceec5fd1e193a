// What views are made of. Texts in html`…` become text nodes: nothing here takes markup.
import { Component, h, render } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { batch, computed, effect, signal } from "@preact/signals";
import htm from "htm";

export const html = htm.bind(h);
export { Component, batch, computed, effect, render, signal, useEffect, useLayoutEffect, useMemo, useRef, useState };

/**
 * Loads something, and again when one of `keys` changes. What was loaded stays until the next is there; an answer that
 * comes after a later question is dropped.
 * @template T
 * @param {() => Promise<T>} load
 * @param {unknown[]} keys
 * @returns {{value: T | undefined, problem: any, again: () => void}}
 */
export function useLoaded(load, keys) {
  const [state, setState] = useState({ value: undefined, problem: null });
  const [turn, setTurn] = useState(0);
  const last = useRef(0);
  useEffect(() => {
    const mine = ++last.current;
    const say = (value, problem) => mine === last.current && setState((old) => ({ value: value ?? old.value, problem }));
    load().then((value) => say(value, null), (problem) => say(undefined, problem));
  }, [...keys, turn]);
  useEffect(() => () => { last.current = -1; }, []);
  return { ...state, again: () => setTurn((old) => old + 1) };
}
