"""`gdn doctor`: checks whether everything that the kernel needs is there, and tells how to mend what is missing.

Looking at the machine raises nothing for what it finds; what cannot be looked at is left out. It starts one program,
the tool host's survey, which runs while the rest is looked at. Of an environment variable only the name is kept.

Exit status 1 when there is a problem. With --json one document: {ok, problems, warnings, findings}.

Source: docs/design/commands.md section 7.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import click
import msgspec
import zmq

from goondan.features.doctor.command.rules import facts
from goondan.features.doctor.command.rules.findings import Finding, judge
from goondan.features.model_servers import api
from goondan.features.model_servers.api.offering import offer
from goondan.kernel import import_path, lock, paths, rundir, spawn, state_root, supervisor_client
from goondan.kernel.bundle import javascript, loader
from goondan.kernel.bundle.rules.models import model_text
from goondan.kernel.bundle.rules.problems import BundleError
from goondan.kernel.bundle.rules.variables import wanted_variables
from goondan.kernel.cli import attach, options, state
from goondan.kernel.cli.output import Style, emit, printable, style_of, wants_json
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.model_providers import PROVIDERS
from goondan.schemas.system import directories, users
from goondan.schemas.wire.errors import GoondanError

#: How long model servers have for their answer (seconds), all together: as long as the survey takes on a slow machine.
ASK_S: Final = 3.0
#: Models whose servers are asked.
MAX_ASKED: Final = 16
#: The survey starts at most two jails; a machine that is starting a hundred things may take long (seconds).
SURVEY_S: Final = 60.0
_CGROUP_ROOT: Final = "/sys/fs/cgroup"
#: How /proc/self/mounts writes white space and backslashes.
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def gather_facts(bundle: str | None) -> facts.Facts:
    """All facts, for the bundle at `bundle` (None: the one that commands take by default)."""
    survey = _start_survey()
    try:
        found, named, models = _bundle(bundle)
        asked = [(model, api.Asking(model, ASK_S)) for model in models]
        return facts.Facts(
            versions=_versions(),
            host=_host(),
            limits=_limits(),
            variables=_variables(named, os.environ),
            state=_state(found.path),
            levels=_levels(found.path),
            run_dir=_run_dir(found.path),
            lock=_lock_place(found.path),
            running=_running(found.path),
            bundle=found,
            survey=_answer(survey),
            models=_asked(asked),
            chosen=_chosen(found.path),
            runtimes=_runtimes(found.path),
            runtimes_fix=javascript.NODE_FIX,
        )
    finally:
        if survey is not None and survey.returncode is None:
            survey.kill()
            survey.communicate()


# --- the tool host's half -------------------------------------------------------------------------------------------


def _start_survey() -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            spawn.command("goondan.toolhost.survey", []),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is this process's business, and what it starts ends with it
        )
    except OSError:
        return None


def _answer(survey: subprocess.Popen[bytes] | None) -> facts.Survey | None:
    if survey is None:
        return None
    try:
        data, _ = survey.communicate(timeout=SURVEY_S)
        return msgspec.json.decode(data, type=facts.Survey) if survey.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return None


def _runtimes(bundle: str) -> list[facts.Runtime]:
    """The JavaScript runtimes that are looked for when a bundle has such a tool."""
    root = bundle if os.path.isdir(bundle) else os.path.dirname(bundle)
    found = sorted(javascript.look(root or "/", os.environ), key=javascript.rank)
    return [msgspec.convert(one, facts.Runtime, from_attributes=True) for one in found]


# --- this machine ---------------------------------------------------------------------------------------------------


def _versions() -> facts.Versions:
    own = "unknown"
    with suppress(PackageNotFoundError):
        own = version("goondan-kernel")
    system = os.uname()
    return facts.Versions(
        kernel=own,
        python=sys.version.split()[0],
        pyzmq=zmq.__version__,
        libzmq=zmq.zmq_version(),
        libzmq_ipc=zmq.has("ipc"),
        current_folder=import_path.entries_of_current_folder(),
        system=system.sysname,
        release=system.release,
        machine=system.machine,
    )


def _host() -> facts.Host:
    return facts.Host(
        uid=os.geteuid(),
        user_numbers=(users.NUMBERS.jails[0], users.NUMBERS.instances[1]),
        numbers_problem=users.problem() or "",
        numbers_account=_account_of(users.NUMBERS.toolhost, users.NUMBERS.jails[0], users.NUMBERS.instances[0]),
        setuid_bwrap=_setuid_bwrap(),
        apparmor_userns=_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        userns_clone=_number("/proc/sys/kernel/unprivileged_userns_clone"),
        max_userns=_number("/proc/sys/user/max_user_namespaces"),
        cgroup=_cgroup(directories.text_of("/proc/self/cgroup")),
        systemd=os.path.isdir("/run/systemd/system"),
    )


def _account_of(*numbers: int) -> str:
    """The name of an account that has one of these numbers. As an ordinary user nobody is asked."""
    for number in numbers if os.geteuid() == 0 else ():
        with suppress(KeyError, OSError, OverflowError):
            return pwd.getpwuid(number).pw_name
    return ""


def _setuid_bwrap() -> str:
    found = shutil.which("bwrap")
    try:
        return found if found is not None and os.stat(found).st_mode & stat.S_ISUID else ""
    except OSError:
        return ""


def _cgroup(membership: str) -> facts.Cgroup:
    """From /proc/self/cgroup: lines of `number:controllers:path`, number 0 without controllers for version 2."""
    groups = [line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2]
    unified = next((path for number, _, path in groups if number == "0"), None)
    if unified is not None and os.path.exists(f"{_CGROUP_ROOT}/cgroup.controllers"):
        return facts.Cgroup("v2", unified)
    for _, names, path in groups:
        if "memory" in names.split(","):
            return facts.Cgroup("v1", path)
    return facts.Cgroup("none")


def _limits() -> facts.Limits:
    pids: int | None = None
    for line in directories.text_of("/proc/self/cgroup").splitlines():
        _, _, path = line.partition("::")
        if path:
            pids = _number(f"{_CGROUP_ROOT}{path.rstrip('/')}/pids.max")
    return facts.Limits(
        open_files=_limit(resource.RLIMIT_NOFILE), processes=_limit(resource.RLIMIT_NPROC), pids_max=pids
    )


def _limit(which: int) -> tuple[int, int]:
    soft, hard = (facts.UNLIMITED if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return soft, hard


def _variables(named: Mapping[str, str], env: Mapping[str, str]) -> list[facts.Variable]:
    """The vendors' keys and what the bundle names; `named` is name -> who wants it."""
    found = []
    for name in dict.fromkeys((*(provider.key_variable for provider in PROVIDERS), *sorted(named))):
        value = env.get(name, "")
        padded = value != value.strip()
        found.append(facts.Variable(name=name, is_set=bool(value), wanted_by=named.get(name, ""), padded=padded))
    return found


