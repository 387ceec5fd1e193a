"""From facts to findings: what is in order, what is not, and the command that mends it (pure).

A problem keeps the kernel or its tools from working, a warning takes something away or will bite later. Each of both
has a fix: a command to be typed as it is, or one sentence where no single command does it.

Source: docs/design/commands.md section 7; docs/design/sandbox.md sections 3, 4 and 7.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from msgspec import Struct

from goondan.features.doctor.command.rules.facts import (
    UNLIMITED,
    Bundle,
    ChosenServer,
    Facts,
    Folder,
    Host,
    Limits,
    LockPlace,
    Model,
    RunDir,
    Running,
    Runtime,
    StateLevels,
    Survey,
    Variable,
    Versions,
)
from goondan.features.model_servers.api.listing import line_of
from goondan.schemas.worker.receipts import STRONGEST

Level = Literal["ok", "warning", "problem"]
Area = Literal["versions", "sandbox", "limits", "keys", "paths", "kernel", "bundle", "models"]

#: The variable for the numbers of users; goondan.schemas.system.users reads it.
VARIABLE: Final = "GOONDAN_JAIL_UIDS"
#: pidfd_open, without which no exit can be observed.
MINIMUM_RELEASE: Final = (5, 3)
#: Longest path of a socket (kernel/paths.py has the reason); from here on it is worth a warning.
MAX_SOCKET_BYTES: Final = 107
NEAR_SOCKET_BYTES: Final = 100
#: Descriptors that some hundred agents and their jails need.
FEW_FILES: Final = 4096
#: Processes: an agent is one, a jail three.
FEW_PROCESSES: Final = 512
#: Free space: below the first nothing can be promised, below the second it will soon be so (bytes).
NO_SPACE: Final = 64 << 20
LITTLE_SPACE: Final = 1 << 30
#: Free inodes; an instance takes ten.
FEW_INODES: Final = 1000
#: File systems on which SQLite's write-ahead log does not work, because it is shared memory between processes.
REMOTE: Final = frozenset(
    ("9p", "afs", "ceph", "cifs", "drvfs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs")
)
#: Problems and warnings of the bundle that are repeated here; `gdn validate` has all.
SHOWN_PROBLEMS: Final = 5
#: Limits of a jail that a control group keeps best, as manifests name them.
_COUNTED: Final = ("memoryMb", "processes", "cpuSeconds")
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")


class Finding(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One line of the report."""

    #: The part of the report.
    area: Area
    #: A stable name within its area.
    check: str
    #: How grave it is.
    level: Level
    #: What was found.
    message: str
    #: What to do about it.
    fix: str | None = None


def judge(facts: Facts) -> list[Finding]:
    """Everything that is to be said, in the order of the areas."""
    return [
        *_versions(facts.versions),
        *_sandbox(facts.survey, facts.host),
        _javascript(facts.runtimes, facts.runtimes_fix),
        *_limits(facts.limits, facts.host),
        *(_variable(variable) for variable in facts.variables),
        *_run_dir(facts.run_dir),
        *_state(facts.state),
        *_levels(facts.levels),
        *_lock(facts.lock),
        _running(facts.running),
        *_bundle(facts.bundle),
        *([] if facts.chosen is None else [_chosen(facts.chosen)]),
        *(_model(model) for model in facts.models),
    ]


def _ok(area: Area, check: str, message: str) -> Finding:
    return Finding(area=area, check=check, level="ok", message=message)


def _warning(area: Area, check: str, message: str, fix: str) -> Finding:
    return Finding(area=area, check=check, level="warning", message=message, fix=fix)


def _problem(area: Area, check: str, message: str, fix: str) -> Finding:
    return Finding(area=area, check=check, level="problem", message=message, fix=fix)


# --- versions -------------------------------------------------------------------------------------------------------


def _versions(versions: Versions) -> Iterator[Finding]:
    yield _ok("versions", "kernel", f"goondan-kernel {versions.kernel}")
    yield _ok("versions", "python", f"Python {versions.python}")
    if versions.current_folder:
        entries = ", ".join(repr(entry) if entry else "an empty one" for entry in versions.current_folder)
        yield _warning(
            "versions",
            "pythonPath",
            f"PYTHONPATH makes Python import from the current folder ({entries}), before gdn can leave it out",
            "export PYTHONPATH=   # or keep only entries that begin with /",
        )
    text = f"pyzmq {versions.pyzmq} with libzmq {versions.libzmq}"
    if versions.libzmq_ipc:
        yield _ok("versions", "zeromq", text)
    else:
        fix = "python3 -m pip install --force-reinstall --only-binary pyzmq pyzmq"
        yield _problem("versions", "zeromq", f"{text}, which was built without ipc sockets", fix)
    system = f"{versions.system} {versions.release} on {versions.machine}"
    found = _RELEASE.match(versions.release)
    if versions.system != "Linux":
        yield _problem("versions", "system", f"{system}: the kernel needs Linux", "Run it in a Linux virtual machine.")
    elif found is not None and (int(found[1]), int(found[2])) < MINIMUM_RELEASE:
        needed = ".".join(map(str, MINIMUM_RELEASE))
        yield _problem("versions", "system", f"{system} is too old; {needed} is needed", "Upgrade the system's kernel.")
    else:
        yield _ok("versions", "system", system)


