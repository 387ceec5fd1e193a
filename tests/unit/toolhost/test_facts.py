"""What is looked up on the host, in folders made for it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

import goondan.toolhost.lookup.this_host
from goondan.schemas.bundle.launch import Filesystem, PythonSpec, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.system.users import NUMBERS, TOOLHOST_UID
from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.lookup.folders import dotfiles
from goondan.toolhost.lookup.hiding import as_it_is_now, hidden_folders
from goondan.toolhost.lookup.jail_request import look_up
from goondan.toolhost.lookup.this_host import find_bwrap, gather, host_facts, version_problem
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Ordinary, Rooted, Uids
from goondan.toolhost.survey import CAPABILITIES, judge, judge_processes
from tests.checks import refuses
from tests.toolhost_fixture import POWERS

HOST = HostFacts(bwrap="/b", python="/usr/bin/python3", inside="/i", machine="x86_64")


def spec(state_dir: Path | str = "/nonexistent", protected: list[str] | None = None) -> ToolHostSpec:
    return ToolHostSpec(tools=[], state_dir=str(state_dir), revision="1", protected=protected or [])


def make(folder: Path, sandbox: SandboxSpec | None = None) -> ToolSpec:
    root = folder / "tools" / "t"
    root.mkdir(parents=True)
    (root / "h.py").write_text("handlers = {}")
    return ToolSpec(name="t", entry=str(root / "h.py"), root=str(root), exports=[], sandbox=sandbox or SandboxSpec())


def test_the_jail_of_a_bundled_tool_shows_what_all_share_in_which_nothing_would_be_masked(tmp_path: Path) -> None:
    base = Path(goondan.toolhost.lookup.this_host.__file__).resolve().parents[1] / "base"
    bash = ToolSpec(name="bash", entry=f"{base}/bash/bash.py", root=f"{base}/bash", exports=[], bundled=True)
    request = look_up(bash, None, spec(), HOST, POWERS)
    assert (request.tool.root, request.tool.entry, request.shared) == (str(base), bash.entry, None)
    assert request.import_paths == [f"{base}/bash", str(base)]
    elsewhere = msgspec.structs.replace(make(tmp_path), bundled=True)
    request = look_up(elsewhere, None, spec(), HOST, POWERS)
    assert (request.tool.root, request.shared) == (elsewhere.root, str(base))
    assert request.import_paths == [elsewhere.root, str(base)]
    assert str(base) in [place.path for place in request.shown]
    request = look_up(make(tmp_path / "b"), None, spec(), HOST, POWERS)
    assert (request.tool.root, request.shared) == (str(tmp_path / "b" / "tools" / "t"), None)
    assert str(base) not in [place.path for place in request.shown]
    assert (base / "goondan_base" / "fetch.py").is_file()
    assert dotfiles(str(base), []) == []


def test_versions() -> None:
    assert version_problem("bubblewrap 0.11.0\n") is None
    assert version_problem("bubblewrap 1.0\n") is None
    assert "0.8, needed 0.11" in (version_problem("bubblewrap 0.8.0\n") or "")
    assert "does not say" in (version_problem("") or "")


def test_a_bubblewrap_that_is_setuid_or_too_old_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, version: str, mode: int) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho bubblewrap {version}\n")
        path.chmod(mode)
        return str(path)

    bad = [program("setuid", "0.11.0", 0o4755), program("setgid", "0.11.0", 0o2755), program("old", "0.8.0", 0o755)]
    good = program("good", "0.12.1", 0o755)
    monkeypatch.setattr(
        goondan.toolhost.lookup.this_host, "_bwrap_candidates", lambda: [*bad, str(tmp_path / "gone"), good]
    )
    assert find_bwrap() == (good, "0.12.1")
    monkeypatch.setattr(goondan.toolhost.lookup.this_host, "_bwrap_candidates", lambda: bad)
    with pytest.raises(GoondanError) as caught:
        find_bwrap()
    message = caught.value.info.message
    assert message.count("is setuid") == 2 and "version 0.8, needed 0.11" in message
    facts = gather(POWERS)
    assert isinstance(facts, HostFacts)
    assert (facts.bwrap, facts.bwrap_root, facts.bwrap_version, facts.lack) == ("", None, "", message)


def test_what_exists_is_guarded_and_what_is_missing_is_made(tmp_path: Path) -> None:
    tool = make(tmp_path)
    workdir = tmp_path / "w"
    (workdir / ".git").mkdir(parents=True)
    (workdir / "doc.yaml").write_text("")
    (workdir / "link.yaml").symlink_to("doc.yaml")
    for nested in ("sub/.git", "sub/deep/.git", "node_modules/x/.git", ".git/modules/x/.git"):
        (workdir / nested).mkdir(parents=True)
    (workdir / "tree").mkdir()
    (workdir / "tree" / ".git").write_text("gitdir: /elsewhere")
    protected = [str(workdir / name) for name in ("doc.yaml", "link.yaml", "absent")]
    request = look_up(tool, str(workdir), spec(protected=protected), HOST, POWERS)
    assert [(os.path.relpath(p.path, workdir), p.kind) for p in request.guarded] == [
        (".git", "dir"), (".venv", "dir"), (".goondan", "dir"), ("doc.yaml", "file"),
        ("sub/.git", "dir"), ("tree/.git", "file"), ("sub/deep/.git", "dir"),
    ]  # fmt: skip
    assert request.made == [str(workdir / ".venv"), str(workdir / ".goondan")]
    assert request.workdir == request.workdir_real == str(workdir)
    (tmp_path / "other").mkdir()
    assert (
        look_up(tool, str(tmp_path / "other"), spec(protected=protected), HOST, POWERS).made == []
    )  # no bundle lies there


@pytest.mark.parametrize("name", [".git", ".venv", ".goondan"])
def test_a_link_where_something_must_be_guarded_is_refused(tmp_path: Path, name: str) -> None:
    tool = make(tmp_path)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / name).symlink_to("/usr")
    with refuses("E_SANDBOX_DENIED", match=f"/w/{name} is a link"):
        look_up(tool, str(tmp_path / "w"), spec(), HOST, POWERS)
    assert os.listdir(tmp_path / "w") == [name]


def test_an_instances_own_workdir_is_left_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "state" / "instances" / "a" / "k" / "workspace"
    own.mkdir(parents=True)
    (own / ".venv").symlink_to("/usr")
    request = look_up(make(tmp_path), str(own), spec(tmp_path / "state"), HOST, POWERS)
    assert (request.guarded, request.made, request.workspace) == ([], [], request.workdir_real)
    assert os.listdir(own) == [".venv"]


def test_the_environments_of_all_tools_are_guarded(tmp_path: Path) -> None:
    tool = make(tmp_path)
    (tmp_path / "w" / "envs" / "e").mkdir(parents=True)
    other = make(tmp_path / "o", SandboxSpec(python=PythonSpec(venv=str(tmp_path / "w" / "envs" / "e"))))
    served = msgspec.structs.replace(spec(), tools=[tool, other])
    request = look_up(tool, str(tmp_path / "w"), served, HOST, POWERS)
    assert str(tmp_path / "w" / "envs" / "e") in [place.path for place in request.guarded]


def test_a_workdir_behind_a_link_is_known_by_both_names(tmp_path: Path) -> None:
    tool = make(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    request = look_up(tool, str(tmp_path / "link"), spec(), HOST, POWERS)
    assert (request.workdir, request.workdir_real) == (str(tmp_path / "link"), str(tmp_path / "real"))


def test_workdirs_of_ours_are_made_others_must_exist(tmp_path: Path) -> None:
    tool = make(tmp_path)
    state = tmp_path / "state"
    own = state / "instances" / "a" / "k" / "workspace"
    look_up(tool, str(own), spec(state), HOST, POWERS)
    assert own.stat().st_mode & 0o777 == 0o700
    for path in (str(tmp_path / "absent"), "relative", tool.entry):
        with refuses("E_SANDBOX_DENIED"):
            look_up(tool, path, spec(state), HOST, POWERS)


def test_shared_tools_have_no_workdir(tmp_path: Path) -> None:
    request = look_up(make(tmp_path, SandboxSpec(isolation="shared")), str(tmp_path), spec(), HOST, POWERS)
    assert (request.workdir, request.workdir_real) == (None, None)


def test_grants_must_exist(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    granted = make(tmp_path, SandboxSpec(filesystem=Filesystem(read=[str(tmp_path / "data"), "h.py"])))
    request = look_up(granted, None, spec(), HOST, POWERS)
    assert [(p.path, p.kind) for p in request.read] == [(str(tmp_path / "data"), "dir"), (granted.entry, "file")]
    absent = ToolSpec(
        name="t", entry=granted.entry, root=granted.root, exports=[],
        sandbox=SandboxSpec(filesystem=Filesystem(write=["/nonexistent/x"])),
    )  # fmt: skip
    with pytest.raises(GoondanError) as caught:
        look_up(absent, None, spec(), HOST, POWERS)
    assert "/nonexistent/x" in caught.value.info.message


@pytest.mark.parametrize("granted", ["link", "link/inner", "plain/link/inner"])
@pytest.mark.parametrize("kind", ["read", "write", "venv"])
def test_a_grant_leads_through_no_link_that_a_tool_could_have_put_there(
    tmp_path: Path, granted: str, kind: str
) -> None:
    """A tool that can write beside a granted place would send the next jail to the operator's keys."""
    (tmp_path / "keys" / "inner").mkdir(parents=True)
    for link in (tmp_path / "link", tmp_path / "plain" / "link"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "keys")
    path = str(tmp_path / granted)
    sandbox = {
        "read": SandboxSpec(filesystem=Filesystem(read=[path])),
        "write": SandboxSpec(filesystem=Filesystem(write=[path])),
        "venv": SandboxSpec(python=PythonSpec(venv=path)),
    }[kind]
    with refuses("E_SANDBOX_DENIED", match="leads through the link"):
        look_up(make(tmp_path, sandbox), None, spec(), HOST, POWERS)


