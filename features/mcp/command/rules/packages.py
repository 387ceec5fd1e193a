"""Packages of MCP servers: which one a command would start, and the bundle with one tool that installs it. Pure.

The commands are those that people know: `npx -y PACKAGE`, `uvx PACKAGE`, `pip install PACKAGE`. The tool (install.py of
the folder jail) is an ordinary tool of a bundle, so its jail, its network and its limits are those of every tool. It is
granted the hosts of the registry, the folder to write to, and what the installer reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

Registry = Literal["npm", "pypi"]

_NPM_NAME: Final = re.compile(r"(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*", re.IGNORECASE)
_NPM_VERSION: Final = re.compile(r"[A-Za-z0-9.^~<>=*|+ -]+")
_PYPI: Final = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?P<extras>\[[A-Za-z0-9,._ -]+\])?"
    r"(?P<version>(?:@(?!\s)[A-Za-z0-9.+!-]+)|(?:(?:===|==|>=|<=|~=|!=|>|<)[A-Za-z0-9.*+!,=<>~ -]+)?)"
)
#: Options of npx and npm exec that stand alone.
_NPX_ALONE: Final = frozenset({"-y", "--yes", "-q", "--quiet", "--silent", "-s", "--no", "--prefer-offline"})
_UVX_ALONE: Final = frozenset({"-q", "--quiet", "--isolated", "--no-cache", "--refresh", "-n", "--no-progress"})


class PackageCommand(Struct, frozen=True):
    """A package to install and what is started of it."""

    #: The kind of registry.
    registry: Registry
    #: The package's name.
    package: str
    #: The version or the range that was asked for, as the installer reads it; "" for the newest.
    wanted: str
    #: The program of the package; None: the only one it has, or the one of its name.
    program: str | None
    #: The arguments of the program.
    arguments: list[str]
    #: The command as it was given, without what is no matter of the package.
    words: list[str]
    #: Optional parts of a Python package, with brackets.
    extras: str = ""
    #: What else pip is asked for, beside a Python package.
    beside: list[str] = []


def package_command(words: Sequence[str]) -> PackageCommand | None:
    """What a command installs and starts; None for one that installs nothing, or is not understood."""
    if not words:
        return None
    program = words[0].rsplit("/", 1)[-1].removesuffix(".cmd").removesuffix(".exe")
    rest = list(words[1:])
    if program == "cmd" and rest[:1] in (["/c"], ["/C"]):
        return package_command(rest[1:]) if rest[1:2] != ["cmd"] else None
    if program == "npx":
        return _npm(rest)
    if program in ("npm", "pnpm", "bun", "yarn") and rest[:1] and rest[0] in ("exec", "x", "dlx"):
        return _npm(rest[1:])
    if program in ("bunx", "pnpx"):
        return _npm(rest)
    if program == "uvx" or (program == "uv" and rest[:2] == ["tool", "run"]):
        return _pypi(rest if program == "uvx" else rest[2:], run=True)
    if program == "pipx" and rest[:1] == ["run"]:
        return _pypi(rest[1:], run=True)
    if program in ("pip", "pip3") and rest[:1] == ["install"]:
        return _pypi(rest[1:], run=False)
    return None


def _npm(rest: list[str]) -> PackageCommand | None:
    package: str | None = None
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word in ("-p", "--package") and rest:
            package = rest.pop(0)
        elif word.startswith("--package="):
            package = word.partition("=")[2]
        elif word not in _NPX_ALONE:
            return None
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest and package is None:
        return None
    first = rest.pop(0) if rest else None
    spec = package if package is not None else first
    name, _, wanted = ((spec or "")[1:] if (spec or "").startswith("@") else spec or "").partition("@")
    if (spec or "").startswith("@"):
        name = f"@{name}"
    if _NPM_NAME.fullmatch(name) is None or (wanted and _NPM_VERSION.fullmatch(wanted) is None):
        return None
    program = first if package is not None else None
    words = ["npx", "-y", *(["-p", package] if package is not None else []), *([first] if first else []), *rest]
    return PackageCommand("npm", name, wanted, program, rest, words)


def _pypi(rest: list[str], *, run: bool) -> PackageCommand | None:
    package: str | None = None
    beside: list[str] = []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word == "--with" and rest and _PYPI.fullmatch(rest[0]):
            beside.append(rest.pop(0))
        elif word in ("--from", "--spec") and rest:
            package = rest.pop(0)
        elif word.startswith(("--from=", "--spec=")):
            package = word.partition("=")[2]
        elif word in ("-p", "--python") and rest:
            rest.pop(0)
        elif word not in _UVX_ALONE:
            return None
    if not rest:
        return None
    first = rest.pop(0)
    match = _PYPI.fullmatch(package if package is not None else first)
    if match is None:
        return None
    version = match["version"]
    wanted = "" if version in ("", "@latest") else f"=={version[1:]}" if version.startswith("@") else version
    program = first if package is not None and run else None
    head = ["uvx", *(word for one in beside for word in ("--with", one))]
    head += ["--from", package] if package is not None else []
    return PackageCommand(
        "pypi", match["name"], wanted, program, rest, [*head, first, *rest], match["extras"] or "", beside
    )


# --- the bundle that installs ---------------------------------------------------------------------------------------

#: The name of the tool in its bundle, and of its function.
TOOL: Final = "install"
CALL: Final = f"{TOOL}__run"
#: The module's place in the bundle.
MODULE: Final = "tools/install.py"
#: What an installation may use. npm unpacks tens of thousands of files and keeps the registry's answers in memory.
LIMITS: Final[Mapping[str, int]] = {
    "memoryMb": 2048, "processes": 256, "openFiles": 1024, "fileMb": 1024, "diskMb": 4096, "files": 200_000,
    "cpuSeconds": 600, "wallSeconds": 900,
}  # fmt: skip


class Installed(Struct, frozen=True):
    """What the installer's jail says about the package. It is not believed before somebody has looked."""

    #: The exact version.
    version: str
    #: Its programs: name -> path in the folder.
    programs: dict[str, str]
    #: How many packages were installed.
    packages: int
    #: Packages that would have run a script, and did not.
    scripts: list[str] = []


