"""What is said of a sick model server, to the person and to a model that asked its agent: the place, the cause, and a
next step that works when it is taken.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from goondan.agentproc.providers.history import result_text
from goondan.schemas.wire.errors import FOR_MODELS, GoondanError, tool_error
from goondan.schemas.wire.frames import ToolResult
from tests.process.model_servers import KEY, question, server
from tests.process.test_model_providers import Asker

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "sick_model_servers.yaml").read_text())


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with server("misbehaving_llm") as url:
        yield url


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody else can while the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_there_are_ten() -> None:
    assert len(CASES) == 10


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_the_place_the_cause_and_a_next_step_that_works(base: str, nobody: str, case: dict[str, Any]) -> None:
    asker = Asker("openai", silent=case["name"] == "silent")
    try:
        at = nobody if "endpoint" in case else base + case.get("path", "")
        with pytest.raises(GoondanError) as caught:
            await asker.model.complete(question("openai", at, case["model"]))
        info = caught.value.info
        assert info.code == case.get("code", "E_MODEL_FAILED")
        assert case["says"] in info.message.replace(base, "BASE").replace(nobody, "NOBODY")
        assert info.suggestion == case["step"]
        asked = tool_error(info.code, info.message, name="AgentError", suggestion=info.suggestion)
        shown = result_text(ToolResult(status="error", error=asked))
        assert FOR_MODELS[info.code] in shown and case["step"] not in shown
        assert KEY not in f"{info}{shown}"
        taken = {"path": case.get("path", ""), "model": case["model"]} | case["taken"]
        answer = await asyncio.wait_for(
            asker.model.complete(question("openai", base + taken["path"], taken["model"])), 20
        )
        assert answer.text == "fine"
    finally:
        await asker.model.close()
