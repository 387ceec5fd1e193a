"""Attempts to see what no jail may see: grants, workdirs and tool folders that lead to a state root or to sockets.

Each attempt is a tool with a sandbox of its own, or a workdir. Whatever it gets, the tool looks in its jail for files
that only hidden folders have. An attempt ends `refused` (no jail was made), `covered` (a jail in which none of them is)
or `seen`, with what was seen. A new find joins `attempts`.

    python -m tests.containment.uncovering FOLDER full|reduced [mounts]

makes all of them in FOLDER, which is empty, as whoever runs it, and prints one JSON document. With `mounts` it does so
in a mount namespace of its own, in which the folders stand at other paths as well; that takes root.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, Self

from msgspec.structs import replace

from goondan.schemas.bundle.launch import Filesystem, PythonSpec, SandboxSpec, ToolSpec
from goondan.toolhost.lookup.hiding import with_hidden
from goondan.toolhost.policy.subject import HostFacts
from tests.toolhost_fixture import Bench, bench, make_tool

#: Files that only a hidden folder has.
SECRETS = ("conversation.db", "policy.yaml", "client.token", "tools.sock")
LOOK = f"""
import os
SECRETS = {SECRETS!r}
def look(ctx, input):
    seen = []
    for top in input["tops"]:
        for folder, folders, files in os.walk(top):
            seen += [os.path.join(folder, name) for name in files if name in SECRETS]
    return sorted(set(seen))
def wait(ctx, input):
    import time
    time.sleep(20)
handlers = {{"look": look, "wait": wait}}
"""
#: Starts of jails in a folder that is exchanged all the time.
EXCHANGES = 4
_NEWNS, _BIND, _PRIVATE, _REC = 0x20000, 0x1000, 0x40000, 0x4000


class Scene:
    """Folders as a kernel has them, below an empty one; `state` and `sockets` are hidden."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.home = place / "home"
        self.state = self.home / "state"
        self.instance = self.state / "workspaces" / "d" / "instances" / "a" / "k"
        self.own = self.instance / "workspace"
        self.sockets = place / "run" / "goondan"
        self.package = self.state / "packages" / "@acme" / "tools"
        self.private = place / "private"  # the operator's, not hidden, and given to no jail
        for folder in (self.own, self.sockets / "d", self.package, self.home / "workdir", place / "mnt"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.instance / "conversation.db").write_text("host secret")
        (self.state / "policy.yaml").write_text("host secret")
        for name in ("client.token", "tools.sock"):
            (self.sockets / "d" / name).write_text("host secret")
        site = self.state / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        site.mkdir(parents=True, exist_ok=True)
        (site / "policy.yaml").write_text("host secret")
        # The state root of another kernel, which this one knows nothing of; in a grant of `/` there is no /tmp.
        self.other = Path(tempfile.mkdtemp(prefix="gdn-other-", dir="/tmp"))
        self.others = self.other / "workspaces" / "0123456789abcdef"
        for folder in (self.others / "kernel", self.others / "instances" / "a" / "k" / "workspace"):
            folder.mkdir(parents=True)
        for file in (self.other / "policy.yaml", self.others / "instances" / "a" / "k" / "conversation.db"):
            file.write_text("host secret")
        # A link where no jail could have put it: beside /tmp's other files.
        self.link = Path(tempfile.mkdtemp(prefix="gdn-link-", dir="/tmp")) / "x"  # a jail has its own
        for folder in (self.other, self.link.parent):
            atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def hide(self, facts: HostFacts) -> HostFacts:
        """The facts of a host that hides them."""
        return with_hidden(facts, [str(self.state), str(self.sockets)])


def reading(*paths: object, write: bool = False) -> SandboxSpec:
    """A sandbox with these grants."""
    named = [str(path) for path in paths]
    return SandboxSpec(filesystem=Filesystem(write=named) if write else Filesystem(read=named))


