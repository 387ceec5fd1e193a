"""Questions of operators to the broker: what waits, what was given up, what a person has to decide, what was spent.

Each route is one question (`op`), asked by its name. A kernel that has no feature for it answers E_FEATURE_MISSING.

Source: docs/design/delivery.md section 10; docs/approvals.md; docs/budgets.md; docs/design/commands.md section 8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct

from goondan.features.serve.api.routing import Asked
from goondan.kernel.cli.named_files import with_files
from goondan.kernel.cli.operations import Operation
from goondan.kernel.cli.operator_question import NO_SUCH_QUESTION, check_texts, learning
from goondan.schemas.wire.errors import GoondanError, fail


class Mailbox(Struct, forbid_unknown_fields=True):
    """Whose mailbox."""

    #: The agent.
    agent: str
    #: The instance.
    instance: str = "default"


class OfEvent(Struct, forbid_unknown_fields=True, rename="camel"):
    """Of which message."""

    #: Its id. None: of all.
    event_id: str | None = None


class Items(Struct, forbid_unknown_fields=True):
    """Which calls that a person decides about."""

    #: Also those that are decided, as long as their turns go on.
    all: bool = False
    #: The history of decisions instead.
    answered: bool = False
    #: What is agreed to for always instead.
    always: bool = False


class Decision(Struct, forbid_unknown_fields=True):
    """What a person has decided."""

    #: `yes`, `no`, or with `answer` the answer to a question. `revoke`: a lasting yes, whose
    #: code is the id, is taken back.
    decision: Literal["yes", "no", "answer", "revoke"]
    #: What the person says about it.
    reason: str | None = None
    #: The answer: a JSON value.
    answer: Any = msgspec.UNSET
    #: Of a lasting yes: {} for later calls with the same arguments; {NAME: TEXT} if the argument NAME may be any text
    #: that begins with TEXT.
    always: dict[str, str] | None = None


class Question(NamedTuple):
    """How a route asks the broker."""

    #: The name of the question.
    op: str
    #: The field that the path names.
    field: str = ""
    #: The lists of the answer whose rows each have an agent; other lists are for those who may see all agents. None:
    #: the answer is of one agent.
    rows: tuple[str, ...] | None = None
    #: The question that tells of which agent it is, asked first for a caller who may not see all.
    first: str = ""

    async def ask(self, asked: Asked) -> Any:
        """The broker's answer, as far as it is of agents of the caller. Raises GoondanError."""
        name = {self.field: asked.path["id"]} if self.field else {}
        if self.first and "*" not in asked.caller.agents:  # who may see all is told again what was done
            asked.caller.check_agent((await question(asked, self.first, name))["agent"])
        answer = await question(asked, self.op, {**name, **_fields(asked)})
        if self.rows is None and not self.first:
            asked.caller.check_agent(answer["agent"])
        if self.rows is None or "*" in asked.caller.agents:
            return answer
        kept = {key: value for key, value in answer.items() if key in self.rows or not isinstance(value, list)}
        return kept | {key: [row for row in answer[key] if _is_shown(asked, row)] for key in self.rows if key in answer}


def _fields(asked: Asked) -> dict[str, Any]:
    """The query and the body as fields of the question."""
    if asked.body is not None:
        reason = f"{asked.body.reason or ''} (token {asked.caller.name})".lstrip()
        return {**msgspec.to_builtins(asked.body), "reason": reason}
    given = {} if asked.query is None else msgspec.to_builtins(asked.query)
    return {name: value for name, value in given.items() if value}


def _is_shown(asked: Asked, row: Any) -> bool:
    return all(asked.caller.may_speak_to(agent) for agent in _agents_in(row))


def _agents_in(row: Any) -> Iterable[str]:
    """All agents that a row names."""
    if isinstance(row, list):
        for each in row:
            yield from _agents_in(each)
    elif isinstance(row, dict):
        yield from (row[key] for key in ("agent", "target") if isinstance(row.get(key), str) and row[key])
        yield from row["by"] if isinstance(row.get("by"), dict) else ()
        yield from _agents_in([value for value in row.values() if isinstance(value, dict | list)])


async def question(asked: Asked, op: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Ask the broker. Raises GoondanError E_FEATURE_MISSING when nothing in it answers."""
    check_texts(fields)
    try:
        return await asked.swarm.admin({"op": op, **fields})
    except GoondanError as error:
        if error.info.code == NO_SUCH_QUESTION and error.info.message.startswith("admin knows"):
            raise fail("E_FEATURE_MISSING", f"the kernel that runs has no feature that answers {op}") from None
        raise


async def mailbox(asked: Asked) -> dict[str, Any]:
    """What an instance works on, and what waits for it."""
    agent, key = asked.place
    return await question(asked, "events", {"agent": agent, "instanceKey": key})


async def learned(asked: Asked) -> list[dict[str, Any]]:
    """What parts of the broker have learned, for who may see all: rows, with `about` and, in words, `text`."""
    rows: list[dict[str, Any]] = []
    for one in learning(limits=False) if "*" in asked.caller.agents else ():
        with suppress(GoondanError):  # no kernel runs, or it is without that part
            found = (await asked.swarm.admin({"op": one.op}))[one.op]
            rows += [{**row, "about": one.op, "text": one.line(row)} for row in found]
    return rows


async def approval(asked: Asked) -> dict[str, Any]:
    """One item, and digests of the files that its arguments name (`files`), as `gdn approve show` has them."""
    return await asyncio.to_thread(with_files, await Question("approve.show", "id").ask(asked))


def _row(
    name: str, method: Literal["GET", "POST"], path: str, summary: str, asking: Question, **more: Any
) -> Operation:
    role: Literal["look", "operate"] = "look" if method == "GET" else "operate"
    return Operation(name, method, path, role, summary, asking.ask, **more)


_DEAD: Final = "/dead-letters/{id}"
_WAITS: Final = Question("why", rows=("waits", "stuck", "turns"))
_LETTERS: Final = Question("dead.list", rows=("events",))
_REQUEUE: Final = Question("dead.requeue", "eventId", first="dead.show")
_DROP: Final = Question("dead.drop", "eventId", first="dead.show")
_CALLS: Final = Question("approve.list", rows=("items", "answered", "always"))
_DECIDE: Final = Question("approve.answer", "id", first="approve.show")
_USED: Final = Question("budget", rows=("trees",))
OPERATIONS: Final = (
    Operation("getMailbox", "GET", "/mailbox", "look", "What waits for an instance.", mailbox, query=Mailbox),
    _row("listWaits", "GET", "/waits", "Who works, and who waits for whom.", _WAITS, query=OfEvent),
    _row("listDeadLetters", "GET", "/dead-letters", "Messages given up.", _LETTERS),
    _row("getDeadLetter", "GET", _DEAD, "One, with what it asked.", Question("dead.show", "eventId")),
    _row("requeueDeadLetter", "POST", f"{_DEAD}/requeue", "Send it again, as a new message.", _REQUEUE),
    _row("dropDeadLetter", "POST", f"{_DEAD}/drop", "Forget it.", _DROP),
    _row("listApprovals", "GET", "/approvals", "Calls that wait for a person.", _CALLS, query=Items),
    Operation("getApproval", "GET", "/approvals/{id}", "look", "One, with all arguments.", approval),
    _row("decideApproval", "POST", "/approvals/{id}", "Decide about it.", _DECIDE, body=Decision),
    Operation("listLearned", "GET", "/learned", "look", "What was learned of servers, as gdn ps tells.", learned),
    _row("listBudgets", "GET", "/budgets", "What messages have used of their budgets.", _USED, query=OfEvent),
)
