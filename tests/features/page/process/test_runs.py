"""The runs of a real swarm in a real browser: the list, the waterfall over agents, and what one span says."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    assert "Refused by grant" in told["panel"]
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
