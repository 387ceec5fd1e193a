"""A model server may send the key of its model back, in any field of an answer. Nothing keeps it or shows it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.http import wire_of
from goondan.agentproc.http.provider import HttpProvider
from goondan.agentproc.machine.turn import AskModel
from goondan.agentproc.model.calls import out_of_answer
from goondan.agentproc.providers.base import SHORTEST_SAID, ModelAnswer, TextDelta
from goondan.agentproc.turn.live import LiveFeed
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire.codec import encode, from_raw
from goondan.schemas.wire.frames import OPERATOR, Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent
from tests.unit.agentproc.fakes import FakeLink, event_frame
from tests.unit.agentproc.turns import Make, Runners

KEY = "sk-live-Zq9xW7vT3bN8mK2pL5"
FORMS = [KEY, KEY[::-1], base64.b64encode(KEY.encode()).decode()]

#: What each provider says in one answer: every field that a server fills. Numbers, and words that say what a part is,
#: stay as they are.
ANSWERS: dict[str, list[dict[str, Any]]] = {
    "anthropic": [
        {"type": "message_start", "message": {"id": "m1", "model": "claude", "content": [],
         "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "hm ", "signature": "s"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "let me think"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "sig"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "redacted_thinking", "data": "opaque"}},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": "well "}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "then"}},
        {"type": "content_block_start", "index": 3,
         "content_block": {"type": "tool_use", "id": "toolu_1", "name": "notes__add", "input": {}, "extra": "x"}},
        {"type": "content_block_delta", "index": 3,
         "delta": {"type": "input_json_delta", "partial_json": '{"text": "hi"}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": "no"},
         "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
    "openai": [
        {"id": "c1", "model": "gpt", "system_fingerprint": "fp", "choices": [{"index": 0, "delta": {"role": "assistant",
         "content": "well", "reasoning_content": "hm", "refusal": "no"}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
         "extra_content": {"signature": "s"}, "function": {"name": "notes__add", "arguments": '{"text": "hi"}'}}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    ],
    "responses": [
        {"type": "response.created", "response": {"id": "r1", "model": "gpt", "status": "in_progress"}},
        {"type": "response.output_item.done", "output_index": 0, "item": {"type": "reasoning", "id": "rs_1",
         "encrypted_content": "opaque", "summary": [{"type": "summary_text", "text": "hm"}]}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "well"},
        {"type": "response.output_item.done", "output_index": 1, "item": {"type": "message", "id": "msg_1",
         "phase": "final", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]}},
        {"type": "response.output_item.done", "output_index": 2, "item": {"type": "function_call", "id": "fc_1",
         "call_id": "call_1", "name": "notes__add", "arguments": '{"text": "hi"}'}},
        {"type": "response.completed", "response": {"id": "r1", "model": "gpt", "status": "completed",
         "usage": {"input_tokens": 1, "output_tokens": 1}}},
    ],
}  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the texts in a JSON value."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """A copy with this text at the place. In the JSON of arguments it is the text inside."""
    if not path:
        return json.dumps({"text": text, text: "hi"}) if value.startswith("{") else text
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], text)
    return copy


def cases() -> list[tuple[str, tuple[Any, ...]]]:
    return [(provider, path) for provider, events in ANSWERS.items() for path in leaves(events)]


class Server:
    """As much of a connection as a provider needs: it gives these answers, one a request."""

    status, reason, coding = 200, "OK", ""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.headers = {"content-type": "text/event-stream"}
        self.parts: list[bytes] = []
        self.requests: list[bytes] = []

    async def ask(self, method: str, url: str, headers: Any, body: Sequence[bytes], patience: Any) -> Server:
        self.requests.append(b"".join(body))
        events = self.answers.pop(0)
        whole = method == "GET" or self.status != 200
        self.parts = [json.dumps(event).encode() if whole else _event(event) for event in events]
        return self

    @property
    def ended(self) -> bool:
        return not self.parts

    async def read(self) -> bytes:
        return self.parts.pop(0) if self.parts else b""

    def close(self) -> None:
        self.parts.clear()


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def done(provider: str) -> list[dict[str, Any]]:
    text = wire_of(provider).REHEARSED[1]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path))
    runners = Runners(tmp_path)
    yield runners.build
    await runners.close()


async def turn(
    make: Make,
    provider: str,
    name: str,
    *answers: list[dict[str, Any]],
    server: Server | None = None,
    model: str = "m",
) -> tuple[FakeLink, Server]:
    link, server = FakeLink(), server or Server(*answers, *[done(provider)] * 3)
    asked = HttpProvider(
        wire_of(provider).VENDOR(),
        client=server,  # type: ignore[arg-type]
        sleep=lambda _: asyncio.sleep(0),
    )
    spec = ModelSpec(provider=provider, model=model, api_key=KEY)
    runner = make(link, asked, name=name, model=spec)
    await runner.run(event_frame("e1", "go", source=OPERATOR, live=True))
    return link, server


def everything(folder: Path, link: FakeLink, log: str) -> str:
    """All that a turn has stored, sent and logged."""
    files = [path.read_bytes().decode("utf-8", "replace") for path in folder.rglob("*") if path.is_file()]
    frames = [encode(frame).decode("utf-8", "replace") for frame in (*link.sent, *link.posted, *link.calls)]
    return "\n".join([*files, *frames, log])


@pytest.mark.parametrize("provider", list(ANSWERS))
async def test_a_key_in_any_field_of_an_answer_is_neither_stored_nor_sent_nor_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, provider: str
) -> None:
    caplog.set_level(logging.DEBUG)
    found: list[tuple[Any, ...]] = []
    for number, path in enumerate(leaves(ANSWERS[provider])):
        form = FORMS[number % len(FORMS)]
        name, said = f"a{number}", changed(ANSWERS[provider], path, form)
        caplog.clear()
        link, server = await turn(make, provider, name, said)
        place = tmp_path / "instances" / name
        assert place.is_dir()
        kept = everything(place, link, caplog.text)
        if form in kept or any(form.encode() in body for body in server.requests):
            found.append(path)
    assert found == []


@pytest.mark.parametrize("provider", list(ANSWERS))
@pytest.mark.parametrize("status", [307, 400, 401, 429, 500])
async def test_a_key_in_a_refusal_is_neither_stored_nor_sent_nor_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, provider: str, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {"error": {"message": f"no {KEY}", "type": KEY, "code": KEY}, "message": KEY}
    refused = Server(*[[said]] * 12)
    refused.status, refused.reason = status, KEY
    refused.headers = {"location": f"https://x.test/{KEY}", "content-type": KEY, "request-id": KEY}
    link, _ = await turn(make, provider, "a", server=refused)
    assert KEY not in everything(tmp_path, link, caplog.text)
    assert "***" in everything(tmp_path, link, caplog.text)


@pytest.mark.parametrize("provider", ["openai", "responses"])
async def test_a_key_as_the_name_of_a_model_in_a_servers_list_is_not_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, provider: str
) -> None:
    caplog.set_level(logging.DEBUG)
    server = Server([{"data": [{"id": KEY}]}], ANSWERS[provider], done(provider))
    link, _ = await turn(make, provider, "a", server=server, model="")
    assert KEY not in everything(tmp_path, link, caplog.text)
    assert [KEY.encode() in body for body in server.requests] == [False, True, True], "it was asked for by that name"


@pytest.mark.parametrize("provider", list(ANSWERS))
async def test_what_has_no_key_in_it_stays_as_it_came(make: Make, tmp_path: Path, provider: str) -> None:
    link, server = await turn(make, provider, "a", ANSWERS[provider])
    assert [(frame.tool, frame.call_id is not None) for frame in link.calls] == [("notes__add", True)]
    assert "***" not in everything(tmp_path, link, "")
    assert b'"hi"' in server.requests[1] or b'\\"hi\\"' in server.requests[1]


def test_an_answer_without_a_secret_is_the_same_object_and_a_word_as_a_key_stays() -> None:
    answer = ModelAnswer(text="write api_key='ollama' into it", finish_reason="stop")
    assert out_of_answer(answer, Redactor(KEY)) is answer
    half = ModelAnswer(text=f"\ud800 {KEY}")
    assert out_of_answer(half, Redactor(KEY)).text == "\ud800 ***"
    assert len(KEY) > SHORTEST_SAID > len("ollama")


class Clock:
    def time(self) -> float:
        return 0.0

    def call_later(self, delay: float, call: Callable[[], None]) -> Clock:
        return self

    def cancel(self) -> None: ...


@pytest.mark.parametrize("size", [1, 3, 7, 30, 400])
@pytest.mark.parametrize("form", FORMS)
def test_a_key_in_pieces_of_a_stream_is_not_shown_while_it_flows(size: int, form: str) -> None:
    link = FakeLink()
    frame = Frame("event", event_id="e1", epoch=1, live=True)
    feed = LiveFeed(link, Clock(), frame, "t1", again=False, redact=Redactor(KEY))  # type: ignore[arg-type]
    feed.tell([AskModel(1)])
    text = f"The key is {form}, and it is yours."
    for at in range(0, len(text), size):
        feed(TextDelta(text[at : at + size]))
        feed._send_text()
    feed.tell([AskModel(2)])
    feed(TextDelta("all good"))
    feed._send_text()
    events = [from_raw(sent.payload, RuntimeEvent) for sent in link.sent]
    first = "".join(event.text or "" for event in events if event.kind == "text" and event.step == 1)
    assert text.startswith(first)
    assert len(first) <= len("The key is ") + 9, "the beginning of a key is no key"
    assert [event.text for event in events if event.step == 2 and event.kind == "text"] == ["all good"]
