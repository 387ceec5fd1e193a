"""Payloads of the frames about gates: who may ask a model server, and when (PROTOCOL-AGENTS.md, "Gates").

An agent names a model by the name of its Model document; "" stands for its own model. So it can only name the gates of
its own models. Which gate that is, the broker knows from the endpoint and the key.

Source: docs/design/turns.md section 13; docs/decisions/107.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final

from msgspec import Meta, Struct

from goondan.schemas.models.server_answers import Amount, RateLimits

#: The name of the feature.
FEATURE: Final = "gates"
#: The types of its frames.
FRAMES: Final = ("model.permit", "model.over", "model.out", "model.gate", "model.line")
#: Characters of an id that an agent gives a request, and of the name of a document.
MAX_PERMIT_ID: Final = 64
MAX_DOCUMENT: Final = 128
#: Characters of a state that an agent keeps for the broker.
MAX_STATE: Final = 512

_Id = Annotated[str, Meta(min_length=1, max_length=MAX_PERMIT_ID)]
_Document = Annotated[str, Meta(max_length=MAX_DOCUMENT)]
_State = Annotated[str, Meta(max_length=MAX_STATE)]


class Refused(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The server has refused a request because too much is asked of it."""

    #: How long it asks to wait (milliseconds); None: it does not say.
    wait_ms: Amount | None = None


class PermitAsk(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `model.permit`: a request wants to go out. With `refused` it was out, and wants to go out again."""

    #: Names the request. A repeat with the same id is the same request.
    id: _Id
    #: The name of its Model document.
    model: _Document = ""
    #: The tokens that it will read, as far as is known.
    tokens: Amount = 0
    #: When it began to wait (CLOCK_BOOTTIME, milliseconds). A broker that has just started believes it.
    asked_ms: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    #: How long it waits for a server that refuses everybody (milliseconds).
    patience_ms: Amount = 60_000
    #: The server has refused it.
    refused: Refused | None = None


class PermitGranted(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `reply` to `model.permit`: the request may go out."""

    #: Nothing limits the gate: the next requests need not ask.
    open: bool = False
    #: What the agent gives back in `hello`, for a broker that takes this one's place.
    state: _State = ""
    #: Whether requests of other agents waited or were out when it came. If not, only the server's limit held it back.
    others: bool = False


class PermitOver(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `model.over`: a request is over, or was given up. Nobody answers it."""

    #: Names the request.
    id: _Id
    #: The name of its Model document.
    model: _Document = ""
    #: Whether the server has answered it.
    accepted: bool = False
    #: The tokens that it has used; None: not known.
    tokens: Amount | None = None
    #: What the server said of its limits.
    limits: RateLimits | None = None


class GateChanged(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `model.gate`, to every agent that asks this server: whether its requests have to ask from now on.
    Requests that are out are named by `model.out` then.
    """

    #: The name of the Model document.
    model: _Document = ""
    #: Whether something limits the gate.
    limited: bool = False


class HeldPermit(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A request that is out: in `hello`, and payload of `model.out`."""

    #: Names the request.
    id: _Id
    #: The name of its Model document.
    model: _Document = ""
    #: For how long it is out (milliseconds).
    out_ms: Amount = 0


class KeptState(Struct, frozen=True, rename="camel", omit_defaults=True):
    """In `hello`: the last state of a gate that the agent was given."""

    #: The name of the Model document.
    model: _Document
    #: The state.
    state: _State


class PlaceInLine(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `model.line`, for an agent whose asker listens: a request waits. It may be lost."""

    #: Names the request.
    id: _Id
    #: How many go out before it.
    before: Amount = 0
    #: For how long nobody goes out, as far as is known (milliseconds).
    held_ms: Amount = 0


#: Its payloads, for the exported schema.
EXPORTED: Final = (PermitAsk, PermitGranted, PermitOver, HeldPermit, GateChanged, PlaceInLine, KeptState)
