"""The examples of docs/serve.md for a shell, as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.features.serve.process.test_gdn_serve import door
from tests.kernel_fixture import BUNDLE, sandbox

PAGE: Final = Path(__file__).resolve().parents[4] / "docs" / "serve.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_what_a_shell_is_told_to_say_is_answered() -> None:
    block = PAGE.read_text(encoding="utf-8").partition("## Our API")[2].partition("```sh\n")[2].partition("```")[0]
    url, ask, *commands = re.sub(r"\\\n\s*", "", block).strip().splitlines()
    with sandbox(BUNDLE.replace("main", "assistant")) as made, door(made) as told:
        url = url.replace("127.0.0.1:7117", f"127.0.0.1:{told['port']}")
        ask = ask.replace("TOKEN_FILE", told["tokenFile"])
        known, answers = "ID", []
        for command in commands:
            said = f"{url}\n{ask}\n{command.replace('messages/ID', f'messages/{known}')}"
            done = subprocess.run(["bash", "-ec", said], capture_output=True, text=True, timeout=50)
            assert done.returncode == 0, done.stderr
            answers.append(done.stdout)
            known = json.loads(answers[0])["eventId"]
    waited, left, looked, told_first, told_again, cancelled, found = answers
    assert json.loads(waited) == json.loads(looked), "its answer"
    assert json.loads(waited)["status"] == "completed"
    assert json.loads(left)["status"] == "accepted"
    for stream in (told_first, told_again):
        assert "event: accepted" in stream
        assert "event: answer\nid: end" in stream
    assert "event: text.again" in told_again, "the position is none of this turn's text"
    assert told_first.rpartition("event: answer")[2] == told_again.rpartition("event: answer")[2], "the same message"
    assert json.loads(cancelled) == {"eventId": known, "status": "done"}
    assert json.loads(found)["traces"] == []
