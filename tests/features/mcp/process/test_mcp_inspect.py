"""`gdn mcp inspect` and `gdn mcp list`, with a server of some lines in a real jail."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

SERVER = """\
import json, socket, sys
try:
    open("/srv/not-granted/settings.json")
except OSError as error:
    print(error, file=sys.stderr, flush=True)
try:
    socket.create_connection(("api.example.com", 443), timeout=5)
except OSError as error:
    print("no network:", error, file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method = asked["method"]
    if method == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "s", "version": "1"}
    elif method == "tools/list":
        result = {"tools": [{"name": "add", "description": "Adds.", "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "3"}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
EXTENSION = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: mcp-adding}
spec:
  entry: "@goondan/base/mcp"
  config:
    transport: {type: stdio, command: ["python3", "./adding/server.py"]}
    expose: {tools: true}
---
"""
PYTHON = shutil.which("python3", path="/usr/bin:/bin")
needs_python = pytest.mark.skipif(PYTHON is None, reason="there is no Python of the system")


@pytest.fixture(scope="module")
def place() -> Iterator[Sandbox]:
    with sandbox(
        EXTENSION
        + BUNDLE.replace("tools: [Tool/bash]", "tools: [Tool/bash]\n  extensions: [{ref: Extension/mcp-adding}]")
    ) as made:
        (made.home / "adding").mkdir()
        (made.home / "adding" / "server.py").write_text(SERVER)
        yield made


@needs_python
def test_what_a_server_offers_and_what_it_was_refused(place: Sandbox) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        (server := Path(folder, "server.py")).write_text(SERVER)
        done = place.gdn("mcp", "inspect", "--json", "--", str(PYTHON), str(server), timeout=50)
    assert done.status == 0, done.err + done.out
    told = done.json
    assert [tool["name"] for tool in told["tools"]] == ["add"]
    assert told["server"]["protocolVersion"] == "2025-11-25"
    assert told["grants"] == {
        "filesystem": {"read": [folder, "/srv/not-granted/settings.json"]},
        "network": {"allow": ["api.example.com:443"]},
    }


@needs_python
def test_the_servers_of_a_bundle_and_how_they_are(place: Sandbox) -> None:
    (idle,) = place.gdn("mcp", "list", "--json").json
    assert (idle["server"], idle["extension"], idle["state"], idle["pid"]) == ("adding", "mcp-adding", "idle", None)
    place.detach()
    called = place.gdn("send", '/adding__add {"a": 1}', timeout=40)
    assert "3" in called.out, called.err
    (row,) = wait_until(lambda: [one for one in place.gdn("mcp", "list", "--json").json if one["calls"] == 1])
    assert (row["state"], row["protocolVersion"], row["attached"]) == ("connected", "2025-11-25", 1)
    assert row["memoryKb"] > 0
    assert Path(f"/proc/{row['pid']}").exists()
    assert "connected" in place.gdn("mcp", "list").out


def test_what_would_install_is_not_started(place: Sandbox) -> None:
    done = place.gdn("mcp", "inspect", "npx", "-y", "package")
    assert done.status == 2
    assert "gdn mcp add" in done.err
    assert not json.dumps(place.gdn("mcp", "inspect", "npx", "-y", "package", "--json").json).count("Traceback")
