"""The one question to a model server, and what its answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.model_servers.api.listing import Learned, Question, learn, line_of, question
from goondan.schemas.bundle.launch import ModelSpec

KEY = "sk-secret-1234567890"


def model(provider: str = "openai", **changes: Any) -> ModelSpec:
    return ModelSpec(**{"provider": provider, "model": "m", "endpoint": "http://127.0.0.1:1/v1", **changes})


def listed(*names: str, **more: Any) -> bytes:
    return json.dumps({"data": [{"id": name} for name in names], **more}).encode()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (model(), Question("http://127.0.0.1:1/v1/models", {}, True)),
        (
            model(endpoint="http://me:p%40ss@h:8/x/?q=1#f"),
            Question("http://h:8/x/models", {"authorization": "Basic bWU6cEBzcw=="}, False),
        ),
        (
            model("anthropic", endpoint=None, api_key=KEY, auth="x-api-key", api_version="2023-06-01"),
            Question(
                "https://api.anthropic.com:443/v1/models",
                {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
                False,
            ),
        ),
        (
            model(endpoint="http://127.0.0.1:1/v1", api_key=KEY, key_origin="http://127.0.0.1:1", headers={"x-a": "b"}),
            Question("http://127.0.0.1:1/v1/models", {"x-a": "b", "authorization": f"Bearer {KEY}"}, True),
        ),
        (model(api_key=KEY, endpoint="https://other.example/v1", key_origin="https://h:443"), None),
        (model(endpoint="https://other.example/v1", headers={"x-a": "b"}), None),
        (model(endpoint="file:///etc/passwd"), None),
        (model("embedded", endpoint=None), None),
    ],
)
def test_the_question(asked: ModelSpec, expected: Question | None) -> None:
    assert question(asked) == expected


@pytest.mark.parametrize(
    ("asked", "status", "body", "words"),
    [
        (model(), 200, listed("a", "m"), "reachable, m is there"),
        (model(api_key=KEY), 200, listed("m"), "reachable, the key is accepted, m is there"),
        (model(model=""), 200, listed("", "first", "b"), "reachable, first is there"),
        (model(model=""), 200, listed(), "reachable, it has no model"),
        (model(), 200, listed("a", "b"), "reachable, m is not in its list of 2"),
        (model("anthropic"), 200, listed("a", has_more=True), "reachable, m is not on the first page of its list"),
        (model(context_tokens=4096), 200, listed("m"), "reachable, m is there, 4,096 tokens of context"),
        (
            model(), 200, json.dumps({"data": [{"id": "m", "max_model_len": 32768}]}).encode(),
            "reachable, m is there, 32,768 tokens of context",
        ),
        (model(api_key=KEY), 401, b"", "the key is refused (401)"),
        (model(), 403, b"", "it wants a key (403)"),
        (model(), 404, b"<html>", "reachable, without a list of models (404)"),
        (model(), 200, b"<html>", "reachable, without a list of models (200)"),
        (model(), 200, b'{"data": 7}', "reachable, without a list of models (200)"),
        (model(), 301, b"", "reachable, without a list of models (301)"),
        (model(), 429, b"", "reachable, and it fails at the moment (429)"),
        (model(), 503, b"", "reachable, and it fails at the moment (503)"),
        (model(model="", api_key=KEY), 200, listed(f"x {KEY}\x1b[2J"), "reachable, the key is accepted, x ***\\x1b[2J"),
    ],
)  # fmt: skip
def test_what_an_answer_says(asked: ModelSpec, status: int, body: bytes, words: str) -> None:
    assert line_of(learn(asked, status, body), asked.api_key is not None).startswith(words)


def test_a_server_without_an_answer() -> None:
    assert line_of(Learned(state="slow"), True) == "no answer yet"
    assert line_of(Learned(state="unreachable", reason="Connection refused"), True) == (
        "not reachable: Connection refused"
    )


@given(st.integers(100, 599), st.binary(max_size=300))
def test_any_answer_is_one_line(status: int, body: bytes) -> None:
    assert "\n" not in line_of(learn(model(model=""), status, body), False)
