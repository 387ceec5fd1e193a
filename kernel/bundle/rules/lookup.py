"""The questions that the rules ask about the file system, as an interface. The rules touch no file; files.py does."""

from __future__ import annotations

from typing import Final, Protocol

from msgspec import Struct

#: The largest YAML file (bytes). People write bundles; code and data belong into other files.
MAX_FILE_BYTES: Final = 1 << 20
#: The largest file with a system prompt (bytes).
MAX_PROMPT_BYTES: Final = 256 << 10
#: The largest module of an extension (bytes), libraries of machine code included.
MAX_MODULE_BYTES: Final = 64 << 20


class Unreadable(Exception):
    """A file cannot be used. The text says why."""


class Found(Struct, frozen=True):
    """What a path in a document leads to. `path` is absolute, with links resolved."""

    #: The absolute path, with links resolved.
    path: str
    #: why it cannot be used; None when it can
    fault: str | None = None
    #: Somebody may execute it.
    executable: bool = True


class Files(Protocol):
    """The files around one bundle. `root` is the bundle's root: absolute, with links resolved."""

    root: str

    def find(self, named: str) -> Found:
        """A regular file of the bundle; links may not lead out of it. Never raises."""

    def read_text(self, path: str) -> str:
        """A text file of at most MAX_PROMPT_BYTES that was found before. Raises Unreadable."""

    def resolve(self, path: str) -> str:
        """A path that a sandbox names: absolute, below the home directory (`~/`), or relative to the root."""

    def is_environment(self, path: str) -> bool:
        """Whether a virtual environment of Python is there (`path` from `resolve`)."""

    def is_file(self, path: str) -> bool:
        """Whether a regular file is there."""

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there (`path` from `resolve`)."""

    def list_files(self, folder: str, suffixes: tuple[str, ...], limit: int) -> list[str]:
        """Files below a folder whose names end so, by their paths in it. Raises Unreadable when there are more."""

    def digest(self, path: str) -> str:
        """SHA-256 of a file of at most MAX_MODULE_BYTES, in hexadecimal digits. Raises Unreadable."""
