"""The runs of a real swarm in a real browser: the list, the waterfall over agents, and what one span says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.bundles import documents
from tests.features.page.browser import PHONE, Chromium, Site, site

BUNDLE = documents(
    "Model console {provider: embedded}",
    "Agent lead {modelConfig: {modelRef: Model/console}, tools: [Tool/bash, Tool/agents, Tool/http-fetch]}",
    "Agent helper {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}",
    "Swarm swarm {entryAgent: Agent/lead, agents: [{ref: Agent/lead}, {ref: Agent/helper}]}",
)
#: Markup, a colour, a turned line, and bytes that are no UTF-8.
HOSTILE = (
    """printf '<img src=x onerror="window.taken=1"><script>window.taken=1</script> """
    r"""\033[31mred \342\200\256 \377 end'"""
)


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with site(chromium, BUNDLE) as made:
        yield made


def say(page: Site, text: str, instance: str) -> Any:
    """Send a message, and wait for its answer."""
    return page.ask("/api/v1/messages", {"text": text, "instance": instance})


def command(text: str) -> str:
    return "/bash__exec " + json.dumps({"command": text})


def asks(text: str) -> str:
    """What has `lead` ask `helper`."""
    return "/agents__request " + json.dumps({"target": "helper", "input": text, "instanceKey": "h"})


OPEN = """
const names = () => page.$$eval(".run-name > span", (all) => all.map((one) => one.innerText.trim()));
const text = (place) => page.$eval(place, (one) => one.innerText);
const go = (hash) => page.evaluate((hash) => { location.hash = hash; }, hash);
const pressed = async (...all) => { for (const key of all) await page.keyboard.press(key); await it.settled(page); };
const opened = async (name) => {
  const at = (await names()).findIndex((one) => one.includes(name));
  await (await page.$$(".run-name"))[at].click();
  await pressed("Enter");
  await page.waitForSelector(".run-panel");
};
await go(it.args.to);
await page.waitForSelector(".run-span");
"""


def test_a_run_is_a_waterfall_over_agents(page: Site) -> None:
    answer = say(page, asks(command("sleep 0.3; echo done")), "tree")
    told = page.see(
        OPEN
        + """
        const kinds = (row) => [...row.querySelectorAll(".run-bar i")].map((bar) => bar.className);
        const bars = await page.$$(".row").then((rows) => Promise.all(rows.map((row) => row.evaluate(kinds))));
        const [legend, head] = [await text(".run-legend"), await text(".run-head")];
        return { names: await names(), legend, head, bars, bad: await it.findings(page) };
        """,
        to=f"#/run/{answer['traceId']}",
    )
    assert told["names"][:6] == ["◆ lead", "▫ step 1", "✦ embedded", "⚙ agents__request", "◆ helper", "▫ step 1"]
    assert "2 turns of helper, lead" in told["head"]
    assert "waits for agents" in told["legend"]
    lead, asking, helper = told["bars"][0], told["bars"][3], told["bars"][4]
    assert "run-agents" in lead
    assert "run-agents" in asking
    assert "run-work" in helper
    assert told["bad"] == []


def test_a_denied_connection_stands_with_what_would_allow_it(page: Site) -> None:
    answer = say(page, '/http-fetch__get {"url":"http://127.0.0.1:9/"}', "denied")
    told = page.see(
        OPEN
        + """
        await it.context.overridePermissions(it.address, ["clipboard-read", "clipboard-sanitized-write"]);
        await opened("http-fetch__get");
        await page.waitForSelector(".run-refused");
        await (await page.$(".run-refused button")).click();
        await it.settled(page);
        const copied = await page.evaluate(() => navigator.clipboard.readText());
        return { panel: await text(".run-panel"), copied, url: page.url() };
        """,
        to=f"#/run/{answer['traceId']}",
    )
    assert told["copied"].startswith("Grant it: spec.sandbox.network: {allow: ['127.0.0.1:9']}")
    assert f"To allow it: {told['copied']}" in told["panel"]
    assert "Denied\n127.0.0.1:9" in told["panel"], "the receipt"
    assert "Refused by the sandbox, because nobody has granted this to the tool: " in told["panel"]
    assert "/span/" in told["url"], "a span has an address"
    steps = OPEN + 'await page.waitForSelector(".run-refused"); return text(".run-panel h2");'
    again = page.see(steps, to=told["url"][told["url"].index("#") :])
    assert again == "http-fetch__get"


