"""The client for Python keeps every rule that `gdn certify client` knows."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.kernel_fixture import ROOT


def test_the_python_client_is_certified() -> None:
    certify = [sys.executable, "-I", "-m", "goondan.kernel.cli", "certify", "client", "--json"]
    program = [sys.executable, "-I", "-m", "goondan_client.certified"]
    said = subprocess.run([*certify, "--", *program], capture_output=True, text=True, cwd=ROOT, check=False)
    report = json.loads(said.stdout)
    assert [rule for rule in report["rules"] if rule["outcome"] != "holds"] == []
    assert (report["certified"], said.returncode) == (True, 0)
    assert len(report["rules"]) > 100
