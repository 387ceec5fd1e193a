import { html } from "./view.js";

export default function Run() {
  return html`<p>Run</p>`;
}
