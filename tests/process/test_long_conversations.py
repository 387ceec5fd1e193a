"""Conversations that are longer than the context of their model, with real turns and real tools.

GOONDAN_CONTEXT_TURNS=300 makes the long version of it (minutes).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from goondan.agentproc.http import wire_of
from goondan.agentproc.http.provider import HttpProvider
from goondan.agentproc.providers.base import ContextOverflow
from tests.kernel_fixture import sandbox
from tests.process.model_servers import KEY, question, seen, server
from tests.process.test_model_turns import swarm

WINDOW = 4096
TURNS = int(os.environ.get("GOONDAN_CONTEXT_TURNS", "16"))


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    with server("narrow_llm", str(WINDOW)) as base:
        yield base


def messages(turns: int) -> Iterator[str]:
    """Talk, and commands whose output has up to 200 kB: digits, words, one long line."""
    chance = random.Random(16)
    for number in range(turns):
        size = int(200_000 ** chance.uniform(0.3, 1))
        yield chance.choice(
            [
                f"run seq 1 {max(1, size // 6)}",
                f"run yes 'some words that repeat' | head -c {size}",
                f"run head -c {size // 2} /dev/urandom | base64 -w 0 | head -c {size}",
                f"number {number}: " + "a word and another one, " * chance.randrange(1, 60),
            ]
        )


@pytest.mark.timeout(60 + 3 * TURNS)
def test_no_turn_fails_for_its_length(narrow: str) -> None:
    with sandbox(swarm("openai", narrow, "narrow"), {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        for text in messages(TURNS):
            sent = kernel.gdn("send", text, "--instance", "long", "--json")
            assert sent.json["status"] == "completed", sent.json
        told = seen(narrow)
        assert told["faults"] == []
        assert len(told["refused"]) <= 1, "one is needed to learn the context"
        assert max(told["answered"]) <= WINDOW
        assert max(told["answered"]) > WINDOW // 2
        print(f"\n{TURNS} turns: {len(told['answered'])} requests, {len(told['refused'])} refused", told["refused"])
        assert "messages left out" in kernel.gdn("trace").out


@pytest.mark.parametrize("listed", [True, False])
async def test_a_server_is_asked_for_its_window_and_its_refusal_has_the_numbers(listed: bool) -> None:
    with server("narrow_llm", str(WINDOW), *(["listed"] if listed else [])) as base:
        provider = HttpProvider(wire_of("openai").VENDOR())
        try:
            request = question("openai", base, "narrow", "word " * 5000)
            assert await provider.window(request) == (WINDOW if listed else None)
            with pytest.raises(ContextOverflow) as refused:
                await provider.complete(request)
            assert refused.value.info.code == "E_CONTEXT_OVERFLOW"
            assert refused.value.overflow.window == WINDOW
            assert (refused.value.overflow.tokens or 0) > WINDOW
            await provider.complete(question("openai", base, "narrow", max_tokens=77))
            assert seen(base)["limits"] == [None, 77]
        finally:
            await provider.close()