def test_a_hostile_result_is_text(page: Site) -> None:
    answer = say(page, command(HOSTILE), "hostile")
    told = page.see(
        OPEN
        + """
        await opened("bash__exec");
        await page.waitForFunction(() => document.querySelector(".run-panel").innerText.includes("stdout"));
        const images = await page.$$("img");
        const taken = await page.evaluate(() => window.taken ?? 0);
        return { shown: await text(".run-panel"), taken, images: images.length };
        """,
        to=f"#/run/{answer['traceId']}",
    )
    assert (told["taken"], told["images"]) == (0, 0)
    for part in ('<img src=x onerror=\\"window.taken=1\\">', "<script>", "end"):
        assert part in told["shown"]
    assert "⟨001B⟩[31mred ⟨202E⟩" in told["shown"], "what steers is shown by number"


def test_a_run_is_read_with_the_keyboard(page: Site) -> None:
    answer = say(page, command("echo one"), "keys")
    told = page.see(
        OPEN
        + """
        const seen = {};
        const active = () => text(".row.active .run-name > span");
        await pressed("j", "j", "j");
        seen.down = await active();
        await pressed("k");
        seen.up = await active();
        await pressed("Enter");
        seen.open = await text(".run-panel h2");
        await pressed("Escape");
        seen.closed = await page.$(".run-panel") === null;
        await pressed("k", "ArrowLeft");
        seen.folded = await names();
        await pressed("ArrowRight", "/");
        await page.keyboard.type("bash one");
        await it.settled(page);
        seen.found = await names();
        await pressed("Escape", "f", "p");
        seen.pressed = await page.$$eval(".run-tools [aria-pressed=true]", (all) => all.map((one) => one.innerText));
        await pressed("?");
        seen.listed = await text("dialog");
        return seen;
        """,
        to=f"#/run/{answer['traceId']}",
    )
    assert (told["down"], told["up"], told["open"]) == ("⚙ bash__exec", "✦ embedded", "embedded")
    assert told["closed"]
    assert told["folded"] == ["◆ lead", "▫ step 1", "▫ step 2", "✦ embedded"]
    assert told["found"] == ["◆ lead", "▫ step 1", "⚙ bash__exec"]
    assert told["pressed"] == ["Follow", "Pause"]
    assert "Search in the run" in told["listed"]


def test_a_click_opens_a_span_and_enter_on_a_button_presses_it(page: Site) -> None:
    answer = say(page, command("echo one"), "click")
    told = page.see(
        OPEN
        + """
        await page.focus(".run-tools button");
        await pressed("Enter");
        const pressing = await page.$eval(".run-tools button", (one) => one.ariaPressed);
        const before = await page.$(".run-panel") === null;
        await (await page.$$(".run-span"))[3].click();
        await page.waitForSelector(".run-panel");
        await (await page.$$(".run-name button"))[1].click();
        await it.settled(page);
        return { pressing, before, panel: await text(".run-panel h2"), names: await names() };
        """,
        to=f"#/run/{answer['traceId']}",
    )
    assert told == {
        "pressing": "true",
        "before": True,
        "panel": "bash__exec",
        "names": ["◆ lead", "▫ step 1", "▫ step 2", "✦ embedded"],
    }


