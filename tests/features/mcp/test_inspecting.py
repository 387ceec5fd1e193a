"""What an inspected server was refused, from what its jail and the server itself have said."""

from __future__ import annotations

import pytest

from goondan.features.mcp.api import idle_row
from goondan.features.mcp.bundle.trial import bundle_text, grants, program_folder, refusals
from goondan.features.mcp.command import render
from goondan.kernel.bundle.rules.positions import Allowance, compose, plain


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("api.example.com:8443 was denied: it was not granted", "hosts", ["api.example.com:8443"]),
        ("api.example.com was denied: it was not granted; granted: x.invalid:1", "hosts", ["api.example.com:443"]),
        ("[2001:db8::1]:80 was denied: it was not granted", "hosts", ["[2001:db8::1]:80"]),
        ("[Errno 2] No such file or directory: '/srv/data/a.json'", "read", ["/srv/data/a.json"]),
        ("Error: ENOENT: no such file or directory, stat '/home/me/x'", "read", ["/home/me/x"]),
        ("Error: EACCES: permission denied, mkdir '/home/me/.cache/x'", "write", ["/home/me/.cache/x"]),
        ("OSError: [Errno 30] Read-only file system: '/srv/out'", "write", ["/srv/out"]),
        ("cannot open /etc/passwd: Permission denied /etc/shadow", "read", []),
        ("GITHUB_TOKEN environment variable is required", "env", ["GITHUB_TOKEN"]),
        ("Please set the environment variable BRAVE_API_KEY", "env", ["BRAVE_API_KEY"]),
        ("server listens", "hosts", []),
    ],
)
def test_each_refusal_is_understood(line: str, kind: str, expected: list[str]) -> None:
    assert refusals([line])[kind] == expected
    assert refusals([line, line])[kind] == expected


def test_grants_open_what_was_refused() -> None:
    tried = {"hosts": ["a.example:443"], "read": ["/srv/a"], "write": [], "env": ["X"]}
    assert grants(tried) == {"filesystem": {"read": ["/srv/a"]}, "network": {"allow": ["a.example:443"]}}
    assert grants({"hosts": [], "read": [], "write": [], "env": ["X"]}) == {}


def test_grants_have_the_folders_of_the_program() -> None:
    assert grants({"read": ["/srv/a"]}, ["/opt/server"]) == {"filesystem": {"read": ["/opt/server", "/srv/a"]}}


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/opt/server/main.py", "/opt/server"),
        ("/a/node_modules/@scope/server/dist/index.js", "/a/node_modules"),
        ("/a/node_modules/x/node_modules/y/z.js", "/a/node_modules"),
        ("/a/node_modules.js", "/a"),
    ],
)
def test_the_folder_that_a_program_needs(path: str, folder: str) -> None:
    assert program_folder(path) == folder


def test_the_bundle_has_the_command_as_it_is() -> None:
    command = ["node", 'a "b" ${WORKDIR}', "--- x"]
    documents = [
        plain(document)
        for document in compose(
            bundle_text({"type": "stdio", "command": command, "env": {"X": "${X}"}}, {}), Allowance()
        ).documents
    ]
    config = documents[1]["spec"]["config"]
    assert config["transport"] == {"type": "stdio", "command": command, "env": {"X": "${X}"}}
    assert config["attach"]["scope"] == "agent"


def test_the_last_error_stands_below_its_server() -> None:
    rows = [
        idle_row("time", "mcp-time", "stdio"),
        {**idle_row("x", "mcp-x", "stdio"), "agent": "a", "instanceKey": "k"},
    ]
    rows[1] |= {"calls": 7, "openCalls": 2, "memoryKb": 20480, "lastError": "it ended\x1b[2J", "state": "ended"}
    lines = render(rows)
    assert lines[1].split()[:3] == ["time", "-", "idle"]
    assert "a/k" in lines[2]
    assert "7 (2 open)" in lines[2]
    assert "20 MiB" in lines[2]
    assert lines[3].startswith("    it ended")
    assert "\x1b" not in lines[3]
