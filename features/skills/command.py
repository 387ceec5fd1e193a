"""`gdn grant skill`: what a skill asks for, and the operator's decision about just this content.

Source: docs/design/tools.md section 14.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click

from goondan.features.skills.api import SKILL_FILE, SkillText, read_skill_text
from goondan.kernel.bundle.files import BundleFiles, read_file
from goondan.kernel.bundle.rules import checked, problems, variables
from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES, Unreadable
from goondan.kernel.cli import options
from goondan.kernel.cli.output import emit, printable
from goondan.kernel.grants.granting import PinnedFolder, Policy, dangers, requested, resolve_part, widen
from goondan.kernel.paths import state_root
from goondan.kernel.trust.policy import POLICY_FILE, gather, pin, read_policies, write_decisions
from goondan.schemas.bundle.launch import SandboxSpec
from goondan.schemas.bundle.resources import FilesystemPart, NetworkAllow, SandboxPart, SwarmPolicy
from goondan.schemas.system.digests import MAX_PINNED_BYTES, MAX_PINNED_FILES
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.hosts import BadHost, parse_rule


@click.command(name="skill")
@click.argument("folder")
@click.option("--pin", "pins", is_flag=True, help="Let commands in a folder with just this content have what you name.")
@click.option("--unpin", is_flag=True, help="Take it back.")
@click.option("--network", multiple=True, metavar="HOST:PORT", help="With --pin: a host that they may reach.")
@click.option("--env", multiple=True, metavar="NAME", help="With --pin: a variable of your environment.")
@click.option("--read", multiple=True, metavar="PATH", help="With --pin: a file or folder to read.")
@click.option("--write", multiple=True, metavar="PATH", help="With --pin: a folder to write to.")
@options.json
def skill(
    folder: str,
    pins: bool,
    unpin: bool,
    network: tuple[str, ...],
    env: tuple[str, ...],
    read: tuple[str, ...],
    write: tuple[str, ...],
) -> None:
    """Show what the skill in FOLDER asks for and gets, or pin its content.

    Commands of a skill in a working directory run with the defaults. A pinned one gets what Tool/skills was granted,
    and what you name here. Another byte in the folder, and it has the defaults again.
    """
    named = bool(network or env or read or write)
    if (pins and unpin) or (named and not pins):
        raise fail("E_USAGE", "name what it gets together with --pin; --unpin stands alone")
    path = os.path.realpath(os.path.expanduser(folder))
    told = _read(path)
    try:
        digest = pin(path, max_files=MAX_PINNED_FILES, max_bytes=MAX_PINNED_BYTES)
    except Unreadable as error:
        raise fail("E_USAGE", f"the skill cannot be pinned: {error}") from None
    policy, accepted, pinned = _decisions()
    others = [item for item in pinned if item.digest != digest]
    known = next((item for item in pinned if item.digest == digest), None)
    if pins:
        known = PinnedFolder(os.path.basename(path), digest, _part(network, env, read, write))
        _check(known)
        write_decisions(policy, accepted, [*others, known])
    elif unpin:
        if known is None:
            raise fail("E_USAGE", "the skill is not pinned as it is now")
        known = None
        write_decisions(policy, accepted, others)
    gets = _gets(known)
    row: dict[str, Any] = {"skill": os.path.basename(path), "path": path, "digest": digest}
    row |= {"description": told.description, "allowedTools": told.allowed_tools, "problems": told.problems}
    changed = ["A kernel that runs gets it at its next start."] if pins or unpin else []
    document = {**row, "pinned": gets is not None, "gets": gets or []}
    emit(document, [*_lines(os.path.basename(path), told, digest, gets), *changed])


def _lines(name: str, told: SkillText, digest: str, gets: list[str] | None) -> list[str]:
    """What a person reads about a skill."""
    lines = [f"{printable(name)}: {printable(told.description)}", f"    content: {digest[:19]}…"]
    lines += [f"    asks for the tool {printable(tool)}, which grants nothing" for tool in told.allowed_tools]
    lines += [f"    note: {printable(problem)}" for problem in told.problems]
    if gets is None:
        return [*lines, "    not pinned: its commands run with the defaults; `--pin` pins it"]
    return [*lines, "    pinned: its commands get what Tool/skills was granted", *(f"    + {thing}" for thing in gets)]


def _read(path: str) -> SkillText:
    try:
        data = read_file(os.path.join(path, SKILL_FILE), MAX_FILE_BYTES)
    except Unreadable as error:
        raise fail("E_USAGE", f"there is no skill in {path}: {SKILL_FILE} {error}") from None
    return read_skill_text(data.decode("utf-8", "replace"), os.path.basename(path))


def _decisions() -> tuple[str, list[Any], list[PinnedFolder]]:
    """The path of the operator's policy, and what `gdn grant` has written there. Raises BundleError."""
    path, report = os.path.join(state_root(), POLICY_FILE), problems.Report()
    found = read_policies([path], report)
    if report.errors:
        raise problems.BundleError(report.errors, report.dropped)
    policy = next((policy for _, policy in found), Policy())
    return path, policy.accepted, policy.pinned


def _part(network: tuple[str, ...], env: tuple[str, ...], read: tuple[str, ...], write: tuple[str, ...]) -> SandboxPart:
    places = [[os.path.abspath(os.path.expanduser(path)) for path in paths] for paths in (read, write)]
    return SandboxPart(
        network=NetworkAllow(list(network)) if network else None,
        filesystem=FilesystemPart(*places) if read or write else None,
        env=list(env) or None,
    )


def _check(pinned: PinnedFolder) -> None:
    """Raise GoondanError for what nobody may be given, so that no policy is written that is refused later."""
    sandbox = pinned.sandbox
    for host in sandbox.network.allow if isinstance(sandbox.network, NetworkAllow) else []:
        try:
            parse_rule(host)
        except BadHost as error:
            raise fail("E_USAGE", f"{host[:200]!r} is no host:port: {error}") from None
    for name in sandbox.env or []:
        if not variables.VARIABLE_NAME.match(name):
            raise fail("E_USAGE", f"{name[:200]!r} is no name of an environment variable")
    context = gather(
        "/", checked.Checked(agents={}, tools={}, policy=SwarmPolicy()), [], [], state_root(), problems.Report()
    )
    part = resolve_part(sandbox, BundleFiles("/"))
    for fault in dangers(widen(SandboxSpec(), part), context):
        raise fail("E_CONFIG_DANGEROUS", f"{fault.path} cannot be granted: {fault.reason}")


def _gets(pinned: PinnedFolder | None) -> list[str] | None:
    """What a pin gives, in the words of `gdn grant list`; None without a pin."""
    if pinned is None:
        return None
    return requested(widen(SandboxSpec(), resolve_part(pinned.sandbox, BundleFiles("/"))))


COMMANDS: Final = {"grant skill": skill}
