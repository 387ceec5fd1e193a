"""Requests that are longer than the context, in the words of the servers that refuse them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.providers.base import Overflow
from goondan.agentproc.providers.faults import MAX_TOKENS, overflow_of

LLAMA: dict[str, Any] = {
    "error": {
        "code": 400,
        "message": "request (4190 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 4190,
        "n_ctx": 2048,
    }
}


def said(message: str, **fields: object) -> str:
    return json.dumps({"error": {"message": message, **fields}})


@pytest.mark.parametrize(
    ("body", "tokens", "window"),
    [
        (json.dumps(LLAMA), 4190, 2048),
        (said(LLAMA["error"]["message"]), 4190, 2048),
        (
            said(
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 10481 tokens."
            ),
            10481,
            8192,
        ),
        (
            said(
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9981 tokens "
                "(9900 in the messages, 81 in the functions).",
                code="context_length_exceeded",
            ),
            9981,
            8192,
        ),
        (said("Your input exceeds the context window of this model.", code="context_length_exceeded"), None, None),
        (
            said(
                "This model's maximum context length is 4096 tokens. However, you requested 4726 tokens (3726 in the "
                "messages, 1000 in the completion). Please reduce the length of the messages or completion."
            ),
            3726,
            4096,
        ),
        (
            said(
                "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is "
                "4096 tokens and your request has 3001 input tokens (8192 > 4096 - 3001)."
            ),
            3001,
            4096,
        ),
        (said("The decoder prompt (length 5000) is longer than the maximum model length of 4096."), 5000, 4096),
        (said("The input (5000 tokens) is longer than the model's context length (4096 tokens)."), 5000, 4096),
        (said("prompt is too long: 213462 tokens > 200000 maximum"), 213462, 200000),
        (
            said("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length"),
            190000,
            200000,
        ),
        (said("input length exceeds the context length"), None, None),
        (
            said(
                "litellm.ContextWindowExceededError: OpenAIException - This model's maximum context length is 4096 "
                "tokens. However, your messages resulted in 9000 tokens."
            ),
            9000,
            4096,
        ),
        (
            said("The input token count (1196265) exceeds the maximum number of tokens allowed (1048575)."),
            1196265,
            1048575,
        ),
        (said("This model's maximum prompt length is 131072 but the request contains 537812 tokens."), 537812, 131072),
        (
            said(
                "Prompt contains 40960 tokens and 0 draft tokens, too large for model with 32768 maximum context length"
            ),
            40960,
            32768,
        ),
        (
            said(
                "This endpoint's maximum context length is 4096 tokens. However, you requested about 5000 tokens "
                "(4000 of text input, 1000 in the output)."
            ),
            4000,
            4096,
        ),
        (
            said("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 20 tokens"),
            5000,
            4096,
        ),
        (said("Your request exceeded model token limit: 131,072 (requested: 140,000)"), 140000, 131072),
        (
            "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with "
            "context length of only 4096 tokens, which is not enough.",
            5000,
            4096,
        ),
    ],
)
def test_what_a_server_says_of_an_overflow(body: str, tokens: int | None, window: int | None) -> None:
    assert overflow_of(400, body) == Overflow(tokens, window)
    assert overflow_of(None, body) == Overflow(tokens, window)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, said("Invalid value for temperature")),
        (401, said("maximum context length is 4096 tokens")),
        (429, said("Request too large: Limit 6000, Requested 8000. Please reduce the length of the messages.")),
        (404, "<!DOCTYPE HTML>"),
        (400, said("max_tokens is too large: 999999. This model supports at most 16384 completion tokens")),
    ],
)
def test_other_refusals_are_none(status: int, body: str) -> None:
    assert overflow_of(status, body) is None


@given(st.text(max_size=300), st.integers(0, 10**20))
def test_hostile_words_give_no_number_out_of_bounds(text: str, number: int) -> None:
    found = overflow_of(
        400, f'{{"error": "prompt is too long: {number} tokens > {number} maximum", "n_ctx": {number}}}{text}'
    )
    assert found is not None
    for value in (found.tokens, found.window):
        assert value is None or 0 < value < MAX_TOKENS
