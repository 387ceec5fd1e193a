"""The view Now on a swarm that works: who waits for whom, a backlog, dead letters, restarts, budgets."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.bundles import documents
from tests.features.page.browser import PHONE, Chromium, Site, site
from tests.kernel_fixture import wait_until
from tests.process.scripted_model import scripted_model

BUNDLE: Final = documents(
    "Model console {provider: embedded}",
    'Model absent {provider: openai, model: m, endpoint: "http://127.0.0.1:PORT/v1", retry: {busyS: 0}}',
    "Agent boss {modelConfig: {modelRef: Model/console}, tools: [Tool/agents]}",
    "Agent clerk {modelConfig: {modelRef: Model/console}, tools: [Tool/wait]}",
    "Agent poor {modelConfig: {modelRef: Model/console}, tools: [Tool/wait], "
    "extensions: [{ref: Extension/budget, config: {limits: {calls: 2}}}]}",
    "Agent lost {modelConfig: {modelRef: Model/absent}}",
    "Swarm swarm {entryAgent: Agent/boss, agents: "
    "[{ref: Agent/boss}, {ref: Agent/clerk}, {ref: Agent/poor}, {ref: Agent/lost}]}",
)
#: What the steps of all tests may use.
STEPS: Final = """
    const text = (label) => page.$eval(`section[aria-label="${label}"]`, (one) => one.innerText).catch(() => "");
    const until = (what, ...given) => page.waitForFunction(what, { polling: 100 }, ...given);
    const shows = (words) => until((words) => document.querySelector("main").innerText.includes(words), words);
    const lacks = (label) => until((label) => !document.querySelector(`section[aria-label="${label}"] table`), label);
    const press = async (label) => {
      await (await page.waitForSelector(`button[aria-label="${label}"]`)).click();
      if (!it.args.code) return;
      const field = await page.waitForSelector('dialog[open] input[name="code"]:focus');
      await field.type(it.args.code);
      await field.press("Enter");
      it.args.code = "";
    };
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port at which nobody listens until a test does."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def page(chromium: Chromium, port: int) -> Iterator[Site]:
    with site(chromium, BUNDLE.replace("PORT", str(port)), OPENAI_API_KEY="k") as made:
        yield made


def send(page: Site, text: str, *more: str, agent: str = "boss") -> None:
    assert page.kernel.gdn("send", "--no-wait", agent, text, *more).status == 0


def end_all(page: Site) -> None:
    """Wait until nobody works."""
    wait_until(lambda: not page.ask("/api/v1/waits")["turns"], what="the end of all turns")


def test_who_waits_for_whom_what_waits_and_how_long_it_will_take_and_a_turn_is_stopped(page: Site) -> None:
    page.kernel.gdn("send", "boss", "hello")
    send(page, "@clerk /wait__seconds seconds=30")
    wait_until(lambda: len(page.ask("/api/v1/waits")["turns"]) == 2, what="the clerk")
    for _ in range(3):
        send(page, "hello")
    seen = page.see(
        STEPS
        + """
        await shows("3 ×");
        const [work, backlog] = [await text("At work"), await text("Mailboxes with messages that wait")];
        const before = await it.text(page);
        const links = await page.$$eval('section[aria-label="At work"] a', (all) => all.map((one) => one.hash));
        await until(() => / [3-9] s/.test(document.querySelector('section[aria-label="At work"]').innerText));
        await press("Stop clerk/default");
        await lacks("Mailboxes with messages that wait");
        await lacks("At work");
        return { work, backlog, before, links, after: await it.text(page), requests: it.seen.requests };
        """,
        code=page.code("act"),
    )
    assert "boss/default" in seen["work"]
    assert "waits for the answer of clerk/default" in seen["work"]
    assert "waits for wait__seconds" in seen["work"]
    assert all(link.startswith("#/run/") for link in seen["links"])
    assert "after its turn about " in seen["backlog"]
    assert "the mean of its last 1" in seen["backlog"]
    assert "the turn before" in seen["backlog"]
    assert "All is well. 2 at work, 3 wait." in seen["before"]
    assert "No turn runs." in seen["after"]
    assert any(url.endswith("/cancel") for url in seen["requests"])


