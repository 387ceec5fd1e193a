"""What a route of the API is: a row from which the route itself and its description in OpenAPI are made.

A request is read within bounds, and every value of it is checked against a struct. Who asks has a role and agents
(`Caller`), and the row says which role it takes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from goondan.features.serve.api.gate import MAX_BODY, Way, refused
from goondan.features.serve.api.rules.callers import Caller, Role
from goondan.features.serve.api.rules.heads import Head
from goondan.features.serve.api.swarm import Swarm
from goondan.schemas.wire.errors import fail

JSON: Final = "application/json"

_S = TypeVar("_S", bound=Struct)


class Asked(NamedTuple):
    """A request, as a handler gets it."""

    #: Who asks.
    caller: Caller
    #: The swarm.
    swarm: Swarm
    #: The parts of the path that have names.
    path: dict[str, str]
    #: The query, as the row's struct.
    query: Any
    #: The body, as the row's struct.
    body: Any
    #: What the head of the request says.
    head: Head

    @property
    def agent(self) -> str:
        """The agent that the path names. Raises GoondanError E_FORBIDDEN when it is none of the caller's."""
        self.caller.check_agent(self.path["agent"])
        return self.path["agent"]


class Operation(NamedTuple):
    """One route."""

    #: The name of the operation in OpenAPI.
    name: str
    #: The method of HTTP.
    method: Literal["GET", "POST", "DELETE"]
    #: The path below PREFIX, with `{names}`.
    path: str
    #: Who may ask. None: everybody, if its path is plain.
    role: Role | None
    #: What it does, in one sentence.
    summary: str
    #: Makes the answer: a Response, or what is encoded as JSON.
    handler: Callable[[Asked], Awaitable[Any]]
    #: The type of the answer, or a tuple of them; None: a JSON value, as the command prints it.
    answer: Any = None
    #: The structs of the query and of the body; None: there is none.
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    #: The longest body (bytes).
    max_body: int = MAX_BODY
    #: It may answer with a stream of events.
    streams: bool = False
    #: The type of an answer with the status 202.
    later: Any = None


#: Where all of them are.
PREFIX: Final = "/api/v1"


def way(operation: Operation, swarm: Swarm, prefix: str = PREFIX) -> Way:
    """The way of a row. What OpenAPI says is of those below PREFIX."""
    role, limit = operation.role, operation.max_body
    made = Way(prefix + operation.path, _Endpoint(operation, swarm), [operation.method], role=role, max_body=limit)
    made.operation = operation._asdict() if prefix is PREFIX else {}
    return made


class _Endpoint(Struct, frozen=True):
    """An ASGI application that answers as a row says. Around a function Starlette would put three more."""

    #: The row.
    operation: Operation
    #: The kernel behind the door.
    swarm: Swarm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation, head = self.operation, scope["state"]["head"]
        query = None if operation.query is None else _query(operation.query, Request(scope))
        body = None if operation.body is None else await _body(operation.body, head, receive)
        asked = Asked(head.caller, self.swarm, scope["path_params"], query, body, head)
        answer = await operation.handler(asked)
        if isinstance(answer, Response):
            await answer(scope, receive, send)
            return
        data = msgspec.json.encode(answer)  # what is answered most needs no Response
        headers = [(b"content-length", b"%d" % len(data)), (b"content-type", JSON.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})


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
