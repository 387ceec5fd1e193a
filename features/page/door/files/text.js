// What comes from models, tools and names. All of it becomes text nodes, and nothing in it moves what stands beside it.
import { get, save } from "./api.js";
import { bytes } from "./format.js";
import { html, useEffect, useRef, useState } from "./view.js";

/** Characters that are not seen or that move others: controls but tab and newline, marks and overrides of direction,
 * what has no width, tags, and halves of pairs. Joiners stay: scripts and emoji need them. */
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}\ud800-\udfff]/gu;
/** How much of a text is drawn at once (characters): a browser lays out some ten of them without a pause. */
const PIECE = 1 << 15;
/** The longest line of JSON that is not folded, its entries that are drawn at once, and the depth that begins open. */
const LINE = 300, ENTRIES = 100, DEPTH = 3;
const BASE64 = /^[A-Za-z0-9+/_-]{256,}={0,2}$/;
const PICTURE = /^(image\/(?:png|jpeg|gif|webp))$/, DATA = /^data:(image\/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/]+=*)$/;

/** A text whose hidden characters are shown by number. @param {unknown} text */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (one) => `⟨${one.codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Where a text is cut to these lines and characters. */
function cut(text, lines, most) {
  let end = -1;
  for (let line = 0; line < lines; line++) {
    end = text.indexOf("\n", end + 1);
    if (end < 0 || end > most) return Math.min(text.length, most);
  }
  return end;
}

/** A text of which some lines are shown, and more on request. */
export function Folded({ text, lines = 12 }) {
  const all = String(text ?? "");
  const [shown, show] = useState(0);
  const end = Math.min(all.length, shown || cut(all, lines, 160 * lines));
  const left = all.length - end;
  return html`<div class="folded"><pre>${visible(all.slice(0, end))}</pre>${left > 0 && html`<p>
    <button onClick=${() => show(end + PIECE)}>Show more</button> <button onClick=${() => save("text.txt", "text/plain", all)}>Save</button>
    <small> ${bytes(left)} more</small></p>`}${shown > 0 && html`<button onClick=${() => show(0)}>Fold</button>`}</div>`;
}

/** How long a value is as JSON, counted to `most`. It goes down no deeper than that, so no depth overflows it. */
function size(value, most) {
  let left = most;
  for (const todo = [value]; todo.length && left > 0;) {
    const one = todo.pop();
    left -= typeof one === "string" ? one.length + 2 : 4;
    if (one === null || typeof one !== "object") continue;
    for (const key in one) {
      if ((left -= key.length + 3) <= 0) break;
      todo.push(one[key]);
    }
  }
  return most - left;
}

function Picture({ type, data }) {
  return html`<img class="picture" alt="a picture (${type})" src=${`data:${type};base64,${data}`} />`;
}

function Text({ value }) {
  const [open, setOpen] = useState(false);
  const picture = DATA.exec(value);
  if (picture) return html`<${Picture} type=${picture[1]} data=${picture[2]} />`;
  if (BASE64.test(value) && !open) return html`<button onClick=${() => setOpen(true)}>base64, ${bytes(value.length)}</button>`;
  if (value.length > LINE || value.includes("\n")) return html`<${Folded} text=${value} />`;
  return html`<span class="json-text">${JSON.stringify(visible(value))}</span>`;
}

function Many({ value, depth }) {
  const keys = Object.keys(value), list = Array.isArray(value);
  const [open, setOpen] = useState(depth < DEPTH && size(value, 4 * LINE) < 4 * LINE);
  const [shown, show] = useState(ENTRIES);
  const type = !list && [value.mimeType, value.mediaType, value.media_type].find((one) => PICTURE.test(one));
  if (type && typeof value.data === "string") return html`<${Picture} type=${type} data=${value.data} />`;
  if (!keys.length) return list ? "[]" : "{}";
  return html`<details open=${open} onToggle=${(event) => { event.stopPropagation(); setOpen(event.currentTarget.open); }}>
    <summary>${list ? `list of ${keys.length}` : `{${visible(keys.slice(0, 5).join(", ")).slice(0, 80)}${keys.length > 5 ? ", …" : ""}}`}</summary>
    ${open && html`<ul>${keys.slice(0, shown).map((key) => html`<li key=${key}>${!list && html`<b>${visible(key)}</b>: `}<${Json} value=${value[key]} depth=${depth + 1} /></li>`)}
      ${keys.length > shown && html`<li><button onClick=${() => show(shown + ENTRIES)}>${keys.length - shown} more</button></li>`}</ul>`}
  </details>`;
}

/** A value of JSON: what is long is folded, base64 too, and pictures are shown. */
export function Json({ value, depth = 0 }) {
  if (typeof value === "string") return html`<${Text} value=${value} />`;
  if (value !== null && typeof value === "object") return html`<span class="json"><${Many} value=${value} depth=${depth} /></span>`;
  return html`<span class="json-word">${String(value)}</span>`;
}

/** A file that stands in a conversation: a picture is shown, once a person comes to where it is; of others the name. */
export function Kept({ file, agent, instance }) {
  const [address, setAddress] = useState(""), place = useRef(null);
  const { name, mediaType, blob } = file, told = `${visible(name ?? "a file")}, ${visible(mediaType)}, ${bytes(blob.size ?? 0)}`;
  useEffect(() => {
    let made = "", gone = false;
    const show = (found) => { if (!gone) setAddress(made = URL.createObjectURL(found)); };
    const watch = new IntersectionObserver((seen) => {
      if (!seen.some((one) => one.isIntersecting)) return;
      watch.disconnect();
      get("/page/api/files", { agent, instance, file: blob.file }).then(show, () => {});
    });
    if (/^image\//.test(mediaType)) watch.observe(place.current);
    return () => { gone = true; watch.disconnect(); URL.revokeObjectURL(made); };
  }, [blob.file]);
  return address ? html`<img class="picture" alt=${told} src=${address} />` : html`<small ref=${place} class="soft">📎 ${told}</small>`;
}

/** One line about what went wrong. @param {{problem: any}} props a Problem, or an error of the page itself */
export function Wrong({ problem }) {
  if (!problem || problem.code === "cancelled") return null;
  return html`<p class="wrong" role="alert">${visible(problem.message)}${problem.suggestion && html` <span>${visible(problem.suggestion)}</span>`}</p>`;
}
