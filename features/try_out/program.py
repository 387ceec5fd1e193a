"""`python -m goondan.features.try_out.program`: one extension in an agent without a bus, for `gdn extension test`.

The extension is loaded as an agent loads it. One turn passes through it: a step with a tool call that is answered here,
and a step with the answer. The model is a script, so no server is asked. The result is one JSON document on the output:
{status, code?, message?, suggestion?, middleware: {kind: number}, points, tools, seconds}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.extensions.points.pipeline import KINDS, POINTS
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, TextDelta
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle import address, launch
from goondan.schemas.system.secrecy import close_memory
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, ToolResult

#: The tool that the turn calls: it is answered in this process.
TRIAL: Final = launch.CatalogItem(name="trial__ping", description="Answers pong.")
ANSWER: Final = "This is the end of the trial."
#: How long the turn may take (seconds). It is longer than a layer's limit, so a slow layer is named in the error.
TURN_S: Final = 70.0


class NoBus:
    """A link to nobody. Tool calls are answered; questions to others are refused."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._counter = 0

    def start_call(self, frame: Frame, done: Callable[[Frame | None, errors.GoondanError | None], None]) -> None:
        """Answer every call."""
        self._name(frame)
        result = Frame(
            "tool.result",
            call_id=frame.call_id,
            payload=codec.to_raw(ToolResult(status="ok", output=codec.to_raw("pong"))),
        )
        asyncio.get_running_loop().call_soon(done, result, None)

    def send(self, frame: Frame) -> bool:
        """Drop the frame."""
        self._name(frame)
        return True

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        """Accept every frame, and keep the turn's answer."""
        self._name(frame)
        if frame.stage in ("done", "failed"):
            answer = codec.from_raw(frame.payload, AgentEvent).answer
            if answer is not None:
                self.answers.append(answer)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        future.set_result(Frame("ack", stage="accepted", in_reply_to=frame.id))
        return future

    def ask(self, frame: Frame, patience_s: float | None = None) -> asyncio.Future[Frame]:
        """Refuse: there is no kernel to answer."""
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        message = f"{frame.type}: there is no kernel in a trial"
        future.set_exception(errors.fail("E_CONFIG_UNSUPPORTED", message, suggestion="Try it in a running swarm."))
        return future

    def forget(self, frame_id: str) -> None:
        """Nothing is open."""

    def _name(self, frame: Frame) -> None:
        self._counter += 1
        frame.id = frame.id or f"trial.{self._counter}"


class Script:
    """A model that calls the trial's tool and then answers. A question of an extension gets the same answer."""

    needs_history = True

    def __init__(self) -> None:
        self._called = False

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """See Provider."""
        if request.tools and not self._called:
            self._called = True
            return ModelAnswer(calls=[AskedCall("trial", TRIAL.name, {})], finish_reason="tool-calls")
        return ModelAnswer(text=ANSWER, finish_reason="stop")

    async def window(self, request: ModelRequest) -> None:
        """It has no context."""

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


async def trial(spec: launch.AgentSpec) -> dict[str, Any]:
    """Load the agent's extensions and run one turn through them. Raises GoondanError when an extension cannot be
    loaded.
    """
    link = NoBus()
    store = ConversationStore(address.instance_dir(spec.state_dir, spec.name, "trial"), durability="process")
    instance = Instance(spec, "trial", link, store, provider=Script())
    runner = TurnRunner(instance)
    try:
        await runner.load_extensions()
        found = registered(instance)
        event = AgentEvent(id="trial", type="client.message", created_at=instance.clock(), input="hello")
        frame = Frame("event", id="e", event_id="trial", epoch=1, payload=codec.to_raw(event))
        async with asyncio.timeout(TURN_S):
            await runner.run(frame)
    finally:
        await runner.close()
    answer = link.answers[-1] if link.answers else None
    if answer is None:
        return {"status": "failed", "code": "E_INTERNAL", "message": "the turn has no answer", **found}
    if answer.error is not None:
        error = answer.error
        told = {"code": error.code, "message": error.message, "suggestion": error.suggestion}
        return {"status": "failed", **told, **found}
    return {"status": "passed", **found}


def registered(instance: Instance) -> dict[str, Any]:
    """The registrations of the extensions."""
    layers = {kind: list(instance.pipeline.at(kind)) for kind in KINDS}
    before = [layer.point for found in layers.values() for layer in found if layer.point is not None]
    return {
        "middleware": {
            kind: count for kind, found in layers.items() if (count := sum(layer.point is None for layer in found))
        },
        "points": [point for point in POINTS if point in before or instance.pipeline.at(point)],
        "tools": [name for name in instance.tools.names if "." not in name],
    }


def run() -> int:
    """Read the specification from a descriptor, and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m goondan.features.try_out.program", description="One extension in an agent alone."
    )
    parser.add_argument("--spec-fd", type=int, required=True, help="descriptor to read the agent's specification from")
    close_memory()
    with open(parser.parse_args().spec_fd, "rb") as source:
        spec = msgspec.msgpack.decode(source.read(), type=launch.AgentSpec)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    out, sys.stdout = sys.stdout, sys.stderr  # what an extension prints is not part of the result
    began = time.monotonic()
    try:
        result = asyncio.run(trial(spec))
    except errors.GoondanError as error:
        info = error.info
        result = {"status": "failed", "code": info.code, "message": info.message, "suggestion": info.suggestion}
    except TimeoutError:
        result = {"status": "failed", "code": "E_AGENT_TIMEOUT", "message": f"the turn took longer than {TURN_S:g} s"}
    result["seconds"] = round(time.monotonic() - began, 3)
    out.write(json.dumps(result))
    out.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
