import { html } from "./view.js";

export default function Runs() {
  return html`<p>Runs</p>`;
}
