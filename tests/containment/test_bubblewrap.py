"""What shows in a jail and what can be written there: the workdir, the tool, grants, and what was replaced meanwhile.

What a handler may try beside that (processes, sockets, mounts, privileges) is in attempts.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import goondan.toolhost.jails.launch
from goondan.schemas.bundle.launch import Filesystem, Limits, PythonSpec, SandboxSpec, ToolHostSpec
from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.jails.launch import launch
from goondan.toolhost.lookup.jail_request import look_up
from goondan.toolhost.lookup.this_host import host_facts
from goondan.toolhost.policy.plan import plan
from tests.containment.ordinary_user import ORDINARY_USER, run_as_user
from tests.toolhost_fixture import POWERS, bench, bwrap, make_tool

SOURCE = """
import os, socket

def attempt(action):
    try: return ["done", action()]
    except BaseException as error: return ["refused", type(error).__name__ + ": " + str(error)]

def read(ctx, input): return {path: attempt(lambda: open(path, "rb").read(20).hex()) for path in input["paths"]}
def listing(ctx, input): return {path: attempt(lambda: sorted(os.listdir(path))) for path in input["paths"]}
def modes(ctx, input): return {path: oct(os.stat(path).st_mode & 0o7777) for path in input["paths"]}
def write(ctx, input): return {path: attempt(lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)))[0]
                               for path in input["paths"]}
def change(ctx, input):
    out = {}
    for path in input["paths"]:
        out[path] = [attempt(lambda: open(path, "ab").close())[0] if not os.path.isdir(path) else "dir",
                     attempt(lambda: os.rename(path, path + ".away"))[0],
                     attempt(lambda: os.chmod(path, 0o777))[0],
                     attempt(lambda: os.rmdir(path) if os.path.isdir(path) else os.unlink(path))[0]]
    return out
def who(ctx, input):
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return {"uid": status["Uid"].split(), "gid": status["Gid"].split(),
            "caps": [status[k].strip() for k in status if k.startswith("Cap")],
            "nnp": status["NoNewPrivs"].strip(), "env": dict(os.environ), "host": socket.gethostname(),
            "fds": {n: attempt(lambda: os.readlink("/proc/self/fd/" + n))[1] for n in os.listdir("/proc/self/fd")},
            "groups": os.getgroups()}
def private(ctx, input):
    seen = [os.listdir("/tmp"), os.listdir(os.environ["HOME"]), os.listdir("/dev/shm")]
    for folder in ("/tmp", os.environ["HOME"], "/dev/shm"): open(folder + "/mine", "w").close()
    return seen
def fill(ctx, input):
    written = 0
    try:
        with open(input["file"], "wb") as target:
            while written < input["bytes"]: written += target.write(bytes(1 << 20))
    except OSError as error: return [written, error.errno]
    return [written, 0]
handlers = {name: value for name, value in list(globals().items()) if callable(value) and name != "attempt"}
"""
NAMES = ["read", "listing", "modes", "write", "change", "who", "private", "fill"]


@pytest.fixture
def place(short_tmp: Path) -> Path:
    (short_tmp / "work").mkdir()
    (short_tmp / "secret").write_text("host secret")
    return short_tmp


async def ask(place: Path, export: str, args: Any = None, *, sandbox: SandboxSpec | None = None, **options: Any) -> Any:
    workdir = options.pop("workdir", place / "work")
    async with bench(make_tool(place, SOURCE, *NAMES, sandbox=sandbox), **options) as made:
        result = await made.call(f"t__{export}", args, workdir=workdir)
    assert result["status"] == "ok", result
    return result["output"]


async def test_nothing_but_a_systems_own_folders_shows(place: Path) -> None:
    roots = await ask(place, "listing", {"paths": ["/", "/etc", str(place), "/root", "/run", "/run/goondan"]})
    assert set(roots["/"][1]) <= {
        "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "tmp", "usr",
        Path(__file__).parts[1], "nix", "gnu", "opt", "home",
    }  # fmt: skip
    assert set(roots["/etc"][1]) <= {
        "alternatives", "group", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "passwd", "pki", "ssl",
    }  # fmt: skip
    assert set(roots[str(place)][1]) == {"work", "tool-t"}
    assert set(roots["/run/goondan"][1]) == {"goondan_tool", "home"}


async def test_folders_that_are_made_for_others_to_stand_in_are_open_to_all_users(place: Path) -> None:
    """A program of the jail that is another user of it, or none, must get to what stands there."""
    deep = place / "x" / "y"
    deep.mkdir(parents=True)
    above = ["/run", "/run/goondan", *map(str, [deep.parent, place, *place.parents][:-1])]
    private = {"/run/goondan/home": "0o700", "/tmp": "0o1777", "/dev/shm": "0o1777"}
    found = await ask(place, "modes", {"paths": [*above, *private]}, workdir=deep)
    assert found == dict.fromkeys(above, "0o755") | private


async def test_only_the_workdir_can_be_written_to(place: Path) -> None:
    """Beside it there is only the jail's own memory: nothing of that reaches the host."""
    paths = [str(place / "tool-t" / "new"), str(place / "new"), "/tmp/new", str(place / "work" / "new")]
    assert await ask(place, "write", {"paths": paths}) == dict(zip(paths, ["refused", *["done"] * 3], strict=True))
    assert (place / "work" / "new").stat().st_uid == os.getuid()
    assert sorted(os.listdir(place)) == ["secret", "tool-t", "work"]