def attempts(scene: Scene, links: dict[str, str], process: int) -> dict[str, SandboxSpec]:
    """Sandboxes by the attempt's name. `links` are links to state, home and sockets that stand in /tmp."""
    state, home, sockets, place = scene.state, scene.home, scene.sockets, scene.place
    inside = {
        "the state root": state,
        "a workspace's state": state / "workspaces" / "d",
        "an instance's folder": scene.instance,
        "another instance's workspace": scene.own,
        "a file in the state root": state / "policy.yaml",
        "a conversation": scene.instance / "conversation.db",
        "the sockets": sockets,
        "a runtime directory": sockets / "d",
        "a token": sockets / "d" / "client.token",
        "all packages": state / "packages",
        "another kernel's state root": scene.other,
        "another kernel's policy": scene.other / "policy.yaml",
        "another kernel's workspaces": scene.other / "workspaces",
        "a workspace of another kernel": scene.others / "instances" / "a" / "k" / "workspace",
        "another kernel's state root, spelt": f"{scene.other}/./workspaces//..",
    }
    spelt = {
        "a final slash": f"{state}/",
        "a final dot": f"{state}/.",
        "two slashes": f"{home}//state",
        "two slashes in front": f"/{state}",
        "there and back": f"{home}/workdir/../state",
        "back into it": f"{state}/workspaces/..",
        "relative": os.path.relpath(state, place / "tool-t"),
        "the home directory's name": "~/state",
        "a link": links["state"],
        "a link in the path": f"{links['home']}/state",
        "a link and back": f"{links['home']}/workdir/../state/workspaces",
        "a link to sockets": links["sockets"],
        "proc's root": f"/proc/self/root{state}",
        "proc's own directory": f"/proc/{process}/cwd",
        "a link to proc's": links["cwd"],
        "an open file": f"/dev/fd/{os.open(state, os.O_RDONLY)}",
    }
    above = {
        "what lies around them": place,
        "the home directory": home,
        "everything": "/",
        "a link to the home directory": links["home"],
        "the home directory by two names": home,
    }
    made = {f"read {name}": reading(path) for name, path in {**inside, **spelt, **above}.items()}
    made["read the home directory by two names"] = reading(home, links["home"], f"{home}/../home")
    made |= {f"write {name}": reading(path, write=True) for name, path in {**inside, **spelt, **above}.items()}
    for name, path in {"in the state root": state / "venv", "through a link": f"{links['home']}/state/venv"}.items():
        made[f"venv {name}"] = SandboxSpec(python=PythonSpec(venv=str(path)))
    return made


def workdirs(scene: Scene, links: dict[str, str], process: int) -> dict[str, str]:
    """Workdirs by the attempt's name."""
    planted = scene.own / "up"  # a tool can make links where it works
    if not planted.is_symlink():
        planted.symlink_to("..")
    return {
        "the state root": str(scene.state),
        "an instance's folder": str(scene.instance),
        "an instance's folder, from below": f"{scene.own}/..",
        "an instance's folder, by a link of a tool": f"{scene.own}/up",
        "all instances": str(scene.instance.parent),
        "a folder of ours that is new": str(scene.state / "workspaces" / "d" / "logs"),
        "beside the workspace": f"{scene.own}-2",
        "the sockets": str(scene.sockets),
        "a runtime directory": str(scene.sockets / "d"),
        "two slashes in front": f"/{scene.state}",
        "a link": links["state"],
        "proc's own directory": f"/proc/{process}/cwd",
        "what lies around them": str(scene.place),
        "the home directory": str(scene.home),
        "a link to the home directory": links["home"],
        "another kernel's state root": str(scene.other),
        "a workspace of another kernel": str(scene.others / "instances" / "a" / "k" / "workspace"),
    }


