"""The client for Python keeps every rule that `gdn certify client` knows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import goondan_client.certified
from tests.forked_programs import forked
from tests.kernel_fixture import ROOT


def certified(program: list[str], *more: str) -> Any:
    certify = [sys.executable, "-I", "-m", "goondan.kernel.cli", "certify", "client", "--json", *more, "--", *program]
    said = subprocess.run(certify, capture_output=True, text=True, cwd=ROOT, check=False)
    report = json.loads(said.stdout)
    assert [rule for rule in report["rules"] if rule["outcome"] != "holds"] == []
    assert (report["certified"], said.returncode) == (True, 0)
    return report


def test_the_python_client_is_certified() -> None:
    with forked(Path(goondan_client.certified.__file__)) as program:
        assert len(certified(program)["rules"]) > 100
    started = [sys.executable, "-I", "-m", "goondan_client.certified"]
    assert certified(started, "--only", "a question and its answer")["rules"]
