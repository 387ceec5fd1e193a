"""A tab of the page beside a benchmark: a door of the swarm, and a headless Chromium that looks at it.

The tab does one thing after the other as it is told: it opens the page, leaves it, goes to a view, says how much memory
it and its worker hold after a collection. Meanwhile the benchmark goes on.

A tree without the page has the benchmarks all the same, and no tab. So its fixture is imported by its name.

Source: docs/decisions/176.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import pytest

from bench.programs import line, program
from bench.swarm import Swarm, environment_kept

#: Where the browser is installed once: a swarm that is used has another home.
_CACHE: Final = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
#: What the tab can do. Each answers with a value.
STEPS: Final = """
const client = await page.createCDPSession();
const used = async (client) => {
  await client.send("HeapProfiler.collectGarbage");
  return (await client.send("Runtime.getHeapUsage")).usedSize;
};
const does = {
  open: async (address) => {
    await page.goto(address);
    await page.waitForSelector("main#content");
  },
  shut: () => page.goto("about:blank"),
  go: (route) => page.evaluate((route) => { location.hash = route; }, route),
  heap: async () => {
    const workers = it.context.targets().filter((target) => target.type() === "shared_worker");
    const all = [client, ...await Promise.all(workers.map(async (target) => (await target.worker()).client))];
    return (await Promise.all(all.map(used))).reduce((sum, size) => sum + size, 0) / 2 ** 20;
  },
  evaluate: (script) => page.evaluate(script),
};
for (;;) {
  const [what, value] = await it.told();
  if (what === "end") return;
  it.say((await does[what](value)) ?? null);
}
"""


class Tab:
    """The tab. Nothing is open at first."""

    def __init__(self, site: Any, chromium: Any, size: tuple[int, int]) -> None:
        """`site` and `chromium` are the fixture's, `size` is in pixels."""
        self.site = site
        self.door: int = site.pid
        #: What drives the browser, whose processes are below it.
        self.driver: int = chromium.pid
        self._chromium = chromium
        chromium.tell({"address": "about:", "route": "blank", "steps": STEPS, "size": size, "dark": False, "args": {}})

    def does(self, what: str, value: Any = None) -> Any:
        """One thing of STEPS, and what it says. Raises SystemExit when it fails."""
        self._chromium.tell([what, value])
        heard = self._chromium.heard()
        if isinstance(heard, dict) and "failed" in heard:
            raise SystemExit(f"the page in the browser: {heard['failed']}")
        return heard

    def open(self, route: str = "#/now", site: Any = None) -> None:
        """Open the page anew, at this view; perhaps that of another site."""
        site = site or self.site
        self.does("open", f"{site.address}/page/#code={site.code()}")
        self.does("go", route)

    @contextmanager
    def beside(self, made: Swarm) -> Iterator[Any]:
        """A site of another swarm that runs, for this tab; its door ends with the block."""
        with _site(made, self._chromium) as site:
            yield site

    def end(self) -> Any:
        """Close it. Returns the errors of its scripts."""
        return self.does("end")["errors"]


@contextmanager
def tab(made: Swarm) -> Iterator[Tab | None]:
    """A tab on the page of a swarm that runs; None where no browser can be had."""
    try:
        browser = import_module("tests.features.page.browser")
        with environment_kept():
            os.environ["XDG_CACHE_HOME"] = _CACHE
            chromium = browser.Chromium()
    except (ImportError, pytest.skip.Exception) as missing:
        print(f"no page beside it: {missing}", flush=True)
        yield None
        return
    try:
        with _site(made, chromium) as site:
            yield Tab(site, chromium, browser.WIDE)
    finally:
        chromium.close()


@contextmanager
def _site(made: Swarm, chromium: Any) -> Iterator[Any]:
    serve = [*Swarm.gdn(), "serve", "--port", "0", "--json", "--bundle", str(made.bundle)]
    with program(*serve) as process:
        yield import_module("tests.features.page.browser").Site(made, json.loads(line(process)), chromium)
