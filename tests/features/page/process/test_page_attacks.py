"""Attacks on the page: by a token that only looks, by other pages, by what models, tools and names say."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from goondan.features.serve.api.routing import ways
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli import beside
from goondan.kernel.cli.state import BundleTarget
from tests.features.page.browser import Site

#: What a token that looks may POST: these read, and the session is for who has a code.
READS = {"/page/api/session", "/page/api/runs/details"}


class _Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>stranger</title><p>elsewhere")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """A page of another origin on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stranger)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_token_that_looks_acts_by_no_way_of_the_door(swarm: Site) -> None:
    token = swarm.ask("/page/api/session", {}, swarm.code())["token"]
    door = Swarm(BundleTarget(str(swarm.kernel.bundle), str(swarm.kernel.state_dirs[0])))
    every = ways(beside.doors(), door)
    asked = [(method, way.path) for way in every for method in way.methods if method != "GET"]
    assert len(asked) > 10
    connection = http.client.HTTPConnection(swarm.address.rpartition("/")[2], timeout=30)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    let_in = set()
    for method, path in asked:
        connection.request(method, path.replace("{", "").replace("}", "").split(":")[0], b"{}", headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 403:
            let_in.add(path)
    connection.close()
    assert let_in <= READS
    assert len(swarm.ask("/api/v1/approvals")["items"]) == 1


def test_another_page_can_neither_show_it_nor_reach_into_it_nor_read_what_its_tab_keeps(
    swarm: Site, stranger: str
) -> None:
    seen = swarm.see(
        """
        const other = await it.context.newPage();
        await other.goto(it.args.stranger);
        const said = await other.evaluate(async (address) => {
          const said = {};
          const frame = document.createElement("iframe");
          frame.src = address;
          document.body.append(frame);
          await new Promise((done) => { frame.onload = done; setTimeout(done, 2000); });
          const failed = (asked) => asked.then(() => "came", ({ name }) => name);
          for (const path of ["", "api/live", "live_worker.js"]) said[path] = await failed(fetch(address + path));
          said.script = await failed(import(`${address}session.js`));
          const opened = window.open(`${address}#/now`);
          await new Promise((done) => setTimeout(done, 500));
          said.opened = opened === null || opened.closed;
          return said;
        }, it.address);
        const text = (frame) => frame.evaluate(() => document.body.innerText);
        said.framed = await Promise.all(other.frames().slice(1).map(text));
        const tabs = await it.context.pages(), last = tabs.at(-1);
        said.opener = await last.evaluate(() => [location.pathname, window.opener === null]);
        const before = await page.evaluate(() => sessionStorage.length);
        await page.goto(it.args.stranger); // the same tab, at another port
        const after = await page.evaluate(() => sessionStorage.length + localStorage.length + document.cookie.length);
        said.kept = [before, after];
        return said;
        """,
        anyway=True,
        stranger=stranger,
    )
    said = seen["value"]
    assert [json.loads(text)["code"] for text in said.pop("framed")] == ["E_DOOR_REFUSED"]
    assert said.pop("opener") == ["/page/", True]
    assert said.pop("opened") is True, "who has opened it has no hand in it"
    assert said.pop("kept") == [1, 0]
    assert set(said.values()) == {"TypeError"}, said


def test_no_worker_of_another_kind_comes_between_the_page_and_its_door(swarm: Site) -> None:
    seen = swarm.see(
        """
        return page.evaluate(async () => {
          await new Promise((done) => setTimeout(done)); // what is evaluated at once may do more than a page
          const tried = [];
          for (const path of ["live_worker.js", "app.js", "data:text/javascript,"]) {
            try {
              tried.push(String(await navigator.serviceWorker.register(path)));
            } catch ({ name }) {
              tried.push(name);
            }
          }
          return { tried, there: (await navigator.serviceWorker.getRegistrations()).length };
        });
        """,
        anyway=True,
    )
    assert seen["value"]["there"] == 0
    assert set(seen["value"]["tried"]) == {"TypeError"}, seen["value"]


def test_an_address_with_markup_in_it_is_a_name_that_is_not_found(swarm: Site) -> None:
    markup = "%3Cimg%20src%3Dx%20onerror%3Ddocument.title%3D1%3E"
    told = swarm.see(
        """
        const said = [];
        for (const route of it.args.routes) {
          await page.evaluate((route) => { location.hash = route; }, route);
          await it.settled(page);
          const seen = () => [document.querySelectorAll("img").length, document.title.endsWith("Goondan")];
          said.push(await page.evaluate(seen));
        }
        return said;
        """,
        routes=[
            f"#/run/{markup}",
            f"#/talk/{markup}/{markup}",
            f"#/runs?text={markup}",
            f"#/inbox/{markup}",
            "#/__proto__/x",
        ],
    )
    assert told == [[0, True]] * 5
