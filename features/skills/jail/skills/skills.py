"""The bundled tool `skills`: commands in the directory of a skill. The extension `skills` brings it.

The tool host has shown the skill's directory read-only and names it in CALL_FOLDER. How a command ends is in
goondan_base/shell.py.

Source: requirements SKILL-13 to SKILL-15; docs/design/tools.md section 14.
"""

from __future__ import annotations

import errno
import posix

from goondan_base.arguments import WHITE_SPACE, InvalidInput, non_empty, number, strings
from goondan_base.shell import SHELL, Shell, ShellError, encode, fitting_texts
from goondan_tool import ToolContext

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

DEFAULT_TIMEOUT_MS = 60_000
#: The variable in which the tool host names the folder of the calls.
CALL_FOLDER = b"CALL_FOLDER"
#: The variables in which a command finds the skill's directory and the working directory.
FOLDER = b"SKILL_DIR"
WORKDIR = b"WORKDIR"


class NotStarted(Exception):
    """The command could not be started."""

    def __init__(self, error: ShellError) -> None:
        super().__init__(f"Failed to run command: {error}")
        self.code = error.code
        self.suggestion = error.suggestion


def run(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`skills__run`: run a command line with /bin/sh in the skill's directory."""
    name, command = non_empty(input, "name"), _text("command", non_empty(input, "command"))
    args = [_text("args", arg) for arg in strings(input, "args")] if "args" in input else []
    timeout_ms = timeout(input)
    line = " ".join([command, *map(quoted, args)])
    environment = {**posix.environ, WORKDIR: encode(ctx.workdir)}
    place = environment[FOLDER] = environment.pop(CALL_FOLDER, b"")
    folder = place.decode("utf-8", "surrogateescape")
    try:
        _check_folder(folder)
        ended = Shell(ctx, [SHELL, "-c", line], folder, environment, timeout_ms).run()
    except ShellError as error:
        raise NotStarted(error) from None
    told = {"skill": name, "command": command, "args": args}
    stdout, stderr = fitting_texts(ctx, told, ended)
    code = posix.waitstatus_to_exitcode(ended.status)
    result = {
        "code": None if ended.timed_out or code < 0 else code,
        "stdout": stdout.strip(WHITE_SPACE),
        "stderr": stderr.strip(WHITE_SPACE),
        **told,
    }
    if ended.left:
        result["endedProcesses"] = ended.left
    return {**result, "timedOut": True} if ended.timed_out else result


handlers = {"run": run}


def timeout(input: dict[str, Any]) -> float:
    """`timeout` in milliseconds; zero or less means the default."""
    given = number(input, "timeout", DEFAULT_TIMEOUT_MS)
    return given if given > 0 else DEFAULT_TIMEOUT_MS


def quoted(text: str) -> str:
    """A text as the shell reads one word of just these characters."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def _text(name: str, value: str) -> str:
    if "\0" in value:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    return value


def _check_folder(path: str) -> None:
    """Raise ShellError when the shell could not start there."""
    try:
        found = posix.stat(path)
    except OSError as error:
        raise ShellError(error.errno or errno.ENOENT, f"stat '{path}'") from None
    if found.st_mode & 0o170000 != 0o040000:
        raise ShellError(errno.ENOTDIR, f"chdir '{path}'")
    if not posix.access(path, posix.X_OK):
        raise ShellError(errno.EACCES, f"chdir '{path}'")