def test_a_turn_is_repeated_from_a_step(page: Site) -> None:
    answer = say(page, command("echo again"), "repeat")
    told = page.see(
        OPEN
        + """
        await opened("lead");
        const button = await page.evaluateHandle(() =>
          [...document.querySelectorAll(".run-panel button")].find((one) => one.innerText === "Repeat from here"));
        await button.click();
        await page.waitForSelector("dialog[open] input:focus");
        await page.keyboard.type(it.args.code);
        await page.keyboard.press("Enter");
        await page.waitForSelector(".talk-one textarea");
        await it.settled(page);
        return { url: page.url(), draft: await page.$eval(".talk-one textarea", (one) => one.value) };
        """,
        to=f"#/run/{answer['traceId']}",
        code=page.code("act"),
    )
    assert "#/talk/lead/" in told["url"]
    assert "/repeat" not in told["url"], "it is a copy"
    assert told["draft"] == command("echo again")


def test_a_run_fits_a_phone(page: Site) -> None:
    answer = say(page, asks(command("echo done")), "phone")
    told = page.see(
        OPEN
        + """
        const wide = () => page.evaluate(() => document.documentElement.scrollWidth);
        const run = await wide();
        await opened("bash__exec");
        return { wide: [run, await wide()], bad: await it.findings(page) };
        """,
        to=f"#/run/{answer['traceId']}",
        size=PHONE,
    )
    assert told == {"wide": [PHONE[0], PHONE[0]], "bad": []}


LIST = """
const send = (text) => fetch(`${new URL(it.address).origin}/api/v1/messages`, {
  method: "POST", body: JSON.stringify({ text, instance: "list" }),
  headers: { authorization: `Bearer ${it.args.token}`, "content-type": "application/json" },
}).then((answer) => answer.json());
const has = (words) => document.querySelector("main").innerText.includes(words);
const says = (words) => page.waitForFunction(has, {}, words);
const first = () => page.$eval(".run-line", (one) => one.innerText);
const total = () => page.$eval("main > p", (one) => parseInt(one.innerText));
await page.evaluate((hash) => { location.hash = hash; }, it.args.to);
"""


def test_new_runs_come_on_top_and_move_nothing_that_is_read(page: Site) -> None:
    for number in range(30):
        say(page, f"early {number}", "list")
    told = page.see(
        LIST
        + """
        await says("early 29");
        const seen = { before: await total() };
        await send("late 1");
        await says("late 1");
        seen.top = await first();
        await page.$eval(".rows", (box) => { box.scrollTop = 500; });
        await it.settled(page);
        await says("early 17");
        const place = () => page.evaluate(() => {
          const row = [...document.querySelectorAll(".run-line")].find((one) => one.innerText.includes("early 17"));
          return row.getBoundingClientRect().top;
        });
        const before = await place();
        await send("late 2");
        const count = (n) => parseInt(document.querySelector("main > p").innerText) === n;
        await page.waitForFunction(count, {}, seen.before + 2);
        await it.settled(page);
        seen.moved = await place() - before;
        return seen;
        """,
        to="#/runs",
        token=page.token,
    )
    assert "late 1" in told["top"]
    assert told["moved"] == 0


def test_a_list_that_is_only_open_asks_seldom_and_draws_what_is_new_at_once(page: Site) -> None:
    say(page, "early", "list")
    told = page.see(
        LIST
        + """
        await says("early");
        await it.settled(page);
        const seen = { before: await total(), runs: 0 };
        await page.evaluate(() => {
          const drawn = window.drawn = [];
          const how = { subtree: true, childList: true, characterData: true };
          new MutationObserver(() => drawn.push(Date.now())).observe(document.querySelector("main"), how);
        });
        const asked = it.seen.requests.length, begun = Date.now();
        while (Date.now() - begun < 4000) {
          await send(`busy ${seen.runs++}`);
          await new Promise((done) => setTimeout(done, 100));
        }
        await says(`busy ${seen.runs - 1}`);
        await it.settled(page);
        seen.seconds = (Date.now() - begun) / 1000;
        seen.lists = it.seen.requests.slice(asked).filter((url) => url.includes("/api/runs?")).length;
        seen.details = it.seen.requests.slice(asked).filter((url) => url.endsWith("/api/runs/details")).length;
        seen.drawn = await page.evaluate(() => window.drawn.length);
        seen.after = await total();
        seen.states = await page.$$eval(".run-line > span:first-child", (all) => all.map((one) => one.innerText));
        return seen;
        """,
        to="#/runs",
        token=page.token,
    )
    looks = told["seconds"] / 2 + 1
    assert told["after"] == told["before"] + told["runs"]
    assert 1 <= told["details"] <= told["lists"] <= looks
    assert told["drawn"] <= told["lists"], "what is listed and what is known of it are drawn together"
    assert len(told["states"]) > 10 and set(told["states"]) == {"✓ completed"}


