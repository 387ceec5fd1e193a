"""The door of OpenAI without a kernel: a swarm that answers by itself, and a client of HTTP in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from goondan.features.openai_door import door
from goondan.features.serve.api import Caller, status_of
from goondan.kernel.cli.one_message import Message
from goondan.kernel.traces.rules.progress import END, News
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Answer, ErrorPayload, FilePart
from goondan.schemas.wire.usage import Usage

AGENTS = ("main", "other", "hidden")
USED = Usage(input_tokens=7, output_tokens=3, cached_tokens=2, reasoning_tokens=1, model_calls=1)


class FakeTurn:
    """A turn of the fake swarm."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.cancelled = asyncio.Event()
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.event_id = message.event_id or ""
        self._news: list[News] = []
        self._changed = asyncio.Event()

    async def run(self, swarm: FakeSwarm) -> None:
        """What the script says, to its end, whether somebody reads it or not."""
        instance = self.message.instance
        swarm.running[instance] = swarm.running.get(instance, 0) + 1
        assert swarm.running[instance] == 1, "two at once in one instance"
        async for news in swarm.script(self):
            self._news.append(news)
            self._changed.set()
            await asyncio.sleep(0)
            if news.kind == "answer":
                swarm.running[instance] -= 1
                self.answered.set_result(news.data)

    async def read(self, state_dir: str, after: Any, idle_s: float) -> AsyncGenerator[News, None]:
        at = 0
        while True:
            while at < len(self._news):
                yield self._news[at]
                at += 1
            self._changed.clear()
            await self._changed.wait()


class FakeSwarm:
    """Answers `echo: TEXT`, or what `answers` says. `said` has what each instance was told."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = str(state_dir)
        self.place = None
        self.said: dict[str, list[str]] = {}
        self.files: list[bytes] = []
        self.tasks: list[Any] = []
        self.turns: dict[str, FakeTurn] = {}
        #: What a turn does: news and an Answer or an error.
        self.script: Callable[[FakeTurn], AsyncIterator[News]] = echo
        self.refusal: GoondanError | None = None
        self.running: dict[str, int] = {}
        self.schema: dict[str, Any] | None = None

    async def begin(self, message: Message) -> FakeTurn:
        if message.agent not in AGENTS:
            raise fail("E_AGENT_NOT_FOUND", "no such agent")
        if self.refusal is not None:
            raise self.refusal
        turn = self.turns[message.event_id or ""] = FakeTurn(message)
        self.said.setdefault(message.instance, []).append(message.input)
        self.tasks.append(asyncio.ensure_future(turn.run(self)))
        return turn

    async def turn(self, event_id: str, place: Any = None) -> FakeTurn:
        if event_id not in self.turns:
            raise fail("E_EVENT_NOT_FOUND", "no such message")
        return self.turns[event_id]

    async def cancel(self, event_id: str) -> str:
        self.turns[event_id].cancelled.set()
        return "cancelled"

    async def lay_down(self, files: Any) -> list[FilePart]:
        self.files += [data for data, _ in files]
        return []


def completed(text: str, **more: Any) -> News:
    fields: dict[str, Any] = {"turn_id": "t1", "status": "completed", "response": text, "usage": USED, **more}
    return News("answer", Answer(**fields), END)


def failed(code: str, message: str = "it failed") -> News:
    return News("answer", Answer(turn_id="t1", status="failed", error=ErrorPayload(code, message)), END)


def pieces(*texts: str, step: int = 1) -> list[News]:
    """Pieces of one step's text."""
    at, found = 0, []
    for text in texts:
        found.append(News("text", {"step": step, "at": at, "text": text}, ""))
        at += len(text)
    return found


async def echo(turn: FakeTurn) -> AsyncIterator[News]:
    last = turn.message.input.rpartition("\n\n")[2]
    yield News("step.started", {"step": 1}, "")
    for news in pieces("echo: ", last):
        yield news
        await asyncio.sleep(0)
    yield completed(f"echo: {last}")


async def until_cancelled(turn: FakeTurn) -> AsyncIterator[News]:
    for news in pieces("thinking ", "hard"):
        yield news
    await turn.cancelled.wait()
    yield failed("E_CANCELLED", "it was cancelled")


class Client:
    """A client of the door with the token `name`."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("state", {})["caller"] = Caller(name, "talk", ("main", "other"))
            try:
                await app(scope, receive, send)
            except GoondanError as error:
                await door.told(error, status_of(error.info.code))(scope, receive, send)

        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(gated), base_url="http://door", timeout=10)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, messages: list[Any], *, status: int = 200, headers: Any = None, **more: Any) -> Any:
        """A chat completion. `instance` is put beside what came."""
        body = {"model": "main", "messages": messages, **more}
        answer = await self.http.post("/v1/chat/completions", json=body, headers=headers or {})
        assert answer.status_code == status, answer.text
        if more.get("stream"):
            return answer
        return {**answer.json(), "instance": answer.headers.get("x-goondan-instance")}

    async def say(self, messages: list[Any], text: str, **more: Any) -> str:
        """Say one more thing in a conversation that this client keeps. Returns the instance."""
        messages.append({"role": "user", "content": text})
        told = await self.chat(messages, **more)
        messages.append(told["choices"][0]["message"])
        return str(told["instance"])

    async def respond(self, input: Any, *, status: int = 200, headers: Any = None, **more: Any) -> Any:
        body = {"model": "main", "input": input, **more}
        answer = await self.http.post("/v1/responses", json=body, headers=headers or {})
        assert answer.status_code == status, answer.text
        if more.get("stream"):
            return answer
        return {**answer.json(), "instance": answer.headers.get("x-goondan-instance")}


def chunks(answer: httpx.Response) -> list[Any]:
    """The JSON of each event of a stream."""
    events = [event for event in answer.text.split("\n\n") if event and not event.startswith(":")]
    datas = [line[6:] for event in events for line in event.split("\n") if line.startswith("data: ")]
    return [json.loads(data) if data != "[DONE]" else data for data in datas]


@pytest.fixture
def swarm(tmp_path: Path) -> FakeSwarm:
    return FakeSwarm(tmp_path)


@pytest.fixture
def opened(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    """Makes a client with a token of this name, of the one door, or of one that was opened `anew`."""

    async def listed(self: Any) -> Any:
        return dict.fromkeys(AGENTS, swarm.schema)

    monkeypatch.setattr(door.Door, "_listed", listed)
    app = Router(routes=door.routes(swarm))  # type: ignore[arg-type]

    def client(name: str = "alice", *, anew: bool = False) -> Client:
        nonlocal app
        if anew:
            app = Router(routes=door.routes(swarm))  # type: ignore[arg-type]
        return Client(app, name)

    return client


@pytest.fixture
def client(opened: Callable[..., Client]) -> Client:
    return opened()
