"""`gdn mcp import`: documents on stdout, remarks on stderr, and the bundle takes what was added.

And `gdn mcp list` of a config with a fault.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.kernel_fixture import BUNDLE, Result, Sandbox, environment

SECRET = "hunter2-Zk8fW0qSECRET77"
FILE = {
    "mcpServers": {
        "GitHub": {"command": "npx", "args": ["-y", "@scope/server"], "env": {"GITHUB_TOKEN": SECRET}},
        "web": {"url": "https://h.example/mcp", "headers": {"Authorization": f"Bearer {SECRET}"}},
    }
}


def gdn(*arguments: str, cwd: Path, input: str | None = None) -> Result:
    made = Sandbox(cwd, environment(cwd / "state"), cwd / "goondan.yaml")
    return made.gdn("mcp", "import", *arguments, input=input)


def test_documents_and_remarks(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    (tmp_path / "servers.json").write_text(json.dumps(FILE))
    done = gdn("servers.json", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("kind: Extension") == 2
    assert "GITHUB_TOKEN MCP_WEB_AUTHORIZATION" in done.err
    piped = gdn("-", "--write", "--json", cwd=tmp_path, input=json.dumps(FILE))
    assert piped.json["changed"] == "./goondan.yaml"
    assert (tmp_path / "goondan.yaml").read_text() == BUNDLE + done.out
    again = gdn("servers.json", "--write", cwd=tmp_path)
    assert again.status == 1
    assert "E_INIT" in again.err
    assert (tmp_path / "goondan.yaml").read_text() == BUNDLE + done.out
    for text in (done.out, done.err, piped.out, piped.err, again.err):
        assert SECRET not in text


def test_what_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff{")
    (tmp_path / "b").write_text('{"mcpServers": {"x": 1, "y": "' + SECRET)
    (tmp_path / "c").write_text('{"mcpServers": {"x": {}}}')
    for name, code in (("a", 2), ("b", 2), ("c", 1), ("none", 2), (".", 2)):
        done = gdn(name, cwd=tmp_path)
        assert done.status == code, name
        assert "Traceback" not in done.err
        assert SECRET not in done.err
        assert done.out == ""


def test_a_server_whose_config_has_a_fault_is_not_listed(tmp_path: Path) -> None:
    for config in ("{transport: {command: [x]}, expose: {}}", "{transport: 5, expose: {}}", "{namePrefix: [x]}"):
        extension = "---\napiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {name: e}\n"
        extension += f"spec: {{entry: '@goondan/base/mcp', config: {config}}}\n"
        (tmp_path / "goondan.yaml").write_text(BUNDLE + extension)
        listed = Sandbox(tmp_path, environment(tmp_path / "state"), tmp_path / "goondan.yaml").gdn("mcp", "list")
        assert (listed.status, listed.err) == (0, "")
        assert listed.out.startswith("no MCP servers in ")
