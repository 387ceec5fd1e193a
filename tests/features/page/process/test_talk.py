"""A person talks to agents in the page: with a kernel, a door, a browser, and a model that says what it is told to."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.features.page.browser import PHONE, Chromium, Site, site
from tests.kernel_fixture import BUNDLE
from tests.process.model_servers import server

#: For tests of what only this feature answers.
EDITS = pytest.mark.feature("edits")
SECOND = """\
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: gated}
spec: {provider: openai, model: m, endpoint: "URL/v1", apiKey: k}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: writer}
spec: {modelConfig: {modelRef: Model/gated}, tools: [Tool/bash]}
"""
#: A picture of one dot.
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
#: Steps can use these. A message goes to the conversation that is shown.
PRELUDE = """
const all = (what, within) => page.$$eval(within, (found, what) => found.map((one) => one[what]), what);
const log = async () => (await all("innerText", ".talk-log"))[0];
const until = (text, within = ".talk-log") => page.waitForFunction(
  (text, within) => [...document.querySelectorAll(within)].some((one) => one.innerText.includes(text)),
  {}, text, within);
const over = (count) => page.waitForFunction(
  (count) => !document.querySelector(".talk-running") && document.querySelectorAll(".talk-turn").length === count,
  {}, count);
const open = async (agent, key) => {
  await page.evaluate((to) => { location.hash = to; }, `#/talk/${agent}/${key}`);
  await page.waitForSelector(".talk-write textarea");
};
const say = async (text) => {
  await page.waitForSelector("textarea");
  await page.type("textarea", text);
  await page.keyboard.press("Enter");
};
const draft = () => page.$eval("textarea", ({ value }) => value);
const press = async (label, within = "") =>
  (await page.waitForSelector(`${within} ::-p-xpath(.//button[normalize-space(.) = "${label}"])`)).click();
