"""The pure parts of the bundled tool `bash`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.toolhost.base.bash import bash
from goondan.toolhost.base.goondan_base import shell
from goondan.toolhost.inside.processes import signal_name


@pytest.mark.requirement("BASH-05")
def test_variables_are_added_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = bash.merged_environment({"env": {"PATH": "/x", "N": 1, "B": True}})
    assert (merged[b"PATH"], merged[b"N"], merged[b"B"]) == (b"/x", b"1", b"true")
    assert set(os.environb) <= set(merged)


@pytest.mark.parametrize(
    ("check", "given", "message"),
    [
        (lambda given: bash.required(given, "command"), {"command": ""}, "'command' must be a non-empty string"),
        (lambda given: bash.required(given, "command"), {"command": "a\0b"}, "'command' must not contain null bytes"),
        (lambda given: bash.optional_string(given, "cwd", ""), {"cwd": None}, "'cwd' must be a string"),
        (lambda given: bash.optional_strings(given, "args"), {"args": "x"}, "'args' must be an array of strings"),
        (lambda given: bash.optional_strings(given, "args"), {"args": ["x", 1]}, "'args' must contain only strings"),
        (bash.merged_environment, {"env": ["A=1"]}, "'env' must be a JSON object"),
        (bash.merged_environment, {"env": {"A": None}}, "env.A must be a primitive string/number/boolean value"),
        (bash.merged_environment, {"env": {"A": [1]}}, "env.A must be a primitive string/number/boolean value"),
        (bash.merged_environment, {"env": {"A=B": "x"}}, "'A=B' is no name of an environment variable"),
        (bash.merged_environment, {"env": {"A": "x\0y"}}, "'env.A' must not contain null bytes"),
        (bash.timeout, {"timeoutMs": "1"}, "'timeoutMs' must be a valid number"),
        (bash.timeout, {"timeoutMs": True}, "'timeoutMs' must be a valid number"),
    ],
)
def test_arguments_and_environments_that_cannot_be(check: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(given)
    assert str(caught.value) == message


def stream(data: bytes, name: str = "stdout") -> shell.Stream:
    read, write = os.pipe()
    made = shell.Stream(read, name)
    try:
        for at in range(0, len(data), 60_000):
            os.write(write, data[at : at + 60_000])
            made.read()
    finally:
        os.close(write)
        os.close(read)
    return made


def test_a_stream_is_decoded_as_a_whole_and_cut_with_a_marker() -> None:
    assert stream("한 👍".encode()).text(100) == "한 👍"
    assert stream(b"a\xff\xed\x95").text(100) == "a\ufffd\ufffd"
    assert stream(b"x" * 100).text(10) == "x" * 10 + "\n[stdout was cut: 100 bytes in all]\n"
    assert stream("한한한".encode()).text(4) == "한\n[stdout was cut: 9 bytes in all]\n"
    full = stream(b"y" * (shell.STREAM_BYTES + 5))
    assert (
        full.text(1 << 30) == "y" * shell.STREAM_BYTES + f"\n[stdout was cut: {shell.STREAM_BYTES + 5} bytes in all]\n"
    )


@pytest.mark.requirement("BASH-02", "BASH-08")
def test_a_report_fits_the_output() -> None:
    ctx: Any = SimpleNamespace(output_limit=10_000)
    both = shell.Ended(0, False, 0.0125, [stream(b"o" * 50_000), stream(b"e" * 50_000, "stderr")])
    made = bash.report(ctx, {"command": "c", "cwd": "/w"}, both)
    assert sum(len(str(value)) for value in made.values()) < 10_000
    assert made["stdout"].startswith("o" * 4000)
    assert made["stderr"].startswith("e" * 4000)
    one = shell.Ended(9, True, 0.0, [stream(b"o" * 50_000), stream(b"e", "stderr")])
    made = bash.report(ctx, {"path": "/w/p", "shell": "/bin/sh", "args": ["a"]}, one)
    assert made["stdout"].startswith("o" * 8000)
    assert made["stderr"] == "e"
    assert (made["exitCode"], made["signal"], made["timedOut"]) == (-1, "SIGKILL", True)


def test_signals_have_names() -> None:
    assert [signal_name(n) for n in (1, 9, 15, 31, 34)] == ["SIGHUP", "SIGKILL", "SIGTERM", "SIGSYS", "SIG34"]


def test_programs_are_looked_up_like_a_shell_does(tmp_path: Path) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    environment = {b"PATH": f"/nonexistent:{tmp_path}".encode()}
    with pytest.raises(shell.ShellError) as caught:
        bash.find_program("tool", environment)
    assert (caught.value.code, str(caught.value)) == ("EACCES", "EACCES: permission denied, posix_spawn 'tool'")
    program.chmod(0o755)
    assert bash.find_program("tool", environment) == str(program)
    with pytest.raises(shell.ShellError) as caught:
        bash.find_program("/no/such", environment)
    assert str(caught.value) == "ENOENT: no such file or directory, posix_spawn '/no/such'"