def beneath(scene: Scene) -> dict[str, Path]:
    """Workdirs of spawned agents below the spawner's own, by the attempt's name: its jails have put links there."""
    own = scene.own
    (scene.private / "inner").mkdir(parents=True)
    (scene.private / "inner" / "client.token").write_text("host secret")
    links: dict[str, Path | str] = {
        "a link": scene.private / "inner",
        "a link in the path": scene.private,
        "a relative link": "../../../../../../../../private/inner",
        "a link to the folder above": "..",
        "a link to an instance's folder": scene.instance,
        "a link to a link": own / "link-0",
        "a link to nothing, which would be made": scene.private / "new",
        "a link to proc's": "/proc/self/root",
    }
    tried = {}
    for number, (name, target) in enumerate(links.items()):
        (own / f"link-{number}").symlink_to(target)
        below = {"a link in the path": "inner", "a link to proc's": str(scene.private)[1:]}.get(name, "")
        tried[name] = own / f"link-{number}" / below
    (own / "file").write_text("no folder")
    return {**tried, "a file": own / "file", "a folder that is not there": own / "missing"}


class Exchanged:
    """A folder below a workdir that is a link to somewhere else every other moment, for as long as this is entered."""

    def __init__(self, folder: Path, elsewhere: Path) -> None:
        self.path, self._other = folder / "changing", folder / "changing-too"
        self.path.mkdir()
        self._other.symlink_to(elsewhere)
        self._ended = Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        libc = ctypes.CDLL(None)
        one, other = os.fsencode(self.path), os.fsencode(self._other)
        while not self._ended.wait(0.0002):
            libc.renameat2(-100, one, -100, other, 2)  # RENAME_EXCHANGE

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


async def judge(made: Bench, call: str, tops: list[str], **options: Any) -> list[Any]:
    """[how it ended, details]."""
    result = await made.call(call, {"tops": tops}, **options)
    if result["status"] == "ok":
        return ["seen" if result["output"] else "covered", result["output"]]
    error = result["error"]
    return ["refused" if error["code"] in ("E_SANDBOX_DENIED", "E_CONFIG_DANGEROUS") else "failed", error]


async def every_attempt(
    scene: Scene, facts: Callable[[HostFacts], HostFacts], *, reduced: bool = False, more: dict[str, str] | None = None
) -> dict[str, list[Any]]:
    """{attempt: [how it ended, details]}. `more` are further places of hidden folders."""
    folder = scene.link.parent
    found: dict[str, list[Any]] = {}
    process = subprocess.Popen(["/bin/sleep", "1000"], cwd=scene.state)
    targets: dict[str, Path | str] = {
        "state": scene.state,
        "home": scene.home,
        "sockets": scene.sockets,
        "cwd": f"/proc/{process.pid}/cwd",
    }
    # /tmp itself is closed to jails, a folder in it is not: only there a link is believed.
    links = {name: f"{folder}-{name}" for name in targets}
    tier: Literal["full", "reduced"] = "reduced" if reduced else "full"
    tools: list[ToolSpec] = []
    try:
        for name, path in links.items():
            os.symlink(targets[name], path)
        tried = attempts(scene, links, process.pid)
        for name, path in (more or {}).items():
            tried[f"read {name}"] = reading(path)
            tried[f"write {name}"] = reading(path, write=True)
        for number, sandbox in enumerate(tried.values()):
            sandbox = replace(sandbox, min_tier=tier)
            tools.append(make_tool(scene.place, LOOK, "look", name=f"t{number}", sandbox=sandbox))
        plain = SandboxSpec(min_tier=tier)
        tools += [make_tool(scene.place, LOOK, "look", name="plain", sandbox=plain), *own_tools(scene, tier)]
        tops = [str(scene.place), str(scene.other), *links.values(), "/run", "/proc/self/cwd/"]
        state = scene.state / "workspaces" / "d"
        async with bench(*tools, state_dir=state, facts=lambda it: scene.hide(facts(it)), max_jails=4) as made:
            for number, name in enumerate(tried):
                found[name] = await judge(made, f"t{number}__look", tops)
            for name, path in {**workdirs(scene, links, process.pid), **(more or {})}.items():
                found[f"workdir {name}"] = await judge(made, "plain__look", tops, workdir=path)
            for name, below in beneath(scene).items():
                look: dict[str, Any] = {"workdir": below, "workdir_base": scene.own}
                found[f"beneath {name}"] = await judge(made, "plain__look", tops, **look)
            assert not (scene.private / "new").exists(), "nothing is made through a link"
            with Exchanged(scene.own, scene.private / "inner") as changing:
                for number in range(EXCHANGES):
                    look = {"workdir": changing.path, "workdir_base": scene.own, "instance_key": f"x{number}"}
                    ended = await judge(made, "plain__look", tops, **look)
                    if ended[0] == "failed" and ended[1]["code"] == "E_SANDBOX_UNAVAILABLE":
                        ended[0] = "refused"  # bubblewrap found another folder than the one of its descriptor
                    found[f"beneath what changes all around it {number}"] = ended
            (scene.own / "sub").mkdir()
            found["fine: a folder below its own workspace"] = await judge(
                made, "plain__look", tops, workdir=scene.own / "sub", workdir_base=scene.own
            )
            found["fine: its own workspace"] = await judge(made, "plain__look", tops, workdir=scene.own)
            found["fine: a package and its data"] = await judge(made, "packed__look", tops, workdir=scene.own)
            found["tool in the state"] = await judge(made, "stray__look", tops)
            found["fine: a workdir that they do not lie in"] = await judge(
                made, "plain__look", tops, workdir=scene.home / "workdir"
            )
    finally:
        process.kill()
        process.wait()
        for path in links.values():
            os.unlink(path)
        folder.rmdir()
        shutil.rmtree(scene.other)
    return found


