"""The view Cost on a swarm that has spent something: by day, model, agent and message, in two currencies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bundles import documents
from tests.features.page.browser import PHONE, Chromium, Site, site
from tests.process.model_servers import server

#: A call of these models has 10 tokens in and 5 out.
MODEL = 'Model {name} {{provider: anthropic, model: {name}, endpoint: "{url}", apiKey: k, pricing: {{{pricing}}}}}'


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with server("fake_llm") as url:
        bundle = documents(
            MODEL.format(name="dear", url=url, pricing="inputPerMillion: 1000, outputPerMillion: 2000"),
            MODEL.format(name="cheap", url=url, pricing="currency: EUR, inputPerMillion: 100, outputPerMillion: 100"),
            "Agent main {modelConfig: {modelRef: Model/dear}}",
            "Agent other {modelConfig: {modelRef: Model/cheap}}",
            "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/other}]}",
        )
        with site(chromium, bundle) as made:
            for agent in ("main", "other", "other", "other"):
                assert made.kernel.gdn("send", agent, "hello").status == 0
            yield made


STEPS = """
    const go = (query) => page.evaluate((query) => { location.hash = `#/cost?${query}`; }, query);
    const cells = (rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim()));
    const table = () => page.$$eval(".cost table tr", cells);
    const rows = (number) => until(`document.querySelectorAll(".cost tbody tr").length === ${number}`);
    const until = async (what) => { await page.waitForFunction(what, { polling: 50 }); await it.settled(page); };
"""


def see(page: Site, steps: str, **more: Any) -> Any:
    return page.see(STEPS + steps, **more)


def test_currencies_stand_beside_each_other_and_are_never_added(page: Site) -> None:
    head, *rows, total = see(
        page,
        'await go("by=model"); await rows(2); return table();',
    )
    assert head == ["Model", "Cost, EUR ▼", "Cost, USD", "Calls", "Tokens in", "Tokens out"]
    assert rows == [
        ["anthropic/cheap", "0.0045 EUR", "–", "3", "30", "15"],
        ["anthropic/dear", "–", "$0.0200", "1", "10", "5"],
    ]
    assert total == ["Total", "0.0045 EUR", "$0.0200", "4", "40", "20"]


def test_a_column_sorts_and_the_address_keeps_it_and_bars_are_of_that_column(page: Site) -> None:
    told = see(
        page,
        """
        await go("by=agent");
        await rows(2);
        const names = () => page.$$eval(".cost tbody tr", (rows) => rows.map((row) => row.cells[0].innerText.trim()));
        const bars = () => page.$$eval(".cost-bar", (all) => all.map((one) => one.style.width));
        const first = [await names(), await bars()];
        const press = async (word) => {
          const links = await page.$$(".cost thead a");
          const words = await Promise.all(links.map((one) => one.evaluate((it) => it.innerText)));
          await links[words.findIndex((one) => one.startsWith(word))].click();
        };
        await press("Cost, USD");
        await until(`document.querySelector("[aria-sort=descending]").innerText.startsWith("Cost, USD")`);
        const second = [await names(), await bars(), page.url()];
        await press("Calls");
        await until(`document.querySelector("[aria-sort=descending]").innerText.startsWith("Calls")`);
        await press("Calls");
        await until(`document.querySelector("[aria-sort=ascending]")`);
        return { first, second, third: [await names(), await bars()] };
        """,
    )
    assert told["first"] == [["other", "main"], ["100%", "0%"]]
    assert told["second"][:2] == [["main", "other"], ["100%", "0%"]]
    assert "sort=USD" in told["second"][2]
    names, bars = told["third"]
    assert (names, bars[0][:4], bars[1]) == (["main", "other"], "33.3", "100%")


def test_a_message_leads_to_its_run_and_times_are_chosen(page: Site) -> None:
    told = see(
        page,
        """
        await go("by=tree&since=30d");
        await rows(4);
        const trees = await table();
        await page.keyboard.press("m");
        await rows(2);
        await page.keyboard.press("d");
        await until(`document.querySelector(".cost th").innerText.startsWith("Day")`);
        const days = await table(), url = page.url();
        await go("by=tree&since=all");
        await rows(4);
        await page.click(".cost tbody a");
        await until(`location.hash.startsWith("#/run/")`);
        return { rows: trees, days, url, run: page.url(), requests: it.seen.requests };
        """,
    )
    assert [row[0].split("other, ")[-1] for row in told["rows"][1:4]] == ["1 turn"] * 3
    assert told["days"][1][1:] == told["days"][2][1:], "one day is all there is"
    assert "since=30d" in told["url"]
    assert "by=day" in told["url"]
    trace = told["run"].rpartition("/")[2]
    newest = page.ask("/api/v1/traces?agent=other&limit=1")["traces"][0]
    assert trace == newest["traceId"]
    asked = [url.partition("usage?")[2] for url in told["requests"] if "/usage?" in url]
    assert "by=tree&since=30d" in asked
    assert "by=tree" in asked, "always has no bound"


def test_a_turn_that_ends_is_added_while_the_view_is_open(page: Site) -> None:
    told = see(
        page,
        """
        await go("by=agent");
        await rows(2);
        const before = await page.$eval(".cost tfoot", (one) => one.innerText);
        const headers = { authorization: `Bearer ${it.args.token}`, "content-type": "application/json" };
        await fetch(`${it.args.door}/api/v1/messages`, { method: "POST", body: `{"text":"hello"}`, headers });
        const changed = (before) => document.querySelector(".cost tfoot").innerText !== before;
        await page.waitForFunction(changed, { polling: 200, timeout: 30000 }, before);
        return [before, await page.$eval(".cost tfoot", (one) => one.innerText)];
        """,
        door=page.address,
        token=page.token,
    )
    assert [int(text.split("\t")[3]) for text in told] == [4, 5]


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), ((1280, 800), False)])
def test_it_can_be_read_by_everybody_and_on_a_phone(page: Site, size: tuple[int, int], dark: bool) -> None:
    told = see(
        page,
        """
        await go("by=tree");
        await until(`document.querySelectorAll(".cost tbody tr").length >= 4`);
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        return { findings: await it.findings(page), wide };
        """,
        size=size,
        dark=dark,
    )
    assert told == {"findings": [], "wide": 0}
