"""Routes from rows (kernel/cli/operations.py): a request is read within bounds, and every value of it is checked
against a struct of its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from inspect import iscoroutinefunction
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from goondan.features.serve.api.gate import MAX_BODY, Exchange, Way, refused
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli import operations
from goondan.kernel.cli.operations import PREFIX, Operation
from goondan.schemas.wire.errors import fail

JSON: Final = "application/json"
_TYPE: Final = JSON.encode()

_S = TypeVar("_S", bound=Struct)

#: A request, as a handler gets it that uses this door's swarm.
Asked: TypeAlias = operations.Asked[Swarm]


def ways(doors: Iterable[Any], swarm: Swarm) -> list[Way]:
    """The ways of these doors."""
    every = [one for door in doors for one in door.routes(swarm)]
    return [way(one, swarm) if isinstance(one, Operation) else one for one in every]


def way(operation: Operation, swarm: Swarm) -> Way:
    """The way of a row. What OpenAPI says is of those below PREFIX."""
    endpoint = _Endpoint(operation, iscoroutinefunction(operation.handler), swarm)
    path, role, limit = operation.prefix + operation.path, operation.role, operation.max_body or MAX_BODY
    made = Way(path, endpoint, [operation.method], role=role, max_body=limit)
    made.is_direct = True
    made.operation = operation._asdict() if operation.prefix == PREFIX else {}
    return made


class _Endpoint(Struct, frozen=True):
    """What answers an exchange as a row says."""

    #: The row.
    operation: Operation
    #: Its handler is a coroutine function.
    waits: bool
    #: The kernel behind the door.
    swarm: Swarm

    async def __call__(self, exchange: Exchange) -> None:
        operation, head, scope = self.operation, exchange.head, exchange.scope
        assert head is not None
        query = None if operation.query is None else _query(operation.query, Request(scope))
        body = None
        if operation.body is not None:
            kind = head.headers.get(b"content-type", b"")
            # A page of a stranger cannot say this type without being asked for leave.
            if kind != _TYPE and kind.partition(b";")[0].strip().lower() != _TYPE:
                raise refused(415, f"a body is {JSON}, and its head says so")
            body = _decoded(operation.body, await exchange.read())
        asked = operations.Asked(head.caller, self.swarm, scope["path_params"], query, body, head.headers, head.digest)
        handler = operation.handler
        answer = await (handler(asked) if self.waits else asyncio.to_thread(handler, asked))
        if isinstance(answer, Response):
            await answer(scope, exchange.receive, exchange.answer)
        else:
            await exchange.write(msgspec.json.encode(answer))


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, JSON)


def _query(struct: type[_S], request: Request) -> _S:
    pairs = request.query_params.multi_items()
    found = dict(pairs)
    if len(found) != len(pairs):
        raise fail("E_USAGE", "a parameter of the query is given twice", suggestion=_SEE)
    try:
        return msgspec.convert(found, struct, strict=False)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise fail("E_USAGE", f"the query is not valid: {error}", suggestion=_SEE) from None


def _decoded(struct: type[_S], data: bytearray) -> _S:
    try:
        return msgspec.json.decode(data, type=struct)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise fail("E_USAGE", f"the body is not valid: {error}", suggestion=_SEE) from None


_SEE: Final = f"{PREFIX}/openapi.json says what is taken."
