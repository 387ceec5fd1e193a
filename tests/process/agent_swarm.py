"""A running swarm of agents that can ask each other, with a model that follows scripts: for tests.

What is said to an agent names its script. Each test has words and instances of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.scripted_model import ScriptedModel, scripted_model

AGENTS = ("alpha", "beta", "gamma", "delta", "epsilon")
#: An extension that asks: in turn middleware before the turn, in step middleware after each step.
ASKS = """\
def register(api):
    async def turn(ctx):
        if ctx.input_event.metadata:  # it says what it was given, and asks nobody
            result = await ctx.next()
            result.response = f"{ctx.input_event.type}: {ctx.input_event.metadata}"
            return result
        asked = await ctx.agents.request("beta", "middleware asks", instance_key=ctx.instance_key + "-mw")
        ctx.emit_message_event({"type": "append", "message": {"data": {"role": "user", "content": asked["response"]}}})
        return await ctx.next()

    async def step(ctx):
        result = await ctx.next()
        if ctx.turn.input_event.metadata:
            return result
        await ctx.agents.send("gamma", f"step {ctx.step_index} ended", instance_key=ctx.instance_key + "-mw")
        return result

    async def call(ctx):
        assert not hasattr(ctx, "agents")
        return await ctx.next()

    for kind, layer in (("turn", turn), ("step", step), ("toolCall", call)):
        api.pipeline.register(kind, layer)
"""
#: A tool of the bundle's own that asks without waiting.
ASKER = """\
def later(ctx, input):
    return ctx.runtime.request(input["target"], input["input"], async_=True)

handlers = {"later": later}
"""


def agent(name: str, *extensions: str) -> str:
    """An agent that can do what all can, with these extensions."""
    return (
        f"Agent {name} {{modelConfig: {{modelRef: Model/scripted}}, prompt: {{system: You are {name}.}}, "
        "tools: [Tool/agents, Tool/handoff, Tool/bash, Tool/asker, Tool/tool-result], "
        f"extensions: [{', '.join(extensions)}]}}"
    )


def bundle(endpoint: str) -> str:
    """Five agents that can do the same, one that cannot start, one whose middleware asks, and one that has no tools."""
    listed = ", ".join(f"Agent/{name}" for name in (*AGENTS, "unfit", "wrapped", "simple"))
    return documents(
        f"Model scripted {{provider: openai, model: m, endpoint: {endpoint}}}",
        "Extension broken {entry: ext/broken.py}",
        "Extension asks {entry: ext/asks.py}",
        "Tool asker {entry: ext/asker.py, sandbox: {permissions: [agents]}, exports: [{name: later}]}",
        *map(agent, AGENTS),
        agent("unfit", "Extension/broken"),
        agent("wrapped", "Extension/asks"),
        "Agent simple {modelConfig: {modelRef: Model/scripted}, prompt: {system: You are simple.}}",
        f"Swarm five {{entryAgent: Agent/alpha, agents: [{listed}], policy: {{agentIdleSeconds: 1}}}}",
    )


class Swarm(NamedTuple):
    """A running kernel and its model."""

    kernel: Sandbox
    model: ScriptedModel

    def script(self, said: str, *answers: Any) -> None:
        """What an agent does that is told `said`."""
        self.model.scripts[said] = list(answers)

    def send(self, said: str, key: str, *, agent: str = "alpha") -> dict[str, Any]:
        """The answer of an agent."""
        sent: dict[str, Any] = self.kernel.gdn("send", agent, said, "--instance", key, "--json").json
        return sent

    def result(self, said: str, call: str = "c1") -> Any:
        """What the model was told of a call in the turn that `said` began."""
        return self.model.results(said)[call]


def request(target: str, said: str, **more: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """A step that asks an agent."""
    return [("c1", "agents__request", {"target": target, "input": said, **more})]


@contextmanager
def asking_swarm() -> Iterator[Swarm]:
    """The swarm while it runs."""
    with scripted_model() as model:
        text = bundle(model.base)
        with sandbox(text, {"OPENAI_API_KEY": "k"}) as kernel:
            (kernel.home / "ext").mkdir()
            (kernel.home / "ext" / "broken.py").write_text("def register(api):\n    import os; os._exit(3)\n")
            (kernel.home / "ext" / "asks.py").write_text(ASKS)
            (kernel.home / "ext" / "asker.py").write_text(ASKER)
            kernel.detach()
            yield Swarm(kernel, model)


def code_of(result: Any) -> str:
    """The code of a failed call, which says what happened and what to do about it."""
    error = result["error"]
    assert result["status"] == "error"
    assert error["message"] and error["suggestion"], error
    return str(error["code"])


def waits(swarm: Swarm, said: str, key: str, agent: str = "beta", answer: str = "late") -> Any:
    """A script in which `agent` works until the file that is returned exists."""
    command = "touch began; while [ ! -e go ]; do sleep 0.02; done"
    swarm.script(said, [("b1", "bash__exec", {"command": command})], answer)
    pattern = f"state/workspaces/*/instances/{agent}/{key}/workspace/began"
    return lambda: wait_until(lambda: next(swarm.kernel.home.glob(pattern), None), what=pattern).parent / "go"


def pid_of(swarm: Swarm, agent: str, key: str) -> int | None:
    """The process of an instance."""
    found = [row["pid"] for row in swarm.kernel.ps() if (row["name"], row["instanceKey"]) == (agent, key)]
    return found[0] if found else None


def told(swarm: Swarm, said: str) -> list[str]:
    """The user messages that the model was shown in the last step of a turn."""
    messages = swarm.model.requests[said][-1]["messages"]
    return [m["content"] for m in messages if m["role"] == "user"]


def all_requests(swarm: Swarm) -> list[Any]:
    """Everything that the model was asked."""
    return [body for bodies in list(swarm.model.requests.values()) for body in bodies]
