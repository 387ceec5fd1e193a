// An editor on npm's SDK: starts the agent named on the command line (a JSON list), says each prompt of standard input
// (a JSON list), and prints what came of it as one JSON document.
import { spawn } from "node:child_process";
import { Readable, Writable } from "node:stream";
import { text } from "node:stream/consumers";
import * as acp from "@agentclientprotocol/sdk";

const [command, ...args] = JSON.parse(process.argv[2]);
const { cwd, prompts } = JSON.parse(await text(process.stdin));
const agent = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const stream = acp.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));
const told = { updates: [], permissions: [], reasons: [] };

const { agent: to, client: from } = acp.methods;
const editor = acp
  .client({ name: "test" })
  .onRequest(from.session.requestPermission, ({ params }) => {
    told.permissions.push(params.toolCall.title);
    return { outcome: { outcome: "selected", optionId: params.options[0].optionId } };
  })
  .onNotification(from.session.update, ({ params }) => {
    told.updates.push(params.update);
  });
await editor.connectWith(stream, async (agent) => {
  const begun = await agent.request(to.initialize, { protocolVersion: acp.PROTOCOL_VERSION, clientCapabilities: {} });
  told.version = begun.protocolVersion;
  const { sessionId, modes } = await agent.request(to.session.new, { cwd, mcpServers: [] });
  told.modes = modes?.availableModes.map((mode) => mode.id);
  for (const prompt of prompts) {
    const { stopReason } = await agent.request(to.session.prompt, { sessionId, prompt: [{ type: "text", text: prompt }] });
    told.reasons.push(stopReason);
  }
  told.live = told.updates.splice(0);
  await agent.request(to.session.load, { sessionId, cwd, mcpServers: [] });
  told.listed = (await agent.request(to.session.list, {})).sessions.map((session) => session.sessionId).includes(sessionId);
});
agent.stdin.end();
agent.on("exit", (status) => console.log(JSON.stringify({ ...told, status })));