const act = async () => {
  await page.waitForSelector("dialog[open] input");
  await page.type("dialog input", it.args.code);
  await page.keyboard.press("Enter");
};
const go = () => fetch(`${it.args.model}/__go`);
"""


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with server("gated_llm") as url:
        yield url


@pytest.fixture(scope="module")
def page(chromium: Chromium, model: str) -> Iterator[Site]:
    agents = BUNDLE.replace("{ref: Agent/main}]", "{ref: Agent/main}, {ref: Agent/writer}]")
    with site(chromium, agents + SECOND.replace("URL", model)) as made:
        yield made


def do(page: Site, steps: str, model: str = "", **how: Any) -> Any:
    """What the steps return, in a tab that may act once it has asked for the code."""
    return page.see(PRELUDE + steps, code=page.code("act"), model=model, **how)


def said(page: Site, agent: str, key: str) -> list[str]:
    """The texts of a stored conversation: of people, and of the model."""
    found = page.ask(f"/api/v1/agents/{agent}/conversation?instance={quote(key, safe='')}")["messages"]
    texts = [one["data"]["content"] for one in found if one["data"]["role"] in ("user", "assistant")]
    return [text if isinstance(text, str) else "".join(part.get("text", "") for part in text) for text in texts]


def test_a_person_talks_and_sees_the_agent_think(page: Site, model: str) -> None:
    steps = """
    await open("writer", "thinks");
    await say("think of it|Hel|wait|lo");
    await act();
    await until("Hel", ".talk-said");
    const [running] = await all("innerText", ".talk-said"), [thought] = await all("innerText", ".talk-thought");
    await page.waitForFunction(() => document.querySelector(".talk-running footer").innerText.includes("Works"));
    await go();
    await over(1);
    const run = await page.$eval(".talk-turn footer a", (link) => link.getAttribute("href"));
    const folded = await page.$eval(".talk-thought", (one) => one.open);
    return { running, thought, run, folded, done: await log(), draft: await draft() };
    """
    seen = do(page, steps, model)
    assert "Hel" in seen["running"] and "Hello" not in seen["running"]
    assert seen["thought"].startswith("Thought")
    assert (seen["folded"], seen["draft"]) == (False, "")
    assert "Hello" in seen["done"]
    assert said(page, "writer", "thinks") == ["think of it|Hel|wait|lo", "Hello"]
    (turn,) = page.ask("/api/v1/traces?agent=writer&instance=thinks")["traces"]
    assert seen["run"] == f"#/run/{turn['turnId']}"


def test_calls_are_shown_as_they_run_and_the_turn_is_stopped(page: Site, model: str) -> None:
    steps = """
    await open("writer", "stops");
    await say('call bash__exec {"command": "echo made it"}|call bash__exec {"command": "sleep 30"}|never');
    await act();
    await until("sleep 30", ".talk-call");
    const running = await log();
    await press("Stop");
    await over(1);
    await page.click(".talk-call summary");
    await until("exitCode", ".talk-call[open]");
    return { running, done: await log() };
    """
    seen = do(page, steps, model)
    assert "echo made it" in seen["running"] and "works" in seen["running"]
    assert "E_CANCELLED" in seen["done"]
    assert page.ask("/api/v1/traces?agent=writer&instance=stops")["traces"][0]["finishReason"] == "cancelled"


def test_a_code_that_is_written_to_an_agent_is_not_sent(page: Site) -> None:
    steps = """
    await open("main", "coded");
    await say(` ${it.args.code}`);
    await page.waitForSelector("dialog[open] input:focus");
    const asked = [await draft(), (await all("innerText", ".talk-write .wrong"))[0]];
    await act();
    await page.waitForFunction(() => !document.querySelector("dialog"));
    await say(it.args.code);
    await until("not sent", ".talk-write .wrong");
    const [empty, again] = [await draft(), await page.$("dialog") === null];
    await say(`${it.args.code} it is`);
    await over(1);
    return { asked, empty, again, wrong: await page.$(".talk-write .wrong") === null };
    """
    seen = do(page, steps)
    assert seen["asked"][0] == "" and "This is a code, so it was not sent" in seen["asked"][1]
    assert (seen["empty"], seen["again"], seen["wrong"]) == ("", True, True)
    (one, _) = said(page, "main", "coded")
    assert one.endswith(" it is")


@EDITS
def test_the_last_turn_is_taken_back_and_its_text_is_there_to_be_sent_again(page: Site) -> None:
    steps = """
    await open("main", "undo");
    await say("first");
    await act();
    await over(1);
    await say("second");
    await over(2);
    const before = (await page.$$("text/Take back")).length;
    page.once("dialog", (dialog) => dialog.dismiss());
    await press("Take back");
    await over(2);
    page.once("dialog", (dialog) => dialog.accept());
    await press("Take back");
    await over(1);
    return { before, draft: await draft(), left: await log() };
    """
    seen = do(page, steps)
    assert (seen["before"], seen["draft"]) == (1, "second")
    assert said(page, "main", "undo")[0] == "first" and len(said(page, "main", "undo")) == 2


@EDITS
def test_a_conversation_goes_on_elsewhere_from_any_message_and_any_step(page: Site, model: str) -> None:
    steps = """
    await open("writer", "forked");
    await say('call bash__exec {"command": "echo x"}|then');
    await act();
    await over(1);
    await say("last");
    await over(2);
    await press("Fork before this step", ".talk-turn:nth-of-type(1)");
    await page.waitForFunction(() => !location.hash.endsWith("/forked"));
    await over(1);
    const step = { draft: await draft(), hash: await page.evaluate(() => location.hash) };
    await page.keyboard.press("Escape");
    await page.focus("textarea");
    await page.keyboard.press("Enter");
    await over(2);
    await open("writer", "forked");
    await over(2);
    await press("Fork before this", ".talk-turn:nth-of-type(2)");
    await page.waitForFunction((hash) => !location.hash.endsWith("/forked"), {}, step.hash);
    await over(1);
    const message = { draft: await draft(), hash: await page.evaluate(() => location.hash) };
    return { step, message };
    """
    seen = do(page, steps, model)
    first, last = said(page, "writer", "forked")[0], said(page, "writer", "forked")[-1]
    assert (seen["step"]["draft"], seen["message"]["draft"]) == ("Go on.", "last")
    step, message = (seen[name]["hash"].rpartition("/")[2] for name in ("step", "message"))
    assert said(page, "writer", step) == [first, "", "Go on.", "Go on."]
    assert said(page, "writer", message) == [first, "", "then"]
    assert (len(said(page, "writer", "forked")), last) == (5, "last")


def test_a_conversation_is_given_out_whole(page: Site) -> None:
    for number in range(60):
        page.ask("/api/v1/messages", {"text": f"message {number}", "agent": "main", "instance": "out"})
    steps = """
    await open("main", "out");
    await until("message 59");
    const shown = await page.$$eval(".talk-turn", (turns) => turns.length);
    await press("Earlier messages");
    await until("message 20");
    await page.evaluate(() => { URL.createObjectURL = (blob) => { window.given = blob.text(); return "#"; }; });
    await press("Export");
    await page.waitForFunction(() => window.given);
    return { shown, given: await page.evaluate(() => window.given), more: (await page.$$(".talk-turn")).length };
    """
    seen = do(page, steps)
    given = json.loads(seen["given"])
    assert (given["agent"], given["instanceKey"], len(given["messages"])) == ("main", "out", 120)
    assert given["messages"] == json.loads(page.kernel.gdn("instance", "export", "main", "out").out)["messages"]
    assert (seen["shown"], seen["more"]) == (25, 50)


def test_pictures_are_chosen_pasted_and_dropped(page: Site, tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    picture.write_bytes(b64decode(DOT))
    (tmp_path / "two.txt").write_text("no picture")
    steps = """
    await open("main", "files");
    const field = await page.$("input[type=file]");
    await field.uploadFile(it.args.picture);
    await until("one.png", ".talk-files");
    const give = (kind, name, count) => page.evaluate((kind, name, count) => {
      const data = new DataTransfer(), type = name.endsWith("png") ? "image/png" : "text/plain";
      const bytes = new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10, ...new Array(40).fill(0)]);
      for (let number = 0; number < count; number += 1) data.items.add(new File([bytes], name, { type }));
      const how = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
      const event = kind === "paste" ? new ClipboardEvent(kind, how) : new DragEvent(kind, how);
      document.querySelector("textarea").dispatchEvent(event);
    }, kind, name, count);
    await give("paste", "pasted.png", 1);
    await until("pasted.png", ".talk-files");
    await give("drop", "dropped.png", 1);
    await until("dropped.png", ".talk-files");
    await page.click("[aria-label='Remove pasted.png']");
    await give("drop", "no.txt", 1);
    await until("no.txt is no picture", ".talk-write .wrong");
    await give("drop", "many.png", 15);
    await until("at most 16 files", ".talk-write .wrong");
    await say("look");
    await act();
    await over(1);
    const left = (await page.$$(".talk-files li")).length;
    const pictures = async () => {
      const shown = (count) => document.querySelectorAll(".talk-turn img[src^='blob:']").length === count;
      await page.waitForFunction(shown, {}, 2);
      return all("alt", ".talk-turn img");
    };
    const here = await pictures();
    await page.evaluate(() => { location.hash = "#/talk"; });
    await page.waitForFunction(() => !document.querySelector(".talk-turn"));
    await open("main", "files");
    const later = await pictures();
    const width = await page.$eval(".talk-turn img", (one) => one.decode().then(() => one.naturalWidth));
    return { here, later, width, left, bad: await it.findings(page) };
    """
    seen = do(page, steps, picture=str(picture))
    (asked, _) = page.ask("/api/v1/agents/main/conversation?instance=files")["messages"]
    assert [file["name"] for file in asked["data"]["files"]] == ["one.png", "dropped.png"]
    assert seen["width"] == 1, "it is drawn"
    assert seen["here"] == seen["later"] == ["one.png, image/png, 68 B", "dropped.png, image/png, 48 B"], "as pictures"
    assert seen["bad"] == []
    assert seen["left"] == 0


def test_what_a_model_says_is_text_and_code_and_never_more(page: Site, model: str) -> None:
    hostile = (
        "<img src=x onerror=alert(1)>\n\n```js\n<script>alert(2)</script>\n```\n\n"
        "after \x1b[31mred\x1b[0m \u202egnp.exe [x](javascript:alert(3))"
    )
    page.ask("/api/v1/messages", {"text": hostile, "agent": "writer", "instance": "hostile"})
    steps = """
    await open("writer", "hostile");
    await over(1);
    const tags = [...new Set(await all("tagName", ".talk-said *"))].sort();
    const [paragraphs, code] = [await all("textContent", ".talk-said p"), await all("textContent", ".talk-said pre")];
    return { tags, paragraphs, code };
    """
    seen = do(page, steps)
    assert seen["tags"] == ["P", "PRE"]
    assert seen["code"] == ["<script>alert(2)</script>"]
    first, last = seen["paragraphs"]
    assert first == "<img src=x onerror=alert(1)>"
    assert last == "after \u27e8001B\u27e9[31mred\u27e8001B\u27e9[0m \u27e8202E\u27e9gnp.exe [x](javascript:alert(3))"


def test_a_stream_goes_on_at_its_last_id_after_a_lost_connection(page: Site, model: str) -> None:
    steps = """
    await page.evaluate(() => {
      const real = window.fetch;
      window.asked = [], window.down = false;
      window.fetch = async (path, how) => {
        if (!path.includes("/messages")) return real(path, how);
        if (window.down) throw new TypeError("Failed to fetch");
        window.asked.push([how.method, how.headers["last-event-id"] ?? "", how.headers["idempotency-key"] ?? ""]);
        const answer = await real(path, how), reader = answer.body.getReader();
        const lost = new Promise((_, fail) => { window.cut = () => fail(new TypeError("network error")); });
        const pull = async (told) => {
          const { done, value } = await Promise.race([reader.read(), lost]);
          if (done) told.close();
          else told.enqueue(value);
        };
        return new Response(new ReadableStream({ pull, cancel: (why) => reader.cancel(why) }), answer);
      };
    });
    await open("writer", "lost");
    await page.evaluate(() => { window.down = true; });
    await say("one |wait|two |wait|three");
    await act();
    await until("The connection is lost");
    await page.evaluate(() => { window.down = false; });
    await until("one", ".talk-said");
    await page.evaluate(() => { window.down = true; window.cut(); });
    await until("The connection is lost");
    await go();
    await page.evaluate(() => { window.down = false; });
    await until("two", ".talk-said");
    const [running] = await all("innerText", ".talk-said");
    await go();
    await over(1);
    const [done] = await all("innerText", ".talk-said");
    return { running, done, asked: await page.evaluate(() => window.asked) };
    """
    seen = do(page, steps, model)
    assert (seen["running"].split(), seen["done"].split()) == (["one", "two"], ["one", "two", "three"])
    (sent, *followed) = seen["asked"]
    assert sent[:2] == ["POST", ""] and sent[2]
    assert [method for method, _, _ in followed] == ["GET"] and followed[0][1].startswith("1.4.")
    assert said(page, "writer", "lost") == ["one |wait|two |wait|three", "one two three"]


def test_a_hidden_tab_lets_its_stream_go_and_takes_it_up_again(page: Site, model: str) -> None:
    steps = """
    const hide = (hidden) => page.evaluate((hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, hidden);
    const ended = new Promise((done) => page.once("requestfailed", done)), asked = [];
    await open("writer", "hidden");
    await say("one |wait|two");
    await act();
    await until("one", ".talk-said");
    page.on("request", (request) => asked.push(request.url()));
    await hide(true);
    const gone = (await ended).url();
    await go();
    await it.settled(page);
    const meanwhile = asked.filter((url) => url.includes("/stream"));
    await hide(false);
    await over(1);
    return { gone, meanwhile, said: await all("innerText", ".talk-said") };
    """
    seen = do(page, steps, model)
    assert seen["gone"].endswith("/api/v1/messages") and seen["meanwhile"] == []
    assert [text.strip() for text in seen["said"]] == ["one two"]


def test_what_is_said_is_not_drawn_anew_while_the_agent_speaks(page: Site, model: str) -> None:
    page.ask("/api/v1/messages", {"text": "kept", "agent": "writer", "instance": "drawn"})
    steps = """
    await open("writer", "drawn");
    await over(1);
    await say("one |wait|again 50 x|wait|end");
    await act();
    await until("one", ".talk-said");
    await page.evaluate(() => {
      const real = String.prototype.replace;
      window.drawn = 0;
      String.prototype.replace = function (...how) {
        window.drawn += String(this) === "kept";
        return real.apply(this, how);
      };
    });
    await go();
    await until("x".repeat(50), ".talk-said");
    const drawn = await page.evaluate(() => window.drawn);
    await go();
    await over(2);
    return { drawn, after: await page.evaluate(() => window.drawn) };
    """
    seen = do(page, steps, model)
    assert seen["drawn"] == 0
    assert seen["after"] > 0, "drawn when the turn is over: it can be taken back no more"


def test_what_others_ask_is_seen_and_a_conversation_that_was_left_is_taken_up_again(page: Site, model: str) -> None:
    steps = """
    await open("writer", "shared");
    await until("Nothing was said yet");
    const type = "application/json", authorization = `Bearer ${it.args.token}`;
    const headers = { authorization, "content-type": type, prefer: "respond-async" };
    const body = JSON.stringify({ text: "wait|begun |wait|and ended", agent: "writer", instance: "shared" });
    await fetch(`${new URL(page.url()).origin}/api/v1/messages`, { method: "POST", headers, body });
    await page.waitForSelector(".talk-running");
    await go();
    await until("begun", ".talk-said");
    const ended = new Promise((done) => page.once("requestfailed", done));
    await open("main", "other");
    const gone = (await ended).url();
    await page.waitForFunction(() => !document.querySelector(".talk-running"));
    await open("writer", "shared");
    await until("begun", ".talk-said");
    await go();
    await over(1);
    return { gone, said: (await all("innerText", ".talk-said"))[0] };
    """
    seen = do(page, steps, model, token=page.token)
    assert "/stream?" in seen["gone"], "who looks elsewhere needs the connection"
    assert seen["said"].strip() == "begun and ended"


def test_who_does_not_want_to_act_has_sent_nothing(page: Site) -> None:
    steps = """
    await open("main", "never");
    await say("not this");
    await page.waitForSelector("dialog[open] input");
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => !document.querySelector("dialog"));
    await over(0);
    return await draft();
    """
    assert do(page, steps) == "not this"
    assert said(page, "main", "never") == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_on_a_phone_and_by_a_screen_reader(page: Site, dark: bool) -> None:
    page.ask("/api/v1/messages", {"text": "/bash__exec command='echo x'", "agent": "main", "instance": f"phone{dark}"})
    steps = """
    await page.evaluate(() => { location.hash = "#/talk"; });
    await until("phone", ".talk-list");
    const list = await it.findings(page);
    await open("main", it.args.key);
    await over(1);
    await page.click(".talk-call summary");
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    const shown = await page.$eval(".talk-list", (one) => one.checkVisibility());
    return { list, wide, shown, one: await it.findings(page) };
    """
    seen = do(page, steps, size=PHONE, dark=dark, key=f"phone{dark}")
    assert (seen["list"], seen["one"], seen["wide"], seen["shown"]) == ([], [], 360, False)


def test_messages_are_read_into_turns_steps_and_blocks(page: Site) -> None:
    steps = """
    return await page.evaluate(async () => {
      const { blocks, turnsOf } = await import("./talk_turn.js"), turn = `t${"0".repeat(20)}`;
      const message = (place, role, content) => {
        const id = place.length > 5 ? place : `${turn}.${place}`;
        return { id, data: { role, content }, source: { type: role, name: "a__b" } };
      };
      const call = (toolCallId) => ({ type: "tool-call", toolCallId, toolName: "a__b", args: {} });
      const result = (toolCallId, status = "ok") =>
        [{ toolCallId, toolName: "a__b", result: { status, error: { code: "E_X" } } }];
      const text = (text) => ({ type: "text", text });
      const read = turnsOf([
        message("0", "user", "asked"), message("1", "assistant", [text("first"), call("1"), call("2")]),
        message("3", "tool", result("2", "error")), message("2", "tool", result("1")),
        message("x:1", "assistant", [text("of an extension")]), message("4", "assistant", [text("second")]),
        message("elsewhere", "system", "told"), message(`t${"1".repeat(20)}-2.4`, "tool", result("9")), { id: "odd" },
      ]);
      return {
        turns: read.map(({ id, whole, items }) => [id.slice(0, 2), whole, items.map(({ step, text, by, calls = [] }) =>
          [step ?? null, text ?? null, by ?? null, calls.map(({ state }) => state)])]),
        blocks: ["a\\n\\n\\nb\\nc", "~~~~\\nx\\n~~~\\n~~~~\\ny", "```js\\nopen", "``` a`b\\nno", ""]
          .map((one) => blocks(one).map(({ code, text }) => [code, text])),
      };
    });
    """
    seen = do(page, steps)
    assert seen["turns"] == [
        [
            "t0",
            True,
            [
                [None, "asked", "", []],
                [1, "first", None, ["done", "E_X"]],
                [0, "of an extension", None, []],
                [2, "second", None, []],
                [None, "told", "a__b", []],
            ],
        ],
        ["t1", False, [[None, None, None, ["done"]], [None, "", None, []]]],
    ]
    assert seen["blocks"] == [
        [[False, "a"], [False, "b\nc"]],
        [[True, "x\n~~~"], [False, "y"]],
        [[True, "open"]],
        [[False, "``` a`b\nno"]],
        [],
    ]
