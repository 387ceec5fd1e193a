"""The inbox in a browser: a person says yes, always, no and why, or answers a question, all by keys; and what a call
says of itself is text.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.features.page.browser import PHONE, WIDE, Chromium, Site, site
from tests.kernel_fixture import has_feature, wait_until
from tests.mcp_fixture import SERVER

pytestmark = pytest.mark.feature("approvals")

#: A server that asks a person something with each call.
ASKS = """
import threading
answers, told = {}, threading.Condition()
FORM = {"type": "object", "required": ["size"], "properties": {
    "size": {"type": "string", "enum": ["s", "l"], "title": "Size"}, "hot": {"type": "boolean"},
    "n": {"type": "integer", "description": "how many"}, "note": {"type": "string"}}}
def pizza(args, ask):
    say({"jsonrpc": "2.0", "id": "q", "method": "elicitation/create",
         "params": {"message": "How large? <b>really</b>", "requestedSchema": FORM}})
    with told:
        told.wait_for(lambda: "q" in answers)
        return answers.pop("q")
def work_on(line):
    message = json.loads(line)
    if "method" in message and "id" in message:
        threading.Thread(target=work, args=(message,), daemon=True).start()
    elif "id" in message:
        with told:
            answers[message["id"]] = message["result"]; told.notify_all()
tools.update(pizza=pizza)
for line in sys.stdin: work_on(line)
"""
_SERVER = f"""\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {{name: mcp-own}}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {{type: stdio, command: ["{sys.base_prefix}/bin/python3", -I, -S, -c, {json.dumps(SERVER + ASKS)}]}}
    expose: {{tools: true}}
---
"""
BUNDLE = f"""\
apiVersion: goondan.ai/v1
kind: Model
metadata: {{name: console}}
spec: {{provider: embedded}}
---
{_SERVER if has_feature("mcp") else ""}
apiVersion: goondan.ai/v1
kind: Agent
metadata: {{name: main}}
spec:
  modelConfig: {{modelRef: Model/console}}
  tools: [Tool/bash]
  extensions:
    - ref: Extension/approval
      config: {{rules: [{{tools: ["bash__*"], action: ask, expiresAfter: 1h, reason: it may delete}}]}}
    {"- ref: Extension/mcp-own" if has_feature("mcp") else ""}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {{name: swarm}}
spec: {{entryAgent: Agent/main}}
"""
#: What the steps of each test begin with: the item with the code is shown, and keys are not early.
BEGIN = """
const until = (what, selector, text) => page.waitForFunction(
  (is, selector, text) => (document.querySelector(selector)?.textContent.includes(text) ?? false) === is,
  {}, what, selector, text);
