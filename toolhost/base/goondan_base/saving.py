"""Saves a download in the workdir: whole or not at all, and nowhere else.

A jail can also write to private memory. A file there would be lost with the jail, so that is refused too.

Source: docs/design/tools.md section 9; requirements TELEGRAM-18, SLACK-20.
"""

from __future__ import annotations

from goondan_tool import ToolContext, ToolError
from goondan_tool.sandbox import within

from .arguments import InvalidInput, absolute

#: The length of the random name under which a file is first written (bytes). So it meets no file of another call.
NAME_BYTES = 8


def place(ctx: ToolContext, name: str, given: str) -> tuple[str, str]:
    """The place that the argument `name` says: its absolute path, and the real path without links.

    Raises InvalidInput for null bytes, and ToolError E_SANDBOX_DENIED for a path that leads out of the workdir, also
    through a link.
    """
    from posixpath import realpath

    if "\0" in given:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    path = absolute(ctx.workdir, given)
    real = realpath(path)
    if not within(real, realpath(ctx.workdir)):
        raise ToolError(
            f"{path} is outside of the workdir, and downloads are saved there only",
            code="E_SANDBOX_DENIED",
            suggestion=f"Use a path in the workdir, such as {path.rstrip('/').rpartition('/')[2] or 'download'}.",
        )
    return path, real


def save(where: tuple[str, str], data: bytes) -> str:
    """Write the file, and return its path. It replaces an existing file. Missing folders are made.

    Raises ToolError with the name of the system's error as its code.
    """
    import os
    from errno import EIO, EISDIR

    from .reasons import name_of, reason_of

    path, real = where
    folder = os.path.dirname(real)
    part = os.path.join(folder, f".{os.urandom(NAME_BYTES).hex()}.part")
    operation, at = "mkdir", folder
    try:
        os.makedirs(folder, exist_ok=True)
        operation, at = "open", path
        if os.path.isdir(real) or path.endswith("/"):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            os.replace(part, real)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        number = error.errno or EIO
        at = error.filename if operation == "mkdir" and isinstance(error.filename, str) else at
        raise ToolError(f"{name_of(number)}: {reason_of(number)}, {operation} '{at}'", code=name_of(number)) from None
    return path
