"""The tier for hosts that refuse user namespaces, as an ordinary user: what it holds, what it refuses, what is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.toolhost.lookup.this_host import landlock_abi
from goondan.toolhost.policy.plan import MINIMUM_LANDLOCK
from tests.containment.ordinary_user import told_as_user
from tests.containment.tried import HARMLESS

pytestmark = pytest.mark.skipif(landlock_abi() < MINIMUM_LANDLOCK, reason="this kernel has no reduced tier")

PLAYED = """
import asyncio, atexit, json, os, socket, subprocess, sys, tempfile
from pathlib import Path
import msgspec
from goondan.schemas.bundle.launch import ExportSpec, Filesystem, Limits, SandboxSpec
from tests.containment import tried
from tests.toolhost_fixture import bench, make_tool
import goondan.toolhost.lookup.this_host
from goondan.toolhost.survey import report
from goondan.toolhost.survey import survey

place = Path(sys.argv[1])
tempfile.tempdir = str(place)
stub = place / "bwrap"
stub.write_text('''#!/bin/sh
[ "$1" = --version ] && echo 'bubblewrap 0.11.0' && exit
echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1
''')
stub.chmod(0o755)
goondan.toolhost.lookup.this_host._bwrap_candidates = lambda: [str(stub)]
from goondan.toolhost.privileges.powers import Ordinary
powers = Ordinary()
"""
SURVEY = (
    PLAYED
    + """
found = asyncio.run(report(powers, goondan.toolhost.lookup.this_host.gather(powers)))
print(msgspec.json.encode(found).decode())
"""
)
ATTEMPTS = (
    PLAYED
    + """
LEFT = '''
import os, time
def leave(ctx, input):
    if os.fork() == 0:
        os.setpgid(0, 0); time.sleep(60); os._exit(0)
    deep = os.environ["TMPDIR"]
    os.chdir(deep)
    for _ in range(300): os.mkdir("d"); os.chdir("d")
    return [os.environ["HOME"], os.getsid(0)]
def ok(ctx, input):
    open("kept", "w").write("x")
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try: fds[name] = os.readlink("/proc/self/fd/" + name)
        except OSError: pass
    import resource
    return [sorted(os.environ), fds, resource.getrlimit(resource.RLIMIT_NPROC)]
def sleeps(ctx, input): time.sleep(30)
handlers = {"leave": leave, "ok": ok, "sleeps": sleeps}
'''
PROGRAM = f'''#!/bin/sh
cat {place}/secret >/dev/null 2>&1 && read=true || read=false
(: >{place}/made) 2>/dev/null && made=true || made=false
(: >here) && here=true || here=false
echo '{{"output":['$read,$made,$here']}}'
'''

def refusal(result): return [result["error"]["code"], result["error"]["message"]]

