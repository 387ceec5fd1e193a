"""Root on a host without user namespaces: full jails, made with root's powers and without a trace of them inside."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import goondan.toolhost.jails.launch
from goondan.schemas.bundle.launch import ToolHostSpec
from goondan.toolhost.launcher import staging
from goondan.toolhost.lookup.jail_request import look_up
from goondan.toolhost.lookup.this_host import host_facts
from goondan.toolhost.policy.plan import plan
from tests.containment.test_attempts import judge
from tests.containment.tried import every_attempt
from tests.process.test_egress import pages
from tests.toolhost_fixture import POWERS, bwrap, make_tool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has the reduced tier there")

ATTEMPTS = """
import asyncio, json, os, sys
from pathlib import Path
from tests.containment.tried import every_attempt
from tests.toolhost_fixture import POWERS
from goondan.toolhost.lookup.this_host import gather
from goondan.toolhost.survey import survey
os.environ["HOST_SECRET"] = "x"
async def main():
    found = await survey(POWERS, gather(POWERS))
    assert found.facts is not None and not found.facts.user_namespaces, found
    tried = await every_attempt(Path(sys.argv[1]), only="instance", ours=True, facts=lambda facts: found.facts)
    print(json.dumps({"walls": found.walls, "notes": found.notes, "tried": tried}))
asyncio.run(main())
"""


def command(error: str, *arguments: str | Path) -> list[str]:
    """An interpreter whose user namespaces are refused with that error."""
    refusing = str(Path(__file__).parent / "no_user_namespaces.py")
    return [sys.executable, refusing, error, sys.executable, *map(str, arguments)]


ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def without(*arguments: str | Path, error: str = "EPERM") -> Any:
    """What a program says at the end on such a host."""
    done = subprocess.run(
        command(error, *arguments), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_no_attempt_gets_out(short_tmp: Path) -> None:
    """Of the jail that such a host gives, in a workdir that belongs to the jail's user."""
    found = without("-c", ATTEMPTS, short_tmp)
    assert found["walls"] == ["namespaces", "seccomp", "landlock", "uid", "limits"]
    assert "bubblewrap runs as root" in found["notes"][0] and "Owners of files cannot be shown" in found["notes"][1]
    judge(found["tried"], "instance")


