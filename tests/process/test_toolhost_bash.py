"""The bundled tool `bash` beyond the recorded cases: its rulings, its limits, its ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from tests.toolhost_fixture import Bench, bench, small_outputs

MIB = 1 << 20


async def run(command: str, workdir: Path, *, deadline_ms: int = 20_000, **args: Any) -> tuple[dict[str, Any], float]:
    """One command in a jail of its own; its output and how long it took (seconds)."""
    async with bench(small_outputs(tool_spec(base_tools()["bash"]))) as made:
        began = time.monotonic()
        result = await made.call("bash__exec", {"command": command, **args}, workdir=workdir, deadline_ms=deadline_ms)
        return result, time.monotonic() - began


def output(result: dict[str, Any]) -> dict[str, Any]:
    assert result["status"] == "ok", result
    found: dict[str, Any] = result["output"]
    return found


@pytest.mark.requirement("BASH-04")
async def test_what_ignores_sigterm_is_killed_half_a_second_later(workdir: Path) -> None:
    command = "trap '' TERM; echo before; sleep 30; echo after"
    result, seconds = await run(command, workdir, timeoutMs=300)
    found = output(result)
    assert (found["stdout"], found["exitCode"], found["signal"], found["timedOut"]) == ("before\n", -1, "SIGKILL", True)
    assert 0.75 <= seconds < 4
    assert found["durationMs"] >= 750


@pytest.mark.requirement("BASH-04")
async def test_a_child_that_ignores_sigterm_does_not_hold_the_call(workdir: Path) -> None:
    result, seconds = await run("(trap '' TERM; sleep 30) & echo x; wait", workdir, timeoutMs=200)
    found = output(result)
    assert (found["stdout"], found["timedOut"], found["signal"]) == ("x\n", True, "SIGTERM")
    assert seconds < 4


async def test_a_call_ends_with_its_shell_and_names_what_it_left(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:

        async def ask(command: str) -> dict[str, Any]:
            return output(await made.call("bash__exec", {"command": command, "timeoutMs": 15_000}, workdir=workdir))

        began = time.monotonic()
        for command, left in [
            ("sleep 60 & echo first", ["sleep 60"]),
            ("sleep 60 >/dev/null 2>&1 & echo first", []),  # ended as well, as the recorded cases show it
            ("set -m; sleep 60 & echo first", ["sleep 60"]),  # with its pipes, in a group of its own
            ("(trap '' TERM; exec sleep 60) & sleep 61 >&2 & echo first", ["sleep 60", "sleep 61"]),
            ("for n in $(seq 13); do sleep 60 & done; echo first", ["sleep 60"] * 10 + ["and 3 more"]),
            ("exec 3>&1; sleep 60 3>&- & echo first", ["sleep 60"]),
            ("echo first", []),
            ("sleep 0 & wait; echo first", []),
        ]:
            found = await ask(command)
            seen = (found["stdout"], found["exitCode"], found["signal"], found["timedOut"])
            assert seen == ("first\n", 0, None, False), command
            assert found.get("endedProcesses", []) == left, command
        assert time.monotonic() - began < 15
        assert (await ask("ps -e -o stat=,comm= | grep -c '^[^Z].*sleep'"))["stdout"] == "0\n"


async def test_what_is_in_the_pipes_when_the_shell_ends_is_kept(workdir: Path) -> None:
    command = "exec > >(tee log); seq 20000; sleep 30 >&2 & echo last"
    result, seconds = await run(f"exec /bin/bash -c '{command}'", workdir)
    found = output(result)
    assert found["stdout"].split() == [*map(str, range(1, 20_001)), "last"]
    assert (found["endedProcesses"], found["timedOut"]) == (["sleep 30"], False)
    assert (workdir / "log").read_text().endswith("last\n")
    assert seconds < 15


async def test_what_a_call_left_is_ended_and_its_neighbours_are_not(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:

        async def left(number: int) -> list[str]:
            command = f"sleep 6{number:02d} & exit"
            found: list[str] = output(await made.call("bash__exec", {"command": command}, workdir=workdir))[
                "endedProcesses"
            ]
            return found

        async def stays() -> int:
            found = await made.call(
                "bash__exec", {"command": "for n in 1 2 3 4 5; do sleep 0.2; done"}, workdir=workdir
            )
            return int(output(found)["exitCode"])

        codes, lists = await asyncio.gather(
            asyncio.gather(*(stays() for _ in range(3))), asyncio.gather(*(left(number) for number in range(8)))
        )
        assert codes == [0, 0, 0]
        assert lists == [[f"sleep 6{number:02d}"] for number in range(8)]


async def test_processes_in_groups_of_their_own_end_with_the_call(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:
        await made.call("bash__exec", {"command": "set -m; sleep 60 >/dev/null 2>&1 & echo"}, workdir=workdir)
        command = "ps -e -o stat=,comm= | grep -c '^[^Z].*sleep'"  # a dead one may wait to be reaped
        assert output(await made.call("bash__exec", {"command": command}, workdir=workdir))["stdout"] == "0\n"


async def test_streams_are_cut_with_a_marker_and_fit_the_result(workdir: Path) -> None:
    command = "head -c 3000000 /dev/zero | tr '\\0' o; head -c 3000000 /dev/zero | tr '\\0' e >&2"
    found = output((await run(command, workdir))[0])
    for name, letter in (("stdout", "o"), ("stderr", "e")):
        assert found[name].startswith(letter * 400_000)
        assert found[name].endswith(f"\n[{name} was cut: 3000000 bytes in all]\n")
    assert len(found["stdout"]) + len(found["stderr"]) < MIB
    found = output((await run("head -c 50000000 /dev/zero | tr '\\0' x", workdir))[0])
    assert found["stdout"].startswith("x" * 950_000)
    assert "50000000 bytes in all" in found["stdout"]
    assert found["exitCode"] == 0


async def test_bytes_that_are_no_text(workdir: Path) -> None:
    found = output((await run("printf 'a\\377b\\000c'; head -c 400000 /dev/urandom >&2", workdir))[0])
    assert found["stdout"] == "a\ufffdb\0c"
    assert len(found["stderr"].encode()) < MIB


@pytest.mark.parametrize("path", ["/root/private", "/nonexistent/x", "/home/someone", "/tmp/elsewhere"])
async def test_paths_outside_every_mount_are_denied_with_the_grant(workdir: Path, path: str) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:
        for args in ({"command": "pwd", "cwd": path}, {"path": path}):
            tool = "bash__exec" if "cwd" in args else "bash__script"
            error = (await made.call(tool, args, workdir=workdir))["error"]
            assert error["code"] == "E_SANDBOX_DENIED"
            assert path in error["message"]
            assert f"filesystem.read: [{path}]" in error["suggestion"]


async def test_paths_that_are_merely_missing(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:
        assert output(await made.call("bash__exec", {"command": "mkdir /tmp/own"}, workdir=workdir))["exitCode"] == 0
        for cwd in ("nope", str(workdir / "nope"), "/usr/nope", "/tmp/own/nope", f"../{workdir.name}/nope"):
            error = (await made.call("bash__exec", {"command": "pwd", "cwd": cwd}, workdir=workdir))["error"]
            assert error["code"] == "ENOENT", cwd
        outside = (await made.call("bash__exec", {"command": "pwd", "cwd": "../other"}, workdir=workdir))["error"]
        assert outside["code"] == "E_SANDBOX_DENIED"


async def test_a_deadline_that_is_sooner_than_the_timeout_still_gives_what_was_printed(workdir: Path) -> None:
    result, seconds = await run("echo before; sleep 30", workdir, deadline_ms=4000, timeoutMs=60_000)
    found = output(result)
    assert (found["stdout"], found["timedOut"]) == ("before\n", True)
    assert seconds < 4
    result, _ = await run("echo before; sleep 30", workdir, deadline_ms=500)
    assert result["error"]["code"] == "E_TOOL_TIMEOUT"


async def test_a_cancelled_command_is_killed(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:
        call_id, waiter = made.start("bash__exec", {"command": "sleep 30"}, workdir=workdir)
        await made.call("bash__exec", {"command": "true"}, workdir=workdir)
        made.cancel(call_id)
        assert (await waiter)["error"]["code"] == "E_CANCELLED"
        command = "for try in $(seq 200); do ps -e -o stat=,comm= | grep -q '^[^Z].*sleep' || exit; done; echo runs"
        assert output(await made.call("bash__exec", {"command": command}, workdir=workdir))["stdout"] == ""
        assert made.host.sessions.jail_count == 1


async def test_commands_run_beside_each_other(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:
        await made.call("bash__exec", {"command": "true"}, workdir=workdir)
        command = "touch {n}; until [ -e 0 -a $(ls | wc -l) = 12 ]; do sleep 0.05; done; echo {n}"  # when all are there
        results = await asyncio.gather(
            *(made.call("bash__exec", {"command": command.format(n=n)}, workdir=workdir) for n in range(12))
        )
        assert [output(result)["stdout"] for result in results] == [f"{n}\n" for n in range(12)]


async def test_odd_arguments(workdir: Path) -> None:
    async with bench(tool_spec(base_tools()["bash"])) as made:

        async def ask(args: dict[str, Any]) -> dict[str, Any]:
            return await made.call("bash__exec", args, workdir=workdir)

        assert (await ask({"command": "echo a\0b"}))["error"]["message"] == "'command' must not contain null bytes"
        assert (await ask({"command": "x" * 200_000}))["error"]["code"] == "E2BIG"
        assert output(await ask({"command": 'echo "$A"', "env": {"A": "x" * 1000}}))["stdout"] == "x" * 1000 + "\n"
        assert output(await ask({"command": "exit 3", "timeoutMs": 0}))["exitCode"] == 3
        assert output(await ask({"command": "echo ok", "timeoutMs": 3e9}))["timedOut"] is False
        assert output(await ask({"command": "kill -34 $$"}))["signal"] == "SIG34"
        assert output(await ask({"command": "pwd", "cwd": ""}))["cwd"] == str(workdir)
        assert await environment_of(made, workdir) == {"PATH", "HOME", "TMPDIR", "LANG", "PWD"}


async def environment_of(made: Bench, workdir: Path) -> set[str]:
    found = output(await made.call("bash__exec", {"command": "env"}, workdir=workdir))
    return {line.partition("=")[0] for line in found["stdout"].splitlines()} - {"SHLVL", "_", "OLDPWD"}
