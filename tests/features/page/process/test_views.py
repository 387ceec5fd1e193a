"""All views, with a swarm that has worked: what axe-core finds, and whether the keyboard reaches everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.features.page.browser import MUST, PHONE, WIDE, Chromium, Site, site
from tests.kernel_fixture import BUNDLE, has_feature, wait_until

#: Who is asked before a shell runs, but for `printf`.
_RULES = """\
  extensions:
    - ref: Extension/approval
      config:
        rules:
          - {tools: ["bash__*"], when: {args.command: {startsWith: printf}}, action: allow}
          - {tools: ["bash__*"], action: ask}
"""
ASKS = BUNDLE.replace("  tools: [Tool/bash]\n", f"  tools: [Tool/bash]\n{_RULES if has_feature('approvals') else ''}")
#: Names and words of somebody who means harm.
NAME = "<img src=x onerror='window.done=1'>"
HOSTILE = f"{NAME}\x1b[31m\u202egnp.exe"
#: 4 MiB of brackets behind markup, an escape sequence and broken UTF-8.
OUTPUT = r"""printf '<img src=x onerror="window.done=1">\033[31m\377\n'; head -c 4194304 /dev/zero | tr '\0' '['"""
VIEWS = ("#/now", "#/runs", "#/inbox", "#/talk", "#/cost")
#: Colours and sizes; `make test-page` tries all of them.
LOOKS = [(False, WIDE), (True, PHONE), *([(True, WIDE), (False, PHONE)] if MUST else [])]


def call(command: str) -> str:
    """What the embedded model takes for a call of the shell."""
    return f"/bash__exec {json.dumps({'command': command})}"


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with site(chromium, ASKS) as made:
        said = {NAME: f"/tools {HOSTILE}", "default": f"@nobody {HOSTILE}", "output": call(OUTPUT)}
        for instance, text in said.items():
            assert "eventId" in made.ask("/api/v1/messages", {"text": text, "instance": instance})
        if has_feature("approvals"):
            waits = {"text": call(f"rm -rf {HOSTILE}"), "instance": "waits"}
            made.ask("/api/v1/messages", waits, Prefer="respond-async")
            wait_until(lambda: made.ask("/api/v1/approvals")["items"])
        yield made


def routes(page: Site) -> list[str]:
    """All views, and those of one run and of one conversation."""
    runs = [row["traceId"] for row in page.ask("/api/v1/traces?limit=50")["traces"]]
    return [*VIEWS, *(f"#/run/{run}" for run in runs), "#/talk/main/default", f"#/talk/main/{quote(NAME, safe='')}"]


@pytest.mark.parametrize(("dark", "size"), LOOKS)
def test_axe_finds_nothing_serious_and_hostile_words_are_text(page: Site, dark: bool, size: tuple[int, int]) -> None:
    told = page.see(
        """
        const said = {};
        for (const route of it.args.routes) {
          await page.evaluate((route) => { location.hash = route; }, route);
          await page.waitForNetworkIdle({ idleTime: 100, concurrency: 1 });
          await it.settled(page);
          said[route] = { findings: await it.findings(page), ...await page.evaluate(() => ({
            done: window.done ?? null, wrong: document.querySelector(".wrong")?.innerText ?? null,
            pictures: document.querySelectorAll("main img").length,
            wide: document.documentElement.scrollWidth - innerWidth,
            words: document.querySelector("main").innerText.length,
          })) };
        }
        return said;
        """,
        dark=dark,
        size=size,
        routes=routes(page),
    )
    for route, seen in told.items():
        assert seen.pop("findings") == [], route
        assert seen.pop("words") > 20, f"{route} shows nothing"
        assert seen == {"done": None, "wrong": None, "pictures": 0, "wide": 0}, route


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Site) -> None:
    told = page.see(
        """
        const said = {};
        for (const route of it.args.routes) {
          await page.evaluate((route) => { location.hash = route; document.activeElement.blur(); }, route);
          await page.waitForNetworkIdle({ idleTime: 100, concurrency: 1 });
          await it.settled(page);
          await page.evaluate(() => { window.reached = new Set(); window.unseen = []; window.began = null; });
          for (let step = 0; step < 300; step++) {
            await page.keyboard.press("Tab");
            const again = await page.evaluate(() => {
              const at = document.activeElement;
              if (window.reached.has(at) || at === document.body && window.reached.size) return true;
              window.reached.add(at);
              const { outlineStyle, outlineWidth } = getComputedStyle(at);
              if (outlineStyle === "none" || outlineWidth === "0px") window.unseen.push(at.outerHTML.slice(0, 200));
              return false;
            });
            if (again) break;
          }
          said[route] = await page.evaluate(() => {
            const may = "a[href], summary, [tabindex='0'], :is(button, input, select, textarea):enabled";
            const all = [...document.querySelectorAll(may)].filter((one) => one.checkVisibility() && one.tabIndex >= 0);
            const missed = all.filter((one) => !window.reached.has(one) && one.type !== "radio");
            return { missed: missed.map((one) => one.outerHTML.slice(0, 200)), unseen: window.unseen, all: all.length };
          });
        }
        return said;
        """,
        routes=routes(page),
    )
    for route, seen in told.items():
        assert seen["missed"] == [], route
        assert seen["unseen"] == [], route
        assert seen["all"] >= 6, route
