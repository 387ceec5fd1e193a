"""What models, tools and names say, in every view: it is text, moves nothing beside it, and makes no page slow."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import Append, AssistantData, Message, MessageSource, TextPart, UserData
from goondan.schemas.bundle.address import instance_dir
from tests.features.page.browser import Site
from tests.features.page.lived import asked, call, tell
from tests.kernel_fixture import wait_until

PAGE: Final = (
    "<!doctype html><html><script>window.done = 1</script><img src=x onerror='window.done = 2'>"
    "<svg onload='window.done = 3'></svg><a href=\"javascript:window.done = 4\">go</a>"
    "<iframe src='//example.org'></iframe>"
    "<form action='//example.org'><button>Act</button></form></html>"
)
#: An answer that imitates the page: its dialog, its buttons, its one line.
IMITATION: Final = (
    "This tab only looks\n\nTo act, it needs a code: [ Code ] [Act]\n\ny Yes, once  a Always …\n\u202ekcab\u202c"
)
#: A tool that no agent has, whose name turns around what stands beside it.
TURNED: Final = "bash__\u202eexe.\u2066gnp"
MESSAGES: Final = 10_000
#: What looks at a page for a text that became more than that.
LOOK: Final = r"""
const look = async (route, text) => {
  const began = performance.now();
  await page.evaluate((route) => { location.hash = route; }, route);
  await page.waitForFunction((text) => document.querySelector("main")?.innerText.includes(text), {}, text);
  const took = performance.now() - began;
  return page.evaluate((took) => ({
    took, done: window.done ?? null, drawn: document.querySelectorAll("*").length,
    made: document.querySelectorAll("main :is(img, svg, iframe, script, form[action], a[href^=javascript])").length,
    hidden: /[\u202a-\u202e\u2066-\u2069]/.test(document.body.innerText),
    dialogs: document.querySelectorAll("dialog").length,
  }), took);
};
"""


def looked(swarm: Site, *pages: tuple[str, str]) -> list[dict[str, Any]]:
    """Each page, once it shows a text."""
    steps = (
        "const seen = []; for (const [route, text] of it.args.pages) seen.push(await look(route, text)); return seen;"
    )
    seen: list[dict[str, Any]] = swarm.see(LOOK + steps, pages=pages)
    for found in seen:
        assert (found["done"], found["made"], found["hidden"], found["dialogs"]) == (None, 0, False, 0), found
        assert found["drawn"] < 3000, "a few of what there is"
    return seen


def runs_of(swarm: Site, instance: str) -> list[str]:
    return [turn["turnId"] for turn in swarm.ask(f"/api/v1/traces?instance={instance}")["traces"]]


def test_a_page_of_markup_is_text_as_message_answer_argument_and_result(swarm: Site) -> None:
    asked(swarm, "lead", PAGE, "markup")
    asked(swarm, "coder", call("bash__exec", command=f"cat <<'X'\n{PAGE}\nX"), "markup")
    turns = runs_of(swarm, "markup")
    assert len(turns) == 2
    spans = [
        step["tools"][0]["spanId"] for step in swarm.ask(f"/api/v1/traces/{turns[0]}")["steps"] if step.get("tools")
    ]
    looked(
        swarm,
        ("#/talk/lead/markup", "echo: <!doctype html>"),
        ("#/talk/coder/markup", "<!doctype html>"),
        ("#/runs?text=doctype", "<!doctype html>"),
        (f"#/run/{turns[0]}", "<!doctype html>"),
        (f"#/run/{turns[0]}/span/{spans[0]}", "Receipt"),
        (f"#/run/{turns[1]}", "<!doctype html>"),
    )


def test_an_answer_that_imitates_the_page_stays_within_its_text(swarm: Site) -> None:
    asked(swarm, "lead", IMITATION, "imitation")
    looked(swarm, ("#/talk/lead/imitation", "This tab only looks"))
    told = swarm.see(
        """
        await page.evaluate(() => { location.hash = "#/talk/lead/imitation"; });
        await page.waitForFunction(() => document.querySelector("main")?.innerText.includes("echo: This tab"));
        const made = (all) => all.filter((p) => p.innerText.includes("Yes, once")).map((p) => p.children.length);
        return page.$$eval(".talk-turn p", made);
        """
    )
    assert told and not any(told), "its buttons are letters"


def test_a_name_that_turns_text_around_is_shown_by_number(swarm: Site) -> None:
    asked(swarm, "coder", f"call {TURNED} {{}}", "turned")
    (turn,) = runs_of(swarm, "turned")
    looked(swarm, ("#/talk/coder/turned", "⟨202E⟩"), ("#/runs", "⟨202E⟩"), (f"#/run/{turn}", "⟨202E⟩"))


def test_a_megabyte_of_brackets_is_looked_at_within_a_moment(swarm: Site) -> None:
    """A body has at most a MiB. `text.js` has four in its own test."""
    asked(swarm, "lead", "[" * 900_000, "brackets")
    tell(swarm, "guard", f"/bash__exec {json.dumps({'command': '[' * 260_000})}", "brackets")
    found = wait_until(
        lambda: [one for one in swarm.ask("/api/v1/approvals")["items"] if one["instanceKey"] == "brackets"]
    )
    seen = looked(
        swarm,
        ("#/talk/lead/brackets", "[[[[["),
        *((f"#/run/{turn}", "[[[[[") for turn in runs_of(swarm, "brackets")),
        (f"#/inbox/{found[0]['code']}", "[[[[["),
        ("#/runs", "[[[[["),
    )
    assert max(one["took"] for one in seen) < 4000
    swarm.ask(f"/api/v1/messages/{found[0]['eventId']}/cancel", {})
    wait_until(lambda: len(swarm.ask("/api/v1/approvals")["items"]) == 1)


def test_a_conversation_of_ten_thousand_messages_begins_at_its_end(swarm: Site) -> None:
    folder = instance_dir(str(swarm.kernel.state_dirs[0]), "lead", "long")
    os.makedirs(folder, 0o700)
    store = ConversationStore(folder, durability="process")
    store.adopt(1)
    at = "2026-11-30T00:00:00.000Z"
    for number in range(MESSAGES // 2):
        turn = f"t{number:020x}"
        with store.write(final=True):
            store.begin_turn(f"e{number}", turn, 1, at)
            store.append(
                turn, 0, Append(Message(f"{turn}.0", UserData(f"question {number}"), at, MessageSource("user")))
            )
            answer = AssistantData([TextPart(f"answer {number}")])
            store.append(turn, 1, Append(Message(f"{turn}.1", answer, at, MessageSource("assistant"))))
            store.finish_turn(f"e{number}", turn, "completed", at, steps=1, answer=None)
    store.close()
    (seen,) = looked(swarm, ("#/talk/lead/long", f"answer {MESSAGES // 2 - 1}"))
    assert seen["took"] < 4000
