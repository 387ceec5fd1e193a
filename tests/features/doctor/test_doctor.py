"""From facts to findings: every way in which a machine can fall short is said once, with its fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from goondan.features.doctor import command
from goondan.features.doctor.command import render
from goondan.features.doctor.command.rules.facts import (
    UNLIMITED,
    Bundle,
    Cgroup,
    Facts,
    Folder,
    Host,
    Lack,
    Limits,
    LockPlace,
    RunDir,
    Running,
    Runtime,
    StateLevel,
    StateLevels,
    Survey,
    Variable,
    Versions,
)
from goondan.features.doctor.command.rules.findings import Finding, judge
from goondan.kernel.bundle.documents import load_documents
from goondan.kernel.bundle.rules.problems import Problem, Report
from goondan.kernel.bundle.rules.variables import wanted_variables
from goondan.kernel.cli.output import Style
from goondan.kernel.import_path import entries_of_current_folder
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.worker.tool_host_reports import Obstacle

COUNTED = dict.fromkeys(("memoryMb", "processes", "cpuSeconds"), "cgroup")
GOOD = Facts(
    versions=Versions(
        kernel="0.1.0", python="3.11.7", pyzmq="27.0", libzmq="4.3.5", release="6.8.0-45-generic", machine="x86_64"
    ),
    host=Host(uid=1000, max_userns=9000, cgroup=Cgroup("v2", "/user.slice")),
    limits=Limits(open_files=(1024, 65536), processes=(9000, 9000), pids_max=9000),
    variables=[Variable(name="ANTHROPIC_API_KEY", is_set=True), Variable(name="OPENAI_API_KEY", is_set=False)],
    state=Folder(path="/home/me/.goondan/w", free_bytes=5 << 30, free_files=10**6, filesystem="ext4"),
    run_dir=RunDir(path="/run/user/1000/goondan/x", socket_bytes=50),
    running=Running(),
    bundle=Bundle(path="/b/goondan.yaml"),
    survey=Survey(
        tier="full", walls=["namespaces"], bwrap="/usr/bin/bwrap", bwrap_version="0.11.0", landlock=6, limits=COUNTED
    ),
)


def but(part: str, **changes: Any) -> Facts:
    """The good machine with this of one part changed."""
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **changes)})


def without_groups(**changes: Any) -> Facts:
    """A host whose tool host has found none, whatever the group that we are in looks like."""
    survey = but("survey", limits={"memoryMb": "watched"}, walls=["uid"] if changes.get("uid") == 0 else []).survey
    return replace(but("host", **changes), survey=survey)


OPEN_LEVEL = StateLevel(path="/s/logs", problem="is open to others (mode 0777)", mendable=True)


def with_levels(**changes: Any) -> Facts:
    return replace(GOOD, levels=replace(StateLevels(root="/s", uid=0, mode=0o700, looked_at=3), **changes))


def with_variable(**changes: Any) -> Facts:
    return replace(GOOD, variables=[replace(GOOD.variables[0], **changes)])


def test_nothing_is_wrong_with_a_good_machine() -> None:
    findings = judge(GOOD)
    assert {finding.level for finding in findings} == {"ok"}
    assert {finding.area for finding in findings} == {
        "versions",
        "sandbox",
        "limits",
        "keys",
        "paths",
        "kernel",
        "bundle",
    }
    assert render(findings, Style())[-1] == "everything is in order"


def test_root_is_fine_where_each_jail_is_a_user_of_its_own() -> None:
    as_root = replace(but("host", uid=0), survey=but("survey", walls=["namespaces", "uid"]).survey)
    assert {finding.level for finding in judge(as_root) if finding.check != "tool host"} == {"ok"}


def test_entries_of_pythonpath_that_mean_the_current_folder_are_named() -> None:
    found = [
        one
        for one in judge(replace(GOOD, versions=replace(GOOD.versions, current_folder=["", "lib"])))
        if one.check == "pythonPath"
    ]
    assert [one.level for one in found] == ["warning"]
    assert "(an empty one, 'lib')" in found[0].message
    assert not [one for one in judge(GOOD) if one.check == "pythonPath"]


def test_which_entries_of_pythonpath_mean_the_current_folder() -> None:
    def found(**environment: str) -> list[str]:
        return entries_of_current_folder(environment, obeyed=True)

    assert found(PYTHONPATH=":/x:lib") == ["", "lib"]
    assert entries_of_current_folder({"PYTHONPATH": ":/x:lib"}, obeyed=False) == []
    assert found(PYTHONPATH="/x:/y") == found(PYTHONPATH="") == found() == []


@pytest.mark.parametrize(("user", "level"), [(2013265919, "ok"), (0, "warning")])
def test_it_says_who_the_tool_host_of_root_is(user: int, level: str) -> None:
    asked = replace(but("host", uid=0), survey=but("survey", walls=["uid"], user=user).survey)
    (found,) = (finding for finding in judge(asked) if finding.check == "tool host")
    assert found.level == level
    assert (str(user) in found.message) == (user != 0)
    assert not [finding for finding in judge(GOOD) if finding.check == "tool host"]


NO_JAIL = Survey(tier=None, findings=[Obstacle("user namespaces", "bwrap: no", "sudo fix")])


@pytest.mark.parametrize(
    ("facts", "check", "level", "fix"),
    [
        (but("versions", libzmq_ipc=False), "zeromq", "problem", "pip install"),
        (but("versions", release="4.19.0-generic"), "system", "problem", "Upgrade"),
        (but("versions", system="Darwin"), "system", "problem", "Linux"),
        (replace(GOOD, survey=None), "jail", "problem", "python3 -m goondan.toolhost.survey"),
        (replace(GOOD, survey=NO_JAIL), "jail", "problem", "sudo fix"),
        (replace(GOOD, survey=Survey(tier=None)), "jail", "problem", "goondan.toolhost.survey"),
        (but("survey", tier="reduced"), "jail", "problem", "goondan.toolhost.survey"),
        (but("host", uid=0), "user", "warning", "ordinary user"),
        (but("host", setuid_bwrap="/my bin/bwrap"), "setuid", "warning", "sudo chmod u-s '/my bin/bwrap'"),
        (without_groups(), "cgroup", "warning", "systemd-run --user --scope -p Delegate=yes gdn run"),
        (without_groups(uid=0), "cgroup", "warning", "systemd-run --scope -p Delegate=yes gdn run"),
        (without_groups(systemd=False), "cgroup", "warning", "Without systemd"),
        (without_groups(cgroup=Cgroup("v1", "/x")), "cgroup", "warning", "systemd.unified_cgroup_hierarchy=1"),
        (without_groups(cgroup=Cgroup("none")), "cgroup", "warning", "mount -t cgroup2"),
        (but("survey", limits=COUNTED | {"processes": "rlimit"}), "cgroup", "warning", "Delegate=yes"),
        (but("limits", open_files=(256, 1024)), "openFiles", "warning", "nofile"),
        (but("limits", processes=(100, UNLIMITED)), "processes", "warning", "ulimit -u unlimited"),
        (but("limits", processes=(100, 200)), "processes", "warning", "nproc"),
        (but("limits", pids_max=100), "tasks", "warning", "TasksMax"),
        (with_variable(padded=True), "ANTHROPIC_API_KEY", "warning", "export ANTHROPIC_API_KEY="),
        (with_variable(is_set=False, wanted_by="Model/m"), "ANTHROPIC_API_KEY", "warning", "export"),
        (but("run_dir", problem="too long"), "runDir", "problem", "XDG_RUNTIME_DIR"),
        (but("run_dir", problem="open to others", fix="chmod 0700 x"), "runDir", "problem", "chmod 0700 x"),
        (
            but("run_dir", path="", unused=[Lack("/tmp/x", "a link", "rm /tmp/x")]),
            "runDirPlace",
            "warning",
            "rm /tmp/x",
        ),
        (replace(GOOD, lock=LockPlace(problem="a link", fix="rm x")), "lock", "problem", "rm x"),
        (replace(GOOD, running=Running(status="cut off", pid=7)), "running", "problem", "gdn stop"),
        (but("run_dir", socket_bytes=105), "runDir", "warning", "XDG_RUNTIME_DIR"),
        (but("run_dir", unused_xdg="/run/me"), "xdgRuntimeDir", "warning", "unset XDG_RUNTIME_DIR"),
        (but("state", problem="read-only"), "stateDir", "problem", "GOONDAN_STATE_ROOT"),
        (but("state", filesystem="nfs4"), "stateDir", "problem", "local disk"),
        (but("state", free_bytes=5 << 20), "diskSpace", "problem", "GOONDAN_STATE_ROOT"),
        (but("state", free_bytes=500 << 20), "diskSpace", "warning", "du -xh"),
        (but("state", free_files=3), "inodes", "warning", "GOONDAN_STATE_ROOT"),
        (with_levels(refused="belongs to uid 7", fix="export GOONDAN_STATE_ROOT=/x"), "stateRoot", "problem", "=/x"),
        (with_levels(levels=[OPEN_LEVEL]), "stateRoot", "warning", "chmod go-rwx /s/logs"),
        (with_levels(levels=[replace(OPEN_LEVEL, mendable=False)]), "stateRoot", "problem", "rm -r /s/logs"),
        (with_levels(doubt="so do `gdn trust --state-root`"), "stateBelieved", "warning", "--state-root"),
        (with_levels(doubt="it lies in /clone"), "stateBelieved", "warning", "GOONDAN_STATE_ROOT"),
        (with_levels(homeless=True), "stateHome", "warning", "export GOONDAN_STATE_ROOT=/s"),
        (replace(GOOD, running=Running(status="hangs")), "running", "problem", "gdn stop"),
        (replace(GOOD, running=Running(status="left")), "running", "warning", "gdn stop"),
        (replace(GOOD, bundle=Bundle(refused=error_payload("E_CONFIG_NOT_FOUND", "no"))), "bundle", "problem", "Name"),
    ],
)
def test_each_lack_is_one_finding_with_its_fix(facts: Facts, check: str, level: str, fix: str) -> None:
    (found,) = [finding for finding in judge(facts) if finding.level != "ok"]
    assert (found.check, found.level) == (check, level)
    assert fix in str(found.fix)


@pytest.mark.parametrize(
    ("sysctl", "fix"),
    [
        ({"max_userns": 0}, "user.max_user_namespaces=15000"),
        ({"userns_clone": 0}, "kernel.unprivileged_userns_clone=1"),
        ({"apparmor_userns": 1}, "kernel.apparmor_restrict_unprivileged_userns=0"),
    ],
)
def test_a_setting_that_restricts_namespaces_counts_only_where_no_jail_works(sysctl: Any, fix: str) -> None:
    def about(facts: Facts) -> Finding:
        return next(finding for finding in judge(facts) if finding.check == "userNamespaces")

    assert about(but("host", **sysctl)).level == "ok"
    broken = about(replace(but("host", **sysctl), survey=NO_JAIL))
    assert (broken.level, fix in str(broken.fix)) == ("warning", True)


def test_a_bundle_shows_its_first_errors_and_counts_the_rest() -> None:
    errors = [
        Problem(code="E_CONFIG_SYNTAX", message=f"m{n}", file="/b/g.yaml", line=n + 1, column=2, suggestion="Mend it.")
        for n in range(7)
    ]
    found = [f for f in judge(replace(GOOD, bundle=Bundle(path="/b", errors=errors, dropped=3))) if f.level != "ok"]
    assert [finding.message for finding in found][-2:] == ["/b/g.yaml:5:2: m4 [E_CONFIG_SYNTAX]", "5 more errors"]
    assert found[0].fix == "Mend it."


anything = st.builds(
    Facts,
    versions=st.builds(Versions),
    host=st.builds(Host, cgroup=st.builds(Cgroup)),
    limits=st.builds(Limits),
    variables=st.lists(st.builds(Variable), max_size=3),
    state=st.builds(Folder),
    run_dir=st.builds(RunDir),
    running=st.builds(Running),
    bundle=st.builds(Bundle, errors=st.lists(st.builds(Problem), max_size=9)),
    survey=st.none() | st.builds(Survey, findings=st.lists(st.builds(Obstacle), max_size=2)),
)


@given(anything)
def test_every_finding_but_the_good_ones_has_a_fix_and_none_steers_the_terminal(facts: Facts) -> None:
    findings = judge(facts)
    for finding in findings:
        assert (finding.fix is None) == (finding.level == "ok")
        assert finding.message
    assert all(line.isprintable() for line in render(findings, Style()))


def test_the_variables_that_a_bundle_names(tmp_path: Path) -> None:
    path = tmp_path / "goondan.yaml"
    path.write_text("""\