const open = async (code) => {
  await page.evaluate((code) => { location.hash = "#/inbox/" + code; }, code);
  await until(true, ".inbox-item h2", code);
  await page.waitForSelector(".inbox-item button.main:enabled");
};
const said = (text) => until(true, ".inbox-said", text);
const act = async () => {
  await page.waitForSelector("dialog[open] input[name=code]:focus");
  await page.type("dialog[open] input[name=code]", it.args.act);
  await page.keyboard.press("Enter");
};
const { code } = it.args;
await open(code);
"""


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with site(chromium, BUNDLE) as made:
        yield made


class Asked:
    """A call that waits, and the message that made it."""

    def __init__(self, page: Site, key: str, command: str, text: str | None = None) -> None:
        known = {item["code"] for item in items(page)}
        text = text or f"/bash__exec {json.dumps({'command': command})}"
        self.page, self.key = page, key
        self.sent = page.kernel.popen("send", "main", text, "--instance", key, "--json")
        found = wait_until(lambda: [item for item in items(page) if item["code"] not in known])
        self.code: str = found[0]["code"]

    def see(self, steps: str, **more: Any) -> Any:
        return self.page.see(BEGIN + steps, code=self.code, act=self.page.code("act"), **more)

    @property
    def answer(self) -> str:
        out, _ = self.sent.communicate(timeout=30)
        return str(json.loads(out)["response"])


def items(page: Site) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.ask("/api/v1/approvals")["items"]
    return found


def always(page: Site) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.ask("/api/v1/approvals?always=true")["always"]
    return found


def test_yes_once_by_a_key_after_a_code_and_a_key_too_many_hits_nothing_else(page: Site) -> None:
    asked, other = Asked(page, "yes", "echo said yes"), Asked(page, "other", "echo other")
    asked.see(
        """
        await page.keyboard.press("y");
        await act();
        await said(`${code} (bash__exec) is approved`);
        await until(false, ".inbox-item h2", code);
        await page.waitForSelector(".inbox-item h2");
        await page.keyboard.press("y"); // meant for the one before
        await it.settled(page);
        """
    )
    assert "said yes" in asked.answer
    assert [item["code"] for item in items(page)] == [other.code]
    other.see('await page.keyboard.press("n"); await page.keyboard.press("Enter"); await act(); await said("denied");')
    assert "E_APPROVAL_DENIED" in other.answer


def test_what_the_call_would_do_is_shown(page: Site) -> None:
    written = Asked(page, "facts", "echo 'echo in the file' > run.sh")
    page.kernel.gdn("approve", "yes", written.code)
    written.sent.wait(30)
    asked = Asked(page, "facts", "sh run.sh")
    told = asked.see("return { text: await it.text(page), run: await page.$eval('.inbox-facts a', (a) => a.hash) };")
    (item,) = items(page)
    digest = hashlib.sha256(b"echo in the file\n").hexdigest()
    for part in ("sh run.sh", "main/facts", item["workdir"], f"sha256:{digest}", item["digest"], "it may delete"):
        assert part in told["text"], part
    assert "denied if not answered in 59 m" in told["text"]
    assert told["run"] == f"#/run/{item['id'].partition('/')[0]}"
    asked.see('await page.keyboard.press("y"); await act(); await said("approved");')
    assert "in the file" in asked.answer


def test_no_with_a_reason_that_the_model_reads(page: Site) -> None:
    asked = Asked(page, "no", "echo never")
    asked.see(
        """
        await page.keyboard.press("n");
        await page.keyboard.type("yes, but use the other folder");
        await page.keyboard.press("Enter");
        await act();
        await said(`${code} (bash__exec) is denied`);
        """
    )
    assert "yes, but use the other folder" in asked.answer


def test_a_person_who_does_not_want_to_act_has_decided_nothing(page: Site) -> None:
    asked = Asked(page, "look", "echo look")
    asked.see(
        """
        await page.keyboard.press("y");
        await page.waitForSelector("dialog[open]"); // else the key is nobody's
        await page.keyboard.press("Escape");
        await page.waitForFunction(() => !document.querySelector("dialog"));
        await it.settled(page);
        """
    )
    assert [item["code"] for item in items(page)] == [asked.code]
    page.kernel.gdn("approve", "no", asked.code)


def test_always_by_keys_and_taken_back(page: Site) -> None:
    asked = Asked(page, "always", "echo and again")
    shown = asked.see(
        """
        await page.keyboard.press("a");
        await page.waitForFunction(() => document.activeElement?.closest(".inbox-always"));
        const shown = await page.$eval(".inbox-always", (form) => form.innerText);
        await page.keyboard.press("Enter"); // the button has the focus
        await act();
        await said("is approved, for always");
        await page.waitForSelector(".inbox-standing li");
        return shown;
        """
    )
    assert "in all of its instances" in shown and "the same as these" in shown
    assert "and again" in asked.answer
    words = ("send", "main", '/bash__exec {"command": "echo and again"}', "--instance", "elsewhere", "--json")
    assert "and again" in page.kernel.gdn(*words).json["response"], "nobody was asked"
    other = Asked(page, "always", "echo and again and again")
    (yes,) = always(page)
    told = other.see(
        """
        await page.waitForSelector(".inbox-standing li");
        const before = await page.$eval(".inbox-standing", (one) => one.innerText);
        await page.focus(".inbox-standing button");
        await page.keyboard.press("Enter");
        await act();
        await said("is taken back");
        await page.waitForFunction(() => !document.querySelector(".inbox-standing li"));
        return before;
        """
    )
    assert "echo and again" in told and yes["code"] in told
    assert always(page) == []
    page.kernel.gdn("approve", "no", other.code)


def test_a_pattern_is_shown_with_its_warning_before_it_is_agreed_to(page: Site) -> None:
    asked = Asked(page, "pattern", "echo part one")
    told = asked.see(
        """
        await page.keyboard.press("a");
        await page.waitForSelector(".inbox-always select");
        await page.select(".inbox-always select", "command");
        await page.waitForSelector(".inbox-always textarea");
        const fill = async (text) => {
          await page.click(".inbox-always textarea", { clickCount: 3 });
          await page.keyboard.type(text);
          await it.settled(page);
          return page.$eval(".inbox-always", (form) => [form.innerText, form.querySelector("button.main").disabled]);
        };
        const wrong = await fill("cat"), right = await fill("echo part ");
        await page.focus(".inbox-always button.main");
        await page.keyboard.press("Enter");
        await act();
        await said("for always");
        return { wrong, right };
        """
    )
    assert told["wrong"][1] is True and "does not begin so" in told["wrong"][0]
    assert told["right"][1] is False and "git status; rm -rf ." in told["right"][0]
    assert "part one" in asked.answer
    (yes,) = always(page)
    assert (yes["argument"], yes["prefix"]) == ("command", "echo part ")
    words = ("send", "main", '/bash__exec {"command": "echo part two"}', "--instance", "pattern", "--json")
    assert "part two" in page.kernel.gdn(*words).json["response"]
    page.kernel.gdn("approve", "revoke", yes["code"])


@pytest.mark.feature("mcp")
def test_a_question_is_answered_by_its_form(page: Site) -> None:
    asked = Asked(page, "eats", "", text="/own__pizza")
    told = asked.see(
        """
        const text = await page.$eval(".inbox-item", (one) => one.innerText);
        await page.keyboard.press("r");
        await page.keyboard.press("l"); // of the list
        await page.keyboard.press("Tab");
        await page.keyboard.press("Space");
        await page.keyboard.press("Tab");
        await page.keyboard.type("3");
        await page.keyboard.press("Enter");
        await act();
        await said("is answered");
        return text;
        """
    )
    assert "How large? <b>really</b>" in told and "how many" in told
    response = asked.answer
    assert '"action":"accept"' in response.replace(" ", "").replace("\\", "")
    content = response.replace("\\", "").replace(" ", "")
    assert all(part in content for part in ('"size":"l"', '"hot":true', '"n":3')) and "note" not in content


HOSTILE = "echo '<img src=x onerror=alert(1)>' \u202e\u200b\x1b[31m; # \ud55c\uae00"


def test_what_a_call_says_is_text_and_a_yes_is_only_for_what_was_shown(page: Site) -> None:
    asked = Asked(page, "<b>hostile", "\n".join([HOSTILE, *["# filler"] * 60, "echo the end"]))
    told = asked.see(
        """
        const look = () => page.$eval(".inbox-item", (one) => one.textContent);
        const first = await look();
        await page.keyboard.press("y");
        await page.waitForSelector(".inbox-whole");
        const whole = await look();
        await page.keyboard.press("y"); // too soon
        await it.settled(page);
        const still = (await page.$("dialog")) === null;
        await page.waitForSelector(".inbox-item button.main:enabled");
        await page.keyboard.press("y");
        await act();
        await said("is approved");
        return { first, whole, still, images: await page.$$eval("main img, main b img", (all) => all.length) };
        """
    )
    assert "<img src=x onerror=alert(1)>" in told["first"]
    assert "\u27e8202E\u27e9\u27e8200B\u27e9\u27e8001B\u27e9[31m" in told["first"] and "\ud55c\uae00" in told["first"]
    assert "main/<b>hostile" in told["first"]
    assert "echo the end" not in told["first"] and "echo the end" in told["whole"]
    assert told["still"] and told["images"] == 0
    assert "the end" in asked.answer


def test_of_many_only_the_visible_ones_are_drawn_and_keys_go_through_them(page: Site) -> None:
    asked = Asked(page, "many", "echo many")
    told = asked.see(
        """
        await page.setRequestInterception(true);
        page.on("request", (request) => {
          if (!request.url().endsWith("/api/v1/approvals")) return request.continue();
          const items = Array.from({ length: 500 }, (_, at) => ({ ...it.args.item, code: String(1e9 + at) }));
          request.respond({ contentType: "application/json", body: JSON.stringify({ items, more: 7 }) });
        });
        await page.waitForFunction(() => document.body.innerText.includes("and 7 more"));
        for (const key of ["j", "j", "j", "k"]) await page.keyboard.press(key);
        await page.waitForFunction(() => document.querySelector(".inbox-list .row.active")?.ariaRowIndex === "3");
        return page.evaluate(() => [
          document.querySelectorAll(".inbox-list .row").length,
          document.querySelector(".inbox-list").offsetHeight - innerHeight,
        ]);
        """,
        item=items(page)[0],
    )
    page.kernel.gdn("approve", "no", asked.code)
    assert told[0] < 60 and told[1] < 0


@pytest.mark.parametrize(("size", "dark"), [(WIDE, False), (PHONE, True)])
def test_nothing_serious_is_found_and_nothing_is_wider_than_the_window(
    page: Site, size: tuple[int, int], dark: bool
) -> None:
    asked = [Asked(page, f"a{at}", f"echo {'long' * 40 * at}") for at in range(2)]
    told = asked[1].see(
        """
        const found = await it.findings(page);
        await page.keyboard.press("a");
        await page.waitForSelector(".inbox-always");
        await page.select(".inbox-always select", "command");
        await page.waitForSelector(".inbox-always textarea");
        await it.settled(page);
        found.push(...await it.findings(page));
        return { found, wide: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth) };
        """,
        size=size,
        dark=dark,
    )
    for one in asked:
        page.kernel.gdn("approve", "no", one.code)
    assert told == {"found": [], "wide": 0}
