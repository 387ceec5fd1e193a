"""Errors as answers of HTTP."""

from __future__ import annotations

import json

import pytest

from goondan.features.serve.api.problems import MEDIA_TYPE, STATUS, document, problem, status_of
from goondan.kernel.cli.commands import load_codes
from goondan.schemas.wire.errors import CODES, GoondanError, error_payload, fail

load_codes()
#: What is no fault of the request, and mended at the swarm: 500.
OF_THE_SWARM = ("E_CONFIG_", "E_BUNDLE_", "E_INTERNAL", "E_STATE", "E_JOURNAL_CORRUPT", "E_VERSION", "E_INIT")


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_its_status(code: str) -> None:
    status = status_of(code)
    assert 400 <= status < 600
    if code.endswith("_NOT_FOUND") and not code.startswith("E_CONFIG"):
        assert status == 404
    told = document(error_payload(code, "a message"))
    assert told.status == status and told.code == told.title == code
    assert told.detail == "a message" and told.type.endswith(code) and told.suggestion


def test_the_table_names_no_code_twice_and_none_that_is_not_there() -> None:
    from goondan.features.serve.api.problems import _BY_STATUS

    named = [code for codes in _BY_STATUS.values() for code in codes.split()]
    assert len(named) == len(set(named)) == len(STATUS)


def test_an_answer_says_when_to_come_again() -> None:
    answer = problem(GoondanError(error_payload("E_OVERLOADED", "full", retry_after_ms=1200)), event_id="e")
    told = json.loads(bytes(answer.body))
    assert (answer.status_code, answer.headers["retry-after"], answer.media_type) == (503, "2", MEDIA_TYPE)
    assert told["retryAfterMs"] == 1200 and told["eventId"] == "e"
    assert problem(fail("E_USAGE", "no"), 418).status_code == 418
