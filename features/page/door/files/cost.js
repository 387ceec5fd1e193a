import { html } from "./view.js";

export default function Cost() {
  return html`<p>Cost</p>`;
}