# --- sandbox --------------------------------------------------------------------------------------------------------


def _sandbox(survey: Survey | None, host: Host) -> Iterator[Finding]:
    if survey is None:
        message = "the tool host's survey gave no answer; what it prints says why"
        yield _problem("sandbox", "jail", message, "python3 -m goondan.toolhost.survey")
    else:
        yield from _jail(survey)
    if host.setuid_bwrap:
        message = f"{host.setuid_bwrap} is setuid root; it is never used here, but every user of this machine can"
        yield _warning("sandbox", "setuid", message, f"sudo chmod u-s {shlex.quote(host.setuid_bwrap)}")
    yield _userns(host, works=survey is not None and survey.tier == STRONGEST)
    if survey is not None and survey.tier is not None:
        yield _cgroup(survey.limits, host)
    if host.uid == 0 and survey is not None and "uid" in survey.walls:
        yield _ok("sandbox", "user", "running as root: each jail is a user of its own, and owns nothing outside")
    elif host.uid == 0 and survey is not None and survey.tier is not None:
        message = "running as root, and jails cannot be given users of their own here"
        yield _warning("sandbox", "user", message, "Start it as an ordinary user.")
    elif host.uid:
        yield _ok("sandbox", "user", f"running as an ordinary user (uid {host.uid})")
    if host.uid == 0 and survey is not None and survey.tier is not None and survey.user is not None:
        yield _toolhost(survey.user)
    if host.uid == 0:
        yield _user_numbers(host)


def _javascript(runtimes: list[Runtime], fix: str) -> Finding:
    usable = [f"{one.name} {one.version} ({one.program}, {one.place})" for one in runtimes if not one.problem]
    passed = [f"{one.program} ({one.place}): {one.problem}" for one in runtimes if one.problem]
    over = f"; passed over: {'; '.join(passed)}" if passed else ""
    if usable:
        return _ok("sandbox", "javascript", f"tools in JavaScript and TypeScript: {', then '.join(usable)}{over}")
    return _ok("sandbox", "javascript", f"no runtime for tools in JavaScript and TypeScript{over}. {fix}".strip())


def _user_numbers(host: Host) -> Finding:
    first, last = host.user_numbers
    if host.numbers_problem:
        return _problem(
            "sandbox", "user numbers", host.numbers_problem, f"export {VARIABLE}=FIRST-LAST   # or unset it"
        )
    what = f"tool hosts and jails are users {first} to {last}"
    if host.numbers_account:
        message = f"{what}, and {host.numbers_account} of this machine has one of these numbers"
        return _warning("sandbox", "user numbers", message, f"export {VARIABLE}=FIRST-LAST   # numbers that nobody has")
    return _ok("sandbox", "user numbers", f"{what}; {VARIABLE} sets others")


def _toolhost(user: int) -> Finding:
    if user != 0:
        return _ok("sandbox", "tool host", f"the tool host is not root: it becomes user {user}")
    message = "the tool host stays root, with few of its powers: it cannot become a user of its own here"
    powers = "CAP_CHOWN, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID and CAP_SETPCAP"
    fix = f"Start it with {powers}, in a container with all user ids; or as an ordinary user."
    return _warning("sandbox", "tool host", message, fix)


def _jail(survey: Survey) -> Iterator[Finding]:
    walls = ", ".join(survey.walls)
    if survey.tier is None:
        for lack in survey.findings:
            yield _problem("sandbox", "jail", f"no tool can run, {lack.what}: {lack.problem}", lack.fix)
        if not survey.findings:
            yield _problem("sandbox", "jail", "no tool can run", "python3 -m goondan.toolhost.survey")
    elif survey.tier == STRONGEST:
        yield _ok("sandbox", "jail", f"a jail was started and looked at from both sides: full ({walls})")
    else:
        # Every tool asks for the full one unless its manifest says that less will do, the bundled ones among them.
        message = f"only the {survey.tier} sandbox ({walls}), and tools need the full one unless they say otherwise"
        lacks = "; ".join(lack.problem for lack in survey.findings)
        fix = survey.findings[0].fix if survey.findings else "python3 -m goondan.toolhost.survey"
        yield _problem("sandbox", "jail", f"{message}: {lacks}" if lacks else message, fix)
    if survey.bwrap is not None:
        yield _ok("sandbox", "bubblewrap", f"bubblewrap {survey.bwrap_version or ''} at {survey.bwrap}")
    if survey.landlock:
        yield _ok("sandbox", "landlock", f"Landlock, version {survey.landlock} of its interface")
    for note in survey.notes:
        yield _ok("sandbox", "note", note)


