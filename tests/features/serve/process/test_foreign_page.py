"""A page of somebody else in a real browser, with the browser's security on: it reaches nothing behind a door.

The page even knows a token. The browser says where it comes from, and the door believes that.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from goondan.features.serve.api import Way
from tests.features.serve.doors import LOOK, TALK, in_process
from tests.machine import FOUND
from tests.npm_fixture import beside, installed

SOURCES = Path(__file__).parents[3] / "servers" / "browser"
#: How long a browser may take to unpack, start and show a page (seconds).
BROWSE_S = 50.0
PAGE = """<!doctype html><meta charset="utf-8"><title>a page of somebody else</title>
<iframe name="sink"></iframe><div id="forms"></div><script>
const door = "http://HOST:PORT", said = {};
const tries = {
  plain: () => fetch(door + "/secret"),
  noCors: () => fetch(door + "/secret", { mode: "no-cors" }),
  token: () => fetch(door + "/secret", { headers: { authorization: "Bearer LOOK" } }),
  send: () => fetch(door + "/send", { method: "POST", mode: "no-cors", body: '{"text":"do it"}' }),
  sendWithToken: () => fetch(door + "/send", { method: "POST", headers: { authorization: "Bearer TALK" }, body: "{}" }),
  query: () => fetch(door + "/secret?token=LOOK", { mode: "no-cors" }),
};
const form = (type) => {
  const made = document.createElement("form");
  made.method = "post"; made.action = door + "/send"; made.target = "sink"; made.enctype = type;
  made.innerHTML = '<input name="text" value="do it">';
  document.getElementById("forms").append(made);
  made.submit();
};
const events = () => new Promise((resolve) => {
  const source = new EventSource(door + "/events");
  source.onmessage = (event) => { source.close(); resolve("read " + event.data); };
  source.onerror = () => { source.close(); resolve("nothing"); };
});
const picture = () => new Promise((resolve) => {
  const image = new Image();
  image.onload = () => resolve("read"); image.onerror = () => resolve("nothing");
  image.src = door + "/secret";
});
(async () => {
  for (const [name, one] of Object.entries(tries)) {
    try {
      const answer = await one();
      const text = await answer.text();
      said[name] = answer.type === "opaque" ? "opaque " + text.length : "read " + text;
    } catch { said[name] = "nothing"; }
  }
  for (const type of ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data"]) {
    form(type);
    await new Promise((resolve) => { document.querySelector("iframe").onload = resolve; setTimeout(resolve, 1000); });
  }
  said.events = await events();
  said.picture = await picture();
  window.done = said;
})();
</script>"""


@contextmanager
def page_at(text: str) -> Iterator[str]:
    """The address of a page with this text, on a port of its own: another origin."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # at the end those are waited for that a browser's spare connections have
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def browsed(url: str) -> dict[str, Any]:
    """What a page says when it is done. Skips the test where no browser can be had."""
    folder = installed(SOURCES)
    unpacked = folder / "unpacked"  # the browser itself, once
    unpacked.mkdir(exist_ok=True)
    program = ["node", str(beside(folder, SOURCES / "browse.mjs")), url]
    env = {**FOUND, "TMPDIR": str(unpacked)}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=BROWSE_S)
    if done.returncode and not done.stdout:
        pytest.skip(f"no browser starts here: {done.stderr.strip()[-300:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_gets_nothing_and_does_nothing(host: str) -> None:
    reached: list[str] = []
    log: list[bytes] = []

    async def secret(request: Request) -> Response:
        reached.append(request.url.path)
        return JSONResponse({"private": "words"})

    async def events(request: Request) -> Response:
        reached.append(request.url.path)
        return StreamingResponse(iter([b"data: private\n\n"]), media_type="text/event-stream")

    ways = [
        Way("/secret", secret, role="look"),
        Way("/send", secret, ("POST",), role="talk"),
        Way("/events", events, role="look"),
    ]
    with in_process([*ways], log=log.append) as door:
        text = PAGE.replace("HOST", host).replace("PORT", str(door.port)).replace("LOOK", LOOK).replace("TALK", TALK)
        with page_at(text) as url:
            said = browsed(url)["done"]
        assert b"private" in door.asks(door.head("/secret", token=LOOK)), "a program with the token reads it"
    assert reached == ["/secret"], "only that program came in"
    tries = {"plain", "noCors", "token", "send", "sendWithToken", "query", "events", "picture"}
    assert said.keys() == tries
    assert set(said.values()) <= {"nothing", "opaque 0"}, said
    lines = [json.loads(line) for line in log]
    assert len(lines) >= 10, "the browser did ask"
    assert {line["status"] for line in lines[:-1]} <= {403, 405}
    assert {line["method"] for line in lines} >= {"GET", "POST"}
