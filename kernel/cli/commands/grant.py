"""`gdn grant list|accept|revoke|files`: the requests of tools, their grants, and the decisions of the operator.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.output import write, write_json, write_result
from goondan.kernel.cli.state import state_of
from goondan.kernel.paths import find_bundle, root_of
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.loader import Inspected
    from goondan.kernel.bundle.tools import CheckedTool
    from goondan.kernel.grants.policy_file import PinnedSkill


@click.command(name="list")
@options.bundle
@options.policy
@options.as_json
def list_(bundle: str | None, policy: str | None, as_json: bool) -> int:
    """Show every tool that asks for more than the defaults, and what it gets."""
    inspected, _ = _inspect(bundle, policy)
    rows = inspected.redact.all_of([_row(tool, inspected) for tool in _asking(inspected)])
    if as_json:
        write_json(rows)
        return 0
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row['tool']}: {_WORDS[row['status']]}")
        lines += [f"    {thing}" for thing in row["requested"]]
        lines += [f"    + {thing} (policy)" for thing in row["widened"]]
    write(*(lines or ["no tool asks for more than the defaults"]))
    return 0


@click.command()
@click.argument("tool")
@options.bundle
@options.as_json
def accept(tool: str, bundle: str | None, as_json: bool) -> int:
    """Grant a packaged TOOL (PACKAGE/NAME) what it requests, for exactly the code that is there now."""
    from goondan.kernel.bundle.granting import dangers
    from goondan.kernel.grants.policy_file import Accepted, write_decisions

    inspected, path = _inspect(bundle, None)
    found = _packaged(inspected, tool)
    row = _row(found, inspected)
    faults = dangers(found.sandbox, inspected.grant_context)
    if faults:
        listed = "; ".join(f"{fault.path}: {fault.reason}" for fault in faults)
        raise fail("E_CONFIG_DANGEROUS", f"{tool} asks for what no tool may have: {listed}")
    digest = inspected.grant_context.pins.get(found.package)
    if not row["requested"]:
        raise fail("E_USAGE", f"{tool} asks for nothing", suggestion="It runs with the defaults; see `gdn grant list`.")
    if digest is None:
        raise fail("E_USAGE", f"the package {found.package} cannot be pinned", suggestion="Make it smaller.")
    others = {name: pinned for name, pinned in inspected.grant_context.accepted.items() if name != tool}
    accepted = [Accepted(name, pinned) for name, pinned in sorted({**others, tool: digest}.items())]
    write_decisions(path, accepted, _pinned(inspected))
    if as_json:
        write_json({**row, "status": "accepted", "digest": digest, "policy": path})
    else:
        granted = [f"    {thing}" for thing in row["requested"]]
        write(f"accepted for {tool} at {digest[:19]}…:", *granted, "A kernel that runs gets it at its next start.")
    return 0


@click.command()
@click.argument("tool")
@options.bundle
@options.as_json
def revoke(tool: str, bundle: str | None, as_json: bool) -> int:
    """Take back what was accepted for TOOL."""
    from goondan.kernel.grants.policy_file import Accepted, write_decisions

    inspected, path = _inspect(bundle, None)
    accepted = inspected.grant_context.accepted
    if tool not in accepted:
        known = ", ".join(sorted(accepted)) or "none"
        raise fail("E_USAGE", f"nothing was accepted for {tool[:100]!r}", suggestion=f"Accepted are: {known}.")
    left = [Accepted(name, pinned) for name, pinned in sorted(accepted.items()) if name != tool]
    write_decisions(path, left, _pinned(inspected))
    text = f"revoked for {tool}. A kernel that runs keeps it until it is stopped."
    write_result({"tool": tool, "status": "revoked", "policy": path}, text, as_json=as_json)
    return 0


@click.command()
@click.option("--accept", is_flag=True, help="Accept what is in them now.")
@options.bundle
@options.policy
@options.as_json
def files(accept: bool, bundle: str | None, policy: str | None, as_json: bool) -> int:
    """Show files of the bundle that a tool may have written; a kernel starts when you have accepted them."""
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.cli.terminal import printable
    from goondan.kernel.grants.written import accept as accept_files

    path = find_bundle(bundle)
    state = state_of(path)
    found = inspect_bundle(path, state_dir=state, handlers=False, policy=policy).written
    if accept:
        accept_files(found, root_of(state))
    if as_json:
        status = "accepted" if accept else "written"
        write_json(
            [{"file": file.path, "status": status, "folder": file.folder, "sha256": file.digest} for file in found]
        )
        return 0
    lines = [
        f"{printable(file.path)}: {'accepted' if accept else 'a tool may have written it'} ({file.digest[:16] or '?'}…)"
        for file in found
    ]
    write(*(lines or ["no file of the bundle was written while tools could write to its folder"]))
    return 0


_WORDS = {
    "own": "gets what it asks for (the bundle's own)",
    "bundled": "gets what it asks for (@goondan/base)",
    "accepted": "accepted",
    "pending": "NOT GRANTED, gets the defaults; `gdn grant accept` grants it",
    "changed": "NOT GRANTED: the package is not the one that was accepted",
    "nothing": "asks for nothing",
}


def _inspect(bundle: str | None, policy: str | None) -> tuple[Inspected, str]:
    """The bundle, and the path of the state root's policy. Raises BundleError only for errors that hide its tools."""
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.bundle.problems import BundleError
    from goondan.kernel.grants.policy_file import POLICY_FILE

    path = find_bundle(bundle)
    state = state_of(path)
    own = os.path.join(root_of(state), POLICY_FILE)
    inspected = inspect_bundle(path, state_dir=state, handlers=False, policy=policy)
    broken = [problem for problem in inspected.errors if problem.code != "E_CONFIG_MISSING_ENV"]
    if broken:
        raise BundleError(broken, inspected.dropped)
    return inspected, own


def _asking(inspected: Inspected) -> list[CheckedTool]:
    from goondan.kernel.grants.merge import requested

    tools = inspected.checked.tools.values()
    return [tool for tool in tools if requested(tool.sandbox) or requested(tool.granted or tool.sandbox)]


def _row(tool: CheckedTool, inspected: Inspected) -> dict[str, Any]:
    from goondan.kernel.bundle.granting import status
    from goondan.kernel.grants.merge import requested

    asked = requested(tool.sandbox)
    got = requested(tool.granted or tool.sandbox)
    row: dict[str, Any] = {
        "tool": tool.id,
        "status": status(tool, inspected.grant_context),
        "requested": asked,
        "granted": got,
        "widened": [thing for thing in got if thing not in asked],
        "agents": {name: requested(left) for name, left in sorted(tool.narrowed.items())},
    }
    if tool.package in inspected.grant_context.pins:
        row["digest"] = inspected.grant_context.pins[tool.package]
    return row


def _pinned(inspected: Inspected) -> list[PinnedSkill]:
    """The skills that were pinned, as the policy has them."""
    from goondan.kernel.grants.policy_file import PinnedSkill

    return [PinnedSkill(pin.skill, pin.digest, pin.sandbox) for pin in inspected.grant_context.skills]


def _packaged(inspected: Inspected, tool: str) -> CheckedTool:
    packaged = {found.id: found for found in inspected.checked.tools.values() if found.package}
    if tool not in packaged:
        known = ", ".join(sorted(packaged)) or "none"
        message = f"the bundle uses no packaged tool {tool[:100]!r}"
        raise fail("E_USAGE", message, suggestion=f"Packaged tools of this bundle: {known}.")
    return packaged[tool]


COMMANDS: Final = {"grant list": list_, "grant accept": accept, "grant revoke": revoke, "grant files": files}
