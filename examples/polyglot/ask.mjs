// Ask the clerk of this folder's swarm, and show what it does meanwhile: `node ask.mjs [TEXT]`. Ctrl-C cancels the question.
import { connect, GoondanError } from "goondan-client";

// Without a key the embedded console answers: each line is a call. With a key, ask in your own words.
const EXAMPLE = [
  '/numbers__summary {"values": [3, 1, 4, 1, 5, 9, 2, 6]}',
  '/calendar__between {"from": "2026-11-24", "to": "2027-01-01"}',
  "/folder__size {}",
  '/primes__count {"below": 1000000}',
].join("\n");

// What models and tools say is data: it must not steer the terminal.
const plain = (text) => String(text ?? "").replace(/[^\P{C}\n]/gu, "");

const interrupted = new AbortController();
process.once("SIGINT", () => interrupted.abort());

try {
  const gdn = await connect({ bundle: import.meta.dirname });
  try {
    for await (const news of gdn.stream("clerk", process.argv[2] ?? EXAMPLE, { signal: interrupted.signal, deadlineMs: 120_000 })) {
      if (news.kind === "tool.called") console.error(`  ${plain(news.toolName)} begins`);
      if (news.kind === "tool.completed") console.error(`  ${plain(news.toolName)} is done`);
      if (news.kind === "tool.failed") console.error(`  ${plain(news.toolName)} failed: ${plain(news.code)}`);
      if (news.kind === "text") process.stderr.write(plain(news.text));
      if (news.kind === "answer") console.log(plain(news.text));
    }
  } finally {
    await gdn.close();
  }
} catch (error) {
  if (!(error instanceof GoondanError)) throw error;
  console.error(`${error.code}: ${plain(error.message)}\n${plain(error.suggestion)}`);
  process.exitCode = 1;
}
