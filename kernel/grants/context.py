"""The context in which grants are decided, gathered from this machine: the policy, digests of packages, folders that
must be kept.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Final

import goondan
from goondan.kernel.bundle.checked import Checked, Package
from goondan.kernel.bundle.lookup import Unreadable
from goondan.kernel.bundle.problems import Position, Report
from goondan.kernel.grants.granting import GrantContext, OpenedFolder, Pin, Rule
from goondan.kernel.grants.merge import requested
from goondan.kernel.grants.policy_file import pin, read_policies
from goondan.kernel.paths import identity, is_shared, key_file
from goondan.schemas.worker.grantable import KEYS, STATE_ROOT, runtime_bases

#: Of an installation, what is the kernel's own code.
_PACKAGES: Final = ("schemas", "kernel", "agentproc", "toolhost", "features")


def gather(
    bundle: str, checked: Checked, packages: Iterable[Package], policies: list[str], root: str | None, report: Report
) -> GrantContext:
    """The context of grants for the bundle at `bundle`. `root` is the state root. What is wrong goes into `report`."""
    read = read_policies(policies, report)
    rules = [
        Rule(item.tool, item.sandbox, document, ("widen", number), _real(item.bundle))
        for item, (document, number) in zip(read.policy.widen, read.places, strict=True)
    ]
    asking = {tool.package for tool in checked.tools.values() if tool.package and requested(tool.sandbox)}
    pins: dict[str, str] = {}
    for package in packages:
        if package.name in asking:
            try:
                pins[package.name] = pin(package.root)
            except Unreadable as error:
                report.warn("W_CONFIG_NOT_GRANTED", f"{package.name} cannot be pinned: {error}", Position(package.root))
    hidden = hidden_folders(root)
    return GrantContext(
        rules=rules,
        accepted={item.tool: item.digest for item in read.policy.accepted},
        pinned=[
            Pin(item.folder, item.digest, item.sandbox, document, ("pinned", number))
            for item, (document, number) in zip(read.policy.pinned, read.pinned_places, strict=True)
        ],
        pins=pins,
        kept=[*(os.path.realpath(path) for path in _ours()), *hidden],
        hidden=hidden,
        home=os.path.realpath(os.path.expanduser("~")),
        bundle=_real(bundle) or "",
        opened=[
            OpenedFolder(os.path.normpath(os.path.expanduser(path)), document, ("spawn", "workdirs", number))
            for path, (document, number) in zip(read.policy.spawn.workdirs, read.workdir_places, strict=True)
        ],
    )


def _real(bundle: str | None) -> str | None:
    """One spelling for a bundle's folder and for its goondan.yaml."""
    if bundle is None:
        return None
    return identity(os.path.expanduser(bundle))


def hidden_folders(root: str | None) -> list[str]:
    """Folders that no tool may see, as they are named and without links: the state roots, where runtime directories
    are, and where keys are. `root` is the state root.
    """
    home = os.path.expanduser("~")
    named = [*([root] if root else []), *key_folders()]
    if home not in ("", "~", "/"):
        named += [f"{home}/{STATE_ROOT}", f"{home}/{KEYS}"]
    named += runtime_bases(os.environ, os.geteuid())
    return list(dict.fromkeys(path for folder in named for path in (folder, os.path.realpath(folder))))


def key_folders() -> list[str]:
    """The folder of keys; [] for a place where no key is used."""
    home = os.path.expanduser("~")
    folder = os.path.dirname(key_file(os.environ, home, "key"))
    return [] if is_shared(folder, home) else [folder]


def _ours() -> list[str]:
    """Interpreters, and our own code."""
    code = os.path.dirname(goondan.__file__)
    return [sys.prefix, sys.base_prefix, code, *(os.path.join(code, name) for name in _PACKAGES)]
