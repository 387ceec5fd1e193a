"""A real jail, once, before any tool: whether this machine can make one, and whether it is one.

The probe goes the way of every tool: policy, launch, worker protocol. Its handler looks around from inside and the
host compares with what it knows; so a bubblewrap that starts but does not separate is found out.

Source: docs/design/sandbox.md sections 3.7 and 7.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from schemas.errors import GoondanError
from schemas.launch import ExportSpec, SandboxSpec, ToolHostSpec, ToolSpec
from schemas.worker_frames import WORKER_PROTOCOL, Call, Ended, Init, LoadFailed, Result, WorkerFrame
from toolhost.jails.cells import Cell, Cells
from toolhost.jails.jail import Jail, process_status
from toolhost.policy.conventions import JAIL_UID
from toolhost.policy.facts import look_up
from toolhost.policy.nested import CAPABILITIES as KEPT
from toolhost.policy.plan import plan
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.untrusted import Violation

CAPABILITIES: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
#: The bounding set in what the probe tells: an ordinary user cannot lower it, and has nothing of it.
_BOUNDING: Final = 3
#: A cold jail takes some 50 ms; a machine that is starting a hundred things may take long (seconds).
PROBE_S: Final = 15.0


class Probed(NamedTuple):
    """What is wrong with a jail, in the words of whoever found it, None when it is one; why the owners of what it was
    made from could not be shown as its user, None when they could or need not be; what would help, if that is known.
    """

    problem: str | None
    unmapped: str | None = None
    fix: str | None = None


async def probe(facts: HostFacts, powers: Powers, spec: ToolHostSpec) -> Probed:
    """Make the jail that these facts give, and look at it."""
    return await _visit(facts, powers, spec, SandboxSpec(isolation="shared", min_tier="reduced"))


async def probe_call(facts: HostFacts, powers: Powers, spec: ToolHostSpec) -> str | None:
    """None when a call that is forked in a jail is behind all of its walls there; else what is wrong."""
    return (
        await _visit(msgspec.structs.replace(facts, nests=True), powers, spec, SandboxSpec(isolation="call"))
    ).problem


async def _visit(facts: HostFacts, powers: Powers, spec: ToolHostSpec, sandbox: SandboxSpec) -> Probed:
    loop = asyncio.get_running_loop()
    visit = _Visit(loop)
    folder = f"{facts.inside}/probe"
    tool = ToolSpec(
        name="probe", entry=f"{folder}/look.py", root=folder, exports=[ExportSpec(name="look")], sandbox=sandbox
    )
    # A process that it must not reach: the jail's own first one, or, without a process namespace, this one.
    outside = 1 if facts.tier == "full" else os.getpid()
    try:
        jail = await Jail.start(
            lambda: plan(look_up(tool, None, spec, facts, powers), facts),
            visit,
            powers,
            output_limit=65536,
            name="probe",
        )
    except GoondanError as error:
        return Probed(error.info.message, fix=error.info.suggestion)
    init = Init(WORKER_PROTOCOL, "probe", tool.entry, {}, import_paths=jail.plan.import_paths, jailed=True)
    call = Call(
        call_id="1",
        export="look",
        input=Raw(msgspec.msgpack.encode({"landlock": facts.landlock, "outside": outside})),
        agent_name="",
        instance_key="",
        turn_id="",
        tool_call_id="",
        workdir=jail.plan.workdir,
    )
    try:
        if jail.plan.calls is None:
            jail.send(init)
            jail.send(call)
        else:
            visit.enter(Cells(jail, visit, loop, 65536, init), call)
        async with asyncio.timeout(PROBE_S):
            told = await visit.told
    except TimeoutError:
        told = f"the probe jail did not answer within {PROBE_S:g} s"
    except OSError as error:
        told = str(error)
    finally:
        jail.kill("the probe is over")
        await visit.over
    if isinstance(told, str):
        return Probed(told)
    uid = os.geteuid() if jail.uid is None else jail.uid
    reduced = facts.tier == "reduced"
    rooted = not reduced and not facts.user_namespaces
    problems = judge(told, uid if reduced or rooted else JAIL_UID, reduced=reduced, rooted=rooted)
    problems += judge_processes(visit.processes, uid, reduced=reduced, forked=jail.plan.calls is not None)
    return Probed("the probe jail is none: " + "; ".join(problems) if problems else None, jail.unmapped)


def judge(seen: dict[str, Any], uid: int = JAIL_UID, *, reduced: bool = False, rooted: bool = False) -> list[str]:
    """What is wrong with what a probe saw from inside. A reduced jail shares the host's namespaces, one that was
    `rooted` (HostFacts.user_namespaces) its user namespace.
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
    """What is wrong with the processes of a jail, as the host sees them: {pid: fields of /proc/PID/status}.

    `uid` is the user on the host that they must run as. `forked`: bubblewrap's own comes first and can come by nothing,
    then the fork server, which has what it needs and no more, then those of one call, which have nothing.
    """
    problems: list[str] = []
    least = 1 if reduced else 4 if forked else 2
    if len(statuses) < least:
        problems.append(f"the host sees {len(statuses)} processes in it, not {least}")
    kept = f"{sum(1 << number for number in KEPT.values()):016x}"
    for at, (pid, status) in enumerate(statuses.items()):
        wanted = {"Seccomp": "2", "NoNewPrivs": "1"} | dict.fromkeys(CAPABILITIES, "0" * 16)
        if reduced:
            del wanted["CapBnd"]  # nothing of the kind can be gained, by the wall before it
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


class _Visit:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.told: asyncio.Future[dict[str, Any] | str] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.processes: dict[int, dict[str, str]] = {}
        self._cells: Cells | None = None

    def jail_found(self, jail: Jail, pid: int) -> None:
        pass  # a probe has no network

    def enter(self, cells: Cells, call: Call) -> None:
        """Fork the one call of a probe."""
        self._cells = cells
        cell = cells.enter(call.call_id)
        cell.send(call)

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        for frame in frames:
            if isinstance(frame, LoadFailed):
                self._tell(frame.message)
            elif isinstance(frame, Ended) and self._cells is not None:
                self._cells.ended(frame)
            elif isinstance(frame, Result):
                if frame.status == "ok" and frame.output is not None:
                    self.processes = {pid: process_status(pid) for pid in jail.processes()}
                    self._tell(msgspec.msgpack.decode(frame.output))
                else:
                    self._tell(frame.error.message if frame.error is not None else frame.status)

    def cell_frames(self, cell: Cell, frames: list[WorkerFrame]) -> None:
        self.jail_frames(cell.jail, frames)

    def cell_broken(self, cell: Cell, violation: Violation) -> None:
        self._tell(str(violation))

    def cell_printed(self, cell: Cell, text: str) -> None:
        pass

    def cell_gone(self, cell: Cell, cause: str) -> None:
        if cell.last_words:
            self._tell(f"{cell.last_words} ({cause})")

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        self._tell(str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        pass  # the last line is in the jail's last words

    def jail_gone(self, jail: Jail, cause: str) -> None:
        if self._cells is not None:
            self._cells.close(cause)
        self._tell(f"{jail.last_words or 'bubblewrap'} ({cause})")
        self.over.set_result(None)

    def _tell(self, what: dict[str, Any] | str) -> None:
        if not self.told.done():
            self.told.set_result(what)
