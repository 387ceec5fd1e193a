"""The agent's side of the gates before model servers: each request asks the broker whether it may go out.

While nothing limits a gate, no request asks: the broker says when that changes. A request that is out then is named by
`model.out`. After a connection was lost, `hello` names those that are out, and gives the broker back what it had said
last about each gate.

Source: docs/design/turns.md section 13; PROTOCOL-AGENTS.md "Gates".
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from msgspec import Struct, structs

from goondan.agentproc.providers import base, faults
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, Ask, OnNews, TakeFrame, TurnCore, TurnPart
from goondan.features.gates import wire
from goondan.features.gates.wire import FEATURE as FEATURE_NAME
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec
from goondan.schemas.models import model_providers, server_answers
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import Frame, Welcome

#: Bytes of a request for one token that the model reads, about.
BYTES_PER_TOKEN: Final = 4


_BOOT_TIME: Final = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class ModelGates(AgentFeature):
    """The gates of one agent process. `clock` is CLOCK_BOOTTIME in seconds, the broker's own."""

    name = FEATURE_NAME

    def __init__(self, instance: Instance, clock: Callable[[], float] = _BOOT_TIME) -> None:
        super().__init__(instance)
        self.clock = clock
        #: The names of the models whose requests have to ask.
        self.limited: set[str] = set()
        #: What the broker gets back in `hello`, by the name of the model.
        self.states: dict[str, str] = {}
        #: The requests that are out.
        self.out: set[GatedRequest] = set()
        #: The requests that wait, by their ids.
        self.waiting: dict[str, GatedRequest] = {}

    @property
    def takes(self) -> Mapping[str, TakeFrame]:
        """See AgentFeature."""
        return {"model.gate": self.changed, "model.line": self.placed}

    def welcomed(self, welcome: Welcome) -> None:
        """The broker names the models whose requests have to ask."""
        self.limited = set(welcome.limited)

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether the agent asks a server: a provider without one needs no gate."""
        return not model_providers.BY_NAME.keys().isdisjoint([model.provider for model in spec.models])

    def begin(self, turn: TurnCore) -> TurnPart:
        """See AgentFeature."""
        return TurnGates(self, turn.event.event_id or "", turn.event.epoch or 0, turn.live.in_line)

    def opened(self, model: str) -> None:
        """Requests to this model need not ask any more."""
        self.limited.discard(model)

    def changed(self, frame: Frame) -> None:
        """`model.gate`. Raises GoondanError E_FRAME_INVALID."""
        said = codec.from_raw(frame.payload, wire.GateChanged)
        if not said.limited:
            self.opened(said.model)
            return
        self.limited.add(said.model)
        for request in list(self.out):
            if request.model == said.model and not request.known:
                request.tell_out()

    def placed(self, frame: Frame) -> None:
        """`model.line`. Raises GoondanError E_FRAME_INVALID."""
        said = codec.from_raw(frame.payload, wire.PlaceInLine)
        request = self.waiting.get(said.id)
        if request is not None:
            request.turn.on_place(said.before, said.held_ms)

    def held(self) -> Mapping[str, Any]:
        """The requests that are out, and what the broker had said last about each gate."""
        for request in self.out:
            request.known = True
        permits = [request.held() for request in self.out if request.model in self.limited]
        states = [wire.KeptState(model, state) for model, state in self.states.items()]
        return {"permits": permits, "gates": states}


class TurnGates(TurnPart):
    """The gates of one turn's requests."""

    def __init__(self, gates: ModelGates, event_id: str, epoch: int, on_place: Callable[[int, int], None]) -> None:
        self.gates = gates
        self.event_id = event_id
        self.epoch = epoch
        self.on_place = on_place

    def model(self, request: base.ModelRequest, on_news: OnNews, ask: Ask) -> Awaitable[base.ModelAnswer]:
        """Give each request its way out."""
        if request.model.provider in model_providers.BY_NAME:
            request = structs.replace(request, permit=GatedRequest(self, request.model))
        return ask(request, on_news)


