"""What an agent can reach on the bus when somebody else speaks for it: the bound that its bundle gives, held by the
broker, whatever runs in the agent's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel.bundle.loader import open_bundle
from goondan.schemas.bundle.effective_config import reachable_tools
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import ErrorPayload, Frame
from tests.bundles import documents
from tests.process.bare_broker import Broker, bare_broker

HEAD = documents(
    "Model console {provider: embedded}",
    "Extension own {entry: ./ext/own.py}",
    'Extension borrowed {entry: "@goondan/base/logging"}',
    "Swarm swarm {entryAgent: plain}",
)
TOOL = "---\n" + documents(
    "Tool NAME {entry: ./tools/words.py, exports: [{name: read}, {name: write}]}",
)
AGENT = "---\n" + documents(
    "Agent NAME {modelConfig: {modelRef: Model/console}, tools: [Tool/mine], REST}",
)
OWN = {"mine__read", "mine__write"}
OTHERS = {"other__read", "other__write"}
#: What the spec of each agent has beside its one tool, and what it reaches beyond that.
AGENTS: dict[str, tuple[str, set[str]]] = {
    "plain": ("extensions: []", set()),
    "own": ("extensions: [Extension/own]", OTHERS),
    "bundled": ("extensions: [Extension/logging, Extension/borrowed]", set()),
    "both": ("extensions: [Extension/logging, Extension/own]", OTHERS),
    "narrowed": (
        "extensions: [Extension/own], policy: {toolCalls: {extensionsMayAdd: ['other__r*']}}",
        {"other__read"},
    ),
    "nothing": ("extensions: [Extension/own], policy: {toolCalls: {extensionsMayAdd: []}}", set()),
    "opened": (
        "extensions: [Extension/own], policy: {toolCalls: {extensionsMayAdd: ['other__*', 'wait__seconds']}}",
        {*OTHERS, "wait__seconds"},
    ),
    "in-vain": ("extensions: [], policy: {toolCalls: {extensionsMayAdd: ['*']}}", set()),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("bundle")
    for place, text in (("ext/own.py", "def register(api): ..."), ("tools/words.py", "handlers = {}")):
        (folder / place).parent.mkdir()
        (folder / place).write_text(text)
    texts = [HEAD, *(TOOL.replace("NAME", name) for name in ("mine", "other"))]
    texts += [AGENT.replace("NAME", name).replace("REST", rest) for name, (rest, _) in AGENTS.items()]
    (folder / "goondan.yaml").write_text("".join(texts))

    def made(state_dir: str) -> KernelPlan:
        return open_bundle(str(Path(folder, "goondan.yaml")), state_dir=state_dir, env={}, handlers=False).plan

    with bare_broker(made) as running:
        yield running


def reached(broker: Broker, spec: AgentSpec) -> set[str]:
    """What the broker passes on to a tool host for whoever speaks for this agent, of every tool that there is."""
    client = broker.hello("client", operator=True)
    event = Frame("event", id="1", event_id=f"e-{spec.name}", to=spec.name, instance_key="k")
    event.payload = to_raw({"id": event.event_id, "type": "user", "createdAt": "2026-01-01T00:00:00Z"})
    assert client.ask(event).stage == "accepted"
    agent = broker.hello("agent", agent=spec.name, instance_key="k")
    lease = agent.receive()
    refused: set[str] = set()
    for number, item in enumerate(spec.registry):
        call = Frame("tool.call", id=f"c{number}", call_id=f"{spec.name}/{number}", tool=item.name)
        call.event_id, call.epoch = lease.event_id, lease.epoch
        call.payload = to_raw({"args": {}, "turnId": "t", "toolCallId": str(number)})
        agent.send(call)
    agent.send(Frame("tool.call", id="last", call_id="x", tool="no__such", event_id=lease.event_id, epoch=lease.epoch))
    while (answer := agent.receive()).in_reply_to != "last":
        assert answer.type == "error", answer
        assert from_raw(answer.payload, ErrorPayload).code == "E_FORBIDDEN"
        refused.add(spec.registry[int((answer.in_reply_to or "c")[1:])].name)
    return {item.name for item in spec.registry} - refused


@pytest.mark.parametrize("name", AGENTS)
def test_who_speaks_for_an_agent_reaches_its_bound_and_nothing_else(broker: Broker, name: str) -> None:
    spec = broker.plan.agents[name]
    assert len(spec.registry) > 30  # the bundled tools are there to be reached for
    assert reached(broker, spec) == OWN | AGENTS[name][1] == reachable_tools(spec)
