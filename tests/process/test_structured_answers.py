"""Answers of a form from a model's server to `gdn send --json`, in the vendors' ways and by the tool `answer`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kernel_fixture import sandbox
from tests.process.model_servers import KEY, server
from tests.process.test_model_turns import swarm

OUTPUT = """\
  output:
    schema:
      type: object
      properties: {city: {type: string}, degrees: {type: number}}
      required: [city, degrees]
      additionalProperties: false
"""
SEOUL = {"city": "서울", "degrees": 21.5}


ALL = pytest.mark.parametrize("provider", ["anthropic", "openai", "responses"])


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with server("fake_llm") as base:
        yield base


@ALL
@pytest.mark.parametrize("via", ["auto", "tool"])
def test_an_answer_fits_its_schema_or_is_asked_for_again_once(fake: str, provider: str, via: str) -> None:
    bundle = swarm(provider, fake).replace("  tools: [Tool/bash]\n", f"  tools: [Tool/bash]\n{OUTPUT}    via: {via}\n")
    value = json.dumps(SEOUL)
    with sandbox(bundle, {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        first = kernel.gdn("send", f"form {value}", "--json").json
        assert (first["object"], json.loads(first["response"])) == (SEOUL, SEOUL)
        mended = kernel.gdn("send", f"misform {value}", "--json").json
        assert mended["object"] == SEOUL
        assert mended["usage"]["modelCalls"] == 2
        failed = kernel.gdn("send", 'form {"city": 1}', "--json").json
        assert failed["error"]["code"] == "E_OUTPUT_INVALID"
        assert "answer.degrees: required property is missing" in failed["error"]["message"]
        assert "object" not in failed
        assert json.loads(kernel.gdn("send", f"form {value}").out) == SEOUL
