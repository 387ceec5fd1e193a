"""The bundled tool `bash`: shell commands and scripts in the instance's workdir.

goondan_base/shell.py runs the shell and ends the call.

Source: docs/design/tools.md section 9; requirements BASH-01 to BASH-09; recorded parity `bash__*`.
"""

from __future__ import annotations

import errno
import posix

from goondan_base.arguments import InvalidInput, absolute, as_text, mapping, non_empty, number, string, strings
from goondan_base.shell import SHELL, Ended, Shell, ShellError, encode, fitting_texts
from goondan_tool import ToolContext
from goondan_tool.processes import signal_name

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

DEFAULT_TIMEOUT_MS = 30_000
SCRIPT_SHELL = "/bin/bash"


# --- exports --------------------------------------------------------------------------------------------------------


def execute(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`bash__exec`: run a command line with /bin/sh as a login shell."""
    command = required(input, "command")
    cwd = absolute(ctx.workdir, optional_string(input, "cwd", ctx.workdir))
    timeout_ms = timeout(input)
    environment = merged_environment(input)
    check_folder(cwd)
    ended = Shell(ctx, [SHELL, "-lc", command], cwd, environment, timeout_ms).run()
    return report(ctx, {"command": command, "cwd": cwd}, ended)


def script(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`bash__script`: run a script file with a shell, in the workdir."""
    path = absolute(ctx.workdir, required(input, "path"))
    args = optional_strings(input, "args")
    shell = optional_string(input, "shell", SCRIPT_SHELL)
    timeout_ms = timeout(input)
    environment = merged_environment(input)
    check_script(path)
    program = find_program(shell, environment)
    ended = Shell(ctx, [shell, path, *args], ctx.workdir, environment, timeout_ms, program=program).run()
    return report(ctx, {"path": path, "shell": shell, "args": args}, ended)


handlers = {"exec": execute, "script": script}


# --- arguments ------------------------------------------------------------------------------------------------------


def required(input: dict[str, Any], name: str) -> str:
    """A required string without zero bytes, which no argument of a program can contain."""
    return without_null(name, non_empty(input, name))


def optional_string(input: dict[str, Any], name: str, default: str) -> str:
    """A string that may be left out, also without zero bytes."""
    return without_null(name, string(input, name, default))


def optional_strings(input: dict[str, Any], name: str) -> list[str]:
    """A list of strings that may be left out, also without zero bytes."""
    return [without_null(name, item) for item in strings(input, name)] if name in input else []


def timeout(input: dict[str, Any]) -> float:
    """`timeoutMs`. Zero or less means no limit."""
    return float(number(input, "timeoutMs", DEFAULT_TIMEOUT_MS))


def merged_environment(input: dict[str, Any]) -> dict[bytes, bytes]:
    """The jail's environment with `env` on top (BASH-05)."""
    environment = dict(posix.environ)
    for name, value in mapping(input, "env").items():
        if not isinstance(value, str | int | float):  # bool is an int
            raise InvalidInput(f"env.{name} must be a primitive string/number/boolean value")
        if not name or "=" in name:
            raise InvalidInput(f"'{name}' is no name of an environment variable")
        environment[encode(without_null("env", name))] = encode(without_null(f"env.{name}", as_text(value)))
    return environment


def without_null(name: str, value: str) -> str:
    """Check that a string has no zero byte: no argument of a program can contain one."""
    if "\0" in value:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    return value


# --- paths ----------------------------------------------------------------------------------------------------------


def check_folder(path: str) -> None:
    """Raise the error that starting the shell in this folder would raise."""
    try:
        mode = posix.stat(path).st_mode
    except OSError as error:
        raise missing(path) or ShellError(error.errno or errno.ENOENT, f"posix_spawn '{SHELL}'") from None
    if mode & 0o170000 != 0o040000:
        raise ShellError(errno.ENOTDIR, f"posix_spawn '{SHELL}'")
    if not posix.access(path, posix.X_OK):
        raise ShellError(errno.EACCES, f"posix_spawn '{SHELL}'")


def check_script(path: str) -> None:
    """Raise an error unless the script exists."""
    try:
        posix.stat(path)
    except OSError as error:
        raise missing(path) or ShellError(error.errno or errno.ENOENT, f"access '{path}'") from None


def missing(path: str) -> Exception | None:
    """The error for a missing path, with a suggestion when the sandbox hides the path."""
    from goondan_tool.sandbox import denied

    return denied(path)


def find_program(shell: str, environment: dict[bytes, bytes]) -> str:
    """The file to start. A bare name is looked up in PATH."""
    if not shell:
        raise InvalidInput("'shell' must be a non-empty string")
    if "/" in shell:
        candidates = [shell]
    else:
        path = environment.get(b"PATH", b"/usr/bin:/bin").decode("utf-8", "surrogateescape")
        candidates = [f"{folder or '.'}/{shell}" for folder in path.split(":")]
    found = errno.ENOENT
    for candidate in candidates:
        try:
            is_folder = posix.stat(candidate).st_mode & 0o170000 == 0o040000
        except OSError:
            continue
        if not is_folder and posix.access(candidate, posix.X_OK):
            return candidate
        found = errno.EACCES
    if found == errno.ENOENT and "/" not in shell:
        raise ShellError(found, "", text=f'Executable not found in $PATH: "{shell}"')
    # A missing program stays ENOENT, as recorded. The suggestion names the places where it may be.
    denied = missing(shell) if shell.startswith("/") and found == errno.ENOENT else None
    raise ShellError(found, f"posix_spawn '{shell}'", getattr(denied, "suggestion", None))


# --- results --------------------------------------------------------------------------------------------------------


def report(ctx: ToolContext, first: dict[str, Any], ended: Ended) -> dict[str, Any]:
    """The result of a call (BASH-02, BASH-08), with `endedProcesses` if there were any. Streams are cut further when
    both do not fit the call's output.
    """
    stdout, stderr = fitting_texts(ctx, first, ended)
    code = posix.waitstatus_to_exitcode(ended.status)
    result = {
        **first,
        "durationMs": ended.duration_ms,
        "stdout": stdout,
        "stderr": stderr,
        "exitCode": code if code >= 0 else -1,
        "signal": None if code >= 0 else signal_name(-code),
        "timedOut": ended.timed_out,
    }
    return {**result, "endedProcesses": ended.left} if ended.left else result
