// A program with npm's openai: `node client.mjs BASE TOKEN` prints one JSON document of what it got.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const told = {};

const messages = [{ role: "user", content: "one" }];
const first = await client.chat.completions.create({ model: "main", messages }).withResponse();
told.whole = first.data.choices[0].message.content;
messages.push(first.data.choices[0].message, { role: "user", content: "again 3 two " });

const runner = client.chat.completions.stream({ model: "main", messages, stream_options: { include_usage: true } });
const pieces = [];
runner.on("content", (piece) => pieces.push(piece));
told.streamed = await runner.finalContent();
told.pieces = pieces.join("");
told.usage = await runner.totalUsage();
told.same = runner.response?.headers?.get("x-goondan-instance") ?? null;
told.instance = first.response.headers.get("x-goondan-instance");

const response = await client.responses.create({ model: "main", input: "three" });
told.response = response.output_text;
const events = client.responses.stream({ model: "main", input: "think Hm.|again 2 four ", previous_response_id: response.id });
const deltas = [];
for await (const event of events) if (event.type === "response.output_text.delta") deltas.push(event.delta);
const final = await events.finalResponse();
told.deltas = deltas.join("");
told.final = [final.status, final.output.map((item) => item.type), final.previous_response_id === response.id];
told.kept = (await client.responses.retrieve(final.id)).output_text;
await client.responses.delete(final.id);
told.models = (await client.models.list()).data.map((model) => model.id);

for (const [name, ask] of Object.entries({
  deleted: () => client.responses.retrieve(final.id),
  model: () => client.chat.completions.create({ model: "nobody", messages: [{ role: "user", content: "x" }] }),
  tools: () => client.chat.completions.create({ model: "main", messages, tools: [{ type: "function", function: { name: "f" } }] }),
})) {
  try {
    await ask();
  } catch (error) {
    told[name] = [error.constructor.name, error.status, error.code, error.param];
  }
}
console.log(JSON.stringify(told));
