"""The bundled tool `file-system` against what a file system can hold, and against paths that lead out of the jail."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from tests.toolhost_fixture import Bench, bench, small_outputs

GIB = 1 << 30


@pytest_asyncio.fixture
async def host() -> AsyncIterator[Bench]:
    async with bench(small_outputs(tool_spec(base_tools()["file-system"]))) as made:
        yield made


async def output(host: Bench, export: str, workdir: Path, **args: Any) -> dict[str, Any]:
    result = await host.call(f"file-system__{export}", args, workdir=workdir, within_s=10)
    assert result["status"] == "ok", result
    found: dict[str, Any] = result["output"]
    return found


async def error(host: Bench, export: str, workdir: Path, **args: Any) -> dict[str, Any]:
    result = await host.call(f"file-system__{export}", args, workdir=workdir, within_s=10)
    assert result["status"] == "error", result
    found: dict[str, Any] = result["error"]
    assert found["suggestion"], found
    assert found["helpUrl"], found
    return found


@pytest.mark.requirement("FS-05", "ERROR-07")
async def test_what_the_sandbox_does_not_show_is_denied_by_name(host: Bench, workdir: Path) -> None:
    outside = workdir.parent / "secret"
    outside.mkdir()
    (outside / "key.txt").write_text("secret")
    (workdir / "file-link").symlink_to(outside / "key.txt")
    (workdir / "folder-link").symlink_to(outside)
    (workdir / "dangling").symlink_to(workdir.parent / "not-there")
    up = f"../{outside.name}/key.txt"
    for path in (str(outside / "key.txt"), up, "file-link", "folder-link/key.txt", f"{workdir}/x/../{up}"):
        for export, more in (("read", {}), ("write", {"content": "x"}), ("mkdir", {}), ("list", {})):
            found = await error(host, export, workdir, path=path, **more)
            assert found["code"] == "E_SANDBOX_DENIED", (export, path, found)
            assert str(outside / "key.txt") in found["message"]
            assert "sandbox.filesystem" in found["suggestion"]
    found = await error(host, "write", workdir, path="dangling", content="x")
    assert found["code"] == "E_SANDBOX_DENIED"
    assert (outside / "key.txt").read_text() == "secret"
    assert sorted(path.name for path in workdir.parent.iterdir()) == ["secret", "work"]


async def test_nothing_is_written_to_memory_that_goes_with_the_jail(host: Bench, workdir: Path) -> None:
    for path in ("/tmp/x", "/tmp/a/b", "/dev/shm/x", "/new/x", "/usr/new", "/etc/passwd", "/proc/sys/kernel/hostname"):
        found = await error(host, "write", workdir, path=path, content="x")
        assert found["code"] in ("E_SANDBOX_DENIED", "EROFS", "EACCES"), found
        assert path in found["message"] or path.rpartition("/")[0] in found["message"]
    assert (await error(host, "mkdir", workdir, path="/tmp/d"))["code"] == "E_SANDBOX_DENIED"
    assert (await error(host, "mkdir", workdir, path="/d", recursive=False))["code"] == "E_SANDBOX_DENIED"


async def test_guarded_places_in_the_workdir_say_that_they_are_read_only(host: Bench, workdir: Path) -> None:
    (workdir / ".git" / "hooks").mkdir(parents=True)
    found = await error(host, "write", workdir, path=".git/hooks/pre-commit", content="x")
    assert (found["code"], list((workdir / ".git" / "hooks").iterdir())) == ("EROFS", [])


async def test_what_is_no_file_is_refused_without_waiting(host: Bench, workdir: Path) -> None:
    os.mkfifo(workdir / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(workdir / "socket"))
        for path in ("fifo", "socket", "/dev/zero", "/dev/tty", "/dev/null"):
            for export, more in (("read", {}), ("write", {"content": "x"})):
                found = await error(host, export, workdir, path=path, **more)
                assert found["code"] in ("EINVAL", "ENXIO", "EACCES"), (export, path, found)
            assert (await error(host, "list", workdir, path=path))["code"] == "ENOTDIR"
    assert (await error(host, "read", workdir, path="."))["code"] == "EISDIR"
    assert (await error(host, "write", workdir, path=".", content="x"))["code"] == "EISDIR"
    assert (await error(host, "write", workdir, path="new/", content="x"))["code"] == "EISDIR"
    listed = await output(host, "list", workdir)
    assert [entry["name"] for entry in listed["entries"]] == []  # neither files nor folders


@pytest.mark.requirement("FS-03")
async def test_files_of_any_size_take_little_memory(host: Bench, workdir: Path) -> None:
    with open(workdir / "sparse", "wb") as made:
        made.truncate(10 * GIB)
    found = await output(host, "read", workdir, path="sparse", maxBytes=10)
    assert (found["size"], found["truncated"], found["content"]) == (10 * GIB, True, "\0" * 10)
    for most in (10 * GIB, 1e308, 2**63):
        refused = await error(host, "read", workdir, path="sparse", maxBytes=most)
        assert refused["code"] == "E_TOOL_LIMIT"
    assert len((await output(host, "read", workdir, path="sparse"))["content"]) == 100_000
    assert (await output(host, "list", workdir))["entries"][0]["size"] == 10 * GIB
    (workdir / "noise").write_bytes(b"\xff" * 1_000_000)  # three times as much as U+FFFD
    assert (await error(host, "read", workdir, path="noise", maxBytes=1_000_000))["code"] == "E_TOOL_LIMIT"
    assert (await output(host, "read", workdir, path="/proc/self/status"))["size"] > 100


async def test_names_and_numbers_out_of_range(host: Bench, workdir: Path) -> None:
    for path in ("a\0b", "\0"):
        for export, more in (("read", {}), ("write", {"content": "x"}), ("list", {}), ("mkdir", {})):
            found = await error(host, export, workdir, path=path, **more)
            assert found["message"] == "'path' must not contain null bytes"
    for path in ("x" * 300, "x/" * 5000):
        for export, more in (("read", {}), ("write", {"content": "x"}), ("list", {}), ("mkdir", {})):
            assert (await error(host, export, workdir, path=path, **more))["code"] == "ENAMETOOLONG"
    (workdir / "loop").symlink_to("loop")
    assert (await error(host, "read", workdir, path="loop"))["code"] == "ELOOP"
    assert (await error(host, "write", workdir, path="loop", content="x"))["code"] == "ELOOP"
    (workdir / "a").write_text("hello")
    assert (await error(host, "read", workdir, path="a", maxBytes=-1e308))["code"] == "E_TOOL"
    assert (await output(host, "read", workdir, path="a", maxBytes=1.9))["content"] == "h"
    assert (await error(host, "read", workdir, path="a/"))["code"] == "ENOTDIR"
    assert (await error(host, "read", workdir, path="a/b"))["code"] == "ENOTDIR"
    assert (await error(host, "mkdir", workdir, path="a"))["code"] == "EEXIST"
    os.mkdir(bytes(workdir) + b"/\xff\xfe")
    names = [entry["name"] for entry in (await output(host, "list", workdir))["entries"]]
    assert names == ["\ufffd\ufffd", "a"]


@pytest.mark.requirement("FS-11", "FS-12")
async def test_a_list_is_bounded(host: Bench, workdir: Path) -> None:
    for number in range(3000):
        (workdir / f"{number:0200}").touch()
    refused = await error(host, "list", workdir)
    assert refused["code"] == "E_TOOL_LIMIT"
    assert (await output(host, "list", workdir, includeFiles=False))["count"] == 0
    # The whole jail: /proc and /usr with all they hold.
    refused = await error(host, "list", workdir, path="/", recursive=True)
    assert refused["code"] in ("E_TOOL_LIMIT", "EACCES"), refused


async def test_a_file_may_grow_from_two_calls_at_once(host: Bench, workdir: Path) -> None:
    lines = [f"{number}\n" * 50 for number in range(20)]
    await asyncio.gather(*(output(host, "write", workdir, path="log", content=line, append=True) for line in lines))
    assert sorted((workdir / "log").read_text().split("\n")) == sorted("".join(lines).split("\n"))
