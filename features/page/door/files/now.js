import { html } from "./view.js";

export default function Now() {
  return html`<p>Now</p>`;
}