def test_what_the_tool_host_may_not_write_to_itself_says_nothing_when_root_has_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is a user without any rights by now, and its jails' files belong to the owner of the workdir."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "keys")
    granted = make(tmp_path, SandboxSpec(filesystem=Filesystem(read=[str(tmp_path / "link")])))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    rooted = Rooted(Uids(1, NUMBERS), None)
    ours = os.geteuid() or 1000  # whoever runs the tests has made these
    for uid, powers, refused in ((0, None, True), (TOOLHOST_UID, rooted, True), (ours, None, False)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        with pytest.raises(GoondanError, match="leads through the link") if refused else nullcontext():
            look_up(granted, None, spec(), HOST, powers or Ordinary())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of somebody else")
@pytest.mark.parametrize(("owner", "mode"), [("link", 0o755), ("folder", 0o755), ("nobody", 0o775), ("nobody", 0o757)])
def test_a_link_that_another_user_could_have_made_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, mode: int
) -> None:
    """A stranger's bundle in the stranger's folder: the jails of whoever runs it would show that person's keys."""
    (tmp_path / "keys").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "keys")
    granted = make(tmp_path, SandboxSpec(filesystem=Filesystem(read=[str(folder / "link")])))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    powers = Ordinary()
    assert len(look_up(granted, None, spec(), HOST, powers).read) == 1
    if owner != "nobody":
        os.lchown({"link": folder / "link", "folder": folder}[owner], 4242, 4242)
    folder.chmod(mode)
    with pytest.raises(GoondanError, match="another user could have put there"):
        look_up(granted, None, spec(), HOST, powers)


