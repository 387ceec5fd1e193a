"""`gdn mcp import`: documents on stdout, remarks on stderr, and the bundle takes what was added."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.kernel_fixture import BUNDLE

SECRET = "hunter2-Zk8fW0qSECRET77"
FILE = {
    "mcpServers": {
        "GitHub": {"command": "npx", "args": ["-y", "@scope/server"], "env": {"GITHUB_TOKEN": SECRET}},
        "web": {"url": "https://h.example/mcp", "headers": {"Authorization": f"Bearer {SECRET}"}},
    }
}


def gdn(*arguments: str, cwd: Path, input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-m", "goondan.kernel.cli", "mcp", "import", *arguments]
    return subprocess.run(command, cwd=cwd, input=input, capture_output=True, text=True)


def test_documents_and_remarks(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    (tmp_path / "servers.json").write_text(json.dumps(FILE))
    done = gdn("servers.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kind: Extension") == 2
    assert "GITHUB_TOKEN MCP_WEB_AUTHORIZATION" in done.stderr
    piped = gdn("-", "--write", "--json", cwd=tmp_path, input=json.dumps(FILE))
    assert json.loads(piped.stdout)["changed"] == "./goondan.yaml"
    assert (tmp_path / "goondan.yaml").read_text() == BUNDLE + done.stdout
    again = gdn("servers.json", "--write", cwd=tmp_path)
    assert again.returncode == 1
    assert "E_INIT" in again.stderr
    assert (tmp_path / "goondan.yaml").read_text() == BUNDLE + done.stdout
    for text in (done.stdout, done.stderr, piped.stdout, piped.stderr, again.stderr):
        assert SECRET not in text


def test_what_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff{")
    (tmp_path / "b").write_text('{"mcpServers": {"x": 1, "y": "' + SECRET)
    (tmp_path / "c").write_text('{"mcpServers": {"x": {}}}')
    for name, code in (("a", 2), ("b", 2), ("c", 1), ("none", 2), (".", 2)):
        done = gdn(name, cwd=tmp_path)
        assert done.returncode == code, name
        assert "Traceback" not in done.stderr
        assert SECRET not in done.stderr
        assert done.stdout == ""