# --- paths ----------------------------------------------------------------------------------------------------------


def _run_dir(bundle: str) -> facts.RunDir:
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        usual = paths.run_dirs(bundle)
        state_dir = paths.state_dir(bundle)
        record = lock.read_record(state_dir)
        held = record is not None and lock.is_held(state_dir)
    except GoondanError as error:
        return facts.RunDir(problem=error.info.message, fix=error.info.suggestion or "")
    above = os.path.join(xdg, "goondan")
    unused_xdg = xdg if xdg and not any(os.path.dirname(path) == above for path in usual) else ""
    if record is not None and held:
        return facts.RunDir(path=record.run_dir, socket_bytes=paths.socket_bytes(record.run_dir), unused_xdg=unused_xdg)
    unused = []
    for path in usual:
        try:
            rundir.examine(path)
        except GoondanError as error:
            unused.append(facts.Lack(path, error.info.message, error.info.suggestion or ""))
        else:
            return facts.RunDir(path=path, socket_bytes=paths.socket_bytes(path), unused=unused, unused_xdg=unused_xdg)
    problem, fix = None, ""
    try:
        rundir.examine_fresh(state_dir)
    except GoondanError as error:
        problem, fix = error.info.message, error.info.suggestion or ""
    return facts.RunDir(problem=problem, fix=fix, unused=unused, unused_xdg=unused_xdg)


