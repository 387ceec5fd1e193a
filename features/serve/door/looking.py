"""What there is: agents, instances, conversations, traces, receipts, processes. Files are read in a thread, also while
no kernel runs.

A caller is shown what is of its agents. Of a trace, the turns of other agents are left out, with all that hangs on
them.

Source: docs/traces.md; docs/design/traces.md; docs/design/commands.md section 8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, structs

from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.swarm import AgentRow, Swarm
from goondan.kernel.cli.attach import by_hand
from goondan.kernel.cli.commands.instances import instance_document, instance_rows
from goondan.kernel.cli.commands.processes import RESTART_S, external
from goondan.kernel.cli.commands.traces import find_trace
from goondan.kernel.cli.operations import Operation
from goondan.kernel.supervisor_client import ProcessInfo, ask_supervisor, memory_of
from goondan.kernel.traces.conversations import page
from goondan.kernel.traces.rules.tree import TraceTree, calls_of, total_of
from goondan.kernel.traces.rules.turn import ToolCall, Trace
from goondan.kernel.traces.search import brief_turns, running_since
from goondan.schemas.system import trace_index
from goondan.schemas.wire.errors import fail

#: Turns that are looked at for one page of traces: half a second of processor time.
MAX_LOOKED: Final = 500
#: So many turns, those that began last, can be found by a filter.
MAX_LISTED: Final = 4096
#: The rows of a page by default, and at most.
PAGE: Final = 20
MAX_PAGE: Final = 200

_Number = Annotated[int, Meta(ge=1, le=MAX_PAGE)]
#: What SQLite can have.
_Place = Annotated[int, Meta(ge=0, lt=1 << 62)]
#: Whether a caller may see what is of an agent.
Shown = Callable[[str], bool]


class OfAgent(Struct, forbid_unknown_fields=True):
    """Of which agent."""

    #: The agent. None: of all.
    agent: str | None = None


class OfInstance(Struct, forbid_unknown_fields=True):
    """Of which instance."""

    #: Its key.
    instance: str = "default"


class Messages(OfInstance, forbid_unknown_fields=True):
    """A page of a conversation."""

    #: The messages before this place, which the page behind it names. None: the last ones.
    before: _Place | None = None
    #: How many.
    limit: _Number = 50


class Traces(Struct, forbid_unknown_fields=True, rename="camel"):
    """Which turns."""

    #: Of this agent.
    agent: str | None = None
    #: Of instances with this key.
    instance: str | None = None
    #: In this state: `running`, `completed`, `failed`, `abandoned`, `interrupted`.
    state: str | None = None
    #: With a call of this tool; `*` and `?` stand for characters.
    tool: str | None = None
    #: With this code as the error of the turn or of a call.
    error: str | None = None
    #: That cost so much at least, in the currency of the model's price.
    min_cost: Annotated[float, Meta(ge=0)] | None = None
    #: With these words in the message, in the arguments, the output or the error of a call.
    text: str | None = None
    #: Those before this place, which the page before has named.
    before: str | None = None
    #: How many.
    limit: _Number = PAGE


async def agents(asked: Asked) -> list[AgentRow]:
    """The agents that the caller may speak to."""
    return [row for row in await asked.swarm.agents() if asked.caller.may_speak_to(row.agent)]


def instances(asked: Asked) -> list[dict[str, Any]]:
    """The instances."""
    rows = instance_rows(asked.swarm.place, asked.query.agent)
    return [row for row in rows if asked.caller.may_speak_to(row["agent"])]


def instance(asked: Asked) -> dict[str, Any]:
    """One instance."""
    return instance_document(asked.swarm.place, asked.agent, asked.query.instance)


async def conversation(asked: Asked) -> dict[str, Any]:
    """A page of a conversation."""
    (agent, key), query = asked.place, asked.query
    generation = await asked.swarm.generation(agent)
    state_dir = asked.swarm.state_dir
    messages, before = await asyncio.to_thread(page, state_dir, agent, key, generation, query.before, query.limit)
    return {"agent": agent, "instanceKey": key, "messages": messages, "before": before}


def traces(asked: Asked) -> dict[str, Any]:
    """A page of turns without their steps, the one that began last first, and the place where the next page begins;
    None: there is none.
    """
    state_dir, wanted, shown = asked.swarm.state_dir, asked.query, asked.caller.may_speak_to
    rows = trace_index.last(state_dir, MAX_LISTED, wanted.agent, wanted.instance)
    places = sorted(((f"{row.at}_{row.turn_id}", row) for row in rows if shown(row.agent)), reverse=True)
    since, found, before, looked = running_since(state_dir), list[Trace](), None, 0
    for place, row in places:
        if wanted.before is not None and place >= wanted.before:
            continue
        if len(found) == wanted.limit or looked == MAX_LOOKED:
            return {"traces": found, "before": before}
        before, looked = place, looked + 1
        found += brief_turns(state_dir, row, since, lambda turn: is_wanted(turn, wanted))
    return {"traces": found, "before": None}


def is_wanted(turn: Trace, wanted: Traces) -> bool:
    """Whether a turn passes the filters (pure)."""
    calls, words = turn.tools, wanted.text
    return (
        wanted.state in (None, turn.status)
        and (wanted.tool is None or any(fnmatchcase(call.tool_name, wanted.tool) for call in calls))
        and (wanted.error is None or wanted.error in _codes(turn))
        and (wanted.min_cost is None or any(cost >= wanted.min_cost for cost in total_of(turn).costs.values()))
        and (words is None or any(words.casefold() in text.casefold() for text in _texts(turn)))
    )


def _codes(turn: Trace) -> Iterator[str | None]:
    yield None if turn.error is None else turn.error.code
    for step in turn.steps:
        yield None if step.model is None else step.model.code
    yield from (call.code for call in turn.tools)


def _texts(turn: Trace) -> Iterator[str]:
    told = [turn.message, *(text for call in turn.tools for text in (call.args, call.output, call.message))]
    yield from (text for text in told if text)


def trace(asked: Asked) -> Trace | TraceTree:
    """A turn, or a whole trace, as `gdn trace --json` prints it."""
    name, shown = asked.path["id"], asked.caller.may_speak_to
    found = find_trace(asked.swarm.state_dir, name, None, None, False, False)
    if isinstance(found, TraceTree):
        found.turns = _only(found.turns, shown)
    elif not shown(found.agent):
        found = structs.replace(found, turns=[])
    else:
        _prune(found, shown)
    if not (found.turns if isinstance(found, TraceTree) else shown(found.agent)):
        raise fail("E_TURN_NOT_FOUND", f"no turn {name[:100]} of an agent of this token")
    found.total = total_of(found)
    return found


def _only(turns: list[Trace], shown: Shown) -> list[Trace]:
    return [_prune(turn, shown) for turn in turns if shown(turn.agent)]


def _prune(turn: Trace, shown: Shown) -> Trace:
    """Leave out what hangs on a turn and is not shown."""
    turn.turns = _only(turn.turns, shown)
    for call in turn.tools:
        call.turns = _only(call.turns, shown)
    return turn


def receipts(asked: Asked) -> list[dict[str, Any]]:
    """What the tool host observed of the calls of a trace."""
    return [_receipt(call) for call in calls_of(trace(asked)) if call.receipt is not None]


def _receipt(call: ToolCall) -> dict[str, Any]:
    told = {"toolCallId": call.tool_call_id, "toolName": call.tool_name, "status": call.status}
    return {**told, "startedAt": call.started_at, "receipt": call.receipt}


def processes(asked: Asked) -> list[ProcessInfo]:
    """The processes of the kernel, and those of the caller's agents."""
    rows, may = _processes(asked.swarm), asked.caller.may_speak_to
    everything = "*" in asked.caller.agents  # what has an instance and is no agent does not say whose it is
    return [one for one in rows if everything or (may(one.name) if one.role == "agent" else one.instance_key is None)]