async def test_no_environment_no_descriptors_no_privileges(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    leak = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        found = await ask(place, "who")
    finally:
        os.close(leak)
    assert set(found["env"]) - {"PWD"} == {"PATH", "HOME", "TMPDIR", "LANG"}
    assert found["env"]["LANG"] == "C.UTF-8"
    assert "0" not in found["uid"]
    assert "0" not in found["gid"]
    assert set(found["caps"]) == {"0000000000000000"}
    assert found["nnp"] == "1"
    assert found["host"] == "tool"
    targets = {n: t for n, t in found["fds"].items() if t != "/proc/loadavg" and int(n) > 2}
    assert set(targets.values()) <= {t for t in targets.values() if str(t).startswith(("socket:", "[Errno", "FileNot"))}
    assert len(targets) <= 2  # the channel, and the listing itself


async def test_what_the_host_runs_later_is_read_only_in_a_workdir_that_holds_it(place: Path) -> None:
    work = place / "work"
    (work / ".git" / "hooks").mkdir(parents=True)
    (work / ".git" / "config").write_text("[core]\n")
    (work / ".venv" / "lib").mkdir(parents=True)
    (work / "tools" / "x").mkdir(parents=True)
    (work / "tools" / "x" / "handler.py").write_text("handlers = {}\n")
    (work / "goondan.yaml").write_text("kind: Swarm\n")
    (work / "free").mkdir()
    paths = [
        work / ".git", work / ".git" / "config", work / ".git" / "hooks", work / ".venv", work / ".venv" / "lib",
        work / "tools", work / "tools" / "x", work / "tools" / "x" / "handler.py", work / "goondan.yaml",
    ]  # fmt: skip
    protected = [str(work / "goondan.yaml"), str(work / "tools" / "x")]
    found = await ask(place, "change", {"paths": list(map(str, paths))}, protected=protected)
    for path, outcomes in found.items():
        allowed = {"refused", "dir"} if path != str(work / "tools") else {"refused", "dir", "done"}
        assert set(outcomes) <= allowed, path
        assert outcomes[1] == outcomes[3] == "refused", path  # neither renamed nor removed, wherever it lies
    assert await ask(place, "write", {"paths": [str(work / "free" / "f"), str(work / "tools" / "new")]}) == {
        str(work / "free" / "f"): "done", str(work / "tools" / "new"): "done",
    }  # fmt: skip
    assert (work / ".git" / "config").read_text() == "[core]\n"


async def test_state_and_sockets_do_not_show_in_a_workdir_around_them(place: Path) -> None:
    state = place / "work" / "state"
    (state / "workspaces").mkdir(parents=True)
    (state / "client.token").write_text("token")
    paths = [str(state), str(state / "client.token")]
    found = await ask(place, "listing", {"paths": [str(state)]}, hidden=[str(state)])
    assert found == {str(state): ["done", []]}
    assert (await ask(place, "read", {"paths": paths}, hidden=[str(state)]))[paths[1]][0] == "refused"
    assert await ask(place, "write", {"paths": [str(state / "x")]}, hidden=[str(state)]) == {
        str(state / "x"): "refused"
    }
    own = state / "instances" / "a" / "k" / "workspace"
    own.mkdir(parents=True)
    (own / "mine").write_text("m")
    found = await ask(place, "listing", {"paths": [str(own), str(state)]}, hidden=[str(state)], workdir=own)
    assert found == {str(own): ["done", ["mine"]], str(state): ["done", ["instances"]]}


async def test_dotfiles_of_the_tool_are_hidden(place: Path) -> None:
    root = place / "tool-t"
    root.mkdir()
    (root / ".env").write_text("KEY=1")
    (root / ".secrets").mkdir()
    (root / ".secrets" / "key").write_text("k")
    (root / "doc.yaml").write_text("d")
    paths = [str(root / ".env"), str(root / ".secrets" / "key"), str(root / "doc.yaml")]
    found = await ask(place, "read", {"paths": [*paths, str(root / "handler.py")]}, protected=[str(root / "doc.yaml")])
    assert found.pop(str(root / "handler.py"))[0] == "done"
    assert {outcome[0] for outcome in found.values()} == {"refused"}


async def test_a_workdir_behind_a_link_is_followed_once(place: Path) -> None:
    (place / "other").mkdir()
    (place / "work").rmdir()
    (place / "work").symlink_to(place / "other")
    assert await ask(place, "write", {"paths": [str(place / "work" / "x")]}) == {str(place / "work" / "x"): "done"}
    assert (place / "other" / "x").exists()


@pytest.mark.parametrize("replaced", ["a", "a/b"])
async def test_a_workdir_that_is_replaced_while_a_jail_starts_is_refused(place: Path, replaced: str) -> None:
    workdir = place / "a" / "b"
    workdir.mkdir(parents=True)
    (place / "elsewhere" / "b").mkdir(parents=True)
    spec = ToolHostSpec(tools=[], state_dir="/nonexistent", revision="1")
    facts = host_facts(bwrap(), [], POWERS)
    made = plan(look_up(make_tool(place, SOURCE, *NAMES), str(workdir), spec, facts, POWERS), facts)
    (place / replaced).rename(place / "moved")
    (place / replaced).symlink_to(place / "elsewhere")
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GoondanError) as caught:
        await launch(lambda: made, POWERS)
    assert caught.value.info.code == "E_SANDBOX_DENIED"
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("place_", ["work/.git", "work/sub", "work/sub/deep/.git", "work", "given", "shown", "tool-t"])
async def test_a_jail_with_another_place_than_was_looked_at_runs_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, place_: str
) -> None:
    """Another jail in the same folder can exchange one for a link to the operator's keys, and back, just while it is
    being mounted (seen in 4 of 60 tries). Here it was looked at while it was something else.
    """
    work = place / "work"
    for folder in (work / ".git", work / "sub" / "deep" / ".git", place / "given", place / "shown"):
        folder.mkdir(parents=True)
    identity = goondan.toolhost.jails.launch._identity
    monkeypatch.setattr(
        goondan.toolhost.jails.launch,
        "_identity",
        lambda path: identity("/usr" if path == str(place / place_) else path),
    )
    sandbox = SandboxSpec(filesystem=Filesystem(read=[str(place / "shown")], write=[str(place / "given")]))
    async with bench(make_tool(place, "open('ran', 'w')", "f", sandbox=sandbox)) as made:
        result = await made.call("t__f", workdir=work)
    assert result["error"]["code"] == "E_SANDBOX_DENIED", result
    assert f"{place / place_} was replaced while the jail was being made" in result["error"]["message"]
    assert not (work / "ran").exists()


