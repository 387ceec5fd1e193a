"""A bundle on disk, loaded as the kernel loads it, and one agent of it in this process: for the twists.

The bundle's documents, the loader, the plan and the turns are the real ones. The model is a script, and the broker with
its tool host is a function that answers tool calls. So one twist costs a few hundredths of a second.
"""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from goondan.agentproc.machine.messages import ToolData, UserData
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.turn.runner import TurnRunner
from goondan.kernel.bundle.loader import open_bundle
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, ToolCallPayload, ToolResult
from tests.contract.twists.notes import NOTES
from tests.unit.agentproc.fakes import FakeLink, FakeModel, says, wants
from tests.unit.agentproc.turns import runner_of

#: Deliveries of the broker, each higher than those before it.
EPOCHS = count(1)
#: The first lines of every extension module of a twist.
HEAD = "from tests.contract.twists.notes import note\n"
#: A tool with two functions, as a bundle declares it; the stage answers its calls.
TOOL = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata: {{name: {name}}}
spec:
  entry: {name}.py
  exports:
    - name: read
      description: Read {name}.
      parameters:
        type: object
        properties: {{path: {{type: string}}}}
        required: [path]
        additionalProperties: false
    - name: wipe
      description: Wipe {name}.
---
"""


@dataclass
class Written:
    """One Extension: its module, and its document. `old`: it is written for v0.9."""

    name: str
    source: str
    config: Any = None
    old: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    entry: str = ""

    @property
    def path(self) -> str:
        """Where the module lies, from the bundle's root."""
        return self.entry or f"ext/{self.name}.py"

    def document(self) -> str:
        """The Extension document; JSON is YAML."""
        spec: dict[str, Any] = {"entry": self.path, **self.spec}
        if self.old:
            spec["runtime"] = "node"
        if self.config is not None:
            spec["config"] = self.config
        metadata: dict[str, Any] = {"name": self.name}
        if self.annotations:
            metadata["annotations"] = self.annotations
        version = "agents.example.io/v1alpha1" if self.old else "goondan.ai/v1"
        document = {"apiVersion": version, "kind": "Extension", "metadata": metadata, "spec": spec}
        return json.dumps(document, ensure_ascii=False) + "\n---\n"


def new(name: str, source: str, **more: Any) -> Written:
    """An extension of today."""
    return Written(name, textwrap.dedent(source), **more)


def old(name: str, source: str, **more: Any) -> Written:
    """An extension of v0.9."""
    return Written(name, textwrap.dedent(source), old=True, **more)


def mutator(point: str, body: str, name: str = "a", *, old: bool = True, **more: Any) -> Written:
    """An extension with one mutator at this point: `body` is what it does with `ctx`."""
    return _acting("def act(ctx):", f"pipelines.mutate({point!r}, act)", body, name, old, more)


def wrap(point: str, body: str, name: str = "a", *, old: bool = True, **more: Any) -> Written:
    """An extension with one wrap at this point: `body` is what it does with `ctx` and `next`."""
    return _acting("async def act(ctx, next):", f"pipelines.wrap({point!r}, act)", body, name, old, more)


def layer(kind: str, body: str, name: str = "a", *, old: bool = False, **more: Any) -> Written:
    """An extension with one middleware of this kind: `body` is what it does with `ctx`."""
    return _acting("async def act(ctx):", f"pipeline.register({kind!r}, act)", body, name, old, more)


def _acting(head: str, registers: str, body: str, name: str, old: bool, more: dict[str, Any]) -> Written:
    inside = textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8)
    return Written(name, f"def register(api):\n    {head}\n{inside}\n\n    api.{registers}\n", old=old, **more)


def calls(*wanted: tuple[str, str, Any] | tuple[str, Any]) -> ModelAnswer:
    """A model that wants calls: (name, args) or (id, name, args)."""
    made = [(f"c{number}", *one) if len(one) == 2 else one for number, one in enumerate(wanted, 1)]
    return wants(*made)


class Model(FakeModel):
    """A script that keeps what it was asked as it was then, whatever becomes of the objects."""

    async def complete(self, request: ModelRequest, *news: Any, **more: Any) -> ModelAnswer:
        """See Provider."""
        return await super().complete(copy.deepcopy(request), *news, **more)


