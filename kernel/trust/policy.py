"""The operator's policy: `$GOONDAN_STATE_ROOT/policy.yaml`, and a file that `--policy` names; and the context in which
grants are decided, gathered from both and from this machine.

    widen:                      # written by hand: what tools get beyond their requests
      - tool: http-fetch        # a tool of the bundle or of @goondan/base; PACKAGE/TOOL for one of a package
        bundle: /home/me/swarm  # optional: only in this bundle
        sandbox: {network: {allow: ["127.0.0.1:8080"]}}
    accepted:                   # written by `gdn grant accept`: requests of packaged tools, pinned to their code
      - {tool: "@acme/weather/forecast", digest: "sha256:…"}
    pinned:                     # written by the command of a feature: what commands in folders with this content get
      - {folder: deploy, digest: "sha256:…", sandbox: {env: [DEPLOY_TOKEN]}}
    spawn: {workdirs: [/srv/p]} # written by hand: where else spawned agents may work (docs/agents.md)

A user who can write it decides what tools may do. So it must belong to the operator and be closed to changes by others.
Accepted requests stand at the end, behind a line of their own, so that the part written by hand keeps its comments.

The digest that a grant is pinned to is of every file. Unlike the digest of a revision it leaves nothing out: neither
hidden nor compiled nor large files, because a module could import any of them.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

import goondan
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules.checked import Checked, Package
from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES, Unreadable
from goondan.kernel.bundle.rules.positions import Allowance, Mapping, compose_file
from goondan.kernel.bundle.rules.problems import Position, Report
from goondan.kernel.bundle.rules.shape import Builder, Document, Environment
from goondan.kernel.grants.granting import Accepted, GrantContext, PinnedFolder, Policy, SpawnPolicy, requested
from goondan.kernel.paths import identity, is_shared, is_utf8, key_file
from goondan.kernel.state_root import doubt, open_state_root
from goondan.schemas.system import digests, directories
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import KEYS, STATE_ROOT, runtime_bases

POLICY_FILE: Final = "policy.yaml"
#: The part that `gdn grant` writes begins with this line and goes to the end of the file.
MARK: Final = "# --- accepted requests, written by `gdn grant`; what you write yourself stands above ---"


def read_policies(paths: list[str], report: Report) -> list[tuple[Document, Policy]]:
    """The policies of several files, each with its document. The first is the state root's: it need not exist, and is
    read only from a root that is believed.

    Everything that is wrong goes into `report`, with its place.
    """
    found: list[tuple[Document, Policy]] = []
    for index, path in enumerate(paths):
        if index == 0 and not os.path.lexists(path):
            continue
        if index == 0 and (why := doubt(os.path.dirname(path))) is not None:
            report.error("E_CONFIG_NOT_FOUND", f"the policy is not read: {why}", Position(path), _ELSEWHERE_HINT)
            continue
        document = _document(path, report)
        if document is None:
            continue
        policy: Policy = Builder(document, Environment(None), report).build(Policy)
        found.append((document, policy))
    return found


def _document(path: str, report: Report) -> Document | None:
    try:
        _check_owner(path)
        composed = compose_file(read_file(path, MAX_FILE_BYTES), Allowance())
    except (OSError, Unreadable) as error:
        why = error.strerror or "" if isinstance(error, OSError) else str(error)
        report.error("E_CONFIG_NOT_FOUND", f"the policy cannot be used: {why.lower()}", Position(path), _POLICY_HINT)
        return None
    composed.report_faults(path, report)
    if not composed.documents:
        return None
    node = composed.documents[0]
    if not isinstance(node, Mapping) or len(composed.documents) > 1:
        message = "a policy is one document: a mapping with `widen`, `accepted`, `pinned` and `spawn`"
        report.error("E_CONFIG_INVALID_VALUE", message, Position(path, node.line, node.column))
        return None
    return Document(path, node)


_ELSEWHERE_HINT: Final = "Do what the message says; `--policy FILE` names a policy that is read in any case."
_POLICY_HINT: Final = "Name a YAML file that belongs to you and that nobody else can write to."


def _check_owner(path: str) -> None:
    """Raise Unreadable when somebody else could have written it."""
    state = os.stat(path)
    if state.st_uid not in (0, os.geteuid()):
        raise Unreadable(f"it belongs to uid {state.st_uid}")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unreadable(f"others can write to it (mode {stat.S_IMODE(state.st_mode):04o})")


def write_decisions(path: str, accepted: list[Accepted], pinned: list[PinnedFolder]) -> None:
    """Replace what `gdn grant` has written in a policy. Raises GoondanError E_STATE."""
    try:
        with open(path, encoding="utf-8") as source:
            before = source.read()
    except FileNotFoundError:
        before = ""
    except (OSError, UnicodeDecodeError) as error:
        raise fail("E_STATE", f"{path}: {error}") from None
    by_hand = before.partition(MARK)[0].rstrip()
    lines = [by_hand, ""] if by_hand else []
    decisions: dict[str, Sequence[Struct]] = {"accepted": accepted, "pinned": pinned}
    if any(decisions.values()):
        lines.append(MARK)
    for key, items in decisions.items():
        if items:
            lines += [f"{key}:", *("  - " + msgspec.json.encode(item).decode() for item in items)]
    text = "\n".join([*lines, ""]) if lines else ""
    root = os.path.dirname(path)
    why = open_state_root(root, make=True).why
    if why is not None:
        raise fail("E_STATE", f"what is accepted would not be read again: {why}")
    try:
        directories.replace_file(path, text.encode(), sync=True)
    except OSError as error:
        raise fail("E_STATE", f"{path}: {error.strerror}") from None


#: Nobody could have looked at a package with more.
MAX_FILES: Final = 20_000
MAX_BYTES: Final = 1 << 30


def pin(root: str, *, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> str:
    """`sha256:` and the digest of everything below `root`. Raises Unreadable for what cannot be pinned."""
    try:
        return digests.folder_digest(root, max_files=max_files, max_bytes=max_bytes)
    except digests.NoDigest as error:
        raise Unreadable(str(error)) from None


#: Of an installation, what is the kernel's own code.
_PACKAGES: Final = ("schemas", "kernel", "agentproc", "toolhost", "features")


def gather(
    bundle: str, checked: Checked, packages: Iterable[Package], policies: list[str], root: str | None, report: Report
) -> GrantContext:
    """The context of grants for the bundle at `bundle`. `root` is the state root. What is wrong goes into `report`."""
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
        policies=[(document, _spelled_out(policy)) for document, policy in read_policies(policies, report)],
        pins=pins,
        kept=[*(os.path.realpath(path) for path in _ours()), *hidden],
        hidden=hidden,
        home=os.path.realpath(os.path.expanduser("~")),
        bundle=identity(os.path.expanduser(bundle)),
    )


def _spelled_out(policy: Policy) -> Policy:
    """A policy with one spelling for a bundle's folder and for its goondan.yaml, and with whole paths."""
    widen = [
        item if item.bundle is None else replace(item, bundle=identity(os.path.expanduser(item.bundle)))
        for item in policy.widen
    ]
    workdirs = [os.path.normpath(os.path.expanduser(path)) for path in policy.spawn.workdirs]
    return replace(policy, widen=widen, spawn=SpawnPolicy(workdirs))


