"""The client that PROTOCOL.md shows works as it stands there, without any code of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.kernel_fixture import ROOT, Sandbox


def test_the_smallest_client(kernel: Sandbox, short_tmp: Path) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "schemas" / "PROTOCOL.md").read_text(), re.DOTALL | re.MULTILINE
    )
    program = short_tmp / "client.py"
    program.write_text(code)
    started = kernel.gdn("run", "--detach", "--json")
    run_dir = started.json["runDir"]

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    answered = ask(run_dir, "main", '/bash__exec {"command": "echo $((6*7))"}')
    assert (answered.returncode, answered.stderr) == (0, "")
    assert "42" in answered.stdout
    refused = ask(run_dir, "nobody", "hi")
    assert refused.returncode == 1
    assert refused.stderr.startswith("E_AGENT_NOT_FOUND")
    assert kernel.gdn("stop").status == 0