async def test_no_attempt_gets_out_where_only_bubblewrap_is_refused_them(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with AppArmor, which lets root have them: then the owners of files are shown as the jail's user."""
    monkeypatch.setenv("HOST_SECRET", "x")
    judge(
        await every_attempt(short_tmp, only="call", facts=lambda facts: replace(facts, user_namespaces=False)), "call"
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What rooted.py has found out."""
    with pages() as (port, _):
        return without("-m", "tests.containment.rooted", tmp_path_factory.mktemp("rooted"), str(port))


@pytest.mark.parametrize("name", ["plain", "private", "once"])
def test_a_jail_is_one_ordinary_user_there(played: Any, name: str) -> None:
    """`private` is the same tool with files that only root may read; `once` has a jail for each call."""
    assert played[name]["status"] == "ok", played[name]
    seen, uid = played[name]["output"], played["uid"]
    assert seen["ids"] == [[uid] * 3, [uid] * 3, []]
    assert seen["id"] == f"uid={uid}(tool) gid={uid}(tool) groups={uid}(tool)"
    assert (seen["whoami"], seen["account"][0], seen["account"][5]) == ("tool", "tool", "/run/goondan/home")
    assert seen["home"] == ["/run/goondan/home", uid, "0o40700"]
    assert seen["cwd"][1] == uid
    assert seen["git"] == "" or seen["git"].startswith("## "), "no dubious ownership"
    assert seen["beside"] == [7, False, "EACCES"]  # what begins with a dot does not show
    assert seen["self"] == [uid, True]
    assert (seen["first"], seen["root"]) == ("closed", ["goondan"])
    none = "0" * 16
    firm = {"Uid": "\t".join([str(uid)] * 4), "Gid": "\t".join([str(uid)] * 4), "Groups": "", "Seccomp": "2",
            "NoNewPrivs": "1", **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), none)}  # fmt: skip
    assert name == "once" or played[f"{name} processes"] == [firm, firm]


def test_its_first_process_reaps_and_cannot_be_reached(played: Any) -> None:
    assert played["leave"]["output"] == 3  # itself, the first one, and the daemon: who is dead is reaped
    assert played["count"]["output"] == [1, 2]
    assert played["first"]["output"] == ["refused"] * 9


def test_its_end_is_told_like_any_other(played: Any) -> None:
    ends = [result["error"]["message"] for result in played["signals"]]
    assert ends == [f"the tool's process ended by {name} during the call" for name in ("SIGTERM", "SIGSEGV", "SIGKILL")]
    assert played["slow"]["error"]["code"] == "E_TOOL_TIMEOUT"
    assert played["left"] == []


def test_a_network_grant_is_a_grant_there(played: Any) -> None:
    assert played["fetch"]["status"] == "ok" and "curl:" not in played["fetch"]["output"], played["fetch"]
    assert "Failed to connect" in played["refused"]["output"]
    assert len(played["reached"]["reached"]) == len(played["reached"]["denied"]) == 1


def test_limits_are_kept_there(played: Any) -> None:
    assert len(played["bombs"]) == 4
    for name, (limit, error, after) in played["bombs"].items():
        assert error["code"] == "E_TOOL_LIMIT", (name, error)
        assert f"the limit {limit} was reached" in error["message"], (name, error)
        assert after == "here", name
    assert (played["receipt"]["calls"], played["receipt"]["limits"]["processes"]) == ("alone", "rlimit")


def test_what_is_somebody_elses_is_refused_with_what_would_help(played: Any) -> None:
    read, written, closed, foreign, workdir, given = played["grants"]
    assert (read["output"], written["output"]) == ("open grant", played["uid"])
    assert "/grants/closed cannot be read by everybody" in closed["error"]["message"]
    assert closed["error"]["suggestion"].startswith("Let others read it: `chmod -R o+rX ")
    assert "/grants belongs to user 0" in foreign["error"]["message"]
    assert "(clone: Operation not permitted)" in foreign["error"]["message"]
    assert f"`chown -R {played['uid']}:{played['uid']} " in foreign["error"]["suggestion"]
    assert workdir["error"]["code"] == "E_SANDBOX_UNAVAILABLE"
    assert "/grants belongs to user 0" in workdir["error"]["message"]
    assert given == {"status": "ok", "output": played["given"]}, "what the operator has given is taken"


async def test_no_link_leads_bubblewrap_out_of_its_root(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is root, and another jail in the same folder exchanges `.git` for a link after everything was looked at."""
    work, keys = short_tmp / "work", short_tmp / "keys"
    for folder in (work / ".git", keys):
        folder.mkdir(parents=True, mode=0o700)
    request = goondan.toolhost.jails.launch._request

    def exchanged(*arguments: Any) -> Any:
        (work / ".git").rmdir()
        (work / ".git").symlink_to(keys)
        return request(*arguments)

    monkeypatch.setattr(goondan.toolhost.jails.launch, "_request", exchanged)
    facts = replace(host_facts(bwrap(), [], POWERS), user_namespaces=False, groups=None)
    tool = make_tool(short_tmp, "handlers = {}", "f")
    spec = ToolHostSpec(tools=[], state_dir="/nonexistent", revision="1")
    made = plan(look_up(tool, str(work), spec, facts, POWERS), facts)
    launched = await goondan.toolhost.jails.launch.launch(lambda: made, POWERS)
    assert os.waitpid(launched.pid, 0)[1] != 0
    said = os.read(launched.output, 4096).decode()
    # Whose folder it is would not matter to root, and what is not there cannot be shown.
    assert said.startswith("bwrap: Can't find source path /run/0/.git: No such file"), said
    assert list(keys.iterdir()) == []
    launched.channel.close()
    for fd in (launched.pidfd, launched.status, launched.output):
        os.close(fd)
    launched.keeper.close()
    POWERS.uids.give_back(launched.uid or 0)


KILLED = """
STAYS = '''
import posix, time
posix._exit = lambda status: time.sleep(99)
def stay(ctx, input):
    ctx.log.info("on")
    time.sleep(99)
handlers = {"stay": stay}
'''
import asyncio, os, sys, time
from pathlib import Path
from tests.toolhost_fixture import POWERS, bench, make_tool
from msgspec.structs import replace
from goondan.toolhost.lookup.this_host import find_bwrap, host_facts
async def main():
    facts = replace(host_facts(find_bwrap()[0], [], POWERS), user_namespaces=False)
    async with bench(make_tool(Path(sys.argv[1]), STAYS, "stay"), facts=lambda _: facts) as made:
        made.start("t__stay")
        while not made.logs:
            await asyncio.sleep(0.01)
        (slot,) = made.host.sessions.pool.sessions()
        print(*made.live_of(slot).jail.processes(), flush=True)
        time.sleep(99)
asyncio.run(main())
"""


def test_a_jail_ends_with_a_tool_host_that_is_killed(short_tmp: Path) -> None:
    """Its first process is another user than bubblewrap, whose death would otherwise end it; the worker, which would
    see that nobody is there any more, does not leave.
    """
    argv = command("EPERM", "-c", KILLED, short_tmp)
    with subprocess.Popen(argv, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2
        fds = [os.pidfd_open(pid) for pid in pids]
        host.kill()
        for fd in fds:
            assert select.select([fd], [], [], 20)[0], "it still runs"
            os.close(fd)


@pytest.mark.parametrize("error", ["EPERM", "ENOSPC"])
def test_the_survey_says_what_it_costs(error: str) -> None:
    found = without("-m", "goondan.toolhost.survey", error=error)
    assert (found["tier"], found["findings"]) == ("full", [])
    how, owners, calls = found["notes"]
    assert "bubblewrap runs as root" in how and "--workdir" in owners
    assert "a jail without a user namespace can make no others" in calls


CONTAINER = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "net_raw",
    "sys_chroot", "mknod", "audit_write", "setfcap", "sys_admin",
)  # fmt: skip


def test_a_kernel_runs_there(short_tmp: Path) -> None:
    """The whole of it: a tool host that is not root any more, and a launcher that knows what it may be asked for.

    Root has the capabilities that it has in a usual container, and CAP_SYS_ADMIN.
    """
    limited = ["setpriv", f"--bounding-set=-all,{','.join(f'+{name}' for name in CONTAINER)}"]
    argv = command("EPERM", "-m", "goondan.kernel.cli", "call", "--bundle", ROOT / "examples" / "quickstart", "--json")
    call = [*limited, *argv, "bash__exec", json.dumps({"command": "id -un; touch made; stat -c %U . made"})]
    env = ENVIRONMENT | {
        "HOME": str(short_tmp),
        "GOONDAN_STATE_ROOT": str(short_tmp / "s"),
        "XDG_RUNTIME_DIR": str(short_tmp),
        "GOONDAN_TRUST": "1",
    }
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["output"]["stdout"].split() == ["tool"] * 3
    assert "uid" in result["receipt"]["jail"]["walls"]


def test_without_power_over_networks_a_jail_has_one_of_which_nothing_is_up() -> None:
    argv = ["setpriv", "--bounding-set=-net_admin", *command("EPERM", "-m", "goondan.toolhost.survey")]
    done = subprocess.run(argv, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tier"] == "full", found
    assert "root lacks CAP_NET_ADMIN" in found["notes"][1]


HIDING = """
mount --bind -o ro /proc/sys /proc/sys && mount -t tmpfs -o ro none /proc/irq && exec "$0" -m goondan.toolhost.survey
"""


def test_a_container_that_hides_parts_of_proc_has_full_jails_under_root() -> None:
    """The kernel refuses a fresh /proc to a user namespace there, and to no one else."""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", HIDING, sys.executable], cwd=ROOT, env=ENVIRONMENT, capture_output=True,
        text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tier"] == "full", found
    assert "mount proc" in found["notes"][0]
    assert not any("Owners of files" in note for note in found["notes"]), "they can be shown: root has user namespaces"


@pytest.fixture
def tree(short_tmp: Path) -> Path:
    """A tool's folder, all of which everybody may read."""
    top = short_tmp / "tree"
    (top / "in" / "deep").mkdir(parents=True)
    (top / ".hidden").mkdir(mode=0o700)
    for name, mode in (
        ("one.py", 0o644),
        ("in/run", 0o755),
        ("in/deep/two", 0o644),
        (".env", 0o600),
        (".hidden/x", 0o600),
    ):
        (top / name).write_text(name)
        (top / name).chmod(mode)
    (top / "in" / "link").symlink_to("/etc/shadow")
    for folder in (top, top / "in", top / "in" / "deep"):
        folder.chmod(0o755)
    return top


def closed(path: Path, *, deep: bool = True, uid: int = 4242) -> str | None:
    fd = os.open(path, os.O_PATH)
    try:
        return staging.first_unreadable(fd, uid, deep=deep)
    finally:
        os.close(fd)


def test_what_others_cannot_read_is_found(tree: Path) -> None:
    assert closed(tree) is None
    (tree / "in" / "deep" / "two").chmod(0o640)
    assert closed(tree) == "in/deep/two"
    assert closed(tree, deep=False) is None
    assert closed(tree, uid=0) is None, "its owner may"
    (tree / "in" / "deep").chmod(0o754)  # its names could be read, and nothing in it be opened
    assert closed(tree) == "in/deep"
    tree.chmod(0o700)
    assert closed(tree) == closed(tree, deep=False) == "."
    (tree / "one.py").chmod(0o600)
    assert closed(tree / "one.py") == "."


def test_a_copy_can_be_read_by_everybody(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tree, *(path for path in tree.rglob("*") if not path.is_symlink())):
        path.chmod(0o700 if path.is_dir() or path.name == "run" else 0o600)
    os.utime(tree / "one.py", ns=(5, 7_000_000_001))
    fd = os.open(tree, os.O_PATH)
    copy = staging.copy_of_place(fd)
    assert isinstance(copy, int)
    at = Path(f"/proc/self/fd/{copy}")
    assert closed(at) is None
    assert (at / "in" / "deep" / "two").read_text() == "in/deep/two"
    assert ((at / "in" / "run").stat().st_mode & 0o777, (at / "one.py").stat().st_mode & 0o777) == (0o755, 0o644)
    assert (at / "one.py").stat().st_mtime_ns == 7_000_000_001  # compiled forms name it
    assert os.readlink(at / "in" / "link") == "/etc/shadow"
    assert ((at / ".env").read_text(), list((at / ".hidden").iterdir())) == ("", [])
    with pytest.raises(OSError, match="Read-only"):
        (at / "new").touch()
    os.close(copy)
    single = os.open(tree / "one.py", os.O_PATH)
    assert staging.copy_of_place(single) == b"one.py"
    monkeypatch.setattr(staging, "MAX_ENTRIES", 3)
    assert staging.copy_of_place(fd) is None
    monkeypatch.setattr(staging, "MAX_ENTRIES", 100)
    monkeypatch.setattr(staging, "MAX_BYTES", 5)
    assert staging.copy_of_place(fd) is None and staging.copy_of_place(single) is None
    os.close(fd)
    os.close(single)
