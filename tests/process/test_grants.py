"""Grants from the command line to the jail: packaged tools, the operator, agents that narrow, --allow-net."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.process.test_egress import pages, unused_port

PACKAGE = documents(
    'Package "@acme/weather" {version: "1.0.0"}',
    "Tool forecast {entry: tools/forecast.py, exports: [{name: look}], sandbox: {filesystem: {read: [/]}, "
    "env: [ACME_KEY]}}",
)
#: It tells a digest of the key: the key itself would be taken out of what a jail says.
LOOK = """\
import hashlib, os
def look(ctx, input):
    try:
        home = sorted(os.listdir(input["folder"]))
    except OSError as error:
        home = type(error).__name__
    key = hashlib.sha256(os.environ.get("ACME_KEY", "").encode()).hexdigest()
    return {"key": key, "folder": home, "workdir": os.listdir(ctx.workdir)}
handlers = {"look": look}
"""
TOOL = '  tools: [Tool/bash, {kind: Tool, name: forecast, package: "@acme/weather"}]\n'
SECRET = "acme-secret-7531"
KEY_DIGEST, NO_KEY = (hashlib.sha256(key.encode()).hexdigest() for key in (SECRET, ""))


@pytest.fixture
def swarm() -> Iterator[Sandbox]:
    with sandbox(BUNDLE.replace("  tools: [Tool/bash]\n", TOOL), {"ACME_KEY": SECRET}) as made:
        package = made.home / "state" / "packages" / "@acme" / "weather"
        (package / "tools").mkdir(parents=True)
        (package / "goondan.yaml").write_text(PACKAGE)
        (package / "tools" / "forecast.py").write_text(LOOK)
        yield made


def look(swarm: Sandbox, folder: Path | str) -> Any:
    result = swarm.gdn("call", "forecast__look", json.dumps({"folder": str(folder)}), "--json").json
    assert result["status"] == "ok", result
    return result["output"]


@pytest.mark.timeout(180)  # three kernels, one after the other
def test_a_packaged_tool_gets_neither_key_nor_files_until_the_operator_accepts(swarm: Sandbox) -> None:
    top = "/var"
    assert look(swarm, top) == {"key": NO_KEY, "folder": "FileNotFoundError", "workdir": []}
    (row,) = (row for row in swarm.gdn("grant", "list", "--json").json if row["tool"] == "@acme/weather/forecast")
    assert (row["status"], row["requested"], row["granted"]) == ("pending", ["read: /", "env: ACME_KEY"], [])
    accepted = swarm.gdn("grant", "accept", "@acme/weather/forecast")
    assert accepted.status == 0, accepted.err
    assert "env: ACME_KEY" in accepted.out
    seen = look(swarm, top)
    assert seen["key"] == KEY_DIGEST
    assert "lib" in seen["folder"]
    # Another byte of code, and it is a stranger's again.
    code = swarm.home / "state" / "packages" / "@acme" / "weather" / "tools" / "forecast.py"
    code.write_text(LOOK + "# changed\n")
    assert look(swarm, top)["key"] == NO_KEY
    assert "not the one that was accepted" in swarm.gdn("grant", "list").out
    assert swarm.gdn("grant", "accept", "@acme/weather/forecast").status == 0
    (row,) = (row for row in swarm.gdn("grant", "list", "--json").json if row["tool"] == "@acme/weather/forecast")
    assert row["granted"] == row["requested"]
    assert swarm.gdn("grant", "revoke", "@acme/weather/forecast").status == 0
    (row,) = (row for row in swarm.gdn("grant", "list", "--json").json if row["tool"] == "@acme/weather/forecast")
    assert (row["status"], row["granted"]) == ("pending", [])


@pytest.mark.skipif(os.geteuid() != 0, reason="their files in /proc are closed to all but root")
def test_granted_values_are_in_no_environment_and_no_command_line(swarm: Sandbox) -> None:
    assert swarm.gdn("grant", "accept", "@acme/weather/forecast").status == 0
    swarm.detach()
    assert look(swarm, "/nonexistent")["key"] == KEY_DIGEST
    for pid, command in swarm.processes().items():
        assert SECRET not in command
        if "supervisor" in command:
            continue  # it was started with the operator's own environment
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), command


def test_what_is_wrong_with_a_grant_is_said(swarm: Sandbox) -> None:
    refused = swarm.gdn("grant", "accept", "@acme/weather/nothing")
    assert (refused.status, "@acme/weather/forecast" in refused.err) == (2, True)
    assert swarm.gdn("grant", "revoke", "forecast").status == 2
    package = swarm.home / "state" / "packages" / "@acme" / "weather" / "goondan.yaml"
    package.write_text(PACKAGE.replace("read: [/]", "write: [/]"))
    dangerous = swarm.gdn("grant", "accept", "@acme/weather/forecast", "--json")
    assert dangerous.status == 2
    assert dangerous.json["error"]["code"] == "E_CONFIG_DANGEROUS"


def test_a_network_from_the_command_line_and_from_a_policy(swarm: Sandbox) -> None:
    with pages() as (port, seen):
        other = unused_port()
        command = f"curl -sS http://127.0.0.1:{port}/a; curl -sS http://localhost:{other}/"
        result = swarm.call(command, "--allow-net", f"127.0.0.1:{port}")
        assert result["output"]["stdout"] == "page /a ", result
        assert result["output"]["exitCode"] == 7
        jail = result["receipt"]["jail"]
        assert jail["reached"] == [f"127.0.0.1:{port}"]
        assert f"127.0.0.1:{other}" in jail["denied"]
        assert seen == [f"GET /a 127.0.0.1:{port}"]
        policy = swarm.home / "mine.yaml"
        policy.write_text(f"widen:\n  - {{tool: bash, sandbox: {{network: {{allow: ['localhost:{port}']}}}}}}\n")
        policy.chmod(0o600)
        result = swarm.call(f"curl -sS http://localhost:{port}/b", "--policy", str(policy))
        assert result["output"]["stdout"] == "page /b "
        assert "page" not in swarm.call(f"curl -sS http://localhost:{port}/c")["output"]["stdout"]
        assert swarm.gdn("call", "bash__exec", "{}", "--allow-net", "0x7f.1:80").status == 2


def test_an_agent_that_narrows_has_less_than_the_operator() -> None:
    bundle = BUNDLE.replace("  tools: [Tool/bash]\n", "  tools: [{ref: Tool/say, sandbox: {env: [ONE]}}]\n")
    bundle += """---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: say}
spec: {entry: tools/say.py, exports: [{name: env}], sandbox: {env: [ONE, TWO]}}
"""
    with sandbox(bundle, {"ONE": "1", "TWO": "2"}) as made:
        (made.home / "tools").mkdir()
        source = "import os\nhandlers = {'env': lambda c, i: [os.environ.get(n) for n in ('ONE', 'TWO')]}\n"
        (made.home / "tools" / "say.py").write_text(source)
        made.detach()
        assert made.gdn("call", "say__env", "--json").json["output"] == ["1", "2"]
        answer = made.gdn("send", "/say__env", "--json").json["response"]
        assert '"1"' in answer, answer
        assert '"2"' not in answer