IMPORTS = """
import os, sys
import packaged
def look(ctx, input):
    try: import planted
    except ImportError: planted = None
    flags = [sys.flags.isolated, sys.flags.no_site, sys.flags.dont_write_bytecode]
    return [packaged.NAME, planted is None, flags, [p for p in sys.path if not p.startswith(sys.base_prefix)],
            "site" in sys.modules, os.path.exists("/tmp/ran"), os.environ.get("PYTHONPATH")]
handlers = {"look": look}
"""


async def test_a_tool_imports_from_its_folder_and_the_declared_environment_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No site, so no .pth and no sitecustomize of the environment runs; nothing in the workdir is a module."""
    monkeypatch.setenv("PYTHONPATH", str(place / "work"))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = place / "env" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "packaged.py").write_text("NAME = 'here'\n")
    (site / "run.pth").write_text("import os; open('/tmp/ran', 'w').close()\n")
    (site / "sitecustomize.py").write_text("open('/tmp/ran', 'w').close()\n")
    (place / "work" / "planted.py").write_text("")
    sandbox = SandboxSpec(python=PythonSpec(venv=str(place / "env")))
    async with bench(make_tool(place, IMPORTS, "look", sandbox=sandbox)) as made:
        result = await made.call("t__look", workdir=place / "work")
    assert result.get("output") == [
        "here", True, [1, 1, 1], [str(place / "tool-t"), str(site), "/run/goondan"], False, False, None,
    ], result  # fmt: skip


LEAKS = """
import array, os, socket
def give(ctx, input):
    body = b"\\x83\\xa4type\\xa3log\\xa5level\\xa4info\\xa7message\\xa1x"
    data = len(body).to_bytes(4, "little") + body
    ours = socket.socket(fileno=os.dup(3))
    for _ in range(50):
        fds = [os.open("/dev/null", os.O_RDONLY), *os.pipe()]
        ours.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        for fd in fds: os.close(fd)
    return "given"
