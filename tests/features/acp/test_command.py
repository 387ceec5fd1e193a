"""`gdn acp` before it serves: who imports the SDK, and what is said where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from goondan.features.acp.command import acp
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