kind: Model
spec: {apiKey: {valueFrom: {env: MY_KEY}}, model: "${MODEL}-$${NOT_THIS}", params: {env: neither, a: ["${IN_A_LIST}"]}}
---
kind: Tool
spec: {sandbox: {env: [TOKEN, "not a name"]}}
""")
    named = wanted_variables(load_documents(str(path), Report()).documents)
    assert set(named) == {"MY_KEY", "MODEL", "IN_A_LIST", "TOKEN"}


def test_membership_of_control_groups_is_read_as_the_kernel_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_CGROUP_ROOT", "/nonexistent")
    assert command._cgroup("") == Cgroup("none")
    assert command._cgroup("0::/user.slice\n") == Cgroup("none")
    assert command._cgroup("4:memory,hugetlb:/a:b\n0::/\n") == Cgroup("v1", "/a:b")


def test_a_group_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_CGROUP_ROOT", str(tmp_path))
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert command._cgroup("0::/mine\n") == Cgroup("v2", "/mine")


def test_without_a_jail_nothing_is_said_about_its_groups_and_root_is_not_told_to_be_somebody_else() -> None:
    checks = {finding.check for finding in judge(replace(but("host", uid=0), survey=NO_JAIL))}
    assert not checks & {"cgroup", "user"}


def test_a_runtime_directory_that_is_not_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))
    for unusable in ("/tmp", str(tmp_path / "missing"), str(tmp_path / ("x" * 100))):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        found = command._run_dir("/b")
        assert (found.unused_xdg, found.problem) == (unusable, None)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert command._run_dir("/b").unused_xdg == ""


def test_a_state_that_cannot_be_written_is_told_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))
    fresh = command._state("/b")
    assert (fresh.problem, fresh.path.startswith(str(tmp_path))) == (None, True)
    assert fresh.filesystem
    assert not (tmp_path / "state").exists()  # looking makes nothing
    (tmp_path / "state").write_text("")
    assert "no directory" in str(command._state("/b").problem)
    monkeypatch.setenv("GOONDAN_STATE_ROOT", "/proc/1/state")
    assert command._state("/b").problem


@pytest.mark.parametrize(
    ("host", "level", "words"),
    [
        ({"user_numbers": (7, 9)}, "ok", "users 7 to 9; GOONDAN_JAIL_UIDS sets others"),
        ({"numbers_problem": "it is no range"}, "problem", "it is no range"),
        ({"numbers_account": "ldap-me"}, "warning", "ldap-me of this machine has one"),
    ],
)
def test_it_names_the_numbers_of_roots_jails(host: dict[str, Any], level: str, words: str) -> None:
    (found,) = [finding for finding in judge(but("host", uid=0, **host)) if finding.check == "user numbers"]
    assert (found.level, words in found.message) == (level, True)
    assert level == "ok" or "export GOONDAN_JAIL_UIDS=" in (found.fix or "")
    assert not [finding for finding in judge(but("host", **host)) if finding.check == "user numbers"], "only root's"


def test_the_levels_of_a_state_are_looked_at_and_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "state"
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(root))
    assert command._levels("/b").mode is None
    (root / "workspaces").mkdir(parents=True)
    for path in (root, root / "workspaces"):
        path.chmod(0o777)
    found = command._levels("/b")
    assert (found.uid, found.mode, found.looked_at, found.refused) == (os.geteuid(), 0o777, 2, "")
    assert [(level.path, level.mendable) for level in found.levels] == [(str(root), True), (f"{root}/workspaces", True)]
    assert root.stat().st_mode & 0o777 == 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_state_root_of_somebody_else_is_a_problem_with_the_line_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "state"
    root.mkdir(mode=0o700)
    os.chown(root, 40_001, 40_001)
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(root))
    (finding,) = [one for one in judge(replace(GOOD, levels=command._levels("/b"))) if one.level != "ok"]
    assert (finding.check, finding.level) == ("stateRoot", "problem")
    assert "belongs to uid 40001" in finding.message
    assert "export GOONDAN_STATE_ROOT=/" in str(finding.fix)


def test_the_runtimes_of_tools_in_javascript() -> None:
    node = Runtime(name="node", program="/n", place="PATH", version="22.20.0", problem="")
    old = Runtime(name="node", program="/o", place="PATH", version="20.1.0", problem="version 20.1.0, needed 22.18")
    (found,) = [one for one in judge(replace(GOOD, runtimes=[node, old])) if one.check == "javascript"]
    assert (found.level, found.fix) == ("ok", None)
    assert "node 22.20.0 (/n, PATH); passed over: /o (PATH): version 20.1.0, needed 22.18" in found.message
    (lacks,) = [
        one for one in judge(replace(GOOD, runtimes=[old], runtimes_fix="Install it.")) if one.check == "javascript"
    ]
    assert (lacks.level, lacks.message[-12:]) == ("ok", " Install it.")
    assert "needed 22.18" in lacks.message