class Actor:
    """One process of one agent instance."""

    def __init__(self, runner: TurnRunner, link: FakeLink, model: FakeModel) -> None:
        self.runner, self.link, self.model = runner, link, model

    async def turn(self, said: Any = "hello", *script: ModelAnswer | Exception | str, **event: Any) -> Answer:
        """One message to the agent: `script` is what its model does ("done" when nothing is given)."""
        epoch = next(EPOCHS)
        for one in script or ("done",):
            self.model.script.append(says(one) if isinstance(one, str) else one)
        event_id = event.pop("id", f"e{epoch}")
        sent = AgentEvent(
            **{
                "id": event_id,
                "type": "client.message",
                "created_at": "2026-01-01T00:00:00.000Z",
                "input": said,
                **event,
            }
        )
        # Who asked is the broker's word, in the header.
        auth = to_raw(sent.auth) if sent.auth is not None else None
        frame = Frame("event", id=f"b.{event_id}", event_id=event_id, epoch=epoch, payload=to_raw(sent), auth=auth)
        before = len(self.link.answers())
        await self.runner.run(frame)
        self.model.script.clear()
        answers = self.link.answers()
        assert len(answers) == before + 1, "a turn has one answer"
        return answers[-1]

    @property
    def asked(self) -> list[Any]:
        """The model's requests."""
        return self.model.requests

    def shown(self, request: int = -1) -> list[str]:
        """The names of the tools that the model was shown."""
        return [item.name for item in self.asked[request].tools]

    def texts(self, request: int = -1) -> list[str]:
        """What the model was shown as user messages."""
        return [m.data.content for m in self.asked[request].messages if isinstance(m.data, UserData)]

    def results(self, request: int = -1) -> dict[str, Any]:
        """What the model was told of each call of the conversation, by the call's id."""
        found: dict[str, Any] = {}
        for message in self.asked[request].messages:
            if isinstance(message.data, ToolData):
                for part in message.data.content:
                    found[part.tool_call_id] = told(part.result)
        return found

    def sent(self) -> list[tuple[str, Any]]:
        """The calls that went to the tool host, with their arguments."""
        return [(str(f.tool), from_raw(from_raw(f.payload, ToolCallPayload).args, object)) for f in self.link.calls]

    async def close(self) -> None:
        """The instance's process ends."""
        await self.runner.close()


def told(result: ToolResult) -> dict[str, Any]:
    """A tool result as JSON."""
    found: dict[str, Any] = {"status": result.status}
    if result.status == "ok":
        found["output"] = from_raw(result.output or b"\xc0", object)
    if result.error is not None:
        found |= {"code": result.error.code, "name": result.error.name, "message": result.error.message}
        found["suggestion"] = result.error.suggestion
    if result.handle is not None:
        found["handle"] = result.handle
    return found


class Stage:
    """Writes bundles, and makes agents of them. `state` is shared by all agents of one stage, as in one workspace."""

    def __init__(self, home: Path) -> None:
        self.home = home / "bundle"
        self.state = home / "state"
        self.home.mkdir()
        self.state.mkdir()
        self.actors: list[Actor] = []

    def write(
        self,
        extensions: Iterable[Written],
        *,
        tools: Iterable[Any] = ("Tool/files", "Tool/bash"),
        refs: list[Any] | None = None,
        policy: dict[str, Any] | None = None,
        swarm: dict[str, Any] | None = None,
        extra: str = "",
    ) -> Path:
        """A bundle with these extensions, used by its one agent in this order unless `refs` says otherwise."""
        extensions = list(extensions)
        spec: dict[str, Any] = {
            "modelConfig": {"modelRef": "Model/console"},
            "prompt": {"system": "You are main."},
            "tools": list(tools),
            "extensions": refs if refs is not None else [f"Extension/{one.name}" for one in extensions],
        }
        if policy is not None:
            spec["policy"] = policy
        for tool in ("files", "admin"):
            (self.home / f"{tool}.py").write_text(
                "handlers = {'read': lambda ctx, input: 1, 'wipe': lambda ctx, input: 2}\n"
            )
        for one in extensions:
            path = self.home / one.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(HEAD + one.source)
        head = "apiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: console}\nspec: {provider: embedded}\n---\n"
        agent = json.dumps({"apiVersion": "goondan.ai/v1", "kind": "Agent", "metadata": {"name": "main"}, "spec": spec})
        team = {"entryAgent": "Agent/main", "agents": ["Agent/main"], **({"policy": swarm} if swarm else {})}
        whole = {"apiVersion": "goondan.ai/v1", "kind": "Swarm", "metadata": {"name": "stage"}, "spec": team}
        documents = "".join(one.document() for one in extensions)
        text = (
            head
            + TOOL.format(name="files")
            + TOOL.format(name="admin")
            + documents
            + extra
            + agent
            + "\n---\n"
            + json.dumps(whole)
        )
        bundle = self.home / "goondan.yaml"
        bundle.write_text(text)
        return bundle

    async def agent(
        self,
        *extensions: Written,
        key: str = "k",
        handler: Callable[[str, Any], ToolResult | GoondanError | None] | None = None,
        **bundle: Any,
    ) -> Actor:
        """The instance `key` of the agent of a bundle with these extensions, which are loaded."""
        path = self.write(extensions, **bundle)
        plan = open_bundle(str(path), state_dir=str(self.state), handlers=False).plan
        spec = plan.agents["main"]
        link = FakeLink(handler) if handler is not None else FakeLink()
        model = Model()
        runner = runner_of(spec, link, model, key)
        await runner.load_extensions()
        self.actors.append(Actor(runner, link, model))
        return self.actors[-1]

    async def close(self) -> None:
        """End what still runs."""
        for actor in self.actors:
            await actor.close()


def fails(name: str) -> Exception:
    """What a model raises that cannot be asked."""
    from goondan.schemas.wire.errors import fail

    return fail("E_MODEL_FAILED", name)


__all__ = ["NOTES", "Actor", "AskedCall", "Stage", "Written", "calls", "fails", "new", "old", "says"]
