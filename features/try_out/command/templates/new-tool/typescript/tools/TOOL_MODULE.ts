// The tool TOOL-NAME: functions, and `handlers` to say under which export each is called.
//
// It runs in a jail, under Node.js or Bun: it sees this folder (to read) and the agent's workspace, `ctx.workdir` (to
// write), and reaches no network. It may import what the runtime has, "@goondan/core", and files of this folder.
import type { ToolHandler } from "@goondan/core";

export const handlers: Record<string, ToolHandler> = {
  // Arguments fit the schema in the manifest already; what is thrown becomes an error that the model can read.
  run(_ctx, input) {
    const words = String(input.text).split(/\s+/u).filter((word) => word !== "");
    return { words: words.length };
  },
};
