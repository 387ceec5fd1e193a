"""What the refusals of servers mean."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.agentproc.providers.faults import error_names, refusal_kind, stream_kind


def kind(status: int, words: str = "", *names: str, after: float | None = None, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return refusal_kind(status, named, names, words, after)


def test_which_statuses_may_pass() -> None:
    assert {s for s in range(300, 600) if kind(s) == "busy"} == {408, 409, 425, *range(500, 600)} - {529}
    assert {s for s in range(300, 600) if kind(s) == "limited"} == {429, 529}
    assert {s for s in range(300, 600) if kind(s) == "quota"} == {402}
    assert kind(429, x_should_retry="false") == "final"
    assert kind(429, x_should_retry="true") == "limited"
    assert kind(400, x_should_retry="true") == "busy"


@pytest.mark.parametrize(
    ("status", "words", "names"),
    [
        (429, "You exceeded your current quota, please check your plan and billing details.", ["insufficient_quota"]),
        (400, "Your credit balance is too low to access the API. Go to Plans & Billing", ["invalid_request_error"]),
        (402, "Insufficient Balance", []),
        (403, "Your account is not active, check your billing details", ["billing_not_active"]),
        (429, "RateLimitError: You exceeded your current quota, check your plan and billing details", []),
        (429, "insufficient credits", []),
    ],
)
def test_a_quota_that_is_used_up_is_known_by_its_names_and_words(status: int, words: str, names: list[str]) -> None:
    assert kind(status, words, *names) == "quota"
    assert kind(status, words, *names, x_should_retry="true") == "quota"


def test_a_server_that_speaks_of_billing_and_names_a_wait_has_a_limit_per_minute() -> None:
    words = "You exceeded your current quota, please check your plan and billing details."
    assert kind(429, words, after=7.0) == "limited"
    assert kind(429, words, "insufficient_quota", after=7.0) == "quota"


@pytest.mark.parametrize(
    "words", ["Loading model", "Model acme/big is currently loading", "the model is not loaded yet"]
)
def test_a_server_that_loads_its_model(words: str) -> None:
    assert kind(503, words) == "loading"
    assert kind(500, words) == "busy"


def test_other_words_about_models_are_no_loading() -> None:
    assert kind(503, "no workers for this model") == "busy"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["overloaded_error"], "limited"),
        (["rate_limit_error", None], "limited"),
        (["x", "rate_limit_exceeded"], "limited"),
        ([None, 429], "limited"),
        ([529], "limited"),
        (["server_error"], "busy"),
        ([None, 503], "busy"),
        (["insufficient_quota"], "quota"),
        ([True, {"odd": 1}], "final"),
        ([400], "final"),
    ],
)
def test_errors_inside_streams(names: list[Any], expected: str) -> None:
    assert stream_kind(names, "words") == expected


def test_the_names_of_an_error_document() -> None:
    assert error_names({"error": {"type": "a", "code": "b", "message": "c"}}) == ["a", "b"]
    assert error_names({"type": "error", "error": {"type": "a"}}) == ["a", "error"]
    assert error_names({"error": "text", "code": 7}) == []
    assert error_names(["odd"]) == []