def _userns(host: Host, *, works: bool) -> Finding:
    """What this host allows. A host whose jails work all the same is told so."""
    message, fix = "", ""
    if host.max_userns == 0:
        message, fix = "user.max_user_namespaces is 0", "sudo sysctl -w user.max_user_namespaces=15000"
    elif host.userns_clone == 0:
        message = "kernel.unprivileged_userns_clone is 0"
        fix = "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    elif host.apparmor_userns == 1:
        message = "kernel.apparmor_restrict_unprivileged_userns is 1"
        fix = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   # better: a profile for bubblewrap"
    if not message:
        return _ok("sandbox", "userNamespaces", "no setting of this host restricts user namespaces")
    if works:
        return _ok("sandbox", "userNamespaces", f"{message}, and jails work all the same")
    return _warning("sandbox", "userNamespaces", f"user namespaces are restricted: {message}", fix)


def _cgroup(limits: Mapping[str, str], host: Host) -> Finding:
    """Whether jails are counted by groups of their own: what the tool host says, not what the group looks like."""
    group = host.cgroup
    watched = [name for name in _COUNTED if limits.get(name) != "cgroup"]
    if not watched:
        return _ok("sandbox", "cgroup", f"cgroup {group.version} at {group.path or '/'}: each jail gets one of its own")
    if group.version == "v2":
        fix = f"systemd-run {'--user ' if host.uid else ''}--scope -p Delegate=yes gdn run"
        if not host.systemd:
            fix = "Delegate a group to it by hand: docs/sandbox.md, Without systemd."
        message = f"cgroup v2 at {group.path or '/'} was not delegated to us"
    elif group.version == "v1":
        fix = "Boot with cgroup v2 only: `systemd.unified_cgroup_hierarchy=1` on the kernel's command line."
        message = "cgroup v1 is root's alone" if host.uid else f"cgroup v1 at {group.path or '/'} is not ours to divide"
    else:
        fix, message = "mount -t cgroup2 cgroup2 /sys/fs/cgroup   # as root", "no cgroups are mounted"
    return _warning("sandbox", "cgroup", f"{message}: jails get no group of their own for {', '.join(watched)}", fix)


# --- limits ---------------------------------------------------------------------------------------------------------


def _limits(limits: Limits, host: Host) -> Iterator[Finding]:
    soft, hard = limits.open_files
    text = f"open files: {_limit(soft)}, and up to {_limit(hard)}"
    if hard != UNLIMITED and hard < FEW_FILES:
        whom = "$USER" if host.uid else "root"
        fix = f'echo "{whom} hard nofile 65536" | sudo tee /etc/security/limits.d/goondan.conf   # then log in again'
        yield _warning("limits", "openFiles", f"{text}, which is few", fix)
    else:
        yield _ok("limits", "openFiles", text)
    soft, hard = limits.processes
    text = f"processes of this user: {_limit(soft)}"
    if host.uid != 0 and soft != UNLIMITED and soft < FEW_PROCESSES:
        fix = (
            f"ulimit -u {_limit(hard)}"
            if hard == UNLIMITED or hard >= FEW_PROCESSES
            else ('echo "$USER hard nproc 8192" | sudo tee /etc/security/limits.d/goondan.conf   # then log in again')
        )
        yield _warning("limits", "processes", f"{text}, which is few", fix)
    else:
        yield _ok("limits", "processes", text if host.uid != 0 else f"{text} (does not count for root)")
    if limits.pids_max is not None:
        text = f"tasks in this control group: {limits.pids_max}"
        if limits.pids_max < FEW_PROCESSES:
            fix = "systemd-run --user --scope -p TasksMax=8192 gdn run"
            yield _warning("limits", "tasks", f"{text}, which is few", fix)
        else:
            yield _ok("limits", "tasks", text)


def _limit(number: int) -> str:
    return "unlimited" if number == UNLIMITED else str(number)


# --- keys -----------------------------------------------------------------------------------------------------------