async def main():
    facts = (await survey(powers, goondan.toolhost.lookup.this_host.gather(powers))).facts
    repository = place / "repository"; repository.mkdir(); (repository / ".git").mkdir()
    (place / "secret").write_text("host secret")
    plain = place / "plain"; plain.mkdir()
    # Processes count on top of what the user has at the start, and others may start some.
    low = SandboxSpec(min_tier="reduced", limits=Limits(wall_seconds=40, processes=1024))
    victim = subprocess.Popen(["/bin/sleep", "1000"], process_group=0)
    atexit.register(victim.kill)
    tools = [
        make_tool(place, tried.source(), "run", sandbox=low),
        make_tool(place, LEFT, "leave", "ok", "sleeps", name="low", sandbox=low),
        make_tool(place, PROGRAM, "run", name="program", file="program.sh", sandbox=low),
        make_tool(place, LEFT, "ok", name="high"),
        make_tool(place, LEFT, "ok", name="net", sandbox=SandboxSpec(min_tier="reduced", network="public")),
    ]
    tcp = socket.create_server(("127.0.0.1", 0))
    stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stream.bind(str(plain / "stream.sock")); stream.listen(); datagram.bind(str(plain / "datagram.sock"))
    told = {"secret": str(place / "secret"), "other_tool": str(place / "tool-high"), "uid": os.getuid(),
            "pid": os.getpid(), "victim": victim.pid, "port": tcp.getsockname()[1],
            "socket": str(plain / "stream.sock")}
    async with bench(*tools) as made:
        made.host.sessions.open(facts)
        out = {"high": refusal(await made.call("high__ok", workdir=plain)),
               "net": refusal(await made.call("net__ok", workdir=plain)),
               "git": refusal(await made.call("low__ok", workdir=repository))}
        there = sum(len(os.listdir(f"/proc/{n}/task")) for n in os.listdir("/proc") if n.isdigit() and os.path.exists(
            f"/proc/{n}/task") and os.stat(f"/proc/{n}").st_uid == os.getuid())
        leak = os.open("/etc/passwd", os.O_RDONLY)
        os.set_inheritable(leak, True)
        out["ok"], out["fds"], out["processes"] = (await made.call("low__ok", workdir=plain))["output"]
        out["there"] = there
        out["program"] = (await made.call("program__run", workdir=plain))["output"]
        out["receipt"] = list(made.receipts.values())[-1]["jail"]
        home, session = (await made.call("low__leave", workdir=plain))["output"]
        out["slow"] = refusal(await made.call("low__sleeps", workdir=plain, deadline_ms=300))
        result = await made.call("t__run", told, workdir=plain, deadline_ms=40000, within_s=45)
        assert result["status"] == "ok", result
        out["found"] = result["output"]
        assert victim.poll() is None
    out["folders"] = [name for name in os.listdir(place) if name.startswith("gdn-jail-")]
    out["left"] = [os.path.exists(os.path.dirname(home)), goondan.toolhost.watch.procfs.members(session)]
    print(json.dumps(out))

import goondan.toolhost.watch.procfs
asyncio.run(main())
"""
)


def test_a_host_without_user_namespaces_has_the_reduced_tier(short_tmp: Path) -> None:
    found = told_as_user(SURVEY, short_tmp)
    assert (found["tier"], found["walls"]) == ("reduced", ["seccomp", "landlock", "limits"])
    assert found["findings"][0]["what"] == "user namespaces"
    assert found["findings"][0]["fix"]


def test_what_the_reduced_tier_holds(short_tmp: Path) -> None:
    found = told_as_user(ATTEMPTS, short_tmp)
    assert found["high"][0] == found["net"][0] == "E_SANDBOX_UNAVAILABLE"
    assert "needs the full sandbox" in found["high"][1]
    assert found["git"][0] == "E_SANDBOX_DENIED"
    assert str(short_tmp / "repository" / ".git") in found["git"][1]
    assert set(found["ok"]) == {"HOME", "LANG", "PATH", "TMPDIR"}
    assert (short_tmp / "plain" / "kept").exists()
    # As in the full tier: the channel, and what is of no use to anybody.
    beside = {name: target for name, target in found["fds"].items() if int(name) > 2}
    assert len([target for target in beside.values() if target.startswith("socket:")]) == 1, beside
    assert not [target for target in beside.values() if target.startswith("/") and target != "/proc/loadavg"], beside
    # The limit of processes counts all of this user's, so it stands on top of those: 1024 and at least the two of us.
    soft, hard = found["processes"]
    assert soft == hard and 1024 < soft <= 1024 + 4 * max(found["there"], 8), (soft, found["there"])
    assert (found["receipt"]["tier"], found["receipt"]["walls"]) == ("reduced", ["seccomp", "landlock", "limits"])
    assert found["program"] == [False, False, True], "a program has the same walls"
    assert found["slow"][0] == "E_TOOL_TIMEOUT"
    assert found["left"] == [False, []]  # neither its folder nor a process of its session
    assert found["folders"] == []
    through = {name: detail for name, (_, verdict, detail) in found["found"].items() if verdict == "done"}
    assert set(through) == HARMLESS, through
