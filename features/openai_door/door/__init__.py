"""`/v1/chat/completions`, `/v1/responses` and `/v1/models`: an agent is a model.

What requests mean and what answers look like is in `rules`, which conversation a request goes on with in turns.py. Here
is what HTTP has to do with it: routes, streams, clients that leave.

Source: https://platform.openai.com/docs/api-reference; docs/design/features.md section 1.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from goondan.features.openai_door.door.agents import Listed
from goondan.features.openai_door.door.known import Begun, Known
from goondan.features.openai_door.door.known import Response as Kept
from goondan.features.openai_door.door.rules import chat, faults, requests, responses
from goondan.features.openai_door.door.rules.faults import Fault, RefusedError, refused
from goondan.features.openai_door.door.rules.parameters import check_format
from goondan.features.openai_door.door.rules.requests import Asked
from goondan.features.openai_door.door.turns import Turns, Underway, instance_of_user
from goondan.features.serve.api import Caller, Swarm, Way
from goondan.schemas.bundle.address import MAX_INSTANCE_KEY, is_instance_key
from goondan.schemas.wire import blobs
from goondan.schemas.wire.codec import DECODE_ERRORS
from goondan.schemas.wire.errors import GoondanError

#: The header that names an instance, in requests and in answers.
INSTANCE: Final = "x-goondan-instance"
#: The largest request (bytes): the files of a message as base64, and the history before it.
MAX_BODY: Final = blobs.MAX_MESSAGE_BYTES * 2
#: How long a stream's head waits for the first that there is to send (seconds). Until then an error has a status.
HEAD_S: Final = 2.0
#: After how long without a piece a comment is sent (seconds). Proxies end connections after thirty.
ALIVE_S: Final = 15.0
#: What the owner chooses: `refuse` answers 409 to a history that was edited; else it goes on in a new instance.
EDITED: Final = "GOONDAN_OPENAI_EDITED"


def routes(swarm: Swarm) -> list[BaseRoute]:
    """The routes of the door."""
    door = Door(swarm)
    return [
        Way("/v1/chat/completions", door.complete, ("POST",), role="talk", max_body=MAX_BODY),
        Way("/v1/responses", door.respond, ("POST",), role="talk", max_body=MAX_BODY),
        Way("/v1/responses/{name}", door.response, ("GET", "DELETE"), role="talk"),
        Way("/v1/responses/{name}/cancel", door.cancel, ("POST",), role="talk"),
        Way("/v1/models", door.models, role="look"),
        Way("/v1/models/{name:path}", door.model, role="look"),
        Way("/v1/{rest:path}", door.nothing, ("GET", "POST", "DELETE", "PUT", "PATCH"), role="look"),
    ]


def told(error: GoondanError, status: int) -> Response:
    """An error of the gate, in OpenAI's form."""
    fault = faults.fault_of(error.info)
    return _refusal(msgspec.structs.replace(fault, status=status))


#: Who makes the answers to errors below a path.
FORMS: Final = {"/v1/": told}


def answered(work: Callable[[Door, Request], Coroutine[Any, Any, ASGIApp]]) -> Callable[..., Any]:
    """An endpoint whose errors are answered in OpenAI's form."""

    async def endpoint(door: Door, request: Request) -> ASGIApp:
        try:
            return await work(door, request)
        except RefusedError as error:
            return _refusal(error.fault)
        except GoondanError as error:
            return _refusal(faults.fault_of(error.info))

    return endpoint