def test_links_where_no_jail_can_write_are_followed(tmp_path: Path) -> None:
    links = [path for path in ("/bin", "/lib", "/sbin") if os.path.islink(path)]
    if not links:
        pytest.skip("this system has no merged /usr")
    (place,) = look_up(
        make(tmp_path, SandboxSpec(filesystem=Filesystem(read=[links[0]]))), None, spec(), HOST, POWERS
    ).read
    assert (place.path, place.shown) == (os.path.realpath(links[0]), links[0])


def test_an_environment_of_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    with refuses("E_SANDBOX_DENIED"):
        look_up(make(tmp_path, SandboxSpec(python=PythonSpec(venv=str(tmp_path / "env")))), None, spec(), HOST, POWERS)


def test_dotfiles_and_documents_are_found_breadth_first(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("KEY=1")
    (tmp_path / ".git" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / ".cache").mkdir(parents=True)
    (tmp_path / "lib" / "doc.yaml").write_text("")
    (tmp_path / "lib" / "code.py").write_text("")
    (tmp_path / ".link").symlink_to("/etc/passwd")
    found = dotfiles(str(tmp_path), [str(tmp_path / "lib" / "doc.yaml")])
    assert [(os.path.relpath(p.path, tmp_path), p.kind) for p in found] == [
        (".env", "file"), (".git", "dir"), ("lib/.cache", "dir"), ("lib/doc.yaml", "file"),
    ]  # fmt: skip


def test_a_bundles_root_shows_the_entry_alone(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text("")
    (tmp_path / "h.py").write_text("")
    for root in (str(tmp_path), str(tmp_path / "h.py")):
        tool = ToolSpec(name="t", entry=str(tmp_path / "h.py"), root=root, exports=[])
        request = look_up(tool, None, spec(), HOST, POWERS)
        assert request.entry_only
        assert request.masked == []


def test_hidden_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    usual = f"/tmp/goondan-{os.geteuid()}"
    endpoint = "ipc:///run/user/0/goondan/abc/tools.sock"
    assert hidden_folders(spec("/h/x/workspaces/abc"), endpoint, "/h", POWERS.operator) == [
        "/h/x", "/h/.goondan", "/h/.config/goondan/keys", "/run/user/0/goondan", usual,
    ]  # fmt: skip
    keys = msgspec.structs.replace(spec("/elsewhere"), hidden=["/config/keys"])
    assert hidden_folders(keys, "tcp://127.0.0.1:5", "", POWERS.operator) == ["/elsewhere", "/config/keys", usual]
    assert hidden_folders(spec("/elsewhere"), "ipc:///x/tools.sock", "/", POWERS.operator) == [
        "/elsewhere",
        "/x",
        usual,
    ]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/r/")
    assert hidden_folders(spec("/elsewhere"), "tcp://127.0.0.1:5", "", POWERS.operator) == [
        "/elsewhere",
        "/r/goondan",
        usual,
    ]


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("later")
    facts = host_facts("/b", [str(tmp_path), "/nonexistent", str(tmp_path / "link")], POWERS)
    assert os.path.isfile(facts.python)
    assert os.path.isfile(f"{facts.inside}/boot.py")
    assert (facts.hidden, facts.absent) == ([str(tmp_path)], ["/nonexistent", str(tmp_path / "later")])
    (tmp_path / "later").mkdir()
    assert as_it_is_now(facts).hidden == [str(tmp_path), str(tmp_path / "later")]
    assert any(path.endswith("/toolhost") for path in facts.code)


GOOD = {
    "uid": [1000] * 3, "capabilities": [0] * 5, "noNewPrivs": 1, "pids": [1, 2], "interfaces": ["lo"],
    "environment": ["HOME", "LANG", "PATH", "PWD", "TMPDIR"], "descriptors": [0, 1, 2, 3],
    "namespaces": dict.fromkeys(("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"), "other:[1]"), "writable": [],
    "looksOut": False, "signalsOut": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"uid": [0, 0, 0]}, "user ids"),
        ({"capabilities": [0, 0, 4, 0, 0]}, "capabilities"),
        ({"noNewPrivs": 0}, "privileges"),
        ({"pids": [1, 2, 77]}, "other processes"),
        ({"interfaces": ["lo", "eth0"]}, "eth0"),
        ({"environment": ["HOME", "SECRET"]}, "environment"),
        ({"descriptors": [0, 1, 2, 3, 9]}, "descriptors"),
        ({"writable": ["/usr"]}, "/usr"),
        ({"namespaces": {"net": os.readlink("/proc/self/ns/net")}}, "share"),
        ({"namespaces": {}}, "does not know"),
        ({"looksOut": True}, "look into"),
        ({"signalsOut": True}, "signal"),
    ],
)
def test_the_probe_is_judged(change: dict[str, object], problem: str | None) -> None:
    problems = judge({**GOOD, **change})
    assert (problems == []) if problem is None else (problem in " ".join(problems))


