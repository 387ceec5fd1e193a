// Numbers and times as people read them. Pure but for the locale.

const plain = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const clocks = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hour12: false }); // to make one takes longer than a row
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** @param {number | null | undefined} ms */
export function duration(ms) {
  if (ms == null || !Number.isFinite(ms)) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000), minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} m` : `${minutes} m ${seconds % 60} s`;
}

/** The clock, with the day when it is another one. @param {string | number} at RFC 3339, or ms since the epoch */
export function time(at, now = Date.now()) {
  const date = new Date(at);
  if (Number.isNaN(date.getTime())) return "–";
  const clock = clocks.format(date);
  return date.toDateString() === new Date(now).toDateString() ? clock : `${date.toLocaleDateString()} ${clock}`;
}

/** How long ago. */
export function ago(at, now = Date.now()) {
  const ms = now - new Date(at).getTime();
  return Number.isNaN(ms) ? "–" : ms < 1000 ? "now" : `${duration(Math.max(0, Math.floor(ms / 1000) * 1000)).replace(/\.0+ s$/, " s")} ago`;
}

/** @param {Record<string, number> | null | undefined} costs amounts by currency */
export function money(costs) {
  return Object.entries(costs ?? {}).map(([currency, amount]) => {
    const digits = amount && Math.abs(amount) < 0.0995 ? 4 : 2;
    return currency === "USD" ? `$${amount.toFixed(digits)}` : `${amount.toFixed(digits)} ${currency}`;
  }).join(" + ");
}

/** @param {number | null | undefined} n */
export const count = (n) => (n == null ? "–" : plain.format(n));

/** @param {{inputTokens?: number, outputTokens?: number} | null | undefined} used */
export function tokens(used) {
  const read = used?.inputTokens ?? 0, written = used?.outputTokens ?? 0;
  return read || written ? `${short.format(read)} in, ${short.format(written)} out` : "";
}

/** @param {number} size bytes or characters */
export function bytes(size) {
  return size < 1024 ? `${size} B` : size < 1 << 20 ? `${(size / 1024).toFixed(1)} KiB` : `${(size / (1 << 20)).toFixed(1)} MiB`;
}
