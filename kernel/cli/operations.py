"""What programs may ask of a swarm over HTTP: a row for each operation. `routes(swarm)` of a feature's `door.py` gives
them; whoever serves HTTP makes ways of them, and describes them.

A request has come in within bounds, by a token with the role that the row says. Each value of it fits the row's struct.

Source: docs/design/features.md section 1; docs/serve.md, "One more door".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.rules.callers import Caller, Role
from goondan.kernel.cli.session import Session

#: Below which path the API is.
PREFIX: Final = "/api/v1"


class Swarm(Protocol):
    """The kernel behind a door, as every feature may use it."""

    #: The state of the bundle's workspace.
    state_dir: str

    async def session(self) -> Session:
        """The open session with the kernel. Raises GoondanError when none runs."""

    async def admin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the broker itself. Raises GoondanError."""


#: The kernel behind a door, as the feature knows it whose handler gets the request.
S = TypeVar("S")


class Asked(Struct, Generic[S], frozen=True):
    """A request, as a handler gets it."""

    #: Who asks.
    caller: Caller
    #: The swarm.
    swarm: S
    #: The parts of the path that have names.
    path: Mapping[str, str]
    #: The query, as the row's struct.
    query: Any
    #: The body, as the row's struct.
    body: Any
    #: What the head says, by names in lower case.
    headers: Mapping[bytes, bytes] = MappingProxyType({})
    #: What a door keeps of the token.
    digest: bytes = b""

    @property
    def agent(self) -> str:
        """The agent that the path names, or else the query. Raises GoondanError E_FORBIDDEN when it is none of the
        caller's.
        """
        agent: str = self.path.get("agent") or self.query.agent
        self.caller.check_agent(agent)
        return agent

    @property
    def place(self) -> tuple[str, str]:
        """That agent, and the instance that the body or the query names. Raises GoondanError: also E_USAGE for what is
        no key of an instance.
        """
        return self.agent, check_instance((self.body or self.query).instance)


class Operation(NamedTuple):
    """One route."""

    #: The name of the operation in OpenAPI.
    name: str
    #: The method of HTTP.
    method: Literal["GET", "POST", "DELETE"]
    #: The path below the prefix, with `{names}`.
    path: str
    #: Who may ask. None: everybody, if its path is plain.
    role: Role | None
    #: What it does, in one sentence.
    summary: str
    #: Makes the answer: a Response of Starlette's, or what is encoded as JSON. One that is no coroutine function is
    #: called in a thread.
    handler: Callable[[Asked[Any]], Any]
    #: The type of the answer, or a tuple of them; None: a JSON value, as the command prints it.
    answer: Any = None
    #: The structs of the query and of the body; None: there is none.
    query: type[Struct] | None = None
    body: type[Struct] | None = None
    #: The longest body (bytes). 0: what a door takes where nothing is said.
    max_body: int = 0
    #: It may answer with a stream of events.
    streams: bool = False
    #: The type of an answer with the status 202.
    later: Any = None
    #: Where it is. Of those below PREFIX OpenAPI tells.
    prefix: str = PREFIX