FIRM = {"Seccomp": "2", "NoNewPrivs": "1", "Uid": "7\t7\t7\t7", **dict.fromkeys(CAPABILITIES, "0" * 16)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"Seccomp": "0"}, "Seccomp"),
        ({"NoNewPrivs": "0"}, "NoNewPrivs"),
        ({"CapBnd": "0000000000000001"}, "CapBnd"),
        ({"Uid": "0 0 0 0"}, "user ids 0 0 0 0"),
        ({"Uid": "7 7 7 0"}, "user ids"),
    ],
)
def test_every_process_of_the_probe_is_judged_from_outside(change: dict[str, str], problem: str | None) -> None:
    for at in (1, 2):
        problems = judge_processes({1: FIRM, 2: FIRM, at: {**FIRM, **change}}, 7)
        assert (problems == []) if problem is None else (problem in problems[0])
    assert "sees 1 processes" in judge_processes({1: FIRM}, 7)[0]
    kept = dict.fromkeys(CAPABILITIES, "0000000000200100")
    jail = {1: {**FIRM, "CapBnd": "0000000000200100"}, 2: {**FIRM, **kept}, 3: FIRM, 4: FIRM}
    assert judge_processes(jail, 7, forked=True) == []
    for at, wrong in ((1, kept), (2, {"CapEff": "00000000a82425fb"}), (3, kept), (4, {"CapBnd": "0000000000200100"})):
        assert judge_processes({**jail, at: {**jail[at], **wrong}}, 7, forked=True), at
        assert judge_processes({**jail, at: {**jail[at], **change}}, 7, forked=True) or problem is None
    assert judge_processes({1: FIRM, 2: {}}, 7)  # gone while it was looked at