def bundle_text(folder: str, grants: Sequence[str], reads: Sequence[str]) -> str:
    """The goondan.yaml of the bundle that installs into `folder`. JSON is YAML, and quotes whatever a path holds."""
    sandbox = {
        "network": {"allow": list(grants)} if grants else "none",
        "filesystem": {"write": [folder], "read": list(dict.fromkeys(reads))},
        "limits": dict(LIMITS),
    }
    document = {
        "apiVersion": "goondan.ai/v1",
        "kind": "Tool",
        "metadata": {"name": TOOL},
        "spec": {"entry": MODULE, "exports": [{"name": "run"}], "sandbox": sandbox},
    }
    return json.dumps(document, indent=1) + "\n"


def arguments(
    command: PackageCommand,
    folder: str,
    installer: Sequence[str],
    settings: Mapping[str, str],
    via: Mapping[str, str],
    certificates: str | None,
) -> dict[str, Any]:
    """The arguments of the installing call."""
    if command.registry == "npm":
        package = f"{command.package}@{command.wanted}" if command.wanted else command.package
    else:
        package = f"{command.package}{command.extras}{command.wanted}"
    return {
        "registry": command.registry,
        "name": command.package,
        "packages": [package, *command.beside],
        "folder": folder,
        "installer": list(installer),
        "settings": dict(settings),
        "via": dict(via),
        "certificates": certificates,
    }


def program_of(command: PackageCommand, installed: Installed) -> str | None:
    """The path of the program to start: the one that was named, the only one, or the one of the package's name."""
    programs = installed.programs
    if command.program is not None:
        return programs.get(command.program)
    if len(programs) == 1:
        return next(iter(programs.values()))
    return programs.get(command.package.rpartition("/")[2])
