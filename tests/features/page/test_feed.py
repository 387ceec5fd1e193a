"""The live stream as the page holds it: feed.js in node, against a server that breaks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.features.page.browser import missing

FILES: Final = Path(__file__).parents[3] / "features" / "page" / "door" / "files"


def node(script: str) -> Any:
    """What a script says at its end. It stands behind those of feed.js."""
    if shutil.which("node") is None:
        missing("node is not installed")
    program = f"{(FILES / 'feed.js').read_text()}\n{script}"
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run(["node", "--input-type=module"], input=program, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_stream_is_read_the_same_wherever_it_is_cut() -> None:
    told = node(
        r"""
        const batch = "event: batch\nid: 7\ndata: [1,\ndata: \"é\u2028\u{1f600}\"]\n\n\n";
        const text = `: hello\n\n${batch}data:plain\r\n\r\nevent: gap\n\ndata: cut`;
        const bytes = new TextEncoder().encode(text), seen = new Set();
        for (let size = 1; size <= bytes.length; size++) {
          const body = new ReadableStream({
            start(control) {
              for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
              control.close();
            },
          });
          const read = [];
          for await (const one of events(body)) read.push(one);
          seen.add(JSON.stringify(read));
        }
        console.log(JSON.stringify([...seen].map((one) => JSON.parse(one))));
        """
    )
    batch = {"event": "batch", "id": "7", "data": '[1,\n"é\u2028\U0001f600"]'}
    assert told == [[batch, {"event": "message", "id": "7", "data": "plain"}]], "what is not whole is no event"


def test_it_is_opened_again_with_a_gap_each_time_until_its_token_is_refused() -> None:
    told = node(
        """
        const server = (await import("node:http")).createServer();
        const answers = [
          (answer) => answer.writeHead(200).end('event: batch\\ndata: [{"n": 1}]\\n\\n'),
          (answer) => answer.writeHead(503).end("busy"),
          (answer) => answer.destroy(),
          (answer) => answer.writeHead(200).end("event: gap\\ndata: {}\\n\\n"),
          (answer) => answer.writeHead(401).end("{}"),
        ];
        const asked = [];
        server.on("request", (request, answer) => {
          asked.push(request.headers.authorization);
          answers.shift()(answer);
        });
        await new Promise((done) => server.listen(0, "127.0.0.1", done));
        const ask = fetch;
        globalThis.fetch = (path, how) => ask(`http://127.0.0.1:${server.address().port}/${path}`, how);
        const heard = [];
        await new Promise((done) => {
          const feed = new Feed((said) => { heard.push(said); if (said.refused) done(); });
          feed.use("secret");
          feed.use("secret"); // it has this one
        });
        server.closeAllConnections();
        console.log(JSON.stringify({ heard, asked }));
        process.exit();
        """
    )
    live, lost = {"state": "live", "gap": True}, {"state": "lost"}
    first, again = [live, {"events": [{"n": 1}]}, lost], [lost, lost, live, {"gap": True}, lost]
    assert told["heard"] == [*first, *again, {"refused": "secret"}]
    assert told["asked"] == ["Bearer secret"] * 5


def test_a_silent_stream_and_one_of_a_machine_that_slept_are_opened_again_and_none_is_held_without_a_token() -> None:
    told = node(
        """
        const { mock } = await import("node:test");
        mock.timers.enable({ apis: ["setInterval", "setTimeout", "Date"] });
        const turn = async () => { for (let n = 0; n < 50; n++) await new Promise((done) => setImmediate(done)); };
        let opened = 0, ended = 0, speak;
        globalThis.fetch = async (path, { signal }) => {
          opened++;
          signal.addEventListener("abort", () => ended++, { once: true });
          const body = new ReadableStream({ start(control) {
            speak = () => control.enqueue(new TextEncoder().encode(":\\n\\n"));
            signal.addEventListener("abort", () => control.error(new Error("ended")));
          } });
          return { ok: true, status: 200, body };
        };
        const feed = new Feed(() => {}), said = {};
        const pass = async (seconds, step = 5) => {
          for (let at = 0; at < seconds; at += step) { mock.timers.tick(step * 1000); await turn(); }
        };
        feed.use("t");
        await turn();
        for (let n = 0; n < 6; n++) { await pass(15); speak(); await turn(); }
        said.heard = opened;
        await pass(60);
        said.silent = opened;
        mock.timers.setTime(Date.now() + 3600_000); // the machine slept
        await pass(10);
        said.slept = opened;
        feed.use("");
        await pass(60);
        said.none = [opened, ended];
        console.log(JSON.stringify(said));
        process.exit();
        """
    )
    assert told["heard"] == 1
    assert told["silent"] == 2
    assert told["slept"] == 3
    assert told["none"] == [3, 3]