def test_a_folder_beneath_a_base_is_found_without_links(tmp_path: Path) -> None:
    """Links on the way to the base are followed, none after it; nothing is made beneath it."""
    (tmp_path / "w" / "a" / "b").mkdir(parents=True)
    (tmp_path / "w" / "out").symlink_to("/usr")
    (tmp_path / "w" / "in").symlink_to("a")
    (tmp_path / "named").symlink_to("w")
    tool, base = make(tmp_path), str(tmp_path / "named")
    for below in ("", "/a/b", "/a/../a/b/"):
        request = look_up(tool, base + below, spec(), HOST, POWERS, base=base)
        assert request.workdir_real == str(tmp_path / "w") + os.path.normpath(below or "/").rstrip("/")
        assert request.workdir == os.path.normpath(base + below), "it is shown by the name that was given"
    for below, why in (("/out", "a link"), ("/in/b", "a link"), ("/missing", "there is no"), ("/out/x", "a link")):
        with pytest.raises(GoondanError, match=why) as caught:
            look_up(tool, base + below, spec(), HOST, POWERS, base=base)
        assert caught.value.code == "E_SANDBOX_DENIED"
    assert sorted(os.listdir(tmp_path / "w")) == ["a", "in", "out"]


def test_in_a_folder_that_jails_can_exchange_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "w" / "sub").mkdir(parents=True)
    protected, base = [str(tmp_path / "w" / "sub" / "doc.yaml")], str(tmp_path / "w")
    tool = make(tmp_path)
    with pytest.raises(GoondanError, match="other jails can exchange it"):
        look_up(tool, f"{base}/sub", spec(protected=protected), HOST, POWERS, base=base)
    assert os.listdir(tmp_path / "w" / "sub") == []
    assert look_up(tool, base, spec(protected=protected), HOST, POWERS, base=base).made, (
        "the base is nobody's to change"
    )


def test_a_folder_in_an_instances_workspace_is_its_users(tmp_path: Path) -> None:
    own = tmp_path / "state" / "instances" / "a" / "k" / "workspace"
    (own / "sub").mkdir(parents=True)
    request = look_up(make(tmp_path), f"{own}/sub", spec(tmp_path / "state"), HOST, POWERS, base=str(own))
    assert (request.workspace, request.workdir_real) == (str(own), f"{own}/sub")
