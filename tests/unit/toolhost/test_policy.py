"""The policy: one request and the facts of one host give one exact plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ToolSpec
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.grantable import within
from goondan.toolhost.policy.launch_plan import LIST, READ, RUN, WRITE, CallWalls, LaunchPlan, call_walls, for_file
from goondan.toolhost.policy.plan import plan
from goondan.toolhost.policy.seccomp import program
from goondan.toolhost.policy.subject import GUARDED_NAMES, HostFacts, HostPath, Request, guard_candidates
from tests.checks import refuses, there

HOST = HostFacts(
    bwrap="/opt/bwrap",
    python="/root/py/bin/python3.11",
    inside="/opt/app/toolhost/inside",
    machine="x86_64",
    prefix="/root/py",
    links=[("/bin", "usr/bin"), ("/lib64", "usr/lib64")],
    dirs=["/lib32"],
    etc=["/etc/alternatives"],
    code=["/opt/app/toolhost", "/root/py"],
    hidden=["/home/u/.goondan", "/tmp/goondan-0"],
    nests=True,
)
TOOL = ToolSpec(name="t", entry="/b/tools/t/h.py", root="/b/tools/t", exports=[ExportSpec(name="f")])


def mounts(made: LaunchPlan) -> list[tuple[str, str]]:
    """(option, destination) of every mount of the plan, in order."""
    kinds = {"--bind": 2, "--ro-bind": 2, "--bind-fd": 2, "--tmpfs": 1, "--proc": 1, "--dev": 1, "--remount-ro": 1}
    found = []
    index = 0
    while index < len(made.options):
        option = made.options[index]
        if option in kinds:
            found.append((option, made.options[index + kinds[option]]))
        index += 1
    return found


def after_system(made: LaunchPlan) -> list[tuple[str, str]]:
    """The mounts that depend on the request."""
    found = mounts(made)
    return found[found.index(("--ro-bind", "/run/goondan/goondan_tool")) + 1 :]


def test_the_whole_plan_of_a_plain_tool() -> None:
    made = plan(Request(tool=TOOL, workdir="/w", workdir_real="/w"), HOST)
    assert made.options == [
        "--unshare-user", "--uid", "1000", "--gid", "1000",
        "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", "tool",
        "--die-with-parent", "--cap-drop", "ALL", "--clearenv",
        "--json-status-fd", "4", "--seccomp", "7", "--disable-userns",
        "--ro-bind", "/usr", "/usr",
        "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib64", "/lib64", "--ro-bind", "/lib32", "/lib32",
        "--perms", "0755", "--dir", "/etc",
        "--ro-bind", "/opt/app/toolhost/inside/etc/passwd", "/etc/passwd",
        "--ro-bind", "/opt/app/toolhost/inside/etc/group", "/etc/group",
        "--ro-bind", "/opt/app/toolhost/inside/etc/hosts", "/etc/hosts",
        "--ro-bind", "/opt/app/toolhost/inside/etc/nsswitch.conf", "/etc/nsswitch.conf",
        "--ro-bind", "/etc/alternatives", "/etc/alternatives",
        "--proc", "/proc", "--dev", "/dev",
        "--size", str(64 << 20), "--perms", "1777", "--tmpfs", "/dev/shm",
        "--size", str(256 << 20), "--perms", "1777", "--tmpfs", "/tmp",
        "--perms", "0755", "--dir", "/run", "--perms", "0755", "--dir", "/run/goondan",
        "--size", str(64 << 20), "--perms", "0700", "--tmpfs", "/run/goondan/home",
        "--perms", "0755", "--dir", "/root",
        "--ro-bind", "/root/py", "/root/py",
        "--ro-bind", "/opt/app/toolhost/inside", "/run/goondan/goondan_tool",
        "--perms", "0755", "--dir", "/b", "--perms", "0755", "--dir", "/b/tools",
        "--ro-bind", "/b/tools/t", "/b/tools/t",
        "--bind-fd", "6", "/w",
        "--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/",
        "--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/root/py/bin",
        "--setenv", "HOME", "/run/goondan/home", "--setenv", "TMPDIR", "/tmp", "--setenv", "LANG", "C.UTF-8",
        "--chdir", "/w",
    ]  # fmt: skip
    assert made.bwrap == "/opt/bwrap"
    assert made.command == [
        "/root/py/bin/python3.11", "-I", "-S", "-B", "/run/goondan/goondan_tool/boot.py",
    ]  # fmt: skip
    assert (made.open_workdir, made.workdir, made.request.import_paths) == ("/w", "/w", ["/b/tools/t"])


def test_without_a_workdir_the_home_is_where_it_starts() -> None:
    made = plan(Request(tool=TOOL), HOST)
    assert (made.open_workdir, made.workdir) == (None, "/run/goondan/home")
    assert "--bind-fd" not in made.options
    assert "--bind" not in made.options


def test_what_trusted_programs_read_stays_read_only_and_cannot_be_moved_away() -> None:
    guarded = [HostPath("/w/.git", "dir"), HostPath("/w/a/b/tools/x", "dir"), HostPath("/w/a/goondan.yaml", "file")]
    made = plan(Request(tool=TOOL, workdir="/w", workdir_real="/w", guarded=guarded), HOST)
    assert after_system(made)[:-3] == [
        ("--ro-bind", "/b/tools/t"),
        ("--bind-fd", "/w"),
        ("--ro-bind", "/w/.git"),
        ("--bind", "/w/a"),
        ("--bind", "/w/a/b"),
        ("--bind", "/w/a/b/tools"),
        ("--ro-bind", "/w/a/b/tools/x"),
        ("--ro-bind", "/w/a/goondan.yaml"),
    ]


def test_nothing_writable_is_mounted_inside_a_guarded_folder() -> None:
    guarded = [HostPath("/w/.venv/lib/python", "dir"), HostPath("/w/.venv", "dir")]
    made = plan(Request(tool=TOOL, workdir="/w", workdir_real="/w", guarded=guarded), HOST)
    assert [item for item in after_system(made) if ".venv" in item[1]] == [("--ro-bind", "/w/.venv")]


def test_a_workdir_keeps_the_name_that_the_caller_has_for_it() -> None:
    guarded = [HostPath("/real/w/d/.git", "dir")]
    made = plan(Request(tool=TOOL, workdir="/link/w", workdir_real="/real/w", guarded=guarded), HOST)
    assert after_system(made)[1:-3] == [
        ("--bind-fd", "/link/w"), ("--bind", "/link/w/d"), ("--ro-bind", "/link/w/d/.git"),
    ]  # fmt: skip
    assert made.open_workdir == "/real/w"
    index = made.options.index("/link/w/d/.git")
    assert made.options[index - 1] == "/real/w/d/.git"


def test_the_tools_own_folder_inside_the_workdir_stays_read_only() -> None:
    tool = ToolSpec(name="t", entry="/w/tools/t/h.py", root="/w/tools/t", exports=[])
    assert guard_candidates("/w", tool, [], HOST) == [
        *(f"/w/{name}" for name in GUARDED_NAMES), "/w/tools/t", "/w/tools/t/h.py",
    ]  # fmt: skip
    made = plan(Request(tool=tool, workdir="/w", workdir_real="/w", guarded=[HostPath("/w/tools/t", "dir")]), HOST)
    assert after_system(made)[:-3] == [("--bind-fd", "/w"), ("--bind", "/w/tools"), ("--ro-bind", "/w/tools/t")]


@pytest.mark.parametrize("named", ["/w", "/link/w"])
def test_the_folder_of_a_call_inside_the_workdir_stays_read_only(named: str) -> None:
    folder = HostPath("/w/a/skills/x", "dir", f"{named}/a/skills/x")
    request = Request(tool=TOOL, workdir=named, workdir_real="/w", folder=folder)
    made = plan(request, HOST)
    assert after_system(made)[1:-3] == [
        ("--bind-fd", named),
        ("--bind", f"{named}/a"),
        ("--bind", f"{named}/a/skills"),
        ("--ro-bind", f"{named}/a/skills/x"),
    ]
    assert bind_sources(made)[f"{named}/a/skills/x"] == "/w/a/skills/x"
    staged = bind_sources(plan(request, msgspec.structs.replace(HOST, stage="/stage")))
    assert staged[f"{named}/a/skills/x"].removesuffix("/a/skills/x") == staged[named]
    whole = plan(Request(tool=TOOL, workdir=named, workdir_real="/w", folder=HostPath("/w", "dir", named)), HOST)
    assert after_system(whole)[1:-3] == [("--bind-fd", named)], "the workdir itself"


def test_a_workdir_inside_the_tools_folder_is_mounted_after_it() -> None:
    made = plan(Request(tool=TOOL, workdir="/b/tools/t/w", workdir_real="/b/tools/t/w"), HOST)
    assert after_system(made)[:-3] == [("--ro-bind", "/b/tools/t"), ("--bind-fd", "/b/tools/t/w")]


def test_candidates_are_only_what_lies_inside() -> None:
    protected = ["/w/goondan.yaml", "/other/goondan.yaml", "/w", "/wide/x"]
    assert guard_candidates("/w", TOOL, protected, HOST) == [
        *(f"/w/{name}" for name in GUARDED_NAMES), "/w/goondan.yaml",
    ]  # fmt: skip
    assert "/root/py" in guard_candidates("/root", TOOL, [], HOST)


def test_state_and_sockets_never_show() -> None:
    made = plan(Request(tool=TOOL, workdir="/home/u", workdir_real="/home/u"), HOST)
    assert after_system(made) == [
        ("--ro-bind", "/b/tools/t"),
        ("--bind-fd", "/home/u"),
        ("--tmpfs", "/home/u/.goondan"),
        ("--remount-ro", "/proc"), ("--remount-ro", "/dev"),
        ("--remount-ro", "/home/u/.goondan"), ("--remount-ro", "/"),
    ]  # fmt: skip


def test_what_is_hidden_cannot_be_moved_away() -> None:
    """Else another one could be put in its place, which the next kernel would take for the state."""
    host = msgspec.structs.replace(HOST, hidden=["/w/a/b/state", "/w/g/in/state"])
    made = plan(Request(tool=TOOL, workdir="/w", workdir_real="/w", guarded=[HostPath("/w/g", "dir")]), host)
    assert [item for item in after_system(made) if item[1].startswith("/w/")] == [
        ("--bind", "/w/a"), ("--bind", "/w/a/b"), ("--tmpfs", "/w/a/b/state"),
        ("--ro-bind", "/w/g"), ("--tmpfs", "/w/g/in/state"),
        ("--remount-ro", "/w/a/b/state"), ("--remount-ro", "/w/g/in/state"),
    ]  # fmt: skip


def test_a_workdir_inside_the_state_root_is_mounted_into_the_emptied_one() -> None:
    workdir = "/home/u/.goondan/instances/a/i/workspace"
    tool = ToolSpec(name="t", entry="/home/u/h.py", root="/home/u", exports=[])
    made = plan(Request(tool=tool, workdir=workdir, workdir_real=workdir), HOST)
    assert after_system(made) == [
        ("--ro-bind", "/home/u"),
        ("--tmpfs", "/home/u/.goondan"),
        ("--bind-fd", workdir),
        ("--remount-ro", "/proc"), ("--remount-ro", "/dev"),
        ("--remount-ro", "/home/u/.goondan"), ("--remount-ro", "/"),
    ]  # fmt: skip
    plain = plan(Request(tool=TOOL, workdir=workdir, workdir_real=workdir), HOST)
    assert "--tmpfs" not in [option for option, path in after_system(plain)]


def test_dotfiles_of_the_tools_folder_are_masked() -> None:
    masked = [
        HostPath("/b/tools/t/.env", "file"),
        HostPath("/b/tools/t/.git", "dir"),
        HostPath("/b/tools/t/tool.yaml", "file"),
    ]
    made = plan(Request(tool=TOOL, masked=masked), HOST)
    assert after_system(made) == [
        ("--ro-bind", "/b/tools/t"),
        ("--ro-bind", "/b/tools/t/.env"),
        ("--tmpfs", "/b/tools/t/.git"),
        ("--ro-bind", "/b/tools/t/tool.yaml"),
        ("--remount-ro", "/proc"),
        ("--remount-ro", "/dev"),
        ("--remount-ro", "/b/tools/t/.git"),
        ("--remount-ro", "/"),
    ]
    index = made.options.index("/b/tools/t/.env")
    assert made.options[index - 1] == "/dev/null"


def test_a_tool_in_the_bundles_root_sees_its_entry_alone() -> None:
    tool = ToolSpec(name="t", entry="/b/h.py", root="/b/h.py", exports=[])
    made = plan(Request(tool=tool, entry_only=True), HOST)
    assert after_system(made)[:-3] == [("--ro-bind", "/b/h.py")]
    assert made.request.import_paths == []  # /b may be the workdir, where any tool puts modules


def test_grants_and_environments() -> None:
    made = plan(
        Request(
            tool=TOOL,
            workdir="/w",
            workdir_real="/w",
            read=[HostPath("/data/real", "dir", "/data/link"), HostPath("/w/own", "dir")],
            write=[HostPath("/scratch", "dir")],
            guarded=[HostPath("/scratch/.git", "dir")],
            venv="/envs/e",
            venv_site="/envs/e/lib/python3.11/site-packages",
        ),
        HOST,
    )
    assert after_system(made)[:-3] == [
        ("--ro-bind", "/b/tools/t"), ("--ro-bind", "/data/link"), ("--ro-bind", "/envs/e"),
        ("--bind", "/scratch"), ("--ro-bind", "/scratch/.git"), ("--bind-fd", "/w"),
    ]  # fmt: skip
    assert made.request.import_paths == ["/b/tools/t", "/envs/e/lib/python3.11/site-packages"]


@pytest.mark.parametrize(
    "path",
    ["/", "/usr", "/usr/local/x", "/etc", "/proc/1", "/dev/shm", "/run", "/home", "/run/goondan/x", "/root/py/x",
     "/opt/app/toolhost/base"],
)  # fmt: skip
def test_no_workdir_in_places_of_the_system_or_of_ours(path: str) -> None:
    with refuses("E_SANDBOX_DENIED") as caught:
        plan(Request(tool=TOOL, workdir=path, workdir_real=path), HOST)
    assert path in caught.value.info.message


@pytest.mark.parametrize("path", ["/home/u", "/home/u/.goondan/x", "/root", "/opt/app", "/etc", "/tmp"])
def test_no_write_grant_around_state_or_code(path: str) -> None:
    with refuses("E_SANDBOX_DENIED"):
        plan(Request(tool=TOOL, write=[HostPath(path, "dir")]), HOST)


@pytest.mark.parametrize("path", ["/", "/proc", "/proc/1", "/dev", "/sys/kernel", "/run", "/run/goondan", "/tmp"])
def test_no_grant_to_read_replaces_what_a_jail_has_of_its_own(path: str) -> None:
    for place in (HostPath(path, "dir"), HostPath("/data", "dir", path), HostPath(path, "dir", "/data")):
        with refuses("E_SANDBOX_DENIED"):
            plan(Request(tool=TOOL, read=[place]), HOST)


@pytest.mark.parametrize("path", ["/root", "/opt/app", "/tmp/x", "/home/u", "/var/x", "/run/user/0"])
def test_other_workdirs_are_fine(path: str) -> None:
    assert plan(Request(tool=TOOL, workdir=path, workdir_real=path), HOST).workdir == path


@pytest.mark.parametrize("path", ["/home/u", "/home", "/home/u/.ssh", "/home/u/.config/x", "/tmp", "/var/tmp"])
def test_what_a_persons_programs_run_is_no_workdir(path: str) -> None:
    host = msgspec.structs.replace(HOST, home="/home/u")
    with refuses("E_SANDBOX_DENIED"):
        plan(Request(tool=TOOL, workdir=path, workdir_real=path), host)
    for fine in ("/home/u/project", "/home/u/.goondan/instances/a/i/workspace", "/home/user"):
        assert plan(Request(tool=TOOL, workdir=fine, workdir_real=fine), host).workdir == fine


def test_within() -> None:
    assert within("/a/b", "/a")
    assert within("/a", "/a")
    assert within("/a", "/")
    assert not within("/ab", "/a")
    assert not within("/", "/a")


def test_a_system_interpreter_needs_no_mount_of_its_own() -> None:
    host = HostFacts(bwrap="/b", python="/usr/bin/python3", inside="/i", machine="x86_64", disable_userns=False)
    made = plan(Request(tool=TOOL), host)
    assert "--disable-userns" not in made.options
    assert made.options[made.options.index("PATH") + 1].endswith("/sbin")


def test_landlock_gives_back_what_the_mounts_give() -> None:
    host = msgspec.structs.replace(HOST, landlock=6)
    request = Request(
        tool=TOOL,
        workdir="/link/w",
        workdir_real="/w",
        read=[HostPath("/data", "dir"), HostPath("/etc/some.conf", "file", "/some.conf")],
        write=[HostPath("/out", "dir"), HostPath("/log", "file")],
        venv="/venv",
        venv_site="/venv/lib",
    )
    made = there(plan(request, host).landlock)
    rights = dict(made.rules)
    assert sorted(rights) == sorted([
        "/", "/usr", "/etc", "/proc", "/dev", "/run/goondan/goondan_tool", "/lib32", "/root/py", "/dev/shm", "/tmp",
        "/run/goondan/home", "/b/tools/t", "/data", "/some.conf", "/venv", "/out", "/link/w", "/log",
    ])  # fmt: skip
    assert rights["/"] == LIST and rights["/proc"] == READ
    assert rights["/data"] == rights["/b/tools/t"] == rights["/usr"] == RUN
    assert rights["/link/w"] == rights["/out"] == rights["/tmp"] == WRITE
    assert rights["/log"] == for_file(WRITE)
    assert rights["/some.conf"] == for_file(RUN)
    assert plan(request, HOST).landlock is None
    one_file = there(plan(Request(tool=TOOL, entry_only=True), host).landlock)
    assert dict(one_file.rules)["/b/tools/t/h.py"] == for_file(RUN)


def test_a_granted_network_opens_sockets_and_leaves_tcp_to_the_grant() -> None:
    host = msgspec.structs.replace(HOST, landlock=6)
    granted = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(network="public"))
    without, with_ = plan(Request(tool=TOOL), host), plan(Request(tool=granted), host)
    assert without.filter == program("x86_64", sockets=False)
    assert with_.filter == program("x86_64", sockets=True)
    assert without.landlock is not None and without.landlock.net == 3
    assert with_.landlock is not None and with_.landlock.net == 0


def test_a_granted_network_brings_its_own_names_and_nothing_else() -> None:
    granted = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(network={"allow": ["db.example.org:5432"]}))
    with_, without = plan(Request(tool=granted), HOST), plan(Request(tool=TOOL), HOST)
    assert without.layout is None
    assert without.files == []
    assert with_.layout is not None
    assert with_.files[0].endswith("127.42.0.2 db.example.org\n")
    places = [with_.options[at + 2] for at, option in enumerate(with_.options) if option == "--ro-bind-data"]
    assert places == ["/etc/hosts", "/etc/resolv.conf"]
    assert "--unshare-net" in with_.options
    broken = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(network={"allow": ["2130706433:80"]}))
    with pytest.raises(GoondanError):
        plan(Request(tool=broken), HOST)


def test_as_root_everything_is_staged_that_a_jails_user_could_not_reach() -> None:
    host = msgspec.structs.replace(HOST, stage="/run", bwrap="/opt/venv/site/b/_bin/bwrap", bwrap_root="/opt/venv/site")
    request = Request(
        tool=ToolSpec(name="t", entry="/w/tools/t/h.py", root="/w/tools/t", exports=[]),
        workdir="/link/w",
        workdir_real="/w",
        guarded=[HostPath("/w/.git", "dir"), HostPath("/w/sub/tools/x", "dir"), HostPath("/w/tools/t", "dir")],
        read=[HostPath("/data/file", "file", "/shown"), HostPath("/usr/share/x", "dir")],
        write=[HostPath("/out", "dir"), HostPath("/log", "file")],
    )
    made = plan(request, host)
    assert made.stage == "/run"
    assert made.open_workdir is None
    assert [(source, stage["at"], stage["folder"], stage["readOnly"]) for source, stage in made.stages] == [
        ("/out", "/run/0", True, False),
        ("/log", "/run/1", False, False),
        ("/w", "/run/2", True, False),
        ("/root/py", "/run/3", True, True),
        ("/opt/app/toolhost/inside", "/run/4", True, True),
        ("/opt/venv/site", "/run/5", True, True),
        ("/w/tools/t", "/run/6", True, True),
        ("/data/file", "/run/7", False, True),
    ]
    assert made.bwrap == "/run/5/b/_bin/bwrap"
    binds = bind_sources(made)
    assert binds["/link/w"] == "/run/2"
    assert binds["/link/w/.git"] == "/run/2/.git"
    assert binds["/link/w/sub"] == "/run/2/sub"
    assert binds["/link/w/sub/tools/x"] == "/run/2/sub/tools/x"
    assert binds["/shown"] == "/run/7"
    assert binds["/usr/share/x"] == "/usr/share/x"
    assert (binds["/out"], binds["/log"]) == ("/run/0", "/run/1")
    assert binds["/root/py"] == "/run/3"
    assert binds["/etc/passwd"] == "/run/4/etc/passwd"
    assert binds["/etc/alternatives"] == "/etc/alternatives"
    shown_anyway = ("/usr", "/lib32", "/etc/alternatives")
    hidden = {at: source for at, source in binds.items() if not source.startswith(("/run/", *shown_anyway))}
    assert hidden == {}


def test_what_every_place_of_a_jail_must_be() -> None:
    request = Request(
        tool=msgspec.structs.replace(TOOL, root="/w/t", entry="/w/t/h.py"),
        workdir="/link/w",
        workdir_real="/w",
        guarded=[HostPath("/w/a/b/.git", "dir"), HostPath("/w/t", "dir")],
        masked=[HostPath("/w/t/.env", "file")],
        read=[HostPath("/data", "dir", "/shown"), HostPath("/out/in", "dir")],
        write=[HostPath("/out", "dir")],
        venv="/venv",
        venv_site="/venv/s",
    )
    for host in (HOST, msgspec.structs.replace(HOST, stage="/run"), msgspec.structs.replace(HOST, hidden=["/w/h/i"])):
        seen = dict(plan(request, host).seen)
        assert seen.pop("/link/w/h", "/w/h") == "/w/h"
        assert seen == {
            "/link/w": "/w", "/link/w/a": "/w/a", "/link/w/a/b": "/w/a/b", "/link/w/a/b/.git": "/w/a/b/.git",
            "/link/w/t": "/w/t", "/shown": "/data", "/out": "/out", "/venv": "/venv",
        }  # fmt: skip


def test_without_user_namespaces_a_jail_begins_as_root_in_a_root_of_its_own() -> None:
    site = "/opt/venv/site"
    host = msgspec.structs.replace(
        HOST, stage="/run", user_namespaces=False, bwrap=f"{site}/b/_bin/bwrap", bwrap_root=site, nests=True
    )
    guarded = [HostPath("/data/w/sub/tools/x", "dir")]
    request = Request(tool=TOOL, workdir="/data/w", workdir_real="/data/w", guarded=guarded, workspace="/data/w")
    made = plan(request, host)
    assert made.options[:7] == ["--as-pid-1", *(f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup")),
                                "--hostname"]  # fmt: skip
    kept = [made.options[at + 1] for at, option in enumerate(made.options) if option == "--cap-add"]
    assert kept == ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"]
    assert not {"--uid", "--gid", "--disable-userns"} & set(made.options)
    assert made.options[-2:] == ["--chdir", "/"]  # its user goes to the workdir
    assert (made.workdir, made.fallback_owner) == ("/data/w", "/data/w")
    assert made.filter == program("x86_64", sockets=False, drops=True) != plan(Request(tool=TOOL), HOST).filter
    assert {source: (stage["unmapped"], stage["owned"]) for source, stage in made.stages} == {
        "/data/w": ("given", True),
        "/root/py": ("shown", False),
        "/opt/app/toolhost/inside": ("copied", False),
        "/b/tools/t": ("copied", True),
    }
    assert made.enclosure is not None
    assert made.enclosure["shown"][:4] == ["/usr", "/lib32", "/etc/alternatives", site]
    assert made.enclosure["shown"][-1] == "/proc"
    assert made.enclosure["links"] == host.links
    assert made.bwrap == f"{site}/b/_bin/bwrap"
    binds = bind_sources(made)
    assert binds["/etc/passwd"] == made.enclosure["texts"][0][0] == "/run/passwd"
    assert "tool:x:{uid}:{uid}:tool:/run/goondan/home:" in made.enclosure["texts"][0][1]
    assert binds["/run/goondan/home"] == made.enclosure["home"]
    # Nothing comes from where bubblewrap could not find it.
    there = (
        *made.enclosure["shown"],
        *(stage["at"] for _, stage in made.stages),
        "/run/passwd",
        "/run/group",
        "/run/home",
    )
    assert [source for source in binds.values() if not any(within(source, place) for place in there)] == []
    assert plan(request, msgspec.structs.replace(host, user_namespaces=True)).enclosure is None


def test_without_power_over_networks_no_jail_has_a_granted_one() -> None:
    host = msgspec.structs.replace(HOST, stage="/run", user_namespaces=False, net_admin=False)
    made = plan(Request(tool=TOOL), host)
    assert "--unshare-net" not in made.options
    assert made.enclosure is not None and made.enclosure["network"], "so the launcher leaves the host's"
    granted = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(network="public"))
    with refuses("E_SANDBOX_UNAVAILABLE", match="CAP_NET_ADMIN"):
        plan(Request(tool=granted), host)
    assert "--unshare-net" in plan(Request(tool=TOOL), msgspec.structs.replace(host, user_namespaces=True)).options


def test_a_call_has_a_jail_of_its_own_where_jails_can_make_no_namespaces() -> None:
    tool = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(isolation="call"))
    host = msgspec.structs.replace(HOST, stage="/run", nests=True)
    assert (plan(Request(tool=tool), host).alone, plan(Request(tool=tool), host).calls is None) == (False, False)
    rooted = plan(Request(tool=tool), msgspec.structs.replace(host, user_namespaces=False))
    assert (rooted.alone, rooted.calls) == (True, None)


def test_a_jails_heir_is_of_its_workdir_or_of_what_it_may_write() -> None:
    assert plan(Request(tool=TOOL), HOST).fallback_owner is None
    grants = [HostPath("/out", "dir"), HostPath("/log", "file")]
    assert plan(Request(tool=TOOL, write=grants), HOST).fallback_owner == "/log"
    assert plan(Request(tool=TOOL, write=grants, workdir="/w", workdir_real="/w"), HOST).fallback_owner == "/w"


def test_what_is_not_around_its_program_is_not_taken_from_there() -> None:
    host = msgspec.structs.replace(HOST, stage="/run", bwrap="/elsewhere/bwrap", bwrap_root="/opt/venv/site")
    assert plan(Request(tool=TOOL), host).bwrap == "/elsewhere/bwrap"


def bind_sources(made: LaunchPlan) -> dict[str, str]:
    """Destination -> source of every bind mount."""
    options = made.options
    return {options[at + 2]: options[at + 1] for at, option in enumerate(options) if option in ("--bind", "--ro-bind")}


def of_a_call(path: str = "/w", **sandbox: Any) -> tuple[LaunchPlan, CallWalls]:
    tool = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(isolation="call", **sandbox))
    made = plan(Request(tool=tool, workdir=path, workdir_real=path, guarded=[HostPath(f"{path}/.git", "dir")]), HOST)
    return made, there(made.calls)


def test_a_fork_server_keeps_two_capabilities_and_its_calls_none() -> None:
    made, walls = of_a_call()
    assert [made.options[at + 1] for at, option in enumerate(made.options) if option == "--cap-add"] == [
        "CAP_SYS_ADMIN", "CAP_SETPCAP",
    ]  # fmt: skip
    assert walls.drop == [8, 21]
    assert made.filter == program("x86_64", sockets=False, server=True)
    assert bytes.fromhex(walls.filter) == program("x86_64", sockets=False)
    assert (walls.workdir, made.workdir) == ("/w", "/w")


def test_what_is_private_is_fresh_for_every_call() -> None:
    _, walls = of_a_call()
    assert [(fresh.kind, fresh.at, fresh.options) for fresh in walls.fresh] == [
        ("tmpfs", "/dev/shm", f"size={64 << 20},mode=1777"),
        ("tmpfs", "/tmp", f"size={256 << 20},mode=1777"),
        ("tmpfs", "/run/goondan/home", f"size={64 << 20},mode=0700"),
        ("devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=620"),
        ("proc", "/proc", ""),
    ]
    nosuid, read_only = 2, 1
    assert all(fresh.flags & nosuid for fresh in walls.fresh)
    assert walls.fresh[-1].flags & read_only
    assert walls.kept == []


def test_what_is_mounted_below_a_private_place_shows_through_as_a_whole() -> None:
    _, walls = of_a_call("/tmp/a/w")
    assert walls.kept == ["/tmp/a/w"]  # and with it the guard on its .git


def test_other_calls_have_a_jail_as_before() -> None:
    call = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(isolation="call"))
    usual = plan(Request(tool=TOOL, workdir="/w", workdir_real="/w"), HOST)
    alone = plan(Request(tool=call, workdir="/w", workdir_real="/w"), msgspec.structs.replace(HOST, nests=False))
    assert alone == msgspec.structs.replace(usual, alone=True, request=alone.request)
    assert usual.calls is None


def test_what_tells_of_the_operators_keys_is_covered_in_the_proc_that_the_tool_sees() -> None:
    """Not in a fork server's: the kernel makes no new /proc where the old one is covered."""
    host = msgspec.structs.replace(HOST, covered=["/proc/keys"])
    options = plan(Request(tool=TOOL), host).options
    at = options.index("/proc/keys")
    assert options[at - 2 : at] == ["--ro-bind", "/dev/null"] and at > options.index("--proc")
    call = plan(Request(tool=msgspec.structs.replace(TOOL, sandbox=SandboxSpec(isolation="call"))), host)
    assert "/proc/keys" not in call.options
    assert call.calls is not None and call.calls.covered == ["/proc/keys"]


def test_a_private_place_that_was_granted_is_no_calls_own() -> None:
    walls = call_walls({"/tmp": "", "/dev/shm": ""}, ["/tmp", "/tmp/x"], "/w", b"")
    assert [fresh.at for fresh in walls.fresh] == ["/dev/shm", "/dev/pts", "/proc"]
    assert walls.kept == []
