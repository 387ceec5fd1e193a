"""Ten things that a person wants to know or to do, each from the first view in five clicks or keys at most.

A click is at what can be read, as a person finds it, and the answer is what stands on the page then. A paste of a code
is one of the five.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.features.page.browser import Site
from tests.features.page.lived import DENIED, PUSH, SLOW_S, call, tell
from tests.kernel_fixture import wait_until

MOST: Final = 5
#: What a person can do, counted. `reads` waits for a text and gives the line that has it.
HANDS: Final = """
let count = 0;
const press = (key) => { count++; return page.keyboard.press(key); };
const click = (text, among = "main") => { count++; return page.locator(`${among} ::-p-text(${text})`).click(); };
const paste = async (text) => {
  count++;
  await page.waitForSelector("dialog[open] input:focus");
  const pad = await it.context.newPage();
  await pad.setContent("<input>");
  await pad.$eval("input", (input, text) => { input.value = text; input.select(); }, text);
  await pad.keyboard.press("c", { commands: ["Copy"] });
  await pad.close();
  await page.bringToFront();
  await page.keyboard.press("v", { commands: ["Paste"] });
};
const reads = async (text, among = "main") => {
  const find = (text, among) => {
    const lines = document.querySelector(among)?.innerText.split("\\n");
    return lines?.find((line) => line.includes(text));
  };
  return (await page.waitForFunction(find, {}, text, among)).jsonValue();
};
await reads("At work");
"""


def done(swarm: Site, steps: str, **args: Any) -> Any:
    """What the steps return, in five clicks or keys at most."""
    count, answer = swarm.see(
        f"{HANDS}const answer = await (async () => {{{steps}}})(); return [count, answer];", **args
    )
    assert count <= MOST, f"{count} clicks and keys"
    return answer


def test_is_all_well(swarm: Site) -> None:
    assert "All is well" in done(swarm, 'return reads("All is well");')


def test_who_waits_for_me(swarm: Site) -> None:
    assert "guard/default" in done(
        swarm, 'return reads("guard/default", "section[aria-label=\\"Wait for a person\\"]");'
    )


@pytest.mark.feature("approvals")
def test_which_run_waits_for_me(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("2");
        await reads("git push");
        const link = await page.waitForSelector(".run-asks");
        const row = await link.evaluate((one) => one.parentElement.innerText);
        const findings = await it.findings(page);
        await page.focus(".rows");
        await click(it.args.push);
        await reads("waits for a person");
        const head = await page.$eval(".run-head p", (one) => one.innerText);
        await click("waits for you");
        return { row, head, findings, item: await reads("bash__exec", ".inbox-item"), url: page.url() };
        """,
        push=PUSH,
    )
    assert "waits for you" in told["row"] and "running" not in told["row"] and PUSH in told["row"]
    assert "waits for you" in told["head"] and "running" not in told["head"]
    assert "/inbox/" in told["url"] and "bash__exec" in told["item"]
    assert told["findings"] == []


def test_why_was_this_slow(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("2");
        await click("call agents__request");
        const waits = await reads("waits for agents");
        await reads("⚙ bash__exec");
        const rows = await page.$$eval(".rows .row", (all) => all.map((row) => row.innerText.replaceAll("\\n", " ")));
        return [waits, rows.find((row) => row.includes("⚙ bash__exec"))];
        """,
    )
    waits, tool = told
    assert float(waits.split()[-2]) >= SLOW_S
    assert float(tool.split("bash__exec")[1].split()[0]) >= SLOW_S, "the call of the other agent's shell"


def test_what_did_it_cost(swarm: Site) -> None:
    row, told = done(
        swarm,
        """
        await press("2");
        const row = await reads("$3.00");
        await click("call agents__request");
        return [row, await reads("2 turns of coder, lead")];
        """,
    )
    assert row.endswith("$3.00") and told.endswith("$3.00"), "both agents together, in the list and in the run"


def test_which_call_was_denied_and_how_do_i_allow_it(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("2");
        await click("denied by the sandbox");
        await click(it.args.url);
        await click("http-fetch__get E_SANDBOX_DENIED");
        return [await reads("10.1.2.3"), await reads("To allow it")];
        """,
        url=DENIED,
    )
    assert "network" in told[1], told


def test_which_agent_spends_most(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("5");
        await reads("Total");
        await press("a");
        await reads("coder");
        return page.$eval("main tbody tr", (row) => row.innerText);
        """,
    )
    assert told.startswith("lead")


def test_stop_this(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await click("Stop");
        await paste(it.args.code);
        return reads("No turn runs");
        """,
        code=swarm.code("act"),
    )
    assert told
    tell(swarm, "coder", call("bash__exec", command="sleep 600", timeoutMs=0), "nightly")
    wait_until(lambda: swarm.ask("/api/v1/waits")["turns"])


def test_say_yes(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("3");
        await reads(it.args.push, ".inbox-item");
        await new Promise((done) => setTimeout(done, 500)); // a yes to what has only just come is none
        await press("y");
        await paste(it.args.code);
        return reads("bash__exec) is");
        """,
        push=PUSH,
        code=swarm.code("act"),
    )
    assert "is approved" in told or "is used" in told
    wait_until(lambda: not swarm.ask("/api/v1/approvals")["items"])
    tell(swarm, "guard", f"/bash__exec command='{PUSH}'")
    wait_until(lambda: swarm.ask("/api/v1/approvals")["items"])


def test_repeat_from_here(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("2");
        await click("call agents__request");
        await click("step 2");
        await click("Repeat from here");
        await paste(it.args.code);
        await page.waitForFunction(() => location.hash.startsWith("#/talk/"));
        return page.url();
        """,
        code=swarm.code("act"),
    )
    key = told.rpartition("/")[2]
    assert key not in ("", "default"), "a copy of the conversation of the agent whose step it is"
    wait_until(lambda: key in {one["instanceKey"] for one in swarm.ask("/api/v1/instances")})


def test_what_does_this_agent_know(swarm: Site) -> None:
    told = done(
        swarm,
        """
        await press("4");
        await click("release");
        return reads("built");
        """,
    )
    assert told
