"""Pictures and PDFs from `gdn send --attach` to the body that a model's server gets, and from tools."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.schemas.bundle.address import blobs_dir, instance_dir
from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.model_servers import KEY, server
from tests.process.test_model_turns import swarm

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9 + b"!"
PDF = b"%PDF-1.7\n" + b"page " * 300


ALL = pytest.mark.parametrize("provider", ["anthropic", "openai", "responses"])


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with server("fake_llm") as base:
        yield base


def described(media_type: str, content: bytes) -> str:
    return f"{media_type} {len(content)} {hashlib.sha256(content).hexdigest()[:8]}"


def shelf(kernel: Sandbox, key: str) -> list[str]:
    """The files of an instance's conversation."""
    folders = [Path(instance_dir(str(state), "main", key), "files") for state in kernel.state_dirs]
    return [name for folder in folders if folder.is_dir() for name in os.listdir(folder)]


@ALL
def test_a_model_gets_the_files_of_a_message_and_those_that_a_tool_returns(
    fake: str, provider: str, tmp_path: Path
) -> None:
    (tmp_path / "cat.txt").write_bytes(PNG)  # what it is says the content
    (tmp_path / "paper.pdf").write_bytes(PDF)
    bundle = swarm(provider, fake).replace("tools: [Tool/bash]", "tools: [Tool/bash, Tool/file-system]")
    with sandbox(bundle, {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        both = ("--attach", str(tmp_path / "cat.txt"), "--attach", str(tmp_path / "paper.pdf"))
        sent = kernel.gdn("send", "look", "--instance", "eye", *both)
        known = [described("image/png", PNG), described("application/pdf", PDF)]
        assert sent.out.strip() == f"echo: look [files: {', '.join(known)}]"
        assert len(shelf(kernel, "eye")) == 2
        blobs = [Path(blobs_dir(str(state))) for state in kernel.state_dirs]
        wait_until(lambda: not any(os.listdir(folder) for folder in blobs))

        again = kernel.gdn("send", "again", "--instance", "eye")  # they are part of the conversation
        assert again.out.strip() == f"echo: again [files: {', '.join(known)}]"

        work = tmp_path / "work"
        work.mkdir()
        (work / "dog.png").write_bytes(PNG + b"dog")
        read = 'call file-system__read {"path":"dog.png"}'
        kernel.gdn("send", read, "--instance", "tool", "--workdir", str(work))
        seen = kernel.gdn("send", "and?", "--instance", "tool").out.strip()
        assert seen == f"echo: and? [files: {described('image/png', PNG + b'dog')}]"


def test_a_model_that_cannot_see_fails_one_turn_and_the_conversation_goes_on(fake: str, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    with sandbox(swarm("openai", fake, model="blind"), {"MY_KEY": KEY}) as kernel:
        kernel.detach()
        refused = kernel.gdn("send", "look", "--attach", str(tmp_path / "cat.png"), "--json")
        assert refused.status == 1
        assert json.loads(refused.out)["error"]["code"] == "E_MODEL_CANNOT_SEE"
        assert kernel.gdn("send", "hi").out.strip() == "echo: hi"
        (tmp_path / "cat.bmp").write_bytes(b"BM" + PNG)
        for wrong in ("cat.bmp", "gone.png"):
            said = kernel.gdn("send", "look", "--attach", str(tmp_path / wrong))
            assert said.status != 0
            assert wrong in said.err
