"""`python -m toolhost.survey`: what sandbox this host can give, found out by making a jail, as one JSON document.

    {"tier": "full" | "reduced" | null, "walls": [NAME, …], "notes": [TEXT, …],
     "findings": [{"what", "problem", "fix"}, …],
     "limits": {"memoryMb": "cgroup" | "watched", …},
     "kernel": "6.18.0", "machine": "x86_64", "root": false, "user": 1000,
     "bwrap": PATH | null, "bwrapVersion": "0.11.0" | null, "landlock": 6}

`tier` is null when no tool can run; `findings` says why, and what would help. `walls` are those that the probe jail
has shown to have, and `limits` says what keeps each limit of a jail, both in the words of the receipts; they are empty
without a jail. `root` says whether root asks, and `user` who makes jails then: the tool host's own user, 0 where there
is no such number. Exit status 0 whatever was found: finding out is what was asked for.

The tool host itself starts with this survey, so both always agree.

Source: docs/design/sandbox.md sections 3.7 and 7.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from typing import Final, Literal

import msgspec
from msgspec import Struct

from schemas.errors import GoondanError, fail
from schemas.launch import ToolHostSpec
from schemas.receipts import Mechanism, Wall
from toolhost.diagnosis import Finding, Signs, explain, unknown_machine, without_bubblewrap, without_landlock
from toolhost.drop_privileges import drop_privileges
from toolhost.limits.plan import mechanisms
from toolhost.policy.facts import find_bwrap, host_facts, landlock_abi, machine, said_version
from toolhost.policy.plan import walls
from toolhost.policy.reduced import MINIMUM_LANDLOCK
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.probe import Probed, probe, probe_call

#: A file of /proc or /sys that says one thing (bytes).
_MAX_SIGN: Final = 4096


#: What it means when they cannot.
ALONE: Final = "Every call of a tool with `isolation: call` gets a jail of its own, which takes some 50 ms"
_NOTHING: Final = ToolHostSpec(tools=[], state_dir="/nonexistent", revision="")


async def calls_can_be_forked(facts: HostFacts, powers: Powers) -> str | None:
    """None when they can, as `isolation: call` wants it; else what is in the way, and each has a jail of its own."""
    if facts.tier != "full":
        return "the reduced sandbox has no namespaces"
    if not facts.user_namespaces:
        return "a jail without a user namespace can make no others"
    return await probe_call(facts, powers, _NOTHING)


class Survey(Struct, frozen=True, kw_only=True, rename="camel"):
    """What was found. `facts` and `error` are for the tool host: exactly one of them is None."""

    tier: Literal["full", "reduced"] | None
    walls: list[Wall] = []
    notes: list[str] = []
    findings: list[Finding] = []
    facts: HostFacts | None = None
    error: GoondanError | None = None


async def survey(powers: Powers) -> Survey:
    """Try to make a jail, from the best that this host may have downwards. Never raises for what a host lacks."""
    signs = msgspec.structs.replace(read_signs(), root=powers.operator == 0)
    try:
        machine()
    except GoondanError as error:
        return _none(unknown_machine(error.info.message))
    if signs.landlock < 1:
        return _none(without_landlock(signs))
    try:
        bwrap = find_bwrap()
    except GoondanError as error:
        return await _reduced(without_bubblewrap(error.info.message), signs, powers)
    signs = msgspec.structs.replace(signs, bwrap=bwrap)
    usual = host_facts(bwrap, [], powers)
    # Some hosts refuse the nested user namespace that --disable-userns takes, but are fine otherwise: the filter
    # refuses new namespaces as well.
    kinds = [usual, msgspec.structs.replace(usual, disable_userns=False)]
    if signs.root:
        # Root can do without any: the jail is made with root's powers, and drops them itself.
        rooted = msgspec.structs.replace(usual, user_namespaces=False)
        kinds += [rooted, msgspec.structs.replace(rooted, net_admin=False)]
    failed: list[Probed] = []
    for facts in kinds:
        if not facts.net_admin and "loopback" not in (failed[-1].problem or ""):
            break
        probed = await probe(facts, powers, _NOTHING)
        if probed.problem is None:
            lack = None if facts.user_namespaces else failed[0].problem
            notes = _notes(facts, signs, lack=lack, unmapped=probed.unmapped)
            return Survey(tier="full", walls=walls(facts), notes=notes, facts=facts)
        failed.append(probed)
    findings = [explain(failure.problem or "", signs, failure.fix) for failure in failed]
    return await _reduced(
        findings[0], signs, powers, others=[other for other in findings if other.what != findings[0].what]
    )


async def _reduced(finding: Finding, signs: Signs, powers: Powers, others: list[Finding] | None = None) -> Survey:
    """The tier below, where it can be had: for tools that ask for no more. `others` are in the way as well."""
    can_be = finding.what in ("bubblewrap", "user namespaces", "procfs")
    if signs.root or signs.landlock < MINIMUM_LANDLOCK or not can_be:
        return _none(finding, *(others or []))
    facts = msgspec.structs.replace(
        host_facts("", [], powers), tier="reduced", bwrap="", bwrap_root=None, fix=finding.fix
    )
    facts = msgspec.structs.replace(facts, lack=finding.problem)
    if (await probe(facts, powers, _NOTHING)).problem is not None:
        return _none(finding)
    return Survey(tier="reduced", walls=["seccomp", "landlock", "limits"], findings=[finding], facts=facts)


def _none(finding: Finding, *others: Finding) -> Survey:
    message = f"tools need a jail, and none can be made: {finding.problem}"
    error = fail("E_SANDBOX_UNAVAILABLE", message, suggestion=finding.fix)
    return Survey(tier=None, findings=[finding, *others], error=error)


def _notes(facts: HostFacts, signs: Signs, *, lack: str | None, unmapped: str | None) -> list[str]:
    notes = []
    if lack is not None:
        notes.append(
            "Jails have no user namespace here: bubblewrap runs as root, in a root directory that holds nothing of "
            f"this host but what jails are made from, and each jail drops root before any tool code. The cause: {lack}"
        )
    if not facts.net_admin:
        notes.append("Tools with a network grant are refused: root lacks CAP_NET_ADMIN, and no jail has a loopback.")
    if unmapped is not None:
        notes.append(
            f"Owners of files cannot be shown as others here ({unmapped}). An instance's own workspace belongs to a "
            "user of its own; a --workdir or a write grant is refused until you give it to the user that the message "
            "names."
        )
    if not signs.root:
        notes.append(
            "All jails run under your own user id: their namespaces and Landlock separate them from each other."
        )
    if facts.landlock < 6:
        notes.append(
            f"Landlock version {facts.landlock}: without its scopes for signals and abstract sockets (Linux 6.12)."
        )
    return notes


def read_signs() -> Signs:
    """What this host says about itself, beside what a jail shows."""
    return Signs(
        release=os.uname().release,
        landlock=landlock_abi(),
        lsm=_read("/sys/kernel/security/lsm"),
        apparmor_userns=_read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        userns_clone=_read("/proc/sys/kernel/unprivileged_userns_clone"),
        max_userns=_read("/proc/sys/user/max_user_namespaces"),
        container=next((path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)), None),
    )


def _read(path: str) -> str | None:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as source:
        return source.read(_MAX_SIGN).strip()
    return None


class Report(Struct, frozen=True, kw_only=True, rename="camel"):
    """The document on stdout."""

    tier: Literal["full", "reduced"] | None
    walls: list[Wall]
    notes: list[str]
    findings: list[Finding]
    limits: dict[str, Mechanism]
    kernel: str
    machine: str
    root: bool
    user: int
    bwrap: str | None
    bwrap_version: str | None
    landlock: int


def report(found: Survey, powers: Powers) -> Report:
    """A survey with the facts that a person wants beside it."""
    bwrap = None if found.facts is None else found.facts.bwrap or None
    if bwrap is None:
        with suppress(GoondanError):
            bwrap = find_bwrap()
    return Report(
        tier=found.tier,
        walls=found.walls,
        notes=found.notes,
        findings=found.findings,
        limits={} if found.facts is None else mechanisms(found.facts.groups),
        kernel=os.uname().release,
        machine=os.uname().machine,
        root=powers.operator == 0,
        user=os.geteuid(),
        bwrap=bwrap,
        bwrap_version=None if bwrap is None else _version(bwrap),
        landlock=landlock_abi(),
    )


def _version(bwrap: str) -> str | None:
    with suppress(OSError, subprocess.TimeoutExpired):
        return said_version(bwrap).strip().removeprefix("bubblewrap ") or None
    return None


async def _report(powers: Powers) -> Report:
    found = await survey(powers)
    told = report(found, powers)
    if found.facts is not None and found.tier == "full" and (problem := await calls_can_be_forked(found.facts, powers)):
        told.notes.append(f"{ALONE}: {problem}.")
    return told


def main() -> int:
    """Print the report. 0; 1 when root stays root."""
    try:
        powers = drop_privileges()
    except OSError as error:
        print(f"toolhost.survey: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_report(powers))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
