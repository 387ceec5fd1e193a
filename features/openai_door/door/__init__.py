"""`/v1/chat/completions`, `/v1/responses` and `/v1/models`: an agent is a model.

What requests mean and what answers look like is in `rules`, which conversation a request goes on with in turns.py. Here
is what HTTP has to do with it: routes, streams, clients that leave.

Source: https://platform.openai.com/docs/api-reference; docs/design/features.md section 1.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from goondan.features.openai_door.door import known
from goondan.features.openai_door.door.rules import answers, faults, parameters, requests
from goondan.features.openai_door.door.rules.faults import Fault, RefusedError, refused
from goondan.features.openai_door.door.turns import Shape, Turns, Underway, beside, instance_of_user, told_by
from goondan.features.serve.api import Caller, Swarm, Way
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.schemas.wire import blobs
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Answer

#: The header that names an instance, in requests and in answers.
INSTANCE: Final = "x-goondan-instance"
#: The largest request (bytes): the files of a message as base64, and the history before it.
MAX_BODY: Final = blobs.MAX_MESSAGE_BYTES * 2
#: How long a turn that was begun by another door is looked at (seconds): its answer may be there already.
LOOK_S: Final = 1.0
#: What the owner chooses for a history that was edited: `refuse`, with 409; or `fork`, it goes on in a new instance.
EDITED: Final = "GOONDAN_OPENAI_EDITED"
#: The parameters of each door.
TABLES: Final = msgspec.json.decode(
    Path(__file__).with_name("parameters.json").read_bytes(), type=dict[str, dict[str, parameters.Parameter]]
)


def routes(swarm: Swarm) -> list[Way]:
    """The routes of the door. Raises GoondanError E_USAGE for an owner's choice that is none."""
    door = Door(swarm)
    return [
        Way("/v1/chat/completions", door.complete, ("POST",), role="talk", max_body=MAX_BODY),
        Way("/v1/responses", door.respond, ("POST",), role="talk", max_body=MAX_BODY),
        Way("/v1/responses/{name}", door.response, ("GET", "DELETE"), role="talk"),
        Way("/v1/responses/{name}/cancel", door.cancel, ("POST",), role="talk"),
        Way("/v1/models", door.models, role="look"),
        Way("/v1/models/{name:path}", door.models, role="look"),
    ]