def _lock_place(bundle: str) -> facts.LockPlace:
    try:
        state_dir = paths.state_dir(bundle)
        path = f"{state_dir}/{paths.FOLDER}"
        lock.read_record(state_dir)
    except GoondanError as error:
        return facts.LockPlace(problem=error.info.message, fix=error.info.suggestion or "")
    return facts.LockPlace(path=path)


def _levels(bundle: str) -> facts.StateLevels:
    try:
        workspace = paths.state_dir(bundle)
    except GoondanError:
        return facts.StateLevels()
    root = paths.root_of(workspace)
    found = list(state_root.look(root, workspace))
    refused = state_root.why_refused(root)
    own = next((level for level in found if level.path == root), None)
    return facts.StateLevels(
        root=root,
        uid=None if own is None else own.uid,
        mode=None if own is None else own.mode,
        looked_at=len(found),
        levels=[facts.StateLevel(path=at.path, problem=at.problem, mendable=at.mendable) for at in found if at.problem],
        refused="" if refused is None else refused.info.message,
        fix="" if refused is None else refused.info.suggestion or "",
        doubt=state_root.doubt(root),
        homeless=paths.is_homeless(root),
    )


def _state(bundle: str) -> facts.Folder:
    try:
        path = paths.state_dir(bundle)
    except GoondanError as error:
        return facts.Folder(path="", problem=error.info.message)
    above = _existing(path)
    problem: str | None = None
    free_bytes = free_files = None
    try:
        if not os.path.isdir(above):
            problem = f"{above} is no directory"
        elif above == path:
            with tempfile.TemporaryFile(dir=path) as probe:  # asks the file system, not only the permissions
                probe.write(b"x")
        elif not _may_write(above):
            problem = f"{above} is not writable"
        space = os.statvfs(above)
        free_bytes = space.f_bavail * space.f_frsize
        free_files = space.f_favail if space.f_files else None
    except OSError as error:
        problem = error.strerror or str(error)
    return facts.Folder(
        path=path, problem=problem, free_bytes=free_bytes, free_files=free_files, filesystem=_filesystem(above)
    )