def _processes(swarm: Swarm) -> list[ProcessInfo]:
    reply = ask_supervisor(swarm.state_dir, "ps")
    if reply is not None:
        return [structs.replace(row, memory=memory_of(row.pid)) for row in reply.processes or ()]
    broker = by_hand(swarm.place)
    return [] if broker is None else external(broker)


def restart(asked: Asked) -> dict[str, Any]:
    """Restart the processes of an agent."""
    agent, state_dir = asked.agent, asked.swarm.state_dir
    why = f"the token {asked.caller.name} of the door"
    reply = ask_supervisor(state_dir, "restart", RESTART_S, reason=why, agent=agent)
    if reply is None:
        raise fail("E_KERNEL_NOT_RUNNING", "no kernel with a supervisor runs the bundle of this door")
    return {"restarted": "agent", "agent": agent, "processes": reply.restarted or 0}


_AGENT: Final = "/agents/{agent}"
_CONVERSATION: Final = "/agents/{agent}/conversation"
_INSTANCE: Final = "One: its conversation in numbers, its process, its last turn, and the messages that wait for it."
OPERATIONS: Final = (
    Operation("listAgents", "GET", "/agents", "look", "The agents.", agents, list[AgentRow]),
    Operation("listInstances", "GET", "/instances", "look", "The last used first.", instances, query=OfAgent),
    Operation("getInstance", "GET", f"{_AGENT}/instance", "look", _INSTANCE, instance, query=OfInstance),
    Operation("getConversation", "GET", _CONVERSATION, "look", "Its messages.", conversation, query=Messages),
    Operation("listTraces", "GET", "/traces", "look", "Turns, the last begun first.", traces, query=Traces),
    Operation("getTrace", "GET", "/traces/{id}", "look", "A turn, or a whole trace.", trace, (Trace, TraceTree)),
    Operation("getReceipts", "GET", "/traces/{id}/receipts", "look", "What was seen of its jails.", receipts),
    Operation("listProcesses", "GET", "/processes", "look", "As gdn ps.", processes, list[ProcessInfo]),
    Operation("restartAgent", "POST", f"{_AGENT}/restart", "operate", "Restart its processes.", restart),
)