def told(error: GoondanError, status: int) -> Response:
    """An error, in OpenAI's form."""
    fault = error.fault if isinstance(error, RefusedError) else faults.fault_of(error.info, status)
    headers, after_ms = {"x-should-retry": "true" if fault.again else "false"}, error.info.retry_after_ms
    if after_ms is not None:
        headers |= {"retry-after": str(-(-after_ms // 1000)), "retry-after-ms": str(after_ms)}
    return Response(answers.encoded({"error": fault.body}), fault.status, headers, "application/json")


#: Who makes the answers to errors below a path.
FORMS: Final = {"/v1/": told}


class Door:
    """The endpoints."""

    def __init__(self, swarm: Swarm) -> None:
        if (edited := os.environ.get(EDITED) or "fork") not in ("fork", "refuse"):
            raise fail("E_USAGE", f"{EDITED} is fork or refuse")
        self._swarm = swarm
        self._known = known.Known(swarm.state_dir)
        self._turns = Turns(swarm, self._known, refuses=edited == "refuse")
        self._running: dict[str, Underway] = {}  # responses whose turns run here, by their ids

    # --- chat completions and responses

    async def complete(self, request: Request) -> Any:
        """POST /v1/chat/completions."""
        body = await request.body()
        asked = await beside(len(body), requests.read, body, TABLES["chat"])
        turn = await self._begin(request, asked, "response_format")
        shape = answers.Completion(f"chatcmpl-{turn.event_id}", int(time.time()), asked)
        if asked.given.get("stream"):
            return self._stream(turn, shape)
        ended = await self._end(turn)
        if isinstance(ended, Fault):
            raise RefusedError(ended)
        return _json(shape.whole(ended), turn)

    async def respond(self, request: Request) -> Any:
        """POST /v1/responses."""
        body = await request.body()
        asked = await beside(len(body), requests.read, body, TABLES["responses"])
        turn = await self._begin(request, asked, "text.format")
        caller, name, place = request.state.caller.name, f"resp_{turn.event_id}", turn.place
        store, background = asked.given.get("store") is not False, bool(asked.given.get("background"))
        response = answers.begun(name, int(time.time()), asked)
        said = [(one.role, one.text) for one in asked.said]
        kept = known.Response(name, place.number, place.turns, said, response)

        def over(ended: Answer | Fault) -> None:
            del self._running[name]
            if store and self._known.response(caller, name) is not None:  # nobody has deleted it
                self._known.keep(caller, msgspec.structs.replace(kept, response=answers.ended(response, ended)))

        turn.over, self._running[name] = over, turn
        with suppress(GoondanError, OverflowError, RecursionError):  # then it cannot be asked for again
            if store:
                self._known.keep(caller, kept)
        if asked.given.get("stream"):
            return self._stream(turn, answers.Events(response), cancels=not background)
        if background:
            turn.leave(cancel=False)
            return _json(response, turn)
        return _json(answers.ended(response, await self._end(turn)), turn)

    async def response(self, request: Request) -> Any:
        """GET and DELETE /v1/responses/{id}."""
        caller, name = request.state.caller.name, request.path_params["name"]
        if request.query_params.get("stream") in ("true", "True", "1"):
            raise refused("A response that was begun is not streamed again: ask for it whole.", "stream", "unsupported")
        if request.method == "GET":
            return _json(await self._current(caller, name))
        if not self._known.forget(caller, name):
            raise _no_response(name)
        return _json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Any:
        """POST /v1/responses/{id}/cancel."""
        caller, name = request.state.caller.name, request.path_params["name"]
        now = await self._current(caller, name)
        if now["status"] == answers.OPEN:
            await self._turns.cancel(name.removeprefix("resp_"))
            if (turn := self._running.get(name)) is not None:
                await turn.end()
            now = await self._current(caller, name)
        return _json(now)

    async def _current(self, caller: str, name: str) -> dict[str, Any]:
        """A response as it is now, also if its door has ended since. Raises RefusedError, GoondanError."""
        kept = self._known.response(caller, name)
        if kept is None:
            raise _no_response(name)
        response, place = kept.response, self._known.numbered(kept.number)
        if response["status"] == answers.OPEN and name not in self._running and place is not None:
            turn = await self._swarm.turn(name.removeprefix("resp_"), (response["model"], place.instance))
            with suppress(TimeoutError):
                answer = await asyncio.wait_for(asyncio.shield(turn.answered), LOOK_S)
                response = answers.ended(response, told_by(answer))
                self._known.keep(caller, msgspec.structs.replace(kept, response=response))
        return response

    # --- models

    async def models(self, request: Request) -> Any:
        """GET /v1/models and /v1/models/{name}."""
        caller, name = request.state.caller, request.path_params.get("name")
        found = {agent: _model(agent) for agent in await self._listed() if caller.may_speak_to(agent)}
        if name is not None and name not in found:
            raise faults.no_model(name)
        return _json(found[name] if name is not None else {"object": "list", "data": [*found.values()]})

    async def _listed(self) -> Mapping[str, Any]:
        """The schema of each agent's answers, by its name; None: it answers in words. They are read from the bundle:
        the broker lists none. It decides, though, and refuses a message to an agent that it does not have.
        """
        place = self._swarm.place
        options: Mapping[str, Any] = {"state_dir": place.state_dir, "policy": place.policy, "handlers": False}
        found = await asyncio.to_thread(inspect_bundle, place.bundle, **options)
        outputs = {name: agent.body.output for name, agent in found.checked.agents.items()}
        return {name: None if output is None else output.schema for name, output in outputs.items()}

    # --- turns over HTTP

    async def _begin(self, request: Request, asked: requests.Asked, param: str) -> Underway:
        """Begin the turn of a request. Raises RefusedError, GoondanError."""
        caller: Caller = request.state.caller
        if not caller.may_speak_to(asked.agent):
            raise faults.no_model(asked.agent)
        if asked.format is not None:
            parameters.check_format(asked.format, param, (await self._listed()).get(asked.agent))
        instance, user = request.headers.get(INSTANCE), asked.given.get("user")
        if instance is None and user:
            instance = instance_of_user(caller.name, user)
        return await self._turns.begin(caller, asked, instance, os.urandom(12).hex())

    async def _end(self, turn: Underway) -> Answer | Fault:
        """How a turn ends. When its client goes, the request is cancelled, and so is the turn."""
        try:
            return await turn.end()
        finally:
            turn.leave(cancel=True)

    def _stream(self, turn: Underway, shape: Shape, *, cancels: bool = True) -> Any:
        """The stream of a turn, which is cancelled when its client goes."""
        response = StreamingResponse(turn.stream(shape), headers=_headers(turn), media_type="text/event-stream")

        async def sent(*asgi: Any) -> None:
            try:
                await response(*asgi)
            finally:  # also when the client has gone before the stream began
                turn.leave(cancel=cancels)

        return sent


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "goondan"}


def _no_response(name: str) -> RefusedError:
    return refused(f"Response with id '{name[:64]}' not found.", "response_id", "response_not_found", 404)


def _headers(turn: Underway) -> dict[str, str]:
    """What an answer says of its turn. A key may have any visible characters, a header has those of ASCII."""
    named = {INSTANCE: turn.route.instance} if turn.route.instance.isascii() else {}
    return {"x-request-id": turn.event_id, **named}


def _json(value: Any, turn: Underway | None = None) -> Response:
    return Response(answers.encoded(value), 200, _headers(turn) if turn else {}, "application/json")