def _variable(variable: Variable) -> Finding:
    who = f" ({variable.wanted_by})" if variable.wanted_by else ""
    if variable.padded:
        message = f"{variable.name} begins or ends with white space{who}, which no key does"
        return _warning("keys", variable.name, message, f'export {variable.name}="$(echo ${variable.name})"')
    if variable.is_set:
        return _ok("keys", variable.name, f"{variable.name} is set{who}")
    if variable.wanted_by:
        return _warning("keys", variable.name, f"{variable.name} is not set{who}", f"export {variable.name}=…")
    return _ok("keys", variable.name, f"{variable.name} is not set; only its provider needs it")


# --- paths ----------------------------------------------------------------------------------------------------------


def _run_dir(run_dir: RunDir) -> Iterator[Finding]:
    if run_dir.unused_xdg:
        message = (
            f"XDG_RUNTIME_DIR {run_dir.unused_xdg} is not used: it must be a short path, yours, and closed to others"
        )
        fix = "unset XDG_RUNTIME_DIR   # or name a directory of yours with mode 0700"
        yield _warning("paths", "xdgRuntimeDir", message, fix)
    for lack in run_dir.unused:
        message = f"{lack.what} is not used for sockets: {lack.problem}"
        yield _warning("paths", "runDirPlace", message, lack.fix)
    if run_dir.problem is not None:
        fix = run_dir.fix or 'export XDG_RUNTIME_DIR="$(mktemp -d /tmp/run.XXXXXX)"'
        yield _problem("paths", "runDir", f"sockets cannot be made: {run_dir.problem}", fix)
        return
    if not run_dir.path:
        yield _ok("paths", "runDir", "sockets will be made in a fresh directory")
        return
    text = f"sockets in {run_dir.path}: paths of {run_dir.socket_bytes} bytes, {MAX_SOCKET_BYTES} at most"
    if run_dir.socket_bytes > NEAR_SOCKET_BYTES:
        yield _warning("paths", "runDir", text, 'export XDG_RUNTIME_DIR="$(mktemp -d /tmp/run.XXXXXX)"')
    else:
        yield _ok("paths", "runDir", text)


def _state(state: Folder) -> Iterator[Finding]:
    elsewhere = "export GOONDAN_STATE_ROOT=DIR   # a directory of yours on a local disk"
    if state.problem is not None:
        yield _problem(
            "paths", "stateDir", f"{state.path or 'the state'} cannot be written: {state.problem}", elsewhere
        )
        return
    if state.filesystem in REMOTE:
        message = f"{state.path} is on {state.filesystem}, where conversations can be damaged"
        yield _problem("paths", "stateDir", message, elsewhere)
    else:
        where = f" on {state.filesystem}" if state.filesystem else ""
        yield _ok("paths", "stateDir", f"state in {state.path}{where}")
    if state.free_bytes is not None:
        yield _space(state, state.free_bytes, elsewhere)
    if state.free_files is not None and state.free_files < FEW_INODES:
        yield _warning("paths", "inodes", f"{state.free_files} more files can be made there", elsewhere)


def _lock(place: LockPlace) -> Iterator[Finding]:
    if place.problem is not None:
        yield _problem("paths", "lock", f"the kernel's lock cannot be taken: {place.problem}", place.fix)
    elif place.path:
        yield _ok("paths", "lock", f"lock and record of the kernel in {place.path}")


def _levels(levels: StateLevels) -> Iterator[Finding]:
    """The owner of the state, level by level, and whether files that decide about powers are read from it."""
    if not levels.root:
        return  # the finding about the state directory says why
    if levels.refused:
        yield _problem("paths", "stateRoot", levels.refused, levels.fix)
        return
    for level in levels.levels:
        if level.mendable:
            message = f"{level.path} {level.problem}; the next command closes it"
            yield _warning("paths", "stateRoot", message, f"chmod go-rwx {shlex.quote(level.path)}")
        else:
            message = f"{level.path} {level.problem}; no command uses this state root"
            yield _problem("paths", "stateRoot", message, f"rm -r {shlex.quote(level.path)}   # look at it first")
    if not levels.levels:
        where = f"the state root {levels.root}"
        if levels.mode is None:
            yield _ok("paths", "stateRoot", f"{where} is made by the first command, closed to others")
        else:
            which = f"owner {levels.uid}, mode {levels.mode:04o}; {levels.looked_at} levels looked at"
            yield _ok("paths", "stateRoot", f"{where} is yours alone ({which})")
    if levels.homeless:
        message = f"there is no home directory to write to: {levels.root} is used"
        yield _warning("paths", "stateHome", message, f"export GOONDAN_STATE_ROOT={shlex.quote(levels.root)}")
    # What is still open says so itself.
    if levels.doubt is not None and not levels.levels:
        confirm = re.search(r"`([^`]+)`$", levels.doubt)
        fix = confirm[1] if confirm else "export GOONDAN_STATE_ROOT=DIR   # a directory of yours outside of it"
        yield _warning("paths", "stateBelieved", f"policies and records of trust are not read: {levels.doubt}", fix)


