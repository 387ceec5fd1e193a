"""What bundled tools take for what a call leaves out: the recorded calls would take too long to show most of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.toolhost.base.bash import bash
from goondan.toolhost.base.file_system import file_system
from goondan.toolhost.base.http_fetch import http_fetch


@pytest.mark.requirement("BASH-01", "BASH-07")
def test_a_command_may_take_half_a_minute_and_a_script_is_for_bash() -> None:
    assert bash.timeout({}) == 30_000
    assert bash.timeout({"timeoutMs": 5}) == 5
    assert bash.optional_string({}, "shell", bash.SCRIPT_SHELL) == "/bin/bash"
    assert bash.optional_strings({}, "args") == []


@pytest.mark.requirement("HTTP-02", "HTTP-04", "HTTP-08")
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_may_take_half_a_minute_and_gives_half_a_million_bytes(method: str) -> None:
    request = http_fetch.Request(method, {"url": "http://127.0.0.1/"})
    assert (request.timeout_ms, request.most, request.headers) == (30_000, 500_000, {})
    given = http_fetch.Request(method, {"url": "http://127.0.0.1/", "timeoutMs": 5, "maxBytes": 7})
    assert (given.timeout_ms, given.most) == (5, 7)


@pytest.mark.requirement("FS-01", "FS-03")
@pytest.mark.parametrize("more", [0, 1])
def test_a_hundred_thousand_bytes_of_a_file_are_read(tmp_path: Path, more: int) -> None:
    (tmp_path / "f").write_text("x" * (100_000 + more))
    ctx: Any = SimpleNamespace(workdir=str(tmp_path), output_limit=1 << 20)
    read = file_system.read(ctx, {"path": "f"})
    assert (len(read["content"]), read["truncated"], read["size"]) == (100_000, bool(more), 100_000 + more)