@pytest.mark.feature("dead_letters")
def test_a_dead_letter_says_what_it_asked_and_is_sent_again_from_the_page(page: Site, port: int) -> None:
    assert page.kernel.gdn("send", "lost", "hello?", "--event-id", "m1").status == 1
    with scripted_model(port) as model:
        model.otherwise = "hello yourself"
        seen = page.see(
            STEPS
            + """
            await shows("Messages that were given up");
            const line = await page.$eval(".trouble", (one) => one.innerText);
            await page.click('section[aria-label="Messages that were given up"] summary');
            await shows("hello?");
            const letter = await text("Messages that were given up");
            await page.click('button[aria-label="Drop the message to lost/default"]');
            await shows("Drop it for good");
            await press("Send again to lost/default");
            await lacks("Messages that were given up");
            await shows("It waits again");
            const again = await page.$eval('main p[role="status"] a', (one) => one.hash);
            await until(() => !document.querySelector(".trouble"));
            return { line, letter, again };
            """,
            code=page.code("act"),
        )
        end_all(page)
    assert seen["line"].startswith("A message to lost/default was given up: E_MODEL_FAILED")
    assert "send it again, or drop it" in seen["line"]
    assert "E_MODEL_FAILED" in seen["letter"]
    assert seen["again"] == "#/run/m1~requeued"
    assert page.ask("/api/v1/dead-letters")["events"] == []


def test_a_killed_process_counts_a_restart_while_the_page_is_open_and_an_agent_is_restarted(page: Site) -> None:
    send(page, "/wait__seconds seconds=4", agent="clerk")
    wait_until(lambda: page.ask("/api/v1/waits")["turns"], what="the turn")
    [clerk] = [row for row in page.kernel.ps() if row["role"] == "agent" and row["name"] == "clerk"]
    seen = page.see(
        STEPS
        + """
        const row = () => [...document.querySelectorAll('section[aria-label="Processes and jails"] tr')]
          .map((one) => one.innerText).find((one) => one.startsWith("clerk/default")) ?? "";
        await until(`(${row})().includes("MiB")`);
        process.kill(it.args.pid, "SIGKILL");
        await until(`(${row})().includes("SIGKILL")`);
        const restarted = await page.evaluate(row);
        await shows("No turn runs.");
        await press("Restart clerk");
        await until(() => !document.querySelector('button[aria-label="Restart clerk"]')?.disabled);
        return restarted;
        """,
        pid=clerk["pid"],
        code=page.code("act"),
    )
    assert seen.split("\t")[1] == "agent"
    assert "1" in seen.split("\t"), "one restart"
    assert os.path.exists(f"/proc/{clerk['pid']}") is False
    assert "restart" in page.kernel.log("supervisor")


@pytest.mark.feature("budgets")
def test_a_budget_that_is_spent_is_shown_and_said(page: Site) -> None:
    failed = page.kernel.gdn("send", "poor", "/wait__seconds seconds=0")
    assert "E_BUDGET_SPENT" in failed.err
    seen = page.see(
        STEPS
        + """
        await shows("2 of 2 calls, spent");
        const meter = await page.$eval("meter", ({ value, max, ariaLabel }) => [value, max, ariaLabel]);
        return { meter, line: await page.$eval(".trouble", (one) => [one.innerText, one.firstChild.hash]) };
        """
    )
    assert seen["meter"] == [2, 2, "calls of poor"]
    assert "The budget of poor is spent: 2 calls" in seen["line"][0]
    assert seen["line"][1].startswith("#/run/")


def test_a_hidden_tab_asks_nothing_and_one_that_is_seen_again_catches_up(page: Site) -> None:
    seen = page.see(
        STEPS
        + """
        const show = (state) => page.evaluate((state) => {
          Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }, state);
        const pause = (ms) => new Promise((done) => setTimeout(done, ms));
        const asked = () => it.seen.requests.filter((url) => url.includes("/waits")).length;
        await shows("No turn runs.");
        await show("hidden");
        await pause(1500);  // what was under way
        const hidden = asked();
        const body = JSON.stringify({ text: "/wait__seconds seconds=8", agent: "clerk", instance: "unseen" });
        const type = { "content-type": "application/json", prefer: "respond-async" };
        const headers = { ...type, authorization: `Bearer ${it.args.token}` };
        await fetch(`${it.args.door}/api/v1/messages`, { method: "POST", body, headers });
        await pause(2500);
        const still = asked();
        await show("visible");
        await shows("clerk/unseen");
        return { hidden, still, then: asked() };
        """,
        door=page.address,
        token=page.token,
    )
    assert seen["still"] == seen["hidden"]
    assert seen["then"] > seen["still"]
    page.kernel.gdn("instance", "delete", "clerk", "unseen", "--force", "--yes")


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), ((1280, 800), False)])
def test_it_can_be_read_by_everybody_and_on_a_phone(page: Site, size: tuple[int, int], dark: bool) -> None:
    name = "<img src=x onerror=alert(1)>" + "x" * 100
    send(page, "/wait__seconds seconds=20", "--instance", name, agent="clerk")
    seen = page.see(
        STEPS
        + """
        await shows("waits for wait__seconds");
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        const images = (await page.$$("img")).length;
        return { findings: await it.findings(page), wide, text: await text("At work"), images };
        """,
        size=size,
        dark=dark,
    )
    page.kernel.gdn("instance", "delete", "clerk", name, "--force", "--yes")
    assert seen["findings"] == []
    assert seen["wide"] <= 0
    assert f"clerk/{name}" in seen["text"]
    assert seen["images"] == 0


