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
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import structs

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


class ModelGates(AgentFeature):
    """The gates of one agent process. `clock` is CLOCK_BOOTTIME in seconds, the broker's own."""

    name = FEATURE_NAME

    def __init__(
        self, instance: Instance, clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    ) -> None:
        super().__init__(instance)
        self.clock = clock
        #: The names of the models whose requests have to ask.
        self._limited: set[str] = set()
        #: What the broker gets back in `hello`, by the name of the model.
        self.states: dict[str, str] = {}
        #: The requests that are out, by their ids.
        self.out: dict[str, GatedRequest] = {}
        #: The requests that wait, by their ids.
        self.waiting: dict[str, GatedRequest] = {}

    @property
    def takes(self) -> Mapping[str, TakeFrame]:
        """See AgentFeature."""
        return {"model.gate": self.changed, "model.line": self.placed}

    def welcomed(self, welcome: Welcome) -> None:
        """The broker names the models whose requests have to ask."""
        self._limited = set(welcome.limited)

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether the agent asks a server: a provider without one needs no gate."""
        return any(model.provider in model_providers.BY_NAME for model in spec.models)

    def begin(self, turn: TurnCore) -> TurnPart:
        """See AgentFeature."""
        return TurnGates(self, turn.event.event_id or "", turn.event.epoch or 0, turn.live.in_line)

    def is_limited(self, model: str) -> bool:
        """Whether requests to this model have to ask."""
        return model in self._limited

    def opened(self, model: str) -> None:
        """Requests to this model need not ask any more."""
        self._limited.discard(model)

    def changed(self, frame: Frame) -> None:
        """`model.gate`. Raises GoondanError E_FRAME_INVALID."""
        said = codec.from_raw(frame.payload, wire.GateChanged)
        if not said.limited:
            self.opened(said.model)
            return
        self._limited.add(said.model)
        for request in list(self.out.values()):
            if request.model == said.model and not request.known:
                request.tell_out()

    def placed(self, frame: Frame) -> None:
        """`model.line`. Raises GoondanError E_FRAME_INVALID."""
        said = codec.from_raw(frame.payload, wire.PlaceInLine)
        request = self.waiting.get(said.id)
        if request is not None:
            request.on_place(said.before, said.held_ms)

    def held(self) -> Mapping[str, Any]:
        """The requests that are out, and what the broker had said last about each gate."""
        for request in self.out.values():
            request.known = True
        permits = [request.held() for request in self.out.values() if self.is_limited(request.model)]
        states = [wire.KeptState(model, state) for model, state in self.states.items()]
        return {"permits": permits, "gates": states}


class TurnGates(TurnPart):
    """The gates of one turn's requests."""

    def __init__(self, gates: ModelGates, event_id: str, epoch: int, on_place: Callable[[int, int], None]) -> None:
        self._gates = gates
        self._event_id = event_id
        self._epoch = epoch
        self._on_place = on_place

    async def model(self, request: base.ModelRequest, on_news: OnNews, ask: Ask) -> base.ModelAnswer:
        """Give each request its way out."""
        if request.model.provider in model_providers.BY_NAME:
            request = structs.replace(request, permit=self.request(request.model))
        return await ask(request, on_news)

    def request(self, model: ModelSpec) -> GatedRequest:
        """The way of one request to this model."""
        return GatedRequest(self._gates, model, self._event_id, self._epoch, self._on_place)


class GatedRequest:
    """One request: it enters, and then it is either refused, and enters again, or over."""

    def __init__(
        self,
        gates: ModelGates,
        model: ModelSpec,
        event_id: str,
        epoch: int,
        on_place: Callable[[int, int], None],
    ) -> None:
        self.model = model.document
        #: Hears of its place in the line.
        self.on_place = on_place
        #: Whether the broker knows that it is out.
        self.known = False
        self._gates = gates
        self._patience_ms = min(round(model.retry.busy_s * 1000), server_answers.MAX_NAMED)
        self._event_id = event_id
        self._epoch = epoch
        self._id = os.urandom(8).hex()
        self._refused: wire.Refused | None = None
        self._asked_at: float | None = None
        self._out_at = 0.0

    async def enter(self, size: int, on_news: Callable[[base.ModelNews], None]) -> None:
        """Wait until the request may go out. `size` is that of its body (bytes). Raises Fault when the server has
        refused everybody for too long, and GoondanError for any other refusal of the broker.
        """
        gates = self._gates
        if self._refused is not None or gates.is_limited(self.model):
            await self._ask(size, on_news)
        self._out_at = gates.clock()
        gates.out[self._id] = self

    async def _ask(self, size: int, on_news: Callable[[base.ModelNews], None]) -> None:
        gates = self._gates
        on_news("queued")
        now = gates.clock()
        self._asked_at = now if self._asked_at is None else self._asked_at
        ask = wire.PermitAsk(
            self._id,
            self.model,
            min(size // BYTES_PER_TOKEN, server_answers.MAX_NAMED),
            round(self._asked_at * 1000),
            self._patience_ms,
            self._refused,
        )
        frame = self._frame("model.permit", ask)
        gates.waiting[self._id] = self
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
            del gates.waiting[self._id]
        self._refused = None
        if not granted.others:
            on_news("held")
        if granted.open:
            gates.opened(self.model)
        elif granted.state:
            gates.states[self.model] = granted.state
        self.known = not granted.open

    def refused(self, wait_s: float | None) -> None:
        """The server has refused the request because too much is asked of it. `wait_s` is the wait that it asks for."""
        self._gates.out.pop(self._id, None)
        self._refused = wire.Refused(None if wait_s is None else min(round(wait_s * 1000), server_answers.MAX_NAMED))

    def over(self, headers: dict[str, str] | None, *, accepted: bool, tokens: int | None = None) -> None:
        """The request is over. `headers` are those of its last answer. `accepted`: the server has answered it."""
        if self._gates.out.pop(self._id, None) is None:
            return
        limits = None if headers is None else faults.rate_limits(headers, time.time())
        if self.known or (limits is not None and headers is not None and faults.is_low(headers)):
            self._tell_over(wire.PermitOver(self._id, self.model, accepted, tokens, limits))

    def held(self) -> wire.HeldPermit:
        """The request, for the broker."""
        out_ms = round((self._gates.clock() - self._out_at) * 1000)
        return wire.HeldPermit(self._id, self.model, max(0, min(out_ms, server_answers.MAX_NAMED)))

    def tell_out(self) -> None:
        """Tell the broker that the request is out."""
        self.known = self._gates.instance.link.send(self._frame("model.out", self.held()))

    def _tell_over(self, said: wire.PermitOver | None = None) -> None:
        self._gates.instance.link.send(self._frame("model.over", said or wire.PermitOver(self._id, self.model)))

    def _frame(self, kind: str, payload: wire.PermitAsk | wire.PermitOver | wire.HeldPermit) -> Frame:
        return Frame(kind, event_id=self._event_id, epoch=self._epoch, payload=codec.to_raw(payload))


FEATURE: Final = ModelGates
