"""A client of the door's API, on the standard library alone: requests, and streams that it reads event by event."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One event of a stream."""

    kind: str
    data: Any
    id: str | None


class Api:
    """The API of a door, with one token."""

    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.token = token

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """One request: status, headers, the document of the answer."""
        with self.asked(method, path, body, **headers) as answer:
            data = answer.read()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, named, json.loads(data) if data else None

    @contextmanager
    def asked(self, method: str, path: str, body: Any = None, **headers: str) -> Iterator[http.client.HTTPResponse]:
        """The answer of one request, on a connection of its own. `headers` have `_` for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=40)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named["content-type"] = "application/json"
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, f"/api/v1{path}", data, {"authorization": f"Bearer {self.token}"} | named)
            yield connection.getresponse()
        finally:
            connection.close()

    @contextmanager
    def stream(
        self, path: str, body: Any = None, after: str | None = None, **headers: str
    ) -> Iterator[Iterator[Event]]:
        """The events of a stream, as long as they come."""
        if after is not None:
            headers["last_event_id"] = after
        method = "GET" if body is None else "POST"
        with self.asked(method, path, body, accept="text/event-stream", **headers) as answer:
            assert answer.status == 200, (answer.status, answer.read())
            yield events(answer)


def events(lines: Any) -> Iterator[Event]:
    """The events in the lines of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}
        else:
            fields = {}


class Heard:
    """What a client has heard of one message, over all of its streams."""

    def __init__(self) -> None:
        self.position: str | None = None
        self.texts: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.answer: Any = None

    def take(self, event: Event) -> None:
        """One more event. What comes twice, or has a hole before it, is an error."""
        self.position = event.id or self.position
        if event.kind == "text":
            before = self.texts.get(event.data["step"], "")
            assert len(before) == event.data["at"], (before, event)
            self.texts[event.data["step"]] = before + event.data["text"]
        elif event.kind == "text.again":
            self.texts[event.data["step"]] = ""
        elif event.kind in ("tool.called", "tool.completed", "tool.failed"):
            call = event.data["toolCallId"], event.kind.removeprefix("tool.")
            assert call not in self.calls, event
            self.calls.append(call)
        elif event.kind == "answer":
            assert self.answer is None
            self.answer = event.data
        assert event.kind != "gap", event


def token_of(told: dict[str, Any]) -> str:
    """The token that a door has made."""
    return Path(told["tokenFile"]).read_text().split()[0]
