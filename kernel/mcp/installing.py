"""The installation of one package as a bundle with one tool, and what becomes of its result. Pure.

The tool (kernel/mcp/jailed_install.py) is an ordinary tool of the bundle, so its jail, its network and its limits are
those of every tool. It is granted the hosts of the registry, the folder to write to, and what the installer reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from goondan.kernel.mcp.packages import PackageCommand

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
