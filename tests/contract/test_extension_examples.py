"""Every example of docs/extensions.md, in both languages, and of docs/approvals.md and docs/old-spellings.md runs."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import shlex
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.messages import encode_message
from goondan.agentproc.turn.runner import TurnRunner
from goondan.kernel.bundle.loader import open_bundle
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.frames import AgentEvent
from tests.unit.agentproc.extensions.test_asking import answer
from tests.unit.agentproc.fakes import BASH, NOTE, FakeLink, FakeModel, event_frame, make_spec, says, wants
from tests.unit.agentproc.turns import runner_of, until

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGES = ("", ".ko")
#: What stands around an Agent of an example so that a bundle can be read.
AROUND = """
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: log}
spec: {entry: extensions/log.py, config: {level: info}}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: search}
spec: {entry: tools/search.py, exports: [{name: all}, {name: one}]}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: other}
spec: {entry: tools/search.py, exports: [{name: all}]}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/assistant, agents: [Agent/assistant]}
"""
HEAD = "apiVersion: goondan.ai/v1\n"
AGENT = "kind: Agent\nmetadata: {name: assistant}\n"


def examples(page: str, language: str = "") -> list[tuple[str, str]]:
    """(kind, text) of every fenced example of a page, in order."""
    text = (DOCS / f"{page}{language}.md").read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w+)\n(.*?)^\1```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(kind, textwrap.dedent(body)) for _, kind, body in found]


@pytest.fixture(params=LANGUAGES, ids=["en", "ko"])
def page(request: pytest.FixtureRequest) -> list[str]:
    """The examples of docs/extensions.md."""
    return [text for _, text in examples("extensions", request.param)]


def test_no_example_is_forgotten() -> None:
    for language in LANGUAGES:
        kinds = [kind for kind, _ in examples("extensions", language)]
        assert kinds == ["yaml", *["python"] * 6, "yaml"]
    assert next(kind for kind, _ in examples("old-spellings")) == "python"
    assert [kind for kind, _ in examples("approvals")] == ["yaml", "console", "console"]


def planned(tmp_path: Path, documents: str) -> AgentSpec:
    """The agent `assistant` of a bundle with these documents."""
    for name, text in (("extensions/guard.py", "register = print"), ("extensions/log.py", "register = print")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tools").mkdir(exist_ok=True)
    (tmp_path / "tools" / "search.py").write_text("handlers = {}")
    bundle = tmp_path / "goondan.yaml"
    bundle.write_text(documents + AROUND)
    return open_bundle(str(bundle), state_dir=str(tmp_path / "state"), env={}, handlers=False).plan.agents["assistant"]


class Running:
    """A turn runner with one extension made of a text, and what it talks to."""

    def __init__(self, runner: TurnRunner, link: Any, model: FakeModel) -> None:
        self.runner, self.link, self.model = runner, link, model
        self._turns = 0

    async def turn(self) -> str | None:
        """A whole turn; its answer."""
        self._turns += 1
        await self.runner.run(event_frame(f"e{self._turns}", "go"))
        ended = self.link.answers()[-1]
        assert ended.error is None, ended.error
        return ended.response  # type: ignore[no-any-return]

    def shown(self) -> list[str]:
        """The conversation as the model was shown it last."""
        return [encode_message(message).decode("utf-8", "replace") for message in self.model.requests[-1].messages]


@asynccontextmanager
async def running(
    tmp_path: Path, source: str, *script: Any, config: dict[str, Any] | None = None
) -> AsyncIterator[Running]:
    """The extension `guard` with this source, in an agent whose model says the script, and then `done` for ever."""
    module = tmp_path / "guard.py"
    module.write_text(source)
    resource = {"metadata": {"name": "guard"}, "spec": {"config": config or {}}}
    extension = ExtensionSpec(name="guard", entry=str(module), resource=resource, config=config or {})
    spec = make_spec(str(tmp_path / "state"), extensions=[extension], registry=[BASH, NOTE])
    link: Any = FakeLink()
    model = FakeModel(*script, *[says("done")] * 4)
    runner = runner_of(spec, link, model)
    try:
        await runner.load_extensions()
        yield Running(runner, link, model)
    finally:
        await runner.close()


def registering(body: str) -> str:
    """A module whose `register` runs these lines."""
    return "def register(api):\n" + textwrap.indent(body, "    ")


def around_a_step(body: str, before: str = "") -> str:
    """A module whose step middleware runs these lines before `next()`."""
    inside = textwrap.indent(f"{before}\n{body}\n", " " * 8)
    return (
        f"def register(api):\n    async def step(ctx):\n{inside}        return await ctx.next()\n\n"
        '    api.pipeline.register("step", step)\n'
    )


# --- docs/extensions.md ---------------------------------------------------------------------------------------------


async def test_the_guard_as_it_is_declared(tmp_path: Path, page: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    declared = page[0].replace("kind: Agent\n# …\nspec:\n", HEAD + AGENT + "spec:\n  modelConfig: Model/console\n")
    declared = declared.replace("modelConfig: Model/console", "modelConfig: {modelRef: Model/console}")
    agent = planned(tmp_path, declared)
    assert [(extension.name, extension.config) for extension in agent.extensions] == [
        ("guard", {"deny": ["rm", "reboot"]}),
        ("log", {"level": "debug"}),
    ]
    assert agent.extensions[0].entry == str(tmp_path / "extensions" / "guard.py")
    calls = wants(("a", "bash__exec", {"command": "rm -rf /"}), ("b", "bash__exec", {"command": "ls"}))
    async with running(tmp_path, page[1], calls, config=agent.extensions[0].config) as made:
        assert await made.turn() == "done"
        (made_call,) = made.link.calls
        assert b"ls" in bytes(made_call.payload)
        told = "".join(made.shown())
        assert "E_EXTENSION_DENIED" in told
        assert "not here" in told
        assert "guard: bash__exec ok" in caplog.text
        assert "Extension/guard refused it: not here" in caplog.text
        assert "Traceback" not in caplog.text


async def test_state_that_stays(tmp_path: Path, page: list[str]) -> None:
    for runs in (1, 2):
        kept = page[2] + f"\nassert api.state.get(scope='workspace') == {{'runs': {runs}, 'seen': True}}\n"
        async with running(tmp_path, registering(kept)) as made:
            assert await made.turn() == "done"


async def test_events(tmp_path: Path, page: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = page[3].splitlines()
    assert lines[-1] == "end()"
    emits = 'api.events.emit("workspace.made", {"path": "/w"})'
    whole = [
        "heard = api.instance.shared.setdefault('heard', [])",
        "handler = lambda payload: heard.append(payload)",
        'api.events.on("guard.*", handler)',
        *lines[:-1], emits, lines[-1], emits,
        *['api.events.emit("auth.granted", {"subject": "kim"})'] * 2,
    ]  # fmt: skip
    async with running(tmp_path, registering("\n".join(whole))) as made:
        assert made.runner.instance.extensions._shared["heard"] == [
            {"type": "guard.initialized", "name": "guard"},
            {"type": "auth.granted", "subject": "kim"},
        ]
    assert capsys.readouterr().out == "workspace.made /w\n"


async def test_message_events(tmp_path: Path, page: list[str]) -> None:
    """Each line in an agent of its own, since the last leaves nothing to look at."""
    statements = [ast.unparse(statement) for statement in ast.parse(page[4]).body]
    assert len(statements) == 4
    appended = re.search(r"'content': '(.+?)'", statements[0])
    assert appended is not None
    old = "old = ctx.conversation_state.base_messages[0]"
    shown = []
    for number, line in enumerate(statements):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = around_a_step(textwrap.indent(f"{old}\n{line}", "    "), "if ctx.conversation_state.base_messages:")
        async with running(folder, source) as made:
            await made.turn()
            await made.turn()
            shown.append(made.shown())
    added, replaced, removed, emptied = shown
    assert len(added) == 4
    assert appended[1] in added[-1]
    assert (len(replaced), "…" in replaced[0], "go" in replaced[0]) == (3, True, False)
    assert (len(removed), "done" in removed[0]) == (2, True)
    assert emptied == []


async def test_a_view(tmp_path: Path, page: list[str]) -> None:
    more = "for number in range(30):\n    ctx.emit_message_event({'type': 'append', 'message': {'data': "
    more += "{'role': 'user', 'content': f'word {number}'}}})"
    async with running(tmp_path, around_a_step(page[5], more)) as made:
        await made.turn()
        assert len(made.shown()) == 20
        assert "word 10" in made.shown()[0]
        stored = made.runner.instance.store.load_messages()
        assert len([message for message in stored if b"word" in encode_message(message)]) == 30, "nothing got lost"


async def test_other_agents(tmp_path: Path, page: list[str]) -> None:
    body = page[6] + '\napi.instance.shared["answer"] = asked["response"]\n'
    async with running(tmp_path, around_a_step(body, "text = 'is it good'")) as made:
        turn = asyncio.ensure_future(made.turn())
        await until(lambda: made.link.asked)
        asked = made.link.asked[0][0]
        event = from_raw(asked.payload, AgentEvent)
        assert (asked.to, event.input) == ("critic", "is it good")
        assert 0 < asked.deadline_ms <= 30_000
        answer(made.link, 0, response="it is")
        assert await turn == "done"
        assert made.runner.instance.extensions._shared["answer"] == "it is"
        (sent,) = [frame for frame in made.link.posted if frame.type == "event"]
        assert (sent.to, sent.reply_to, from_raw(sent.payload, AgentEvent).input) == ("logger", None, "a turn began")


def test_what_extensions_may_add(tmp_path: Path, page: list[str]) -> None:
    guard = HEAD + "kind: Extension\nmetadata: {name: guard}\nspec: {entry: extensions/guard.py}\n---\n"
    declared = page[7].replace("spec:\n", "spec:\n  modelConfig: {modelRef: Model/console}\n", 1)
    agent = planned(tmp_path, guard + HEAD + AGENT + declared)
    assert sorted(agent.addable) == ["http-fetch__get", "search__all", "search__one"]


async def test_points(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(tmp_path, examples("old-spellings")[0][1], wants(("a", "notes__add", {}))) as made:
        assert await made.turn() == "done"
        blocks = [request.blocks for request in made.model.requests]
        assert blocks == [[{"type": "custom.info", "data": {"stepIndex": index}}] for index in (0, 1)]
        assert len(re.findall(r"the model took \d+\.\d s", caplog.text)) == 2


# --- docs/approvals.md ----------------------------------------------------------------------------------------------


@pytest.mark.feature("approvals")
def test_the_rules_of_the_page_decide_as_it_says(tmp_path: Path) -> None:
    from goondan.features.approvals.wire import decide, policies_of

    agent = planned(tmp_path, HEAD + examples("approvals")[0][1])

    def judged(tool: str, **args: Any) -> tuple[str, str | None]:
        decision = decide(policies_of(agent.parts), tool, args)
        return decision.action, decision.reason

    assert judged("bash__exec", command="git push --force origin") == ("deny", "not here")
    assert judged("bash__exec", command="git status")[0] == judged("bash__exec", command="git diff")[0] == "allow"
    assert judged("bash__exec", command="git status; rm -rf .")[0] == judged("bash__exec", command="ls")[0] == "ask"
    assert judged("file-system__write", path="x")[0] == "ask"
    assert judged("file-system__read", path="x")[0] == "allow"
    assert decide(policies_of(agent.parts), "bash__exec", {"command": "ls"}).expires_s == 12 * 3600


@pytest.mark.feature("approvals")
def test_the_commands_of_the_page_are_there_and_take_these_arguments() -> None:
    from goondan.features.approvals.command import approve

    console = "\n".join(text for kind, text in examples("approvals") if kind == "console")
    lines = [shlex.split(line, comments=True) for line in console.splitlines() if line.startswith("$ ")]
    assert len(lines) == 10
    for words in lines:
        assert words[:3] == ["$", "gdn", "approve"]
        named = approve.commands[words[3]]
        named.make_context(words[3], words[4:], resilient_parsing=False)
