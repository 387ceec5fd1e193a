// Runs a script of code mode in Node. See node_script.py for the lines of the socket.
import net from "node:net";
import { createInterface } from "node:readline";

const channel = new net.Socket({ fd: Number(process.argv[2]), readable: true, writable: true });
const waiting = new Map();
let last = 0;

class ToolCallError extends Error {
  constructor(error) {
    super(error.message);
    this.name = "ToolCallError";
    this.code = error.code ?? "E_TOOL";
    if (error.suggestion) this.suggestion = error.suggestion;
    if (error.helpUrl) this.helpUrl = error.helpUrl;
  }
}

class Pending {
  constructor(handle) {
    this.handle = handle;
  }
}

const tell = (message) => new Promise((told) => channel.write(JSON.stringify(message) + "\n", told));

const ask = (op, value, read) =>
  new Promise((resolve, reject) => {
    const id = ++last;
    waiting.set(id, { resolve, reject, read });
    tell({ id, op, value });
  });

const outputOf = (result) => (result.status === "pending" ? new Pending(result.handle) : (result.output ?? null));

const own = {
  search: (query, limit = 10) => ask("tools", { query: String(query), limit }, (found) => found.tools),
  describe: (...names) => ask("tools", { names: names.map(String) }, (found) => found.tools),
};

const tools = new Proxy(Object.freeze(own), {
  get(target, name) {
    if (typeof name !== "string" || name === "then") return undefined;
    if (Object.hasOwn(target, name)) return target[name];
    return (args = {}) => ask("tool", { name, args }, outputOf);
  },
});

const end = async (message) => {
  await tell(message);
  process.exit(0);
};

const told = (error) => {
  if (!(error instanceof Error)) return `the script threw ${String(error)}`;
  const code = error.code ? ` [${error.code}]` : "";
  const lines = (error.stack ?? "").split("\n").filter((line) => line.includes("<script>"));
  const places = lines.map((line) => line.trim()).slice(0, 6);
  const advice = error.suggestion ? ` (${error.suggestion})` : "";
  return [`${error.name}${code}: ${error.message}${advice}`, ...places].join("\n");
};

const run = async (code) => {
  const Script = Object.getPrototypeOf(async () => {}).constructor;
  const script = new Script("tools", "ToolCallError", "Pending", `${code}\n//# sourceURL=<script>`);
  await script(tools, ToolCallError, Pending);
  return end({ done: true });
};

// What the script throws as well: nobody else waits for it.
process.on("uncaughtException", (error) => end({ error: told(error) }));
process.on("unhandledRejection", (error) => end({ error: told(error) }));

createInterface({ input: channel }).on("line", (line) => {
  const message = JSON.parse(line);
  if ("code" in message) return run(message.code);
  const asked = waiting.get(message.id);
  waiting.delete(message.id);
  if (asked === undefined) return;
  if (message.error) asked.reject(new ToolCallError(message.error));
  else asked.resolve(asked.read(message.value));
});
channel.on("close", () => process.exit(1));
