"""Turns in tests: runners over one state directory, and what is asked of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.extensions.api import ExtensionApi
from goondan.agentproc.extensions.state import ExtState, StoredState
from goondan.agentproc.machine.messages import Message, ToolData
from goondan.agentproc.machine.turn import End
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec
from goondan.schemas.wire.frames import Answer, ErrorPayload, ToolError, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, make_spec

Make = Callable[..., TurnRunner]


def runner_of(
    spec: AgentSpec,
    link: FakeLink,
    model: FakeModel | None,
    key: str = "k",
    features: Sequence[type[AgentFeature]] | None = None,
) -> TurnRunner:
    """A process of the instance `key` of an agent, over this link, with this model and these features (None: all)."""
    store = ConversationStore(instance_dir(spec.state_dir, spec.name, key), durability="process")
    return TurnRunner(Instance(spec, key, link, store, provider=model), features)


class Runners:
    """Makes runners; each is a new incarnation of the instance `k` of its agent."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = str(state_dir)
        self._made: list[TurnRunner] = []

    def build(
        self,
        link: FakeLink,
        script: FakeModel | None = None,
        features: Sequence[type[AgentFeature]] | None = None,
        **changes: Any,
    ) -> TurnRunner:
        """A runner over this link with this model and these features (None: all). `changes` are of its
        specification.
        """
        self._made.append(runner_of(make_spec(self._state_dir, **changes), link, script, features=features))
        return self._made[-1]

    async def close(self) -> None:
        """Close all of them."""
        for runner in self._made:
            await runner.close()


def api_of(runner: TurnRunner, name: str = "ext", **changes: Any) -> ExtensionApi:
    """What `register(api)` of an extension of this name gets."""
    resource = {"kind": "Extension", "metadata": {"name": name}, "spec": {"config": changes.get("config", {})}}
    spec = ExtensionSpec(name=name, entry="/x.py", **{"resource": resource, **changes})
    place = runner.instance.place
    stored = StoredState(name, place.instance_dir, place.state_dir)
    return ExtensionApi(
        spec,
        runner.instance.pipeline,
        runner.instance.tools,
        runner.instance.events,
        ExtState(),
        stored,
        {},
        agent=place.agent,
        instance_key=place.instance_key,
        brought={member: make(name) for member, make in runner.instance.extensions.brought.items()},
        workdir=lambda: runner.instance.workspaces.workdir,
    )


async def settle(rounds: int = 20) -> None:
    """Let everything that can run, run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def the_answer(link: FakeLink) -> Answer:
    (answer,) = link.answers()
    return answer


def last_results(messages: list[Message]) -> list[tuple[str, str]]:
    return [
        (part.tool_call_id, part.result.status)
        for message in messages
        if isinstance(message.data, ToolData)
        for part in message.data.content
    ]


def code_of(answer: Answer | ToolResult) -> str | None:
    return None if answer.error is None else answer.error.code


def failed(ended: Answer | ToolResult | End, code: str, *words: str) -> ErrorPayload | ToolError:
    """The error of what has failed: it has this code, and its message these words."""
    error = ended.error
    assert error is not None, ended
    assert ended.status in ("failed", "error")
    assert error.code == code, error
    for part in words:
        assert part in error.message, (part, error)
    return error