def _space(state: Folder, free: int, elsewhere: str) -> Finding:
    text = f"{free / (1 << 30):.1f} GiB free there" if free >= 1 << 30 else f"{free >> 20} MiB free there"
    if free < NO_SPACE:
        return _problem("paths", "diskSpace", f"only {text}", elsewhere)
    if free < LITTLE_SPACE:
        return _warning("paths", "diskSpace", f"only {text}", f"du -xh --max-depth=2 {shlex.quote(state.path)}")
    return _ok("paths", "diskSpace", text)


# --- kernel and bundle ----------------------------------------------------------------------------------------------


def _running(running: Running) -> Finding:
    if running.status == "runs":
        many = f"{running.processes} process{'' if running.processes == 1 else 'es'}"
        return _ok("kernel", "running", f"a kernel of this bundle runs (pid {running.pid}, {many})")
    if running.status == "by hand":
        return _ok("kernel", "running", f"a broker that was started by hand serves this bundle (pid {running.pid})")
    if running.status == "hangs":
        return _problem("kernel", "running", "a kernel of this bundle runs and does not answer", "gdn stop")
    if running.status == "cut off":
        message = f"the kernel of this bundle (pid {running.pid}) has lost its runtime directory"
        return _problem("kernel", "running", message, "gdn stop   # a broker that was started by hand: end it")
    if running.status == "left":
        message = "a killed kernel has left its record and its sockets; the next start clears them"
        return _warning("kernel", "running", message, "gdn stop")
    return _ok("kernel", "running", "no kernel of this bundle runs")


def _bundle(bundle: Bundle) -> Iterator[Finding]:
    if bundle.refused is not None:
        fix = bundle.refused.suggestion or "gdn init"
        yield _problem("bundle", "bundle", f"{bundle.refused.message} [{bundle.refused.code}]", fix)
        return
    path = shlex.quote(bundle.path)
    for problem in bundle.errors[:SHOWN_PROBLEMS]:
        where = f"{problem.file}:{problem.line}:{problem.column}" if problem.line else problem.file
        message = f"{where}: {problem.message} [{problem.code}]"
        yield _problem("bundle", "error", message, problem.suggestion or f"gdn validate {path}")
    more = len(bundle.errors) + bundle.dropped - SHOWN_PROBLEMS
    if more > 0:
        yield _problem("bundle", "error", f"{more} more errors", f"gdn validate {path}")
    for problem in bundle.warnings[:SHOWN_PROBLEMS]:
        message = f"{problem.file}: {problem.message} [{problem.code}]"
        yield _warning("bundle", "warning", message, problem.suggestion or f"gdn validate {path}")
    if not bundle.errors:
        yield _ok("bundle", "bundle", f"{bundle.path} is valid")


# --- models -----------------------------------------------------------------------------------------------------------


def _chosen(chosen: ChosenServer) -> Finding:
    if chosen.taken:
        text = f"{chosen.endpoint}, which you have chosen, is not used: another user listens on its port"
        return _warning("models", "chosen", text, "gdn doctor --forget-server   # or start your own server there")
    text = f"where the environment names no model, {chosen.endpoint} is used, as you have chosen"
    return _ok("models", "chosen", f"{text} (gdn doctor --forget-server)")


def _model(model: Model) -> Finding:
    learned = model.learned
    text = f"{model.text}: {line_of(learned, model.keyed)}"
    if learned.state == "answered" and learned.model and learned.there is not False:
        return _ok("models", "model", text)
    if learned.state == "answered":
        fix = "Give the Model the name of one that the server has; for provider: auto set GOONDAN_MODEL."
        return _problem("models", "model", text, fix) if not learned.model else _warning("models", "model", text, fix)
    if learned.state == "refused":
        return _problem("models", "model", text, "Check the Model's apiKey, or the environment variable of the key.")
    if learned.state == "unreachable":
        return _problem("models", "model", text, "Start the server, or correct its base URL.")
    if learned.state == "slow":
        return _warning("models", "model", text, "Look whether the server is busy or still loading its model.")
    fix = "Check the base URL: it is what stands before the path of each request, such as http://127.0.0.1:11434/v1."
    return _warning("models", "model", text, fix)