def own_tools(scene: Scene, tier: Literal["full", "reduced"]) -> list[ToolSpec]:
    """A tool of a package that reads what belongs to the package, and one that lies where only the kernel writes."""
    (scene.package / "data").mkdir(exist_ok=True)
    packed = make_tool(scene.package, LOOK, "look", name="packed", sandbox=replace(reading("../data"), min_tier=tier))
    stray = make_tool(scene.instance, LOOK, "look", name="stray", sandbox=SandboxSpec(min_tier=tier))
    return [packed, stray]


def in_other_places(scene: Scene) -> dict[str, str]:
    """In a mount namespace of its own: bind mounts of the hidden folders, of what they lie in, and of parts of them."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "no mount namespace")

    check(libc.unshare(_NEWNS))
    check(libc.mount(None, b"/", None, _PRIVATE | _REC, None))
    places = {
        "a mount of the state root": scene.state,
        "a mount of a part of it": scene.state / "workspaces",
        "a mount of an instance's folder": scene.instance,
        "a mount of the home directory": scene.home,
        "a mount of the sockets": scene.sockets,
        "a mount of a runtime directory": scene.sockets / "d",
    }
    made: dict[str, str] = {}
    for name, target in places.items():
        at = scene.place / "mnt" / f"at {len(made)}"  # the kernel writes the blank as \\040
        at.mkdir()
        check(libc.mount(os.fsencode(target), os.fsencode(at), None, _BIND, None))
        made[name] = str(at)
    made["what lies in a mount of the home directory"] = f"{made['a mount of the home directory']}/state"
    made["what the mounts lie in"] = str(scene.place / "mnt")
    return made


def main(place: Path, how: str, mounts: bool) -> dict[str, list[Any]]:
    """Make the attempts in an empty folder."""
    scene = Scene(place)
    os.environ["HOME"] = str(scene.home)
    more = in_other_places(scene) if mounts else {}
    if how == "full":
        return asyncio.run(every_attempt(scene, lambda facts: facts, more=more))
    tempfile.tempdir = str(place)
    return asyncio.run(
        every_attempt(scene, lambda facts: replace(facts, tier="reduced", bwrap="", bwrap_root=None), reduced=True)
    )


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], "mounts" in sys.argv)))
