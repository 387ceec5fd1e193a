"""The examples of docs/serve.md for the packages of OpenAI, as they stand there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests import npm_fixture
from tests.features.serve.process.test_gdn_serve import door
from tests.javascript_runtimes import runtime
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox

PAGE: Final = Path(__file__).resolve().parents[4] / "docs" / "serve.md"
SOURCES: Final = Path(__file__).parents[3] / "servers" / "openai"


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with sandbox(BUNDLE.replace("main", "assistant")) as made:
        made.detach()
        yield made


@pytest.fixture(scope="module")
def told(kernel: Sandbox) -> Iterator[dict[str, Any]]:
    with door(kernel) as made:
        yield made


def example(language: str, told: dict[str, Any]) -> str:
    """The example in this language, with the address of a door."""
    block = PAGE.read_text(encoding="utf-8").partition("## OpenAI")[2].partition(f"```{language}\n")[2]
    return block.partition("```")[0].replace("127.0.0.1:7117", f"127.0.0.1:{told['port']}")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def conversations(kernel: Sandbox) -> list[list[tuple[str, Any]]]:
    """Who said what in each instance."""
    keys = [row["instanceKey"] for row in kernel.gdn("instance", "list", "--json").json]
    exported = [kernel.gdn("instance", "export", "assistant", key).json["messages"] for key in keys]
    return [[(one["data"]["role"], one["data"]["content"]) for one in messages] for messages in exported]


def test_python(kernel: Sandbox, told: dict[str, Any]) -> None:
    assert run(sys.executable, "-c", f"token_file = {told['tokenFile']!r}\n{example('python', told)}") == ""
    found = conversations(kernel)
    assert all([role for role, _ in said] == ["user", "assistant"] * 2 for said in found)
    asked = sorted([text for role, text in said if role == "user"] for said in found)
    assert asked == [["Fix the test.", "And the next one."], ["hello", "go on"]], "each is one conversation"


def test_node(kernel: Sandbox, told: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(npm_fixture.installed(SOURCES) / "node_modules")
    token = f"const token = {json.dumps(Path(told['tokenFile']).read_text().strip())};\n"
    (tmp_path / "example.mjs").write_text(token + example("js", told))
    shown = run(runtime("node"), str(tmp_path / "example.mjs"))
    answer = [{"type": "text", "text": shown}]
    assert [("user", "hello"), ("assistant", answer)] in conversations(kernel), "what is shown is the answer"
