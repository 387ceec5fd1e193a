"""What servers say of a model's context, each in the form of its own listing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.models.server_answers import (
    LEAST_WINDOW,
    MODEL_INFO,
    MOST_WINDOW,
    PROPS,
    RUNNING,
    ListedModel,
    in_answer,
    in_listing,
    known_window,
    server_root,
)


def listing(*models: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": models}).encode()


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"id": "m", "owned_by": "vllm", "max_model_len": 4096}, ListedModel(4096)),
        ({"id": "m", "context_window": 131072, "owned_by": "x"}, ListedModel(131072)),
        ({"id": "m", "context_length": 65536}, ListedModel(65536)),
        ({"id": "m", "max_context_length": 32768, "loaded_context_length": 4096}, ListedModel(4096)),
        ({"id": "m", "type": "model", "max_input_tokens": 200000}, ListedModel(200000)),
        ({"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 32768}}, ListedModel(32768, PROPS)),
        ({"id": "m", "owned_by": "llamacpp", "meta": None}, ListedModel(None, PROPS)),
        ({"id": "m", "owned_by": "llamacpp", "meta": {"n_ctx_train": 32768, "n_ctx": 4096}}, ListedModel(4096)),
        ({"id": "m", "owned_by": "library"}, ListedModel(None, RUNNING)),
        ({"id": "m", "owned_by": "openai"}, ListedModel(None, MODEL_INFO)),
        ({"id": "m", "max_model_len": True}, ListedModel(None, MODEL_INFO)),
        ({"id": "m", "max_model_len": 1}, ListedModel(None, MODEL_INFO)),
    ],
)
def test_each_server_lists_the_window_in_its_own_field(model: dict[str, Any], found: ListedModel) -> None:
    assert in_listing(listing({"id": "other"}, model), "m") == found


def test_a_server_with_one_model_ignores_the_name() -> None:
    assert in_listing(listing({"id": "served", "max_model_len": 2048}), "asked") == ListedModel(2048)


def test_what_else_a_server_can_be_asked() -> None:
    props = json.dumps({"default_generation_settings": {"n_ctx": 4096}}).encode()
    assert in_answer(PROPS, props, "m") == 4096
    running = json.dumps({"models": [{"name": "m", "context_length": 8192}]}).encode()
    assert in_answer(RUNNING, running, "m") == 8192
    assert in_answer(RUNNING, running, "another") is None
    info = json.dumps({"data": [{"model_name": "m", "model_info": {"max_input_tokens": 16384}}]}).encode()
    assert in_answer(MODEL_INFO, info, "m") == 16384
    assert in_answer(MODEL_INFO, info, "another") is None


@given(st.binary(max_size=200), st.sampled_from([PROPS, RUNNING, MODEL_INFO]))
def test_what_is_no_document_says_nothing(body: bytes, path: str) -> None:
    assert in_answer(path, body, "m") is None
    assert in_listing(body, "m").window is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["data", "id", "meta", "models", "n_ctx", "max_model_len"]), inner, max_size=4
            )
        ),
        max_leaves=20,
    )
)
def test_a_hostile_document_gives_a_size_within_bounds_or_none(document: Any) -> None:
    body = json.dumps(document).encode()
    found = [in_listing(body, "m").window, *(in_answer(path, body, "m") for path in (PROPS, RUNNING, MODEL_INFO))]
    assert all(size is None or LEAST_WINDOW <= size < MOST_WINDOW for size in found)


@pytest.mark.parametrize(
    ("name", "window"),
    [("claude-sonnet-5-5", 200_000), ("gpt-4", 8_192), ("openai/gpt-4o-mini", 128_000), ("llama3", None), ("", None)],
)
def test_well_known_models(name: str, window: int | None) -> None:
    assert known_window(name) == window


def test_the_root_of_a_server() -> None:
    assert server_root("http://127.0.0.1:8080/v1/") == server_root("http://127.0.0.1:8080") == "http://127.0.0.1:8080"