class GatedRequest(Struct, eq=False):
    """One request of a turn to a model: it enters, and then it is either refused, and enters again, or over."""

    #: The gates of its turn.
    turn: TurnGates
    #: The model.
    spec: ModelSpec
    #: Its id, once somebody is told it.
    _id: str = ""
    #: Whether the broker knows that it is out.
    known: bool = False
    #: What the server has said when it refused it, for the broker.
    refusal: wire.Refused | None = None
    #: When it asked for its permit first (seconds).
    asked_at: float | None = None
    #: When it went out last (seconds).
    out_at: float = 0.0

    @property
    def id(self) -> str:
        """Names it."""
        self._id = self._id or os.urandom(8).hex()
        return self._id

    @property
    def model(self) -> str:
        """The document of the model."""
        return self.spec.document

    def passes(self) -> bool:
        """Let it out, if nothing limits its model. Whether it is out."""
        gates = self.turn.gates
        if self.refusal is not None or self.spec.document in gates.limited:
            return False
        self.out_at = gates.clock()
        gates.out.add(self)
        return True

    async def enter(self, size: int, on_news: Callable[[base.ModelNews], None]) -> None:
        """Wait until the request may go out. `size` is that of its body (bytes). Raises Fault when the server has
        refused everybody for too long, and GoondanError for any other refusal of the broker.
        """
        if not self.passes():
            await self._ask(size, on_news)
            self.out_at = self.turn.gates.clock()
            self.turn.gates.out.add(self)

    async def _ask(self, size: int, on_news: Callable[[base.ModelNews], None]) -> None:
        gates = self.turn.gates
        on_news("queued")
        now = gates.clock()
        self.asked_at = now if self.asked_at is None else self.asked_at
        ask = wire.PermitAsk(
            self.id,
            self.model,
            min(size // BYTES_PER_TOKEN, server_answers.MAX_NAMED),
            round(self.asked_at * 1000),
            min(round(self.spec.retry.busy_s * 1000), server_answers.MAX_NAMED),
            self.refusal,
        )
        frame = self._frame("model.permit", ask)
        gates.waiting[self.id] = self
        future = gates.instance.link.post(frame)
        try:
            granted = codec.from_raw((await future).payload, wire.PermitGranted)
        except errors.GoondanError as error:
            if error.info.code == "E_MODEL_FAILED":
                raise faults.Fault("final", error.info.message) from None
            raise
        except asyncio.CancelledError:
            gates.instance.link.forget(frame.id)
            self._tell_over()  # it may have been granted meanwhile
            raise
        finally:
            del gates.waiting[self.id]
        self.refusal = None
        if not granted.others:
            on_news("held")
        if granted.open:
            gates.opened(self.model)
        elif granted.state:
            gates.states[self.model] = granted.state
        self.known = not granted.open

    def refused(self, wait_s: float | None) -> None:
        """The server has refused the request because too much is asked of it. `wait_s` is the wait that it asks for."""
        self.turn.gates.out.discard(self)
        self.refusal = wire.Refused(None if wait_s is None else min(round(wait_s * 1000), server_answers.MAX_NAMED))

    def over(self, headers: dict[str, str] | None, *, accepted: bool, tokens: int | None = None) -> None:
        """The request is over. `headers` are those of its last answer. `accepted`: the server has answered it."""
        if self not in self.turn.gates.out:
            return
        self.turn.gates.out.remove(self)
        limits, low = None, False
        if headers is not None and not faults.REMAINING.isdisjoint(headers):
            limits, low = faults.rate_limits(headers, time.time()), faults.is_low(headers)
        if self.known or (limits is not None and low):
            self._tell_over(wire.PermitOver(self.id, self.model, accepted, tokens, limits))

    def held(self) -> wire.HeldPermit:
        """The request, for the broker."""
        out_ms = round((self.turn.gates.clock() - self.out_at) * 1000)
        return wire.HeldPermit(self.id, self.model, max(0, min(out_ms, server_answers.MAX_NAMED)))

    def tell_out(self) -> None:
        """Tell the broker that the request is out."""
        self.known = self.turn.gates.instance.link.send(self._frame("model.out", self.held()))

    def _tell_over(self, said: wire.PermitOver | None = None) -> None:
        self.turn.gates.instance.link.send(self._frame("model.over", said or wire.PermitOver(self.id, self.model)))

    def _frame(self, kind: str, payload: wire.PermitAsk | wire.PermitOver | wire.HeldPermit) -> Frame:
        return Frame(kind, event_id=self.turn.event_id, epoch=self.turn.epoch, payload=codec.to_raw(payload))


FEATURE: Final = ModelGates