handlers = {"give": give}
"""


@pytest.mark.parametrize("isolation", ["instance", "call"])
async def test_descriptors_that_a_jail_sends_are_dropped(place: Path, isolation: Any) -> None:
    tool = make_tool(place, LEAKS, "give", sandbox=SandboxSpec(isolation=isolation, limits=Limits(open_files=250)))
    async with bench(tool) as made:
        await made.call("t__give", workdir=place / "work")
        before = len(os.listdir("/proc/self/fd"))
        assert (await made.call("t__give", workdir=place / "work"))["output"] == "given"
        assert len([line for line in made.logs if line.message == "x"]) == 100  # its frames have all been read
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # a cell that is made ahead


async def test_memory_file_systems_are_private_and_sized(place: Path) -> None:
    sandbox = SandboxSpec(limits=Limits(file_mb=1024))  # the file systems are what is full first
    async with bench(make_tool(place, SOURCE, *NAMES, sandbox=sandbox)) as made:
        for key in ("k1", "k2"):
            first = (await made.call("t__private", workdir=place / "work", instance_key=key))["output"]
            assert first[1:] == [[], []]
            assert "mine" not in first[0]
        for path, limit in (("/dev/shm/f", 64 << 20), ("/run/goondan/home/f", 64 << 20), ("/tmp/f", 256 << 20)):
            written, number = (await made.call("t__fill", {"file": path, "bytes": 1 << 30}, workdir=place / "work"))[
                "output"
            ]
            assert number == 28  # ENOSPC
            assert written <= limit


async def test_grants_are_all_that_is_given(place: Path) -> None:
    for name in ("shown", "given", "neither"):
        (place / name).mkdir()
        (place / name / "f").write_text(name)
    sandbox = SandboxSpec(filesystem=Filesystem(read=[str(place / "shown")], write=[str(place / "given")]))
    paths = [str(place / name / "f") for name in ("shown", "given", "neither")]
    found = await ask(place, "read", {"paths": paths}, sandbox=sandbox)
    assert [found[path][0] for path in paths] == ["done", "done", "refused"]
    targets = [str(place / name / "new") for name in ("shown", "given", "neither")]
    written = await ask(place, "write", {"paths": targets}, sandbox=sandbox)
    assert [written[path] for path in targets] == ["refused", "done", "refused"]


AS_USER = """
import asyncio, os, sys
from pathlib import Path
from tests.toolhost_fixture import POWERS, bench, bwrap, make_tool
from goondan.toolhost.lookup.this_host import host_facts
from goondan.toolhost.survey import probe

async def main():
    place = Path(sys.argv[1])
    found = await probe(host_facts(bwrap(), [], POWERS), POWERS)
    assert found.problem is None, found
    source = "import os\\ndef f(ctx, input): open('made', 'w').close(); return os.getuid()\\nhandlers = {'f': f}"
    async with bench(make_tool(place, source, "f")) as made:
        print(os.getuid(), await made.call("t__f", workdir=place))

asyncio.run(main())
"""


def test_an_ordinary_user_gets_the_same_jail(short_tmp: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("every other test here has just shown it")
    done = run_as_user(AS_USER, short_tmp)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ORDINARY_USER} {{'status': 'ok', 'output': 1000}}\n"
    assert (short_tmp / "made").stat().st_uid == ORDINARY_USER
