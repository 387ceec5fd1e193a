import { html } from "./view.js";

export default function Inbox() {
  return html`<p>Inbox</p>`;
}
