"""What a launch plan says besides its mounts: what the jail may write to, what is watched, what keeps each limit.

`test_policy.py` and `test_reduced.py` look at what a jail sees.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from goondan.schemas.bundle.launch import Limits, SandboxSpec
from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.policy.launch_plan import DEVICES, RUN, LaunchPlan, for_file
from goondan.toolhost.policy.limits import GroupPlan, Tree
from goondan.toolhost.policy.plan import plan, walls_full
from goondan.toolhost.policy.subject import HostFacts, HostPath, Request
from tests.checks import refuses, there
from tests.unit.toolhost.test_policy import HOST, TOOL
from tests.unit.toolhost.test_reduced import LOW, REQUEST

LIMITS = Limits(memory_mb=10, processes=5, open_files=7, file_mb=3, disk_mb=2)
TREE = Tree(version=2, memory="/cg/m", pids="/cg/p", cpu="/cg/c", cpuacct="/cg/c")
#: RLIMIT_NPROC
NPROC = 6
ISOLATED = SandboxSpec(isolation="call", limits=LIMITS)


def jail(host: HostFacts = HOST, sandbox: SandboxSpec | None = None, **request: Any) -> LaunchPlan:
    tool = TOOL if sandbox is None else replace(TOOL, sandbox=sandbox)
    return plan(Request(**{"tool": tool, "workdir": "/w", "workdir_real": "/w", **request}), host)


def reduced(host: HostFacts = LOW, **request: Any) -> LaunchPlan:
    return plan(replace(REQUEST, **request), host)


# --- what it may write to, and what is looked after


def test_what_the_jail_may_write_to_and_which_of_it_is_not_ours() -> None:
    out = [HostPath("/out", "dir")]
    made = jail(write=out)
    assert (made.writable, made.request.named, made.fallback_owner) == (["/out", "/w"], ["/out", "/w"], "/w")
    own = jail(write=out, workspace="/w0")
    assert (own.writable, own.request.named, own.fallback_owner) == (["/out", "/w"], ["/out"], "/w0")
    without = jail(workdir=None, workdir_real=None)
    assert (without.writable, without.request.named, without.fallback_owner) == ([], [], None)
    low = reduced(write=out)
    private = ["/tmp/gdn-jail-1/home", "/tmp/gdn-jail-1/tmp"]
    assert (low.writable, low.request.named) == ([*private, "/out", "/w"], ["/out", "/w"])
    assert reduced(workspace="/w0").request.named == []
    alone = reduced(workdir=None, workdir_real=None)
    assert (alone.writable, alone.workdir, alone.seen) == (private, private[0], [("/b/tools/t", "/b/tools/t")])


def test_what_is_guarded_in_the_workdir_and_what_of_it_was_put_there() -> None:
    made = jail(guarded=[HostPath("/w/.git", "dir"), HostPath("/w/goondan.yaml", "file")], made=["/w/goondan.yaml"])
    assert [place.path for place in made.request.guarded] == ["/w/.git", "/w/goondan.yaml"]
    assert made.request.made == ["/w/goondan.yaml"]


def test_hidden_folders_inside_of_what_shows_are_named() -> None:
    host = replace(HOST, hidden=["/data/secret", "/elsewhere"])
    assert jail(host, read=[HostPath("/data", "dir")]).hiding == ["/data/secret"]
    assert jail(host).hiding == []
    low = replace(LOW, absent=["/data/secret"])
    assert reduced(low, read=[HostPath("/data", "dir")]).hiding == ["/data/secret"], "the jail ends should it come"


def test_a_place_that_is_not_there_yet_hides_none_of_those_behind_it() -> None:
    low = replace(LOW, absent=["/w/gone"])
    assert reduced(low, guarded=[HostPath("/w/gone", "dir")]).workdir == "/w"
    with pytest.raises(GoondanError) as caught:
        reduced(low, guarded=[HostPath("/w/gone", "dir"), HostPath("/w/.git", "dir")])
    assert "/w/.git" in caught.value.info.message


# --- limits


def test_the_limits_of_a_tool_are_those_of_its_jail() -> None:
    made = jail(sandbox=SandboxSpec(limits=LIMITS))
    assert made.request.tool.sandbox.limits == LIMITS
    assert dict(made.limits) == {4: 0, 2: 10 << 20, 1: 3 << 20, 7: 7, 6: 5, 8: 64 << 10, 11: 1024}
    assert (made.group, made.trusted) == (None, 0)
    low = reduced(tool=replace(TOOL, sandbox=SandboxSpec(min_tier="reduced", limits=LIMITS)))
    assert low.limits == made.limits


def test_control_groups_say_the_same_and_leave_the_namespace_room() -> None:
    host = replace(HOST, groups=TREE)
    made = jail(host, SandboxSpec(limits=LIMITS))
    settings = [
        ("/cg/m", "memory.max", str(10 << 20)), ("/cg/m", "memory.swap.max", "0"), ("/cg/m", "memory.oom.group", "1"),
        ("/cg/p", "pids.max", "6"),
    ]  # fmt: skip
    assert made.group == GroupPlan(TREE, settings)
    assert dict(made.limits)[NPROC] == 5 + 16
    keeps = made.mechanisms
    assert (keeps["memoryMb"], keeps["processes"], keeps["cpuSeconds"]) == ("cgroup", "cgroup", "cgroup")
    low = reduced(replace(LOW, groups=TREE), tool=replace(TOOL, sandbox=SandboxSpec(min_tier="reduced", limits=LIMITS)))
    assert low.group == made.group
    assert low.mechanisms == keeps
    assert dict(low.limits)[NPROC] == 5, "the reduced tier has no namespace whose limit could stand back"


def test_what_keeps_each_limit_without_groups() -> None:
    keeps = {
        "memoryMb": "watched", "processes": "rlimit", "openFiles": "rlimit", "fileMb": "rlimit", "diskMb": "watched",
        "files": "watched", "cpuSeconds": "watched", "wallSeconds": "host", "outputMb": "host",
    }  # fmt: skip
    assert jail().mechanisms == reduced().mechanisms == keeps


def test_a_fork_servers_own_processes_come_on_top_of_its_tools() -> None:
    host = replace(HOST, groups=TREE)
    serving = jail(host, ISOLATED)
    assert serving.calls is not None
    assert serving.trusted > 0
    assert not serving.alone
    assert dict(serving.limits)[NPROC] == 5 + 16 + serving.trusted
    assert ("/cg/p", "pids.max", str(5 + 1 + serving.trusted)) in there(serving.group).settings
    assert serving.options.count("--cap-add") > 0
    without = jail(replace(host, nests=False), ISOLATED)
    assert (without.calls, without.trusted, without.alone) == (None, 0, True)
    assert "--cap-add" not in without.options
    shared = jail(host)
    assert (shared.calls, shared.alone) == (None, False)


def test_in_the_reduced_tier_each_call_that_is_to_be_alone_has_a_jail_of_its_own() -> None:
    sandbox = SandboxSpec(min_tier="reduced", isolation="call")
    assert reduced(tool=replace(TOOL, sandbox=sandbox)).alone
    assert not reduced().alone


# --- walls


def test_the_walls_of_a_host() -> None:
    assert walls_full(HOST) == jail().walls == ["namespaces", "seccomp", "limits"]
    rooted = replace(HOST, stage="/stage", landlock=1)
    assert walls_full(rooted) == ["namespaces", "seccomp", "landlock", "uid", "limits"]


def test_a_network_needs_somebody_who_brings_it_up() -> None:
    host = replace(HOST, net_admin=False)
    with refuses("E_SANDBOX_UNAVAILABLE") as caught:
        jail(host, SandboxSpec(network="public"))
    assert "CAP_NET_ADMIN" in (caught.value.info.suggestion or "")


def test_whose_bubblewrap_it_is() -> None:
    bundled = replace(HOST, stage="/stage", bwrap="/app/bw/bin/bwrap", bwrap_root="/app/bw")
    for host, expected in (
        (HOST, HOST.bwrap),
        (replace(bundled, user_namespaces=False), "/app/bw/bin/bwrap"),
        (replace(HOST, stage="/stage"), HOST.bwrap),
    ):
        assert jail(host).bwrap == expected
    assert jail(bundled).bwrap.startswith("/stage"), "behind the cover it has another name"


# --- the interpreter and what is imported


@pytest.mark.parametrize("prefix", ["/root/py", None])
def test_an_interpreter_outside_of_the_system_shows_runs_and_is_found(prefix: str | None) -> None:
    low = reduced(replace(LOW, prefix=prefix))
    assert low.environment == {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin" + (f":{prefix}/bin" if prefix else ""),
        "HOME": "/tmp/gdn-jail-1/home",
        "TMPDIR": "/tmp/gdn-jail-1/tmp",
        "LANG": "C.UTF-8",
    }
    rights = dict(there(low.landlock).rules)
    assert rights.get("/root/py") == (RUN if prefix else None)
    assert rights["/opt/app/toolhost/inside"] == rights["/lib32"] == RUN
    assert None not in rights
    full = jail(replace(HOST, prefix=prefix, landlock=6))
    assert full.landlock is not None
    assert dict(full.landlock.rules).get("/root/py") == (RUN if prefix else None)
    assert None not in dict(full.landlock.rules)


def test_what_a_reduced_jail_imports_and_where_it_finds_it() -> None:
    low = reduced()
    assert (low.private, low.code, low.request.import_paths) == (
        "/tmp/gdn-jail-1",
        "/opt/app/toolhost/inside",
        ["/b/tools/t"],
    )
    inner = reduced(tool=replace(REQUEST.tool, entry="/b/tools/t/sub/h.py"))
    assert inner.request.import_paths == ["/b/tools/t/sub", "/b/tools/t"]
    assert dict(there(low.landlock).rules)["/dev/null"] == for_file(DEVICES) & ~(1 << 15), "no ioctl"
    alone = reduced(entry_only=True)
    assert alone.request.import_paths == []
    rights = dict(there(alone.landlock).rules)
    assert rights["/b/tools/t/h.py"] == for_file(RUN)
    assert "/b/tools/t" not in rights
    environment = reduced(venv="/venv", venv_site="/venv/site")
    assert environment.request.import_paths == ["/b/tools/t", "/venv/site"]
    assert dict(there(environment.landlock).rules)["/venv"] == RUN
    assert ("/venv", "/venv") in environment.seen
    file = reduced(read=[HostPath("/data/one", "file")])
    assert dict(there(file.landlock).rules)["/data/one"] == for_file(RUN)


# --- refusals name the place and what is in it


def test_a_refusal_of_what_would_uncover_a_hidden_folder_names_both() -> None:
    with pytest.raises(GoondanError) as caught:
        jail(read=[HostPath("/home/u/.goondan/x", "dir", "/shown")])
    text = caught.value.info.message
    assert "/shown" in text
    assert "/home/u/.goondan" in text
    for workdir in ("/home/u/.goondan", "/home/u/.goondan/x"):
        with pytest.raises(GoondanError) as caught:
            jail(workdir=workdir, workdir_real=workdir)
        assert f"the workdir {workdir}" in caught.value.info.message
        assert caught.value.info.message.count("/home/u/.goondan") == 2


def test_the_reduced_tier_says_what_is_lacking() -> None:
    for lack, said in ((None, "the reduced one"), ("no user namespaces", "the reduced one: no user namespaces")):
        with pytest.raises(GoondanError) as caught:
            reduced(replace(LOW, lack=lack), tool=TOOL)
        assert caught.value.info.message.endswith(said)