def _existing(path: str) -> str:
    """The nearest place at or above `path` that is there."""
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _filesystem(path: str) -> str:
    """The type of the file system that holds `path`; "" when it cannot be told."""
    path = os.path.realpath(path)
    best, kind = "", ""
    for line in directories.text_of("/proc/self/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, fields[2]
    return kind


# --- kernel and bundle ----------------------------------------------------------------------------------------------


def _running(bundle: str) -> facts.Running:
    try:
        state_dir = paths.state_dir(bundle)
        record = lock.read_record(state_dir)
    except GoondanError:
        return facts.Running()  # the place of the lock says why nobody can tell
    try:
        client = supervisor_client.SupervisorClient.connect(state_dir)
        if client is not None:
            try:
                rows = client.ask("ps").processes or []
            finally:
                client.close()
            return facts.Running(status="runs", pid=client.pid, processes=sum(row.pid is not None for row in rows))
        broker = attach.by_hand(state.BundleTarget(bundle, state_dir))
        if broker is not None:
            broker.finish()
            return facts.Running(status="by hand", pid=broker.pid)
        if record is not None and lock.is_held(state_dir):
            return facts.Running(status="cut off", pid=record.pid)
    except GoondanError:
        return facts.Running(status="hangs")
    return facts.Running(status="none" if record is None else "left")


def _bundle(given: str | None) -> tuple[facts.Bundle, dict[str, str], list[ModelSpec]]:
    """The bundle, the variables that it names, and the models of its agents, each once. Before anybody has agreed to
    the bundle, nothing is sent to servers that it names: then there are no models.
    """
    try:
        path = paths.find_bundle(given)
        inspected = loader.inspect_bundle(path, state_dir=paths.state_dir(path))
    except BundleError as error:
        return facts.Bundle(path=given or "", errors=error.problems), {}, []
    except GoondanError as error:
        return facts.Bundle(path=given or "", refused=error.info), {}, []
    found = facts.Bundle(
        path=path,
        errors=inspected.errors,
        warnings=inspected.warnings,
        dropped=inspected.dropped,
    )
    models: list[ModelSpec] = []
    for agent in inspected.checked.agents.values() if inspected.judgement.trusted else ():
        asked = [*([] if agent.model is None else [agent.model]), *(fallback.model for fallback in agent.fallback)]
        models += [model for model in asked if model not in models]
    return found, wanted_variables(inspected.loaded.documents), models[:MAX_ASKED]


def _asked(asked: list[tuple[ModelSpec, api.Asking]]) -> list[facts.Model]:
    """What their servers have said."""
    until = time.monotonic() + ASK_S
    found = []
    for model, asking in asked:
        learned = asking.wait(until - time.monotonic())
        if learned is not None:
            found.append(facts.Model(text=model_text(model), keyed=model.api_key is not None, learned=learned))
    return found


def _chosen(bundle: str) -> facts.ChosenServer | None:
    try:
        root = paths.root_of(paths.state_dir(bundle))
    except GoondanError:
        return None
    chosen = api.read(root, bundle).endpoint
    return None if chosen is None else facts.ChosenServer(endpoint=chosen, taken=api.endpoint(root, bundle) is None)


# --- small things ---------------------------------------------------------------------------------------------------


def _number(path: str) -> int | None:
    text = directories.text_of(path).strip()
    return int(text) if text.isdecimal() and text.isascii() else None


def _may_write(path: str) -> bool:
    return os.access(path, os.W_OK | (os.X_OK if os.path.isdir(path) else 0), effective_ids=True)


@click.command()
@click.option("--forget-server", is_flag=True, help="Forget which model server of this machine you have chosen.")
@options.bundle
@options.json
def doctor(forget_server: bool, bundle: str | None) -> int:
    """Check this machine, the sandbox, the bundle and its model servers; every finding comes with its fix.

    On a terminal it also looks for model servers on the usual ports of this machine, and asks before one is used.
    """
    if forget_server:
        _forget_server()
        return 0
    findings = judge(gather_facts(bundle))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    document = {"ok": problems == 0, "problems": problems, "warnings": warnings, "findings": findings}
    emit(document, render(findings, style_of(sys.stdout)))
    if not wants_json():
        _offer_server(bundle)
    return 1 if problems else 0


def _forget_server() -> None:
    forgotten = api.forget(state.checked_root())
    text = "forgotten: no model server of this machine is chosen" if forgotten else "no model server was chosen"
    emit({"forgotten": forgotten}, [text])


def _offer_server(bundle: str | None) -> None:
    """Ask about a model server that runs here. What cannot be kept is no reason to fail: the findings are printed."""
    with suppress(GoondanError):
        path = paths.find_bundle(bundle)
        offer(paths.root_of(paths.state_dir(path)), path)


def render(findings: Iterable[Finding], style: Style) -> list[str]:
    """The report for a person, by area, and the number of problems and warnings."""
    paint = {"ok": style.good, "warning": style.warning, "problem": style.bad}
    lines: list[str] = []
    area = ""
    counted = {"problem": 0, "warning": 0}
    for finding in findings:
        if finding.area != area:
            area = finding.area
            lines.append(style.bold(area))
        lines.append(f"  {paint[finding.level](f'{finding.level:<8}')} {printable(finding.message)}")
        if finding.fix is not None:
            lines.append(f"           fix: {printable(finding.fix)}")
        if finding.level in counted:
            counted[finding.level] += 1
    words = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counted.items() if count]
    return [*lines, "", ", ".join(words) or style.good("everything is in order")]


COMMANDS: Final[Mapping[str, click.Command]] = {"doctor": doctor}
