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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from goondan.features.serve.api.gate import MAX_BODY, WHOLE, Way, refused
from goondan.features.serve.api.rules.heads import Head
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli import operations
from goondan.kernel.cli.operations import PREFIX, Operation
from goondan.schemas.wire.errors import fail

JSON: Final = "application/json"

_S = TypeVar("_S", bound=Struct)

#: A request, as a handler gets it that uses this door's swarm.
Asked: TypeAlias = operations.Asked[Swarm]


def ways(doors: Iterable[Any], swarm: Swarm) -> list[BaseRoute]:
    """The ways of these doors."""
    every = [one for door in doors for one in door.routes(swarm)]
    return [way(one, swarm) if isinstance(one, Operation) else one for one in every]


def way(operation: Operation, swarm: Swarm) -> Way:
    """The way of a row. What OpenAPI says is of those below PREFIX."""
    endpoint = _Endpoint(operation, iscoroutinefunction(operation.handler), swarm)
    path, role, limit = operation.prefix + operation.path, operation.role, operation.max_body or MAX_BODY
    made = Way(path, endpoint, [operation.method], role=role, max_body=limit)
    made.operation = operation._asdict() if operation.prefix == PREFIX else {}
    return made


class _Endpoint(Struct, frozen=True):
    """An ASGI application that answers as a row says. Around a function Starlette would put three more."""

    #: The row.
    operation: Operation
    #: Its handler is a coroutine function.
    waits: bool
    #: The kernel behind the door.
    swarm: Swarm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation, head = self.operation, scope["state"]["head"]
        query = None if operation.query is None else _query(operation.query, Request(scope))
        body = None if operation.body is None else await _body(operation.body, head, receive)
        asked = operations.Asked(head.caller, self.swarm, scope["path_params"], query, body, head.headers, head.digest)
        handler = operation.handler
        answer = await (handler(asked) if self.waits else asyncio.to_thread(handler, asked))
        if isinstance(answer, Response):
            await answer(scope, receive, send)
        else:
            await send({"type": WHOLE, "body": msgspec.json.encode(answer)})


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


async def _body(struct: type[_S], head: Head, receive: Receive) -> _S:
    # A page of a stranger cannot say this type without being asked for leave.
    if head.headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != JSON.encode():
        raise refused(415, f"a body is {JSON}, and its head says so")
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        data += message["body"]
        more = message["more_body"]
    try:
        return msgspec.json.decode(data, type=struct)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise fail("E_USAGE", f"the body is not valid: {error}", suggestion=_SEE) from None


_SEE: Final = f"{PREFIX}/openapi.json says what is taken."
