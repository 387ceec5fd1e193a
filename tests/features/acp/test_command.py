"""`gdn acp` before it serves: who imports the SDK, and what is said where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.features.acp.command import acp
from goondan.kernel.cli.state import BundleTarget
from tests.checks import refuses
from tests.kernel_fixture import BUNDLE


def test_the_sdk_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))
    monkeypatch.setattr("goondan.features.acp.command.find_spec", lambda name: None)
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    with refuses("E_USAGE", match="agent-client-protocol"):
        acp.main(["--bundle", str(tmp_path)], standalone_mode=False)


def test_only_a_gdn_acp_that_serves_imports_the_sdk() -> None:
    program = (
        "import sys, goondan.features.acp.command as _; sys.exit('acp' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0


async def test_a_server_that_the_bundle_has_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from goondan.features.acp.command import agent, records

    monkeypatch.setattr(records, "keep_session", lambda *_: None)
    transport = cast(Any, SimpleNamespace(working=lambda handle: handle))
    side = agent.Agent(BundleTarget(str(tmp_path), str(tmp_path)), None, transport)
    side._agents, side._servers = ["main"], {"files"}
    for names, told in ((["files"], ""), (["files", "other"], "not used: other.")):
        side._open("main/s", "main", cwd=str(tmp_path), mcp_servers=[SimpleNamespace(name=name) for name in names])
        assert told in "".join(side._session("main/s").notes)
        assert bool(told) is bool(side._session("main/s").notes)
