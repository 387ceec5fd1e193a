import { html } from "./view.js";

export default function Talk() {
  return html`<p>Talk</p>`;
}
