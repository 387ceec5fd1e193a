// The handlers by themselves, without a jail: `node --test tests/` (Node.js 22.18 or newer; `bun test` finds them as well).
import assert from "node:assert/strict";
import { test } from "node:test";

import type { ToolContext } from "@goondan/core";

import { handlers } from "../tools/TOOL_MODULE.ts";

const ctx = { workdir: import.meta.dirname } as ToolContext;

test("words are counted", async () => {
  assert.deepEqual(await handlers.run(ctx, { text: "three short words" }), { words: 3 });
  assert.deepEqual(await handlers.run(ctx, { text: "" }), { words: 0 });
});