def test_what_is_seldom_is_drawn_too(page: Site) -> None:
    seen = page.see(
        STEPS
        + """
        await page.setRequestInterception(true);
        page.on("request", (asked) => {
          const told = Object.entries(it.args.told).find(([path]) => asked.url().endsWith(path));
          if (told) asked.respond({ contentType: "application/json", body: JSON.stringify(told[1]) });
          else asked.continue();
        });
        await page.keyboard.press("r");
        await shows("MCP servers");
        const line = await page.$eval(".trouble", (one) => one.innerText);
        const more = await page.$eval(".now-wrong", (one) => one.innerText);
        return { line, more, servers: await text("MCP servers"), learned: await text("Learned of servers") };
        """,
        told={
            "/api/v1/waits": {"waits": [], "turns": [], "stuck": [], "cycles": [["a/k", "b/k"]], "more": 0},
            "/api/v1/mcp/servers": [
                {"server": "mail", "extension": "mail", "agent": "boss", "instanceKey": "k", "state": "login"},
                {"server": "f", "extension": "f", "state": "ended", "calls": 7, "memoryKb": 2048}
                | {"lastError": "<b>gone</b>\u202e"},
            ],
            "/api/v1/learned": [
                {"about": "gates", "text": "the server of Model/m: at most 2 at once", "refusingMs": 0}
            ],
        },
    )
    assert "They wait for each other: a/k → b/k → a/k: stop one of them (and " in seen["line"]
    assert "gdn auth login mcp:mail" in seen["more"]
    assert "<b>gone</b>⟨202E⟩" in seen["more"]
    assert "boss/k" in seen["servers"]
    assert "2.0 MiB" in seen["servers"]
    assert "at most 2 at once" in seen["learned"]


def test_a_door_without_a_feature_is_no_trouble(page: Site) -> None:
    seen = page.see(
        STEPS
        + """
        await shows("supervisor");
        await page.setRequestInterception(true);
        page.on("request", (asked) => {
          const answer = { status: 404, contentType: "application/problem+json", body: it.args.body };
          return asked.url().endsWith("/api/v1/mcp/servers") ? asked.respond(answer) : asked.continue();
        });
        return page.evaluate(async () => {
          const { seen, soon } = await import("/page/health.js");
          soon();
          while (seen.value.servers) await new Promise((done) => setTimeout(done, 20));
          return { error: seen.value.error, processes: seen.value.processes.length > 0 };
        });
        """,
        body='{"code": "E_DOOR_REQUEST", "status": 404, "detail": "nothing is served at this path"}',
    )
    assert seen == {"error": None, "processes": True}


def test_a_kernel_that_stops_and_one_that_comes_are_noticed(page: Site) -> None:
    seen = page.see(
        STEPS
        + """
        await shows("supervisor");
        const { spawnSync } = await import("node:child_process");
        const { program: [program, ...before], env, cwd } = it.args;
        const gdn = (...words) => spawnSync(program, [...before, ...words], { env, cwd }).status;
        const stopped = gdn("stop");
        await until(() => document.querySelector(".trouble")?.innerText.startsWith("No kernel runs the bundle"));
        const gone = await it.text(page);
        const started = gdn("run", "--detach");
        await shows("supervisor");
        return { stopped, started, gone, back: await it.text(page) };
        """,
        program=[sys.executable, "-I", "-m", "goondan.kernel.cli"],
        env=page.kernel.env,
        cwd=str(page.kernel.home),
    )
    assert (seen["stopped"], seen["started"]) == (0, 0)
    assert "start it with: gdn run" in seen["gone"]
    assert "No process runs." in seen["gone"]
    assert "No kernel runs" not in seen["back"]
