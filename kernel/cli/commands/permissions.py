"""`gdn trust` and `gdn grant`: what a bundle can do beyond its jails, what its tools ask for, and the decisions of the
operator about both.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.cli import options
from goondan.kernel.cli.consent import ask, look_again, remember, screen, words
from goondan.kernel.cli.output import can_ask, columns_of, emit, is_terminal, printable, style_of, wants_json, write
from goondan.kernel.cli.state import BundleTarget, checked_root, state_of
from goondan.kernel.grants.granting import Accepted, dangers, requested, status
from goondan.kernel.grants.powers import Endpoint, Folder, Judgement, OpenKey, Power, TokenServer, untrusted
from goondan.kernel.paths import find_bundle, root_of
from goondan.kernel.state_root import confirm, doubt
from goondan.kernel.trust.policy import POLICY_FILE, write_decisions
from goondan.kernel.trust.records import Record, every, forget
from goondan.kernel.trust.written import accept as accept_files
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.rules.checked import CheckedTool


@click.command()
@click.argument("path", required=False, metavar="[PATH]", shell_complete=options.completed_path("file"))
@click.option("--show", is_flag=True, help="Only show what the bundle asks for.")
@click.option("--list", "list_", is_flag=True, help="List the bundles that you trust.")
@click.option("--revoke", is_flag=True, help="Trust the bundle no more.")
@click.option("--own", is_flag=True, help="It is your own work: do not ask again when its code changes.")
@click.option("--state-root", is_flag=True, help="Believe again what is in a state root that others could write to.")
@options.json
def trust(path: str | None, show: bool, list_: bool, revoke: bool, own: bool, state_root: bool) -> None:
    """Trust a bundle: a goondan.yaml or its directory (default: ./goondan.yaml, else the quickstart).

    Shows what it can do beyond its jails and, on a terminal, asks. Without a terminal the command itself is the answer.
    """
    if show + list_ + revoke + state_root > 1 or (own and (show or list_ or revoke or state_root)):
        raise fail("E_USAGE", "give one of --show, --list, --revoke, --own and --state-root")
    if state_root:
        if path is not None:
            raise fail("E_USAGE", "--state-root is about the state of all bundles; GOONDAN_STATE_ROOT names it")
        _confirm()
    elif list_:
        found = every(checked_root())
        emit(found, _record_lines(found) or ["you have trusted no bundle"])
    elif revoke:
        _revoke(path)
    else:
        _trust(path, show=show, own=own)


def _trust(path: str | None, *, show: bool, own: bool) -> None:
    bundle = find_bundle(path)
    place = BundleTarget(bundle, state_of(bundle))
    inspected = look_again(place)
    judgement = inspected.judgement
    wanted = not show and (bool(judgement.powers) or own)
    if show or not wanted:
        nothing = f"{bundle} asks for nothing beyond its jails: it runs without a question"
        lines = [*_shown(inspected), f"trusted: {_why(inspected)}"] if judgement.powers else [nothing]
        emit(_document(inspected, judgement.trusted), lines)
        return
    if not judgement.trusted and can_ask():
        if ask(inspected) != "always":
            raise untrusted(judgement, bundle)
    elif not wants_json() and not judgement.trusted:
        write(*_shown(inspected))
    remember(inspected, place.state_dir, how="command", own=own or None)
    emit(_document(inspected, True), [f"trusted: {bundle}"])


def _shown(inspected: Inspected) -> list[str]:
    """The screen. Without a terminal, values of the environment are hidden: addresses can contain them, and the output
    may end up in a log.
    """
    judgement = inspected.judgement if is_terminal(sys.stdout) else _without_values(inspected)
    return screen(judgement, inspected.path, style_of(sys.stdout), columns_of(sys.stdout, 80))


def _without_values(inspected: Inspected) -> Judgement:
    """The judgement with `***` for values of the environment that a bundle has put into addresses and paths."""

    def hidden(power: Power) -> Power:
        if isinstance(power, Endpoint | OpenKey | TokenServer):
            return replace(power, origin=inspected.redact(power.origin))
        return replace(power, path=inspected.redact(power.path)) if isinstance(power, Folder) else power

    judgement = inspected.judgement
    return replace(
        judgement,
        powers=[hidden(power) for power in judgement.powers],
        missing=[hidden(power) for power in judgement.missing],
    )


def _why(inspected: Inspected) -> str:
    reason = inspected.judgement.reason
    return {"not trusted": "no", "record": "yes", "shipped": "yes, it came with goondan"}.get(reason, f"yes ({reason})")


def _document(inspected: Inspected, trusted: bool) -> dict[str, Any]:
    judgement = _without_values(inspected)
    return {
        "bundle": inspected.path,
        "trusted": trusted,
        "powers": judgement.powers,
        "new": [] if trusted else [*judgement.missing, *judgement.changed],
    }


def _confirm() -> None:
    root = checked_root()
    confirm(root)
    why = doubt(root)
    if why is not None:
        raise fail("E_STATE", why, suggestion="Set GOONDAN_STATE_ROOT to a folder of your own outside of it.")
    emit({"stateRoot": root, "believed": True}, [f"believed: what is in {root}"])


def _record_lines(found: list[Record]) -> list[str]:
    lines: list[str] = []
    for record in found:
        mine = ", your own work" if record.own else ""
        lines.append(f"{record.bundle}  (since {record.when}{mine})")
        lines += [f"    {words(power)}" for power in record.powers]
    return lines


def _revoke(path: str | None) -> None:
    # The records can still name a folder that is gone.
    gone = path is not None and not os.path.lexists(os.path.expanduser(path))
    bundle = os.path.abspath(os.path.expanduser(path or "")) if gone else find_bundle(path)
    revoked = forget(checked_root(), bundle)
    done = f"no longer trusted: {bundle}. A kernel that runs keeps running until it is stopped."
    emit({"bundle": bundle, "revoked": revoked}, [done if revoked else f"{bundle} was not trusted"])


@click.command(name="list")
@options.bundle
@options.policy
@options.json
def grant_list(bundle: str | None, policy: str | None) -> None:
    """Show every tool that asks for more than the defaults, and what it gets."""
    inspected, _ = _inspect(bundle, policy)
    rows = inspected.redact.all_of([_row(tool, inspected) for tool in _asking(inspected)])
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row['tool']}: {_WORDS[row['status']]}")
        lines += [f"    {thing}" for thing in row["requested"]]
        lines += [f"    + {thing} (policy)" for thing in row["widened"]]
    emit(rows, lines or ["no tool asks for more than the defaults"])


@click.command(name="accept")
@click.argument("tool")
@options.bundle
@options.json
def grant_accept(tool: str, bundle: str | None) -> None:
    """Grant a packaged TOOL (PACKAGE/NAME) what it requests, for exactly the code that is there now."""
    done = accept_tool(tool, bundle)
    granted = [f"    {thing}" for thing in done["requested"]]
    digest = done["digest"][:19]
    emit(done, [f"accepted for {tool} at {digest}…:", *granted, "A kernel that runs gets it at its next start."])


def accept_tool(tool: str, bundle: str | None) -> dict[str, Any]:
    """Grant a packaged tool (PACKAGE/NAME) what it requests. Returns what is said of it. Raises GoondanError."""
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
    write_decisions(path, accepted, inspected.grant_context.pinned)
    return {**row, "status": "accepted", "digest": digest, "policy": path}


@click.command(name="revoke")
@click.argument("tool")
@options.bundle
@options.json
def grant_revoke(tool: str, bundle: str | None) -> None:
    """Take back what was accepted for TOOL."""
    inspected, path = _inspect(bundle, None)
    accepted = inspected.grant_context.accepted
    if tool not in accepted:
        known = ", ".join(sorted(accepted)) or "none"
        raise fail("E_USAGE", f"nothing was accepted for {tool[:100]!r}", suggestion=f"Accepted are: {known}.")
    left = [Accepted(name, pinned) for name, pinned in sorted(accepted.items()) if name != tool]
    write_decisions(path, left, inspected.grant_context.pinned)
    text = f"revoked for {tool}. A kernel that runs keeps it until it is stopped."
    emit({"tool": tool, "status": "revoked", "policy": path}, [text])


@click.command(name="files")
@click.option("--accept", is_flag=True, help="Accept what is in them now.")
@options.bundle
@options.policy
@options.json
def grant_files(accept: bool, bundle: str | None, policy: str | None) -> None:
    """Show files of the bundle that a tool may have written; a kernel starts when you have accepted them."""
    path = find_bundle(bundle)
    state = state_of(path)
    found = inspect_bundle(path, state_dir=state, handlers=False, policy=policy).written
    if accept:
        accept_files(found, root_of(state))
    now = "accepted" if accept else "written"
    lines = [
        f"{printable(file.path)}: {'accepted' if accept else 'a tool may have written it'} ({file.digest[:16] or '?'}…)"
        for file in found
    ]
    emit(
        [{"file": file.path, "status": now, "folder": file.folder, "sha256": file.digest} for file in found],
        lines or ["no file of the bundle was written while tools could write to its folder"],
    )


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
    path = find_bundle(bundle)
    state = state_of(path)
    return look_again(BundleTarget(path, state, policy)), os.path.join(root_of(state), POLICY_FILE)


def _asking(inspected: Inspected) -> list[CheckedTool]:
    tools = inspected.checked.tools.values()
    return [tool for tool in tools if requested(tool.sandbox) or requested(tool.granted or tool.sandbox)]


def _row(tool: CheckedTool, inspected: Inspected) -> dict[str, Any]:
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


def _packaged(inspected: Inspected, tool: str) -> CheckedTool:
    packaged = {found.id: found for found in inspected.checked.tools.values() if found.package}
    if tool not in packaged:
        known = ", ".join(sorted(packaged)) or "none"
        message = f"the bundle uses no packaged tool {tool[:100]!r}"
        raise fail("E_USAGE", message, suggestion=f"Packaged tools of this bundle: {known}.")
    return packaged[tool]


COMMANDS = {
    "trust": trust,
    "grant list": grant_list,
    "grant accept": grant_accept,
    "grant revoke": grant_revoke,
    "grant files": grant_files,
}
