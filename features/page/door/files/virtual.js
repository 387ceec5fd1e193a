// A list of which only the visible rows are drawn.
import { html, useEffect, useRef, useState } from "./view.js";

/** The tallest element that every browser can have, with room to spare (px). A longer list is scrolled in proportion. */
const TALLEST = 8e6;
/** Rows that are drawn above and below of what is seen. */
const SPARE = 6;
let lists = 0;

/**
 * @param {{count: number, height: number, row: (index: number) => any, label: string, onEnter?: (index: number) => void,
 *   active?: number, onActive?: (index: number) => void, handle?: {current: any}}} props
 *   `height`: of each row (px). `active`: the row that has the keys, when the view keeps it. `handle`: gets the `first` row
 *   that is seen, how many are `shown` from it on, `to(index)`, and `shift(rows)`, which goes on so far and leaves the active row alone.
 */
export function Rows({ count, height, row, label, onEnter, active, onActive, handle }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [id] = useState(() => `rows${++lists}`);
  const [top, setTop] = useState(0);
  const [seen, setSeen] = useState(600);
  const [own, setOwn] = useState(0);
  const at = Math.max(0, Math.min(count - 1, active ?? own));
  const whole = count * height, tall = Math.min(whole, TALLEST);
  const stretch = tall > seen ? (whole - seen) / (tall - seen) : 1;

  useEffect(() => {
    const watch = new ResizeObserver(() => setSeen(box.current?.clientHeight || 600));
    watch.observe(/** @type {HTMLElement} */ (box.current));
    return () => watch.disconnect();
  }, []);

  const to = (index) => {
    const next = Math.max(0, Math.min(count - 1, index)), from = top * stretch;
    setOwn(next);
    onActive?.(next);
    const begin = next * height;
    const wished = begin < from ? begin : begin + height > from + seen ? begin + height - seen : from;
    if (wished !== from && box.current) box.current.scrollTop = wished / stretch;
  };
  const shift = (rows) => { if (box.current) box.current.scrollTop += (rows * height) / stretch; };
  if (handle) handle.current = { first: Math.floor((top * stretch) / height), shown: Math.ceil(seen / height) + SPARE, to, shift };
  const onKeyDown = (event) => {
    const page = Math.max(1, Math.floor(seen / height) - 1);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: count - 1 };
    if (event.target !== box.current || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in steps) to(steps[event.key]);
    else if (event.key === "Enter" && count) onEnter?.(at);
    else return;
    event.preventDefault();
  };

  const from = top * stretch, first = Math.max(0, Math.floor(from / height) - SPARE);
  const last = Math.min(count, Math.ceil((from + seen) / height) + SPARE);
  const drawn = [];
  for (let index = first; index < last; index++) {
    drawn.push(html`<div key=${index} id=${`${id}-${index}`} role="row" aria-rowindex=${index + 1} class=${index === at ? "row active" : "row"}
      style=${{ height: `${height}px`, transform: `translateY(${top + index * height - from}px)` }}
      onPointerDown=${() => { setOwn(index); onActive?.(index); }}><div role="gridcell">${row(index)}</div></div>`);
  }
  return html`<div class="rows" ref=${box} role="grid" tabindex="0" aria-label=${label} aria-rowcount=${count}
    aria-activedescendant=${at >= first && at < last ? `${id}-${at}` : undefined} onKeyDown=${onKeyDown}
    onScroll=${(event) => setTop(event.currentTarget.scrollTop)}>
    <div role="rowgroup" style=${{ height: `${tall}px` }}>${drawn}</div></div>`;
}