def test_filters_stand_in_the_address(page: Site) -> None:
    say(page, '/http-fetch__get {"url":"http://127.0.0.1:9/"}', "filters")
    say(page, "a needle in the haystack", "filters")
    told = page.see(
        LIST
        + """
        await says("needle");
        const shown = async (name, value) => {
          await page.$eval(`[name=${name}]`, (one, value) => {
            one.value = value;
            one.dispatchEvent(new Event("change", { bubbles: true }));
          }, value);
          await page.waitForFunction(() => /^[0-9,]+ turns? found/.test(document.querySelector("main > p").innerText));
          await it.settled(page);
          return { url: page.url(), count: await total() };
        };
        const seen = [await shown("text", "needle"), await shown("agent", "helper")];
        await page.evaluate(() => { location.hash = "#/runs?error=E_SANDBOX_DENIED&tool=http*"; });
        await says("127.0.0.1:9");
        seen.push(await total());
        await page.focus(".rows");
        await page.keyboard.press("Enter");
        await page.waitForSelector(".run-span");
        seen.push(page.url(), await it.findings(page));
        return seen;
        """,
        to="#/runs",
    )
    needle, of_helper, denied, run, bad = told
    assert (needle["url"].partition("#")[2], needle["count"]) == ("/runs?text=needle", 1)
    assert (of_helper["url"].partition("#")[2], of_helper["count"]) == ("/runs?text=needle&agent=helper", 0)
    assert denied >= 1
    assert "#/run/" in run
    assert bad == []


PIECES = 40


@contextmanager
def speaking() -> Iterator[str]:
    """A model server whose answer comes in pieces, for some seconds; its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for number in range(PIECES + 1):
                delta = {"content": f"piece {number} "} if number < PIECES else {}
                choice = {"index": 0, "delta": delta, "finish_reason": "stop" if number == PIECES else None}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.1)
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_text_streams_and_a_pause_holds_it(chromium: Chromium) -> None:
    with speaking() as base:
        bundle = documents(
            f'Model m {{provider: openai, model: m, endpoint: "{base}", apiKey: {{value: k}}}}',
            "Agent main {modelConfig: {modelRef: Model/m}}",
            "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}]}",
        )
        with site(chromium, bundle) as page:
            told = page.see(
                LIST
                + """
                const answered = send("tell me");
                await page.waitForSelector(".run-line");
                await page.keyboard.press("Enter");
                const streams = (least) => page.waitForFunction((least) => {
                  const text = document.querySelector(".run-text")?.innerText ?? "";
                  return Math.max(...(text.match(/[0-9]+/g) ?? [0]).map(Number)) >= least && text;
                }, {}, least).then((found) => found.jsonValue());
                const seen = { first: await streams(3) };
                await page.keyboard.press("p");
                await page.waitForFunction(() => document.querySelector(".run-tools").innerText.includes("Pause ("));
                seen.paused = await page.$eval(".run-head", (one) => one.innerText);
                await answered;
                await it.settled(page);
                seen.still = await page.$eval(".run-head", (one) => one.innerText);
                await page.keyboard.press("p");
                await page.waitForFunction(() => document.querySelector(".run-head").innerText.includes("completed"));
                await (await page.$$(".run-name"))[2].click();
                await page.keyboard.press("Enter");
                await page.waitForFunction(() => document.querySelector(".run-panel")?.innerText.includes("piece 39"));
                return seen;
                """,
                to="#/runs",
                token=page.token,
            )
    assert "piece " in told["first"]
    assert "● running" in told["paused"]
    assert "● running" in told["still"], "what a reader has paused does not change"
