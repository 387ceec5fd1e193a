"""Saving a download in the workdir: whole or not at all, and nowhere else.

A jail can write to private memory beside its workdir; a file there would be gone with it, so that is refused too.

Source: docs/design/tools.md section 9; requirements TELEGRAM-18, SLACK-20.
"""

from __future__ import annotations

from goondan_tool import ToolContext, ToolError
from goondan_tool.sandbox import within

from .arguments import InvalidInput, absolute

#: A file is written under a random name of so many bytes first, so that no call meets another's, or what one left.
NAME_BYTES = 8


def place(ctx: ToolContext, name: str, given: str) -> tuple[str, str]:
    """Where the argument `name` says: as an absolute path, and where that really is.

    Raises InvalidInput for null bytes, ToolError E_SANDBOX_DENIED for what leads out of the workdir, also by a link.
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
    """Write the file, in place of one that is there, and return its path; missing folders are made.

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
