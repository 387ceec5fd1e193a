"""What a program is given for an answer: the value that it asked for, or one error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import Raw

from goondan_client import GoondanError
from goondan_client.client import Client
from goondan_client.files import Place
from goondan_client.frames import Frame, encode


@dataclass
class Weather:
    city: str
    degrees: float


@pytest.fixture
def client() -> Client:
    return Client(Place(run_dir="/nowhere"), 1.0)


def answered(**answer: Any) -> Frame:
    said = {"turnId": "t", "status": "completed", "response": "done", **answer}
    event = {"id": "e-1:answer", "type": "agent.response", "createdAt": "2026-11-24T09:30:08Z", "answer": said}
    return Frame("event", event_id="e-1:answer", payload=Raw(encode(event)))


def test_an_answer_has_the_type_that_was_asked_for(client: Client) -> None:
    answer = client._answer(answered(object={"city": "Seoul", "degrees": 21}), Weather)
    assert (answer.object, answer.text, answer.event_id, answer.kind) == (
        Weather("Seoul", 21.0),
        "done",
        "e-1",
        "answer",
    )
    assert client._answer(answered(object={"any": [1]}), None).object == {"any": [1]}
    for wrong in ({"object": {"city": "Seoul"}}, {}):
        with pytest.raises(GoondanError) as caught:
            client._answer(answered(**wrong), Weather)
        assert caught.value.code == "E_OUTPUT_INVALID" and caught.value.suggestion


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (
            {"status": "failed", "error": {"code": "E_MODEL_FAILED", "message": "no", "suggestion": "s"}},
            "E_MODEL_FAILED",
        ),
        ({"status": "failed"}, "E_AGENT_FAILED"),
        ({"status": "perhaps"}, "E_FRAME_INVALID"),
        ({"object": {"n": float("nan")}}, "E_FRAME_INVALID"),
        ({"object": b"bytes"}, "E_FRAME_INVALID"),
    ],
)
def test_what_is_no_answer_is_one_error(client: Client, answer: dict[str, Any], code: str) -> None:
    with pytest.raises(GoondanError) as caught:
        client._answer(answered(**answer), None)
    assert caught.value.code == code


def test_usage_is_the_sum_of_the_answers(client: Client) -> None:
    for used in (
        {"inputTokens": 10, "outputTokens": 2, "modelCalls": 1},
        {"inputTokens": 5, "outputTokens": 1, "modelCalls": 2, "cost": 0.5, "currency": "EUR"},
        {"inputTokens": 1, "outputTokens": 1, "modelCalls": 1, "cost": 0.25, "currency": "EUR"},
        {"inputTokens": 1, "outputTokens": 1, "modelCalls": 1, "cost": 9.0},
    ):
        client._answer(answered(usage=used), None)
    found = client.usage()
    assert (found.input_tokens, found.output_tokens, found.model_calls) == (17, 5, 5)
    assert (found.cost, found.currency) == (0.75, "EUR")


async def test_nothing_is_asked_without_a_connection(client: Client) -> None:
    for asking in (client.ask("a", "hi"), client.send("a", "hi"), client.cancel(event_id="e"), client.instances()):
        with pytest.raises(GoondanError) as caught:
            await asking
        assert caught.value.code == "E_LINK_CLOSED"


def test_an_error_says_when_to_try_again() -> None:
    error = GoondanError("E_OVERLOADED", "full", retry_after=0.5)
    assert (str(error), error.retry_after, error.suggestion) == ("E_OVERLOADED: full", 0.5, None)