class Door:
    """The endpoints."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._listed = Listed(swarm)
        self._known: Known | None = None
        self._turns: Turns | None = None
        #: Responses whose turns run here.
        self._running: dict[str, Underway] = {}

    @property
    def known(self) -> Known:
        """What is known of conversations. Raises GoondanError."""
        if self._known is None:  # not at the start: there may be no kernel yet, and no folder of its state
            self._known = Known(self._swarm.state_dir)
        return self._known

    @property
    def turns(self) -> Turns:
        """The turns. Raises GoondanError."""
        if self._turns is None:
            self._turns = Turns(self._swarm, self.known, refuses=os.environ.get(EDITED) == "refuse")
        return self._turns

    # --- chat completions

    @answered
    async def complete(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        asked = requests.read_chat(await _object(request))
        caller = await self._checked(request, asked, "response_format")
        name = os.urandom(12).hex()
        shape = chat.Completion(f"chatcmpl-{name}", int(time.time()), asked.agent, usage=asked.usage)

        def last(turn: Underway) -> bytes:
            return shape.last(turn.answer) if turn.answer is not None else shape.failed(_fault(turn))

        writes = shape if asked.stream else None
        turn = await self.turns.begin(caller, asked, _instance(request, caller, asked), name, writes, last)
        if asked.stream:
            return await self._stream(turn, leaves=True)
        await self._over(turn)
        if turn.answer is None:
            raise RefusedError(_fault(turn))
        return _json(shape.whole(turn.answer), turn)

    # --- responses

    @answered
    async def respond(self, request: Request) -> ASGIApp:
        """POST /v1/responses."""
        asked = requests.read_response(await _object(request))
        caller = await self._checked(request, asked, "text.format")
        name = os.urandom(12).hex()
        shape = responses.Events(responses.begun(f"resp_{name}", int(time.time()), asked))
        begun: list[Kept] = []

        def accepted(at: Begun, turn: Underway) -> None:
            place = at.place
            said = [*asked.said]
            kept = Kept(f"resp_{name}", place.number, place.turns, asked.previous, name, said, shape.response)
            begun.append(kept)
            self._running[kept.name] = turn
            if asked.store:
                self.known.keep(caller.name, kept)

        def last(turn: Underway) -> bytes:
            if turn.answer is not None:
                end = shape.last(turn.answer, int(time.time()))
            else:
                fault = _fault(turn)
                end = shape.failed(fault, cancelled=fault.code == "E_CANCELLED")
            self._running.pop(f"resp_{name}", None)
            if asked.store and self.known.response(caller.name, f"resp_{name}") is not None:  # nobody has deleted it
                with suppress(GoondanError):
                    self.known.keep(caller.name, msgspec.structs.replace(begun[0], response=shape.response))
            return end

        turn = await self.turns.begin(caller, asked, _instance(request, caller, asked), name, shape, last, accepted)
        if asked.stream:
            return await self._stream(turn, leaves=not asked.background)
        if not asked.background:
            await self._over(turn)
        return _json(shape.response, turn)

    @answered
    async def response(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/{id}."""
        caller: Caller = request.state.caller
        name = request.path_params["name"]
        if request.method == "DELETE":
            if not self.known.forget(caller.name, name):
                raise _no_response(name)
            return _json({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream") in ("true", "True", "1"):
            raise refused("A response that was made is not streamed again: ask for it whole.", "stream", "unsupported")
        return _json(await self._current(caller, name))

    @answered
    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel."""
        caller: Caller = request.state.caller
        name = request.path_params["name"]
        now = await self._current(caller, name)
        if now["status"] in responses.OPEN:
            kept = self._kept(caller, name)
            with suppress(GoondanError):
                await self.turns.cancel(kept.event_id)
            if (turn := self._running.get(name)) is not None:
                await turn.over.wait()
            now = await self._current(caller, name)
        return _json(now)

    def _kept(self, caller: Caller, name: str) -> Kept:
        kept = self.known.response(caller.name, name)
        if kept is None:
            raise _no_response(name)
        return kept

    async def _current(self, caller: Caller, name: str) -> dict[str, Any]:
        """A response as it is now, also if the door that began it has ended since."""
        kept = self._kept(caller, name)
        if kept.response["status"] not in responses.OPEN or name in self._running:
            return kept.response
        place = self.known.numbered(kept.number)
        where = (str(kept.response["model"]), "" if place is None else place.instance)
        try:
            answer = await self.turns.answer(kept.event_id, where)
        except GoondanError as error:
            ended = responses.failed(kept.response, faults.fault_of(error.info, begun=True))
        else:
            if answer is None:
                return kept.response
            if answer.error is None:
                ended = responses.ended(kept.response, answer, int(time.time()))
            else:
                fault = faults.fault_of(answer.error, begun=True)
                ended = responses.failed(kept.response, fault, cancelled=fault.code == "E_CANCELLED")
        self.known.keep(caller.name, msgspec.structs.replace(kept, response=ended))
        return ended

    # --- models

    @answered
    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        caller: Caller = request.state.caller
        named = [name for name in await self._listed.agents() if caller.may_speak_to(name)]
        return _json({"object": "list", "data": [_model(name) for name in named]})

    @answered
    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        caller: Caller = request.state.caller
        name = request.path_params["name"]
        if not caller.may_speak_to(name) or name not in await self._listed.agents():
            raise faults.no_model(name)
        return _json(_model(name))

    @answered
    async def nothing(self, request: Request) -> Response:
        """Everything else below /v1."""
        message = (
            f"Unknown request URL: {request.method} {request.url.path[:200]}. Served are /v1/chat/completions, "
            "/v1/responses and /v1/models; the swarm's own API is below /api/v1."
        )
        raise refused(message, code="unknown_url", status=404)

    # --- turns over HTTP

    async def _checked(self, request: Request, asked: Asked, param: str) -> Caller:
        """Who asks. Raises RefusedError for an agent that they may not speak to, or that answers in another form."""
        caller: Caller = request.state.caller
        if not caller.may_speak_to(asked.agent):
            raise faults.no_model(asked.agent)
        if asked.format is not None:
            agents = await self._listed.agents()
            if asked.agent not in agents:
                raise faults.no_model(asked.agent)
            check_format(asked.format, param, agents[asked.agent])
        return caller

    async def _over(self, turn: Underway) -> None:
        """Wait until a turn is over. When its client goes, the request is cancelled, and so is the turn."""
        try:
            await turn.over.wait()
        finally:
            self.turns.leave(turn)

    async def _stream(self, turn: Underway, *, leaves: bool) -> ASGIApp:
        """The stream of a turn. `leaves`: the turn is cancelled when its client goes. Raises RefusedError for one that
        failed at once.
        """
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAD_S):
                    await turn.heard.wait()
        except BaseException:
            if leaves:
                self.turns.leave(turn)
            raise
        if turn.fault is not None and not turn.said:
            raise RefusedError(turn.fault)

        async def sent() -> AsyncIterator[bytes]:
            async for piece in turn.stream(ALIVE_S):
                yield chat.ALIVE if piece is None else piece

        response = StreamingResponse(sent(), headers=_headers(turn), media_type="text/event-stream")
        return _Leaving(response, lambda: self.turns.leave(turn) if leaves else None)


class _Leaving:
    """A response, and what is done when it has been sent, or when its client has gone: perhaps before it began."""

    def __init__(self, response: Response, done: Callable[[], None]) -> None:
        self._response = response
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._done()


async def _object(request: Request) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(await request.body())
    except DECODE_ERRORS:
        given = None
    if not isinstance(given, dict):
        raise refused("The body has to be a JSON object.", code="invalid_json")
    return given


def _instance(request: Request, caller: Caller, asked: Asked) -> str | None:
    """The instance that a request names."""
    named = request.headers.get(INSTANCE)
    if named is None:
        return None if asked.user is None else instance_of_user(caller.name, asked.user)
    if not is_instance_key(named):
        raise refused(f"{INSTANCE} has 1 to {MAX_INSTANCE_KEY} visible characters.", INSTANCE, "invalid_value")
    return named


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "goondan"}


def _fault(turn: Underway) -> Fault:
    assert turn.fault is not None
    return turn.fault


def _no_response(name: str) -> RefusedError:
    return refused(f"Response with id '{name[:64]}' not found.", "response_id", "response_not_found", 404)


def _headers(turn: Underway) -> dict[str, str]:
    """What an answer says of its turn. A key may have any visible characters, a header has those of ASCII."""
    found = {"x-request-id": turn.event_id}
    if turn.route.instance.isascii():
        found[INSTANCE] = turn.route.instance
    return found


def _json(value: Any, turn: Underway | None = None) -> Response:
    return Response(chat.encoded(value), 200, {} if turn is None else _headers(turn), "application/json")


def _refusal(fault: Fault) -> Response:
    return Response(msgspec.json.encode({"error": fault.body}), fault.status, fault.headers, "application/json")
