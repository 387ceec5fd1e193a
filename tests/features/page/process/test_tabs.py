"""Tabs of one browser: one stream for all of them, and none misses anything for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.page.browser import Chromium, Site, door
from tests.kernel_fixture import Sandbox, sandbox

#: `hears(tab)` notes what a tab hears; `say(tab, text)` sends a message and waits for its answer.
LIVE = """
const hears = (tab) => tab.evaluate(async () => {
  const { connection, on } = await import("/page/live.js");
  window.heard = [];
  on((events) => window.heard.push(...(events ? events.map((one) => one.kind) : [null])));
  while (connection.value !== "live") await new Promise((done) => setTimeout(done, 20));
});
const heard = (tab) => tab.evaluate(() => window.heard);
const say = (tab, text) => tab.evaluate((text, token) => fetch("/api/v1/messages", {
  method: "POST", body: JSON.stringify({ text }),
  headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
}).then((answer) => answer.status), text, it.args.token);
const until = (tab, kind) => tab.waitForFunction((kind) => window.heard.includes(kind), {}, kind);
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox() as made:
        made.detach()
        yield made


@pytest.fixture
def page(kernel: Sandbox, chromium: Chromium) -> Iterator[Site]:
    with door(kernel, chromium) as made:
        yield made


def test_seven_tabs_share_one_stream_and_all_of_them_hear_and_ask(page: Site) -> None:
    told = page.see(
        LIVE
        + """
        const tabs = [page];
        for (let tab = 1; tab < 7; tab++) {
          tabs.push(await it.tab("#/runs"));
          await tabs[tab].waitForSelector("#content"); // the shared worker has handed it the token
        }
        for (const tab of tabs) await hears(tab);
        const status = await say(tabs[6], "/tools");
        for (const tab of tabs) await until(tab, "event.ended");
        const asked = await Promise.all(tabs.map((tab) => tab.evaluate(() =>
          import("/page/api.js").then(({ get }) => get("/api/v1/agents")).then((rows) => rows.length))));
        return { status, asked, heard: await Promise.all(tabs.map(heard)) };
        """,
        token=page.token,
    )
    assert told["status"] == 200
    assert told["asked"] == [1] * 7
    first = [kind for kind in told["heard"][0] if kind]
    assert {"turn.started", "turn.completed", "event.ended"} <= set(first)
    assert all([kind for kind in heard if kind] == first for heard in told["heard"])
    assert page.streams() == 1


def test_a_tab_that_slept_catches_up_and_nobody_holds_a_stream_when_all_sleep(page: Site) -> None:
    told = page.see(
        LIVE
        + """
        const sleep = (tab, hidden) => tab.evaluate((hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }, hidden);
        const state = (tab) => tab.evaluate(() => import("/page/live.js").then(({ connection }) => connection.value));
        const other = await it.tab("#/runs");
        await other.waitForSelector("#content");
        await Promise.all([hears(page), hears(other)]);
        const said = {};
        await sleep(other, true);
        await say(page, "/tools");
        await until(page, "event.ended");
        said.asleep = { heard: await heard(other), state: await state(other) };
        await sleep(other, false);
        await until(other, null);
        said.awake = { heard: await heard(other), state: await state(other) };
        await say(page, "/tools");
        await until(other, "event.ended");
        await sleep(other, true);
        await sleep(page, true);
        const before = (await heard(page)).length;
        await say(page, "/tools");
        said.nobody = (await heard(page)).length - before;
        await sleep(page, false);
        await page.waitForFunction((before) => window.heard.length > before, {}, before);
        said.again = (await heard(page)).slice(before);
        return said;
        """,
        token=page.token,
    )
    assert told["asleep"] == {"heard": [], "state": "asleep"}
    assert told["awake"] == {"heard": [None], "state": "live"}
    assert told["nobody"] == 0
    assert told["again"][0] is None, "what happened meanwhile is loaded anew"
    assert page.streams() == 2, "one for both tabs, and one after all have slept"


def test_without_a_shared_worker_a_tab_has_a_stream_of_its_own(page: Site) -> None:
    told = page.see(
        LIVE
        + """
        const plain = await it.context.newPage();
        await plain.evaluateOnNewDocument(() => { delete globalThis.SharedWorker; });
        const asked = [];
        plain.on("request", (request) => asked.push(request.url()));
        await plain.goto(`${it.address}#code=${it.args.code}`);
        await plain.waitForSelector("#content");
        await hears(plain);
        await say(plain, "/tools");
        await until(plain, "event.ended");
        return asked.filter((url) => url.includes("/api/live?")).length;
        """,
        token=page.token,
        code=page.code(),
    )
    assert told == 1


def test_when_the_door_is_gone_the_page_says_so_and_what_to_do(page: Site) -> None:
    told = page.see(
        LIVE
        + """
        await hears(page);
        process.kill(it.args.pid, "SIGTERM");
        await page.waitForFunction(() => document.querySelector(".trouble")?.innerText.includes("gdn ui"));
        return page.evaluate(() => import("/page/live.js").then(({ connection }) => connection.value));
        """,
        pid=page.pid,
    )
    assert told == "lost"