def hidden_folders(root: str | None) -> list[str]:
    """Folders that no tool may see, as they are named and without links: the state roots, where runtime directories
    are, and where keys are. `root` is the state root. Raises GoondanError E_STATE for a name that no plan can hold.
    """
    home = os.path.expanduser("~")
    named = [*([root] if root else []), *key_folders()]
    if home not in ("", "~", "/"):
        named += [f"{home}/{STATE_ROOT}", f"{home}/{KEYS}"]
    named += runtime_bases(os.environ, os.geteuid())
    hidden = list(dict.fromkeys(path for folder in named for path in (folder, os.path.realpath(folder))))
    if not all(map(is_utf8, hidden)):
        message = "a folder that tools must not see has a name that is not UTF-8"
        raise fail(
            "E_STATE", message, suggestion="Look at HOME, GOONDAN_KEY_FILE, XDG_CONFIG_HOME and XDG_RUNTIME_DIR."
        )
    return hidden


def key_folders() -> list[str]:
    """The folder of keys; [] for a place where no key is used."""
    home = os.path.expanduser("~")
    folder = os.path.dirname(key_file(os.environ, home, "key"))
    return [] if is_shared(folder, home) else [folder]


def _ours() -> list[str]:
    """Interpreters, and our own code."""
    code = os.path.dirname(goondan.__file__)
    return [sys.prefix, sys.base_prefix, code, *(os.path.join(code, name) for name in _PACKAGES)]
