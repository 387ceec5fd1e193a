// TypeScript: `handlers` says which function an export is. What it returns goes to the model; what it throws is one error.
import type { ToolHandler } from "@goondan/core";

const DAY_MS = 86_400_000;
const weekday = new Intl.DateTimeFormat("en", { weekday: "long", timeZone: "UTC" });

function date(text: string): Date {
  const found = new Date(`${text}T00:00:00Z`);
  if (Number.isNaN(found.getTime())) throw new RangeError(`${text} is no day of the calendar`);
  return found;
}

export const handlers: Record<string, ToolHandler> = {
  between(ctx, input) {
    const [from, to] = [date(String(input.from)), date(String(input.to))];
    ctx.logger.info(`from ${input.from} to ${input.to}`);
    return { days: (to.getTime() - from.getTime()) / DAY_MS, from: weekday.format(from), to: weekday.format(to) };
  },
};
