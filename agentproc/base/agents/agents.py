"""`agents__*`: asks other agents of the swarm.

It computes nothing. It runs in the process of the agent that calls it, because that process owns the link, the ids and
the conversation that a resumed turn needs (docs/decisions/051).
"""

from __future__ import annotations

from typing import Any, Final

from goondan.agentproc.calls.swarm import Handler, Swarm
from goondan.agentproc.machine.questions import Question


async def request(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """Have another agent run a turn and return its answer. With `async` the answer comes later, as a message; so does
    one that does not come within `timeoutMs`.
    """
    later = bool(args.get("async"))
    timeout_ms = args.get("timeoutMs", None if later else swarm.patience_ms)
    question = Question(
        op="request",
        name=name,
        target=args["target"],
        input=args["input"],
        instance_key=args.get("instanceKey"),
        event_type=args.get("eventType"),
        timeout_ms=None if timeout_ms is None else int(timeout_ms),
        metadata=args.get("metadata"),
        asynchronous=later,
        goes_on=swarm.hears_later,
    )
    return await (swarm.start(question) if later else swarm.request(question))


async def send(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """Have another agent run a turn, and do not wait for an answer."""
    return await swarm.send(
        Question(
            op="send",
            name=name,
            target=args["target"],
            input=args["input"],
            instance_key=args.get("instanceKey"),
            event_type=args.get("eventType"),
            metadata=args.get("metadata"),
        )
    )


async def spawn(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """Start the process of an instance."""
    return await swarm.spawn(name, args["target"], args.get("instanceKey"), args.get("cwd"))


async def list_instances(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """The instances that the caller has spawned, or all instances."""
    return await swarm.list(bool(args.get("includeAll")))


async def catalog(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """The agents of the swarm."""
    return await swarm.catalog()


handlers: Final[dict[str, Handler]] = {
    "request": request,
    "send": send,
    "spawn": spawn,
    "list": list_instances,
    "catalog": catalog,
}
