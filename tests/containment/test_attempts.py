"""Every attempt of attempts.py in one real jail: none may get through. docs/sandbox.md shows the table.

The attempts are made as whoever runs the tests, so a run as root and one as an ordinary user cover both.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from pathlib import Path

import pytest

from schemas.launch import ExportSpec, Limits, SandboxSpec
from tests.containment import attempts
from tests.toolhost_fixture import bench, make_tool

ROOT = Path(__file__).parents[2]
#: How the system refuses, as exceptions of Python.
REFUSALS = {"OSError", "PermissionError", "FileNotFoundError", "ProcessLookupError", "BlockingIOError", "gaierror"}


async def test_no_attempt_gets_out(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = short_tmp / "work"
    for folder in (".git/hooks", ".venv/lib"):
        (work / folder).mkdir(parents=True)
    (work / ".git" / "config").write_text("[core]\n")
    (work / "goondan.yaml").write_text("kind: Swarm\n")
    (short_tmp / "secret").write_text("host secret")
    other = make_tool(short_tmp, "handlers = {}\n", name="other")
    monkeypatch.setenv("HOST_SECRET", "x")
    source = Path(attempts.__file__).read_text(encoding="utf-8")
    made_tool = make_tool(
        short_tmp,
        source,
        ExportSpec(name="run"),
        sandbox=SandboxSpec(limits=Limits(processes=64, wall_seconds=110)),
    )
    servers = {
        "tcp": socket.create_server(("127.0.0.1", 0)),
        "stream": socket.socket(socket.AF_UNIX),
        "datagram": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    }
    try:
        servers["stream"].bind(str(work / "stream.sock"))
        servers["stream"].listen()
        servers["datagram"].bind(str(work / "datagram.sock"))
        servers["datagram"].setblocking(False)
        told = {
            "secret": str(short_tmp / "secret"),
            "other_tool": other.root,
            "uid": os.getuid(),
            "pid": os.getpid(),
            "port": servers["tcp"].getsockname()[1],
            "socket": str(work / "stream.sock"),
        }
        before = len(os.listdir("/proc/self/fd"))
        async with bench(made_tool, protected=[str(work / "goondan.yaml")]) as made:
            result = await made.call("t__run", told, workdir=work, deadline_ms=100_000, within_s=110)
            assert result["status"] == "ok", result
            found = result["output"]
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the launcher's socket may be new
        with pytest.raises(BlockingIOError):
            servers["datagram"].recv(10)
    finally:
        for server in servers.values():
            server.close()
    assert set(found) == set(attempts.ATTEMPTS)
    through = {name: detail for name, (_, verdict, detail) in found.items() if verdict == "done"}
    assert through == {}
    # An attempt that fails for a reason of its own proves nothing.
    broken = {name: detail for name, (_, _, detail) in found.items() if detail.split(":")[0] not in REFUSALS}
    assert broken == {}
    assert not [path for path in work.rglob("*") if path.lstat().st_mode & 0o6000]


def test_the_document_shows_the_table() -> None:
    groups = Counter(group for group, _ in attempts.ATTEMPTS.values())
    assert sum(groups.values()) >= 80
    for name in ("docs/sandbox.md", "docs/sandbox.ko.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        rows = dict(re.findall(r"^\| ([\w/, ]+?) \| (\d+) \| 0 \|", text, flags=re.MULTILINE))
        assert {group: int(count) for group, count in rows.items()} == dict(groups)
