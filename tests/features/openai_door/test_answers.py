"""Answers in OpenAI's words: whole, in chunks and in events; and what goes wrong over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.openai_door.door import TABLES
from goondan.features.openai_door.door.rules import answers, requests
from goondan.features.openai_door.door.rules.pieces import BETWEEN, Pieces
from goondan.kernel.traces.rules.progress import News
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.runtime_events import RuntimeEvent
from tests.features.openai_door.conftest import FakeSwarm, chunks, completed, failed, pieces, until_cancelled

HI = [{"role": "user", "content": "hi"}]
USED = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


async def two_steps(turn: Any) -> Any:
    yield News("step.started", {"step": 1}, "")
    yield News("reasoning", RuntimeEvent(kind="reasoning", step=1, text="Hm."))
    for news in pieces("I ", "look."):
        yield news
    yield News("tool.called", {"step": 1, "toolCallId": "c1", "toolName": "bash__exec"}, "")
    yield News("step.started", {"step": 2}, "")
    yield News("reasoning", RuntimeEvent(kind="reasoning", step=2, text="So"))
    for news in pieces("It is", " 4.", step=2):
        yield news
    yield News("reasoning", RuntimeEvent(kind="reasoning", step=1, text="late"))
    yield completed("It is 4.", reasoning="So.")


async def test_a_chat_completion(client: Any, swarm: FakeSwarm) -> None:
    swarm.script = two_steps
    told = await client.chat(HI)
    message = {"role": "assistant", "content": "It is 4.", "refusal": None, "reasoning_content": "So."}
    assert told["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert told["usage"].items() >= USED.items()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert (told["object"], told["model"], told["id"][:9]) == ("chat.completion", "main", "chatcmpl-")


async def test_a_stream_of_chunks(client: Any, swarm: FakeSwarm) -> None:
    swarm.script = two_steps
    answer = await client.chat(HI, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-goondan-instance"] in swarm.said
    *told, used, done = chunks(answer)
    assert done == "[DONE]"
    assert (used["choices"], used["usage"].items() >= USED.items()) == ([], True)
    deltas = [one["choices"][0]["delta"] for one in told]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "I look.\n\nIt is 4."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm.So"
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    assert {(one["id"], one["usage"]) for one in told} == {(used["id"], None)}
    assert all("usage" not in one for one in chunks(await client.chat(HI, stream=True))[:-1])


@pytest.mark.parametrize(
    ("more", "reason", "incomplete"),
    [
        ({"cut_off": True}, "length", "max_output_tokens"),
        ({"finish_reason": "content_filter"}, "content_filter", "content_filter"),
        ({"finish_reason": "end_turn"}, "stop", None),
    ],
)
async def test_finish_reasons(client: Any, swarm: FakeSwarm, more: Any, reason: str, incomplete: str | None) -> None:
    async def ends(turn: Any) -> Any:
        yield completed("It", **more)

    swarm.script = ends
    assert (await client.chat(HI))["choices"][0]["finish_reason"] == reason
    assert chunks(await client.chat(HI, stream=True))[-2]["choices"][0]["finish_reason"] == reason
    told = await client.respond("hi")
    assert told["status"] == ("incomplete" if incomplete else "completed")
    assert told["incomplete_details"] == ({"reason": incomplete} if incomplete else None)
    assert chunks(await client.respond("hi", stream=True))[-1]["type"] == f"response.{told['status']}"


async def test_a_response_and_its_stream(client: Any, swarm: FakeSwarm) -> None:
    swarm.script = two_steps
    told = await client.respond("hi", metadata={"a": "b"}, instructions="Be brief.")
    [item] = told["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("message", "completed", "It is 4.")
    assert told["usage"]["total_tokens"] == 10
    assert (told["metadata"], told["instructions"]) == ({"a": "b"}, "Be brief.")
    events = chunks(await client.respond("hi", stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    [item] = last["response"]["output"]
    assert item["content"][0]["text"] == "I look.\n\nIt is 4."
    kept = (await client.http.get(f"/v1/responses/{last['response']['id']}")).json()
    assert kept["output"][0]["content"] == told["output"][0]["content"]  # as it is when it was not streamed
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    done = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    assert "".join(deltas) == done[0] == item["content"][0]["text"]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == last["response"]["output"]


async def test_an_empty_answer(client: Any, swarm: FakeSwarm) -> None:
    async def empty(turn: Any) -> Any:
        yield completed("")

    swarm.script = empty
    assert (await client.chat(HI))["choices"][0]["message"]["content"] == ""
    assert (await client.respond("hi"))["output"][0]["content"][0]["text"] == ""


async def test_a_turn_that_fails(client: Any, swarm: FakeSwarm) -> None:
    async def at_once(turn: Any) -> Any:
        yield failed("E_MODEL_QUOTA", "no money is left")

    async def later(turn: Any) -> Any:
        for news in pieces("so ", "far"):
            yield news
        await asyncio.sleep(0.01)
        yield failed("E_MODEL_FAILED")

    swarm.script = at_once
    answer = await client.http.post("/v1/chat/completions", json={"model": "main", "messages": HI})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert answer.headers["x-should-retry"] == "false"
    assert chunks(await client.chat(HI, stream=True))[-1]["error"]["type"] == "rate_limit_error"
    told = await client.respond("hi")
    assert (told["status"], told["error"]["code"]) == ("failed", "insufficient_quota")
    swarm.script = later
    *_, last = chunks(await client.chat(HI, stream=True))
    assert last["error"]["code"] == "E_MODEL_FAILED"
    last = chunks(await client.respond("hi", stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_a_client_that_leaves_cancels_its_turn(client: Any, swarm: FakeSwarm) -> None:
    swarm.script = until_cancelled
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "stream": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": "hi", "stream": True}),
    ):
        await gone(client, path, {"model": "main", **body})
        turn = next(reversed(swarm.turns.values()))
        await asyncio.wait_for(turn.cancelled.wait(), 5)
        await asyncio.wait_for(turn.answered, 5)
    await gone(client, "/v1/responses", {"model": "main", "input": "hi", "background": True, "stream": True})
    assert not swarm.turns.popitem()[1].cancelled.is_set()


async def gone(client: Any, path: str, body: Any) -> None:
    """Post a request, and leave when its turn has begun: then the gate cancels the work on it."""
    asking = asyncio.ensure_future(client.http.post(path, json=body))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_responses_in_the_background(client: Any, swarm: FakeSwarm) -> None:
    swarm.script = until_cancelled
    told = await client.respond("hi", background=True)
    assert (told["status"], told["background"]) == ("in_progress", True)
    assert (await client.http.get(f"/v1/responses/{told['id']}")).json()["status"] == "in_progress"
    ended = (await client.http.post(f"/v1/responses/{told['id']}/cancel")).json()
    assert ended["status"] == "cancelled"
    assert (await client.http.get(f"/v1/responses/{told['id']}")).json() == ended
    assert (await client.http.post(f"/v1/responses/{told['id']}/cancel")).json() == ended
    assert (await client.http.delete(f"/v1/responses/{told['id']}")).json()["deleted"]
    assert (await client.http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def test_a_response_whose_door_has_ended(opened: Any, swarm: FakeSwarm) -> None:
    swarm.script = until_cancelled
    told = await opened().respond("hi", background=True)
    later = opened(anew=True)
    path = f"/v1/responses/{told['id']}"
    assert (await later.http.get(path)).json()["status"] == "in_progress"
    [turn] = swarm.turns.values()
    turn.answered = asyncio.get_running_loop().create_future()
    turn.answered.set_result(Answer(turn_id="t", status="completed", response="done"))
    ended = (await later.http.get(path)).json()
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "done")
    assert (await opened(anew=True).http.get(path)).json() == ended
    turn.answered = None  # type: ignore[assignment] # the second door has kept it


async def test_responses_that_are_not_stored(client: Any) -> None:
    told = await client.respond("hi", store=False)
    assert told["status"] == "completed"
    assert (await client.http.get(f"/v1/responses/{told['id']}")).status_code == 404
    await client.respond("x", previous_response_id=told["id"], status=400)


async def test_models_are_the_agents_of_the_token(client: Any) -> None:
    told = (await client.http.get("/v1/models")).json()
    assert [model["id"] for model in told["data"]] == ["main", "other"]
    assert (await client.http.get("/v1/models/main")).json()["object"] == "model"
    for name in ("hidden", "nobody", "a/b"):
        answer = await client.http.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        told = await client.chat(HI, model=name, status=404)
        assert told["error"] == {**told["error"], "code": "model_not_found", "param": "model"}


async def test_the_form_of_answers_is_the_agents_own(client: Any, swarm: FakeSwarm) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "object", "required": ["a"]}}}
    await client.chat(HI, response_format=form, status=400)
    swarm.schema = {"type": "object", "required": ["a"]}
    await client.chat(HI, response_format=form)
    await client.respond("hi", text={"format": {"type": "json_schema", "name": "t", "schema": swarm.schema}})
    await client.respond("hi", text={"format": {"type": "json_schema", "schema": {"type": "object"}}}, status=400)


async def test_files_go_beside_the_message(client: Any, swarm: FakeSwarm) -> None:
    import base64

    png = b"\x89PNG\r\n\x1a\n" + bytes(64)
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "this"}, part]}]
    told = await client.chat(messages)
    assert swarm.files == [png]
    messages += [{"role": "assistant", "content": "echo: this"}, *HI]
    assert (await client.chat(messages))["instance"] == told["instance"]
    assert swarm.files == [png]  # it is known


async def test_very_long_conversations(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = [
        {"role": "assistant" if number % 2 else "user", "content": str(number)} for number in range(10_000)
    ]
    told = await client.chat([*messages, *HI])
    assert swarm.said[told["instance"]][0].count('"role"') == 10_000
    await client.chat([*HI * 10_000])
    text = "x" * (8 << 20)
    told = await client.chat([{"role": "user", "content": text}])
    assert told["choices"][0]["message"]["content"] == f"echo: {text}"
    await client.chat([{"role": "user", "content": text}] * 3, status=413)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"7", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a":NaN}'],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_bodies_that_are_no_request(client: Any, path: str, body: bytes) -> None:
    answer = await client.http.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_lone_surrogates(client: Any) -> None:
    for body in (b'{"model":"main","input":"\\ud800"}', b'{"model":"main","input":"a","user":"\\udfff"}'):
        assert (await client.http.post("/v1/responses", content=body)).status_code in (200, 400)


# --- pieces -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(min_size=1, max_size=6), max_size=8), st.sets(st.integers(0, 8)), st.integers(0, 9))
def test_pieces_make_the_answer_whatever_is_lost(texts: list[str], lost: set[int], again: int) -> None:
    made = Pieces()
    at = 0
    for number, text in enumerate(texts):
        if number == again:
            made.heard(News("text.again", {"step": 1}))
            at = 0
            for before in texts[:number]:
                made.heard(News("text", {"step": 1, "at": at, "text": before}))
                at += len(before)
        if number not in lost:
            made.heard(News("text", {"step": 1, "at": at, "text": text}))
        at += len(text)
    answer = "".join(texts)
    made.ended(Answer(turn_id="t", status="completed", response=answer))
    assert made.said == answer


@given(st.text(min_size=1, max_size=9), st.text(max_size=9))
def test_a_text_that_became_another_is_followed_by_the_answer(first: str, second: str) -> None:
    made = Pieces()
    made.heard(News("text", {"step": 1, "at": 0, "text": first}))
    made.heard(News("text.again", {"step": 1}))
    made.heard(News("text", {"step": 1, "at": 0, "text": second}))
    made.ended(Answer(turn_id="t", status="completed", response=second))
    whole = [second] if second.startswith(first) else [first, first + BETWEEN + second]
    assert made.said in whole or second.strip() == first.strip()


@given(st.lists(st.tuples(st.integers(1, 3), st.text(min_size=1)), max_size=9))
def test_events_of_a_response_are_in_step_with_it(heard: list[tuple[int, str]]) -> None:
    asked = requests.read(b'{"model": "main", "input": "hi"}', TABLES["responses"])
    events = answers.Events(answers.begun("resp_1", 1, asked))
    made, out = Pieces(), events.first()
    lengths: dict[int, int] = {}
    for step, text in sorted(heard, key=lambda one: one[0]):
        at = lengths.get(step, 0)
        lengths[step] = at + len(text)
        out += b"".join(map(events.piece, made.heard(News("text", {"step": step, "at": at, "text": text}))))
    last = max((step for step, _ in heard), default=1)
    done = Answer(turn_id="t", status="completed", response="".join(text for step, text in heard if step == last))
    out += b"".join(map(events.piece, made.ended(done))) + events.last(done)
    told = [json.loads(block.partition(b"data: ")[2]) for block in out.split(b"\n\n")[:-1]]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    deltas = "".join(event["delta"] for event in told if event["type"].endswith("text.delta"))
    assert deltas == made.said == told[-1]["response"]["output"][0]["content"][0]["text"]


@given(st.text())
def test_an_event_is_one_line_for_every_client(text: str) -> None:
    data = answers.encoded({"text": text}).decode()
    assert len(data.splitlines()) == 1
    assert json.loads(data) == {"text": text}
