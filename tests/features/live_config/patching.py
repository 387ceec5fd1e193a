"""Agents of a stage whose proposals go to a real broker: for the twists of live configuration.

The broker is the one of tests/unit/kernel/broker/world.py, with the plan of the stage's bundle. So a proposal goes the
whole way: extension, agent, frame, broker, journal, `config.changed`, next step.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from goondan.features.live_config.broker import LiveConfigs
from goondan.kernel.broker.state.entities import CLIENTS, Connection
from goondan.kernel.bundle.loader import open_bundle
from goondan.schemas.wire.codec import encode, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload, Frame
from tests.contract.twists.notes import NOTES
from tests.contract.twists.stage import Actor, Model, Stage, Written, calls, new
from tests.unit.agentproc.fakes import FakeLink
from tests.unit.agentproc.turns import runner_of
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.world import World, part_of, run, tell

#: Proposes what the message says, one after the other, and notes what came of each.
PROPOSER = """
    import json

    def register(api):
        async def propose(ctx):
            if ctx.step.index == 0:
                for one in json.loads(str(ctx.turn.input_event.input)):
                    try:
                        told = await api.live_config.propose_patch(one)
                        code = told["error"]["code"] if told["error"] else ""
                        note(told["status"], code, told["patchId"], told["revision"])
                    except Exception as exc:
                        note("raised", getattr(exc, "code", type(exc).__name__), "", 0)
            return ctx

        api.pipelines.mutate("step.post", propose)
"""
NOTING = """
    def register(api, config):
        note("registered", NAME, config)
        api.events.on("extension.cleanup", lambda payload: note("cleaned", NAME))
"""


def noting(name: str, **config: Any) -> Written:
    """An extension that notes each time that it is registered."""
    return new(name, NOTING.replace("NAME", repr(name)), config=config)


class Joined(FakeLink):
    """The agent's link to the broker of a world."""

    def __init__(self, kernel: Patching, key: str) -> None:
        super().__init__()
        self.kernel, self.key = kernel, key
        self.replies["config.propose"] = self._propose

    def _propose(self, frame: Frame) -> Any:
        frame.id = f"{self.key}.{self.kernel.count()}.{frame.id}"
        reply = self.kernel.tell(frame, self.key)
        return GoondanError(from_raw(reply.payload, ErrorPayload)) if reply.type == "error" else reply


class Patching:
    """A broker and instances of the agent `main` of one bundle."""

    def __init__(self, stage: Stage, *extensions: Written, proposer: str = PROPOSER, **bundle: Any) -> None:
        self.stage = stage
        path = stage.write([new("proposer", proposer), *extensions], **bundle)
        self.plan = open_bundle(str(path), state_dir=str(stage.state), handlers=False).plan
        self.world = World()
        agents = {**self.world.plan.agents, "main": self.plan.agents["main"]}
        self.world.plan = msgspec.structs.replace(self.world.plan, agents=agents)
        self.world.kill_broker()
        run(self.world)
        self.actors: dict[str, Actor] = {}
        self._count = 0

    def count(self) -> int:
        self._count += 1
        return self._count

    async def start(self, key: str) -> Actor:
        """A process of the instance, told what is in force as a welcome tells it."""
        self.world.launches += 1
        self.world.agents["main", key] = Agent(self.world, "main", key, self.world.launches)
        run(self.world)
        spec = self.plan.agents["main"]
        link, model = Joined(self, key), Model()
        runner = runner_of(spec, link, model, key)
        changes = part_of(self.world.router, LiveConfigs).changes("main", key)
        if changes is not None:
            runner.instance.config.take(to_raw(changes))
        await runner.load_extensions()
        self.actors[key] = Actor(runner, link, model)
        self.stage.actors.append(self.actors[key])
        return self.actors[key]

    async def again(self, key: str) -> Actor:
        """The instance's process ends, and another one takes its place."""
        await self.actors.pop(key).close()
        self.world.kill_agent(self.world.agents["main", key])
        return await self.start(key)

    def broker_restarts(self) -> None:
        """kill -9, and another one with the same journal."""
        self.world.kill_broker()
        run(self.world)

    def connection(self, key: str) -> Connection:
        return self.world.peer("main", key)

    def tell(self, frame: Frame, key: str) -> Frame:
        """A frame of an instance, and its answer; what is in force is told to every process."""
        frames = tell(self.world, frame, self.connection(key))
        self._spread()
        (reply,) = [one for one in frames if one.in_reply_to == frame.id]
        return reply

    def _spread(self) -> None:
        for key, actor in self.actors.items():
            changes = part_of(self.world.router, LiveConfigs).changes("main", key)
            if changes is not None:
                actor.runner.instance.config.take(to_raw(changes))

    def admin(self, **asked: Any) -> Any:
        """What an operator is answered; the error as a GoondanError."""
        connection = next(iter(self.world.router.bus.presence.connections[CLIENTS].values()))
        connection.claims = msgspec.structs.replace(connection.claims, operator=True)
        frame = Frame("admin", id=f"adm{self.count()}", payload=to_raw(asked))
        self.world.router.receive(connection, encode(frame), self.world.now)
        frames = tell(self.world, Frame("ping", id=f"ping{self.count()}"), connection)
        self._spread()
        (reply,) = [one for one in frames if one.in_reply_to == frame.id]
        if reply.type == "error":
            raise GoondanError(from_raw(reply.payload, ErrorPayload))
        return from_raw(reply.payload, dict)

    def operator(self, *patches: dict[str, Any], key: str | None = None, **more: Any) -> tuple[str, str]:
        """What an operator's patch comes to: `status` and the error's code."""
        asked = {"op": "config.propose", "agent": "main", "id": f"op{self.count()}", "patches": list(patches), **more}
        if key is not None:
            asked["instanceKey"] = key
        try:
            told = self.admin(**asked)
        except GoondanError as exc:
            return "refused", exc.code
        return told["status"], (told.get("error") or {}).get("code", "")

    async def propose(self, key: str, *proposals: Any) -> list[tuple[str, str]]:
        """One turn of the instance whose first step proposes these: (`status` or `raised`, code) of each."""
        before = len(NOTES)
        answer = await self.actors[key].turn(json.dumps(proposals), calls(("files__read", {"path": "x"})), "done")
        assert answer.error is None, answer.error
        told = [
            one for one in NOTES[before:] if isinstance(one, tuple) and one[0] in ("accepted", "rejected", "raised")
        ]
        self.told = told
        return [(one[0], one[1]) for one in told]

    async def one(self, key: str, *patches: dict[str, Any], **more: Any) -> tuple[str, str]:
        """One proposal in a turn of its own."""
        (told,) = await self.propose(key, {"patches": list(patches), **more})
        return told

    async def look(self, key: str) -> tuple[str | None, list[str]]:
        """Prompt and tools that the model of the instance gets in a new turn."""
        actor = self.actors[key]
        answer = await actor.turn("[]")
        assert answer.error is None, answer.error
        return actor.asked[-1].system, actor.shown()

    def listed(self, key: str | None = None) -> list[dict[str, Any]]:
        asked = {"op": "config.list", "agent": "main"} | ({} if key is None else {"instanceKey": key})
        found: list[dict[str, Any]] = self.admin(**asked)["patches"]
        return found
