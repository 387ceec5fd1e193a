/** What a program in TypeScript may write. Nobody runs it: the compiler reads it. */

import { type Answer, GoondanError, connect } from "goondan-client";
import type { AgentEvent } from "goondan-client/wire";

interface Price {
  price: number;
}

export async function asks(signal: AbortSignal): Promise<number> {
  await using gdn = await connect({ bundle: "." });
  const { object } = await gdn.ask("clerk", "How much?", { schema: (value) => value as Price, signal, deadlineMs: null });
  for await (const event of gdn.stream("clerk", "And now?", { files: ["a.png", { data: new Uint8Array(), name: "b" }] })) {
    if (event.kind === "text") process.stdout.write((event as { text?: string }).text ?? "");
  }
  const answer: Answer = await gdn.ask("clerk", "hi");
  const result = await gdn.call("shop__price", { name: "tea", id: 2n ** 60n }, { instance: "a" });
  const state: string = await gdn.cancel({ eventId: await gdn.send("clerk", "hi") });
  for (const item of await gdn.approvals()) await gdn.decide(item.id, item.kind === "question" ? "answer" : "yes");
  try {
    // @ts-expect-error An agent has a name.
    await gdn.ask(1, "hi");
  } catch (error) {
    if (error instanceof GoondanError) console.log(error.code, error.suggestion, error.retryAfterMs);
  }
  const event: Pick<AgentEvent, "id"> = { id: answer.eventId };
  return object.price + result.status.length + state.length + event.id.length;
}
