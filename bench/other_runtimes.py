"""`python -m bench.other_runtimes WHICH ROLE ADDRESS [SECONDS]`: a question and its answer through another runtime.

WHICH is `autogen` (its distributed runtime, over gRPC) or `nats` (requests through its server). ROLE is `host` (AutoGen
only), `echo`, which answers, or `ask`, which prints its figures as JSON. It runs in an environment that has these
packages and not the kernel (bench/others.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from bench.asker import ASKED, TEXT, measure


@dataclass
class Text:
    """A question, and its answer."""

    text: str


async def autogen(role: str, address: str, seconds: float) -> None:
    """Agents of AutoGen, each asked by its key."""
    from autogen_core import AgentId, MessageContext, RoutedAgent, message_handler, try_get_known_serializers_for_type
    from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost

    if role == "host":
        GrpcWorkerAgentRuntimeHost(address=address).start()
        await ready()

    async def answer(self: object, message: Text, ctx: MessageContext) -> Text:
        return message

    answer.__annotations__ = {"message": Text, "ctx": MessageContext, "return": Text}
    echo: Any = type("Echo", (RoutedAgent,), {"answer": message_handler(answer)})
    runtime = GrpcWorkerAgentRuntime(host_address=address)
    runtime.add_message_serializer(try_get_known_serializers_for_type(Text))
    await runtime.start()
    if role == "echo":
        await echo.register(runtime, "echo", lambda: echo("answers"))
        await ready()
    told(await measure(lambda number: runtime.send_message(Text(TEXT), AgentId("echo", f"r{number}")), seconds))


async def nats(role: str, address: str, seconds: float) -> None:
    """A subject for each that is asked."""
    from nats import connect

    client = await connect(address)

    async def answer(message: Any) -> None:
        await message.respond(message.data)

    if role == "echo":
        for number in range(ASKED):
            await client.subscribe(f"r{number}", cb=answer)
        await client.flush()
        await ready()
    text = TEXT.encode()
    told(await measure(lambda number: client.request(f"r{number}", text, timeout=10), seconds))


async def ready() -> None:
    """Say so, and wait to be killed."""
    print("ready", flush=True)
    await asyncio.Event().wait()


def told(figures: dict[str, float]) -> None:
    """Print the figures. These runtimes have threads that do not end by themselves."""
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    which, role, address, *seconds = sys.argv[1:]
    asyncio.run((autogen if which == "autogen" else nats)(role, address, float(seconds[0]) if seconds else 0.0))
