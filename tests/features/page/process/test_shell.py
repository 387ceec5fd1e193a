"""The shell of the page: who comes in, what is kept where, what the policy forbids, keys, a wall around each view."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.features.page.browser import PHONE, Chromium, Site, site

#: What a tab keeps where others could read it.
KEPT = """
const kept = (page) => page.evaluate(() => ({
  session: Object.values(sessionStorage), local: Object.values(localStorage), cookie: document.cookie,
}));
const session = (page) => page.evaluate(() => import("/page/session.js").then(({ looking, acting, role }) =>
  ({ looking: looking.value, acting: acting.value, role: role.value })));
const text = async (page, selector) => {
  await page.waitForSelector(selector);
  return page.$eval(selector, (element) => element.innerText);
};
"""


@pytest.fixture(scope="module")
def page(chromium: Chromium) -> Iterator[Site]:
    with site(chromium) as made:
        yield made


def test_a_code_leaves_the_address_and_the_history_and_its_token_lives_in_tabs(page: Site) -> None:
    told = page.see(
        KEPT
        + """
        const history = await (await page.createCDPSession()).send("Page.getNavigationHistory");
        const first = { ...await kept(page), ...await session(page) };
        await page.reload();
        await page.waitForSelector("#content");
        const again = { ...await kept(page), ...await session(page) };
        const second = await it.tab("#/cost"); // by the shared worker: a tab of its own shares no sessionStorage
        await second.waitForSelector("#content");
        return { url: page.url(), history: history.entries.map(({ url }) => url), first, again,
          second: { ...await kept(second), ...await session(second) }, secondUrl: second.url() };
        """
    )
    assert told["url"] == f"{page.address}/page/"
    assert told["history"][-1] == told["url"]
    assert not [url for url in told["history"] if "code" in url]
    first = told["first"]
    assert (first["role"], first["acting"], first["local"], first["cookie"]) == ("look", False, [], "")
    assert first["session"] == [first["looking"]]
    assert told["again"] == first
    assert told["second"] == first
    assert told["secondUrl"].endswith("#/cost")
    answer = page.ask("/api/v1/messages", {"text": "no"}, first["looking"])
    assert (answer["status"], answer["code"]) == (403, "E_FORBIDDEN"), "it only looks"


def test_a_used_code_and_a_wrong_one_are_told_and_a_token_can_be_pasted(page: Site) -> None:
    code = page.code()
    told = page.see(
        KEPT
        + """
        await page.waitForSelector(".door");
        // It is shown late, so that it does not flash up.
        await page.waitForFunction(() => getComputedStyle(document.querySelector(".door")).opacity === "1");
        const findings = await it.findings(page);
        const paste = async (text) => {
          await page.$eval("input", (input) => { input.value = ""; });
          await page.type("input", text);
          await page.keyboard.press("Enter");
        };
        await paste("aaaa-bbbb-cccc");
        const unknown = await text(page, ".wrong");
        await paste(it.args.code);
        await page.waitForSelector("#content");
        const by = await session(page);
        const other = await (await it.context.browser().createBrowserContext()).newPage();
        await other.goto(`${it.address}#code=${it.args.code}`);
        const used = await text(other, ".wrong");
        await other.type("input", it.args.token);
        await other.keyboard.press("Enter");
        await other.waitForSelector("#content");
        const pasted = { ...await kept(other), ...await session(other) };
        await other.waitForFunction(() =>
          import("/page/live.js").then(({ connection }) => connection.value === "live"));
        const beside = await other.browserContext().newPage();
        await beside.goto(it.address);
        await beside.waitForSelector(".door");
        await it.settled(beside);
        const handed = await session(beside);
        await other.reload();
        await other.waitForSelector(".door");
        await other.browserContext().close();
        return { findings, unknown, by, used, pasted, handed };
        """,
        route="",
        code=code,
        token=page.token,
    )
    assert told["findings"] == []
    assert "gdn ui" in told["unknown"], told["unknown"]
    assert told["by"]["role"] == "look"
    assert "used" in told["used"], told["used"]
    pasted = told["pasted"]
    assert (pasted["role"], pasted["acting"]) == ("operate", True)
    assert pasted["session"] == pasted["local"] == [], "what may act is in no storage"
    assert told["handed"]["looking"] == "", "and is handed to no other tab"


def test_to_act_needs_a_second_code_and_its_token_is_in_this_tab_alone_until_it_is_loaded_again(page: Site) -> None:
    told = page.see(
        KEPT
        + """
        const post = (where) => where.evaluate(async () => {
          const { post } = await import("/page/api.js");
          const asked = post("/api/v1/messages", { text: "/tools", instance: "acted" });
          return asked.then(JSON.stringify, ({ code }) => code);
        });
        const first = post(page);
        await page.waitForSelector("dialog[open]");
        await page.keyboard.press("Escape");
        const cancelled = await first;
        await page.waitForFunction(() => !document.querySelector("dialog"));
        const second = post(page);
        await page.waitForSelector("dialog[open]");
        await page.type("dialog input", it.args.looks);
        await page.keyboard.press("Enter");
        const refused = await text(page, "dialog .wrong");
        await page.$eval("dialog input", (input) => { input.value = ""; });
        await page.type("dialog input", it.args.acts);
        await page.keyboard.press("Enter");
        const done = await second, third = await post(page);
        const here = { ...await kept(page), ...await session(page) };
        const other = await it.tab("#/runs");
        await other.waitForSelector("#content");
        const there = await session(other);
        await page.reload();
        await page.waitForSelector("#content");
        return { cancelled, refused, done, third, here, there, after: await session(page) };
        """,
        looks=page.code(),
        acts=page.code("act"),
    )
    assert told["cancelled"] == "cancelled"
    assert "only looks" in told["refused"]
    assert "bash__exec" in told["done"]
    assert "bash__exec" in told["third"], "the code was asked for once"
    here = told["here"]
    assert (here["acting"], here["role"], here["local"], here["cookie"]) == (True, "operate", [], "")
    assert here["session"] == [here["looking"]], "the token that looks, and no other"
    assert (told["there"]["acting"], told["there"]["looking"]) == (False, here["looking"])
    assert told["after"] == told["there"]


def test_the_policy_forbids_markup_scripts_and_other_places(page: Site) -> None:
    seen = page.see(
        """
        return page.evaluate(async () => {
          await new Promise((done) => setTimeout(done)); // what is evaluated at once may do more than a page
          const tries = {
            markup: () => { document.body.insertAdjacentHTML("beforeend", "<b>x</b>"); },
            inner: () => { document.createElement("p").innerHTML = "<img src=x onerror='window.done=1'>"; },
            worker: () => { new Worker("app.js"); },
            text: () => { setTimeout("window.done = 2"); },
            words: () => { (0, eval)("window.done = 3"); },
            another: () => { trustedTypes.createPolicy("another", {}); },
            again: () => { trustedTypes.createPolicy("goondan", {}); },
            elsewhere: () => fetch("http://127.0.0.1:9/"),
          };
          const said = {};
          for (const [name, one] of Object.entries(tries)) {
            try { await one(); said[name] = "done"; } catch (error) { said[name] = error.name; }
          }
          const script = document.createElement("script");
          try { script.text = "window.done = 4"; } catch (error) { said.script = error.name; }
          script.append("window.done = 5");
          document.body.append(script);
          const picture = new Image();
          picture.src = "http://127.0.0.1:9/x.png";
          await new Promise((done) => { picture.onerror = done; });
          await new Promise((done) => setTimeout(done, 50));
          return { said, done: window.done ?? null };
        });
        """,
        anyway=True,
    )
    assert seen["value"]["done"] is None
    assert set(seen["value"]["said"].values()) <= {"TypeError", "EvalError"}, seen["value"]
    assert len(seen["value"]["said"]) == 9
    kinds = {said.split()[0] for said in seen["violations"]}
    assert kinds >= {"require-trusted-types-for", "trusted-types", "connect-src", "img-src"}, kinds
    assert [url for url in seen["requests"] if not url.startswith(f"{page.address}/")] == [], "nothing went out"


def test_an_error_of_a_view_is_one_line_and_the_rest_works(page: Site) -> None:
    seen = page.see(
        """
        await page.setRequestInterception(true);
        page.on("request", (request) => {
          const name = request.url().split("/").at(-1), contentType = "text/javascript";
          if (name === "cost.js") request.respond({ contentType, body: "export default () => null.x;" });
          else if (name === "talk.js") request.respond({ contentType, body: "this is no script" });
          else request.continue();
        });
        const said = {};
        for (const [key, name] of [["5", "cost"], ["4", "talk"]]) {
          await page.keyboard.press(key);
          await page.waitForSelector(`.view-${name} .wrong`);
          said[name] = await page.$eval("#content", (element) => element.innerText);
        }
        await page.keyboard.press("2");
        await page.waitForSelector(".view-runs");
        await it.settled(page);
        said.runs = await page.$$eval(".wrong", (all) => all.length);
        return said;
        """,
        anyway=True,
    )
    for name in ("cost", "talk"):
        assert "This view has failed: " in seen["value"][name]
        assert len(seen["value"][name].split("\n")) == 3, "the unseen heading and one line"
    assert seen["value"]["runs"] == 0


def test_keys_go_everywhere_and_are_listed_and_none_fires_while_somebody_types(page: Site) -> None:
    told = page.see(
        """
        const said = { routes: [] };
        await page.waitForSelector(".swarm");
        await it.settled(page);
        said.swarm = [await page.title(), ...await page.$eval(".swarm", (one) => [one.innerText, one.title])];
        for (const key of "23451") {
          await page.keyboard.press(key);
          await it.settled(page);
          said.routes.push(new URL(page.url()).hash);
        }
        await page.keyboard.press("?");
        await page.waitForSelector("dialog[open]");
        said.keys = await page.$$eval("dialog dt", (all) => all.map((one) => one.innerText));
        await page.keyboard.press("2"); // a dialog has the keys
        said.behind = new URL(page.url()).hash;
        said.findings = await it.findings(page);
        await page.click("dialog form button");
        await page.waitForFunction(() => !document.querySelector("dialog"));
        await page.evaluate(() => {
          const field = document.createElement("input");
          document.body.append(field);
          field.focus();
        });
        await page.keyboard.type("2?");
        said.typed = await page.$eval("body > input", (field) => field.value);
        said.typing = new URL(page.url()).hash;
        await page.$eval("body > input", (field) => field.remove());
        return said;
        """
    )
    bundle = page.kernel.home / "goondan.yaml"
    assert told["swarm"] == [f"Now · {bundle.parent.name} · Goondan", bundle.parent.name, str(bundle)], "which it is"
    assert told["routes"] == ["#/runs", "#/inbox", "#/talk", "#/cost", "#/now"]
    assert {"1", "2", "3", "4", "5", "?", "Esc"} <= set(told["keys"])
    assert told["findings"] == []
    assert (told["behind"], told["typing"], told["typed"]) == ("#/now", "#/now", "2?")


def test_a_long_list_draws_what_is_seen_and_goes_to_its_end_by_a_key(page: Site) -> None:
    told = page.see(
        """
        await page.evaluate(async () => {
          const { Rows } = await import("/page/virtual.js");
          const { html, render } = await import("/page/view.js");
          const place = Object.assign(document.createElement("div"), { id: "list" });
          place.style.cssText = "height: 300px; display: flex; flex-direction: column";
          document.body.prepend(place);
          render(html`<${Rows} count=${1e6} height=${24} label="numbers" row=${(index) => `number ${index}`}
            onEnter=${(index) => { window.entered = index; }} />`, place);
        });
        await it.settled(page);
        await page.focus("#list .rows");
        const shown = async () => {
          await it.settled(page);
          return page.$eval("#list", (list) => {
            const box = list.querySelector(".rows").getBoundingClientRect();
            const rows = [...list.querySelectorAll(".row")];
            const inside = rows.filter((row) => {
              const { top, bottom } = row.getBoundingClientRect();
              return top > box.top - 1 && bottom < box.bottom + 1;
            });
            return { drawn: rows.length, first: inside[0].innerText, last: inside.at(-1).innerText,
              active: list.querySelector(".active")?.innerText };
          });
        };
        const said = { begin: await shown() };
        for (const key of ["End", "ArrowUp", "PageUp"]) {
          await page.keyboard.press(key);
          said[key] = await shown();
        }
        await page.keyboard.press("Enter");
        said.entered = await page.evaluate(() => window.entered);
        await page.keyboard.press("Home");
        said.Home = await shown();
        await page.$eval("#list .rows", (box) => { box.scrollTop = box.scrollHeight / 2; });
        said.middle = await shown();
        await page.$eval("#list", (list) => list.remove());
        return said;
        """
    )
    assert told["begin"]["first"] == told["Home"]["first"] == told["begin"]["active"] == "number 0"
    assert told["End"]["last"] == told["End"]["active"] == "number 999999"
    assert told["ArrowUp"]["active"] == "number 999998"
    assert told["PageUp"]["active"] == f"number {told['entered']}"
    assert 999_998 - 30 < told["entered"] < 999_998
    assert abs(int(told["middle"]["first"].split()[1]) - 500_000) < 50
    assert all(told[name]["drawn"] < 40 for name in ("begin", "End", "middle"))


def test_hostile_texts_are_text(page: Site) -> None:
    told = page.see(
        r"""
        await page.evaluate(async () => {
          const { Folded, Json, Wrong, visible } = await import("/page/text.js");
          const { html, render } = await import("/page/view.js");
          const markup = "<img src=x onerror='window.done=1'><script>window.done=2</script>";
          const deep = [];
          for (let at = deep, depth = 0; depth < 200000; depth++) at.push(at = []);
          const texts = {
            markup, escapes: "\x1b]0;title\x07\x1b[31mred\0", bidi: "abc\u202egnp.exe\u2066\u200b\ufeff",
            tags: "a\u{e0041}\u{e0042}", broken: "\ud800x\udfff", brackets: "[".repeat(4 << 20),
            "<b>key</b>\u202e": [1, null, true], picture: "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
          };
          const place = Object.assign(document.createElement("div"), { id: "hostile" });
          document.body.append(place);
          const began = performance.now();
          render(html`<${Json} value=${texts} /><${Json} value=${deep} /><${Folded} text=${texts.brackets} />
            <${Folded} text=${markup} /><${Wrong} problem=${{ message: markup, suggestion: texts.bidi }} />
            <p title=${markup}>${visible(texts.escapes)}</p>`, place);
          window.took = performance.now() - began;
          for (const one of place.querySelectorAll("details")) one.open = true;
        });
        await it.settled(page);
        await page.$$eval("#hostile .folded button", (all) => {
          for (const button of all) if (button.textContent === "Show more") button.click();
        });
        await it.settled(page);
        const said = await page.$eval("#hostile", (place) => ({
          text: place.innerText, size: place.textContent.length, took: window.took, done: window.done ?? null,
          elements: [...place.querySelectorAll("*")].map((one) => one.localName),
        }));
        await page.$eval("#hostile", (place) => place.remove());
        return said;
        """
    )
    assert told["done"] is None
    assert not {"img", "script"} & set(told["elements"]), told["elements"]
    shown = [
        "<img src=x onerror=",
        "⟨001B⟩]0;title⟨0007⟩",
        "abc⟨202E⟩gnp.exe⟨2066⟩⟨200B⟩⟨FEFF⟩",
        "⟨E0041⟩",
        "⟨D800⟩x⟨DFFF⟩",
    ]
    for text in (*shown, "<b>key</b>⟨202E⟩"):
        assert text in told["text"], told["text"][:2000]
    assert told["size"] < 1 << 18, "what is long is folded"
    assert told["took"] < 1000


def test_it_works_on_a_phone(page: Site) -> None:
    told = page.see(
        """
        const said = {};
        for (const key of "12345") {
          await page.keyboard.press(key);
          await it.settled(page);
          said[key] = await page.evaluate(() =>
            [document.documentElement.scrollWidth, document.querySelector("main").scrollWidth]);
        }
        return said;
        """,
        size=PHONE,
    )
    assert set(map(tuple, told.values())) == {(360, 360)}, told
