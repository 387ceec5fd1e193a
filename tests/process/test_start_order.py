"""What a start does before the one thing that everything waits for: it is no slower than it must be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from goondan.kernel.ahead import PROGRAMS
from goondan.schemas.bundle.launch import ExtensionSpec, KernelPlan
from tests.bundles import documents
from tests.kernel_fixture import Sandbox
from tests.process.bare_broker import bare_broker, plan

ROOT = Path(__file__).resolve().parent.parent.parent
BUNDLE = documents(
    "Tool t {entry: ./t.py, exports: [{name: a, description: a, parameters: {type: object}}]}",
)
#: Prints what a supervisor has imported when it starts the program that looks into the modules of tools.
LOOK = """\
import sys
from goondan.kernel.bundle.handlers import Inspector
from goondan.kernel.supervisor import __main__
from goondan.kernel.supervisor.options import load_bundle, parse
Inspector.start_early = lambda self: (print(*sys.modules), sys.exit(0))
load_bundle(parse(["--bundle", sys.argv[1]]))
"""


def test_the_modules_of_tools_are_looked_into_while_the_checks_of_a_bundle_are_imported(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    program = [sys.executable, "-I", "-c", LOOK, str(tmp_path / "goondan.yaml")]
    environment = {"HOME": str(tmp_path), "GOONDAN_STATE_ROOT": str(tmp_path / "state")}
    run = subprocess.run(program, capture_output=True, text=True, check=True, env=environment, timeout=30)
    imported = set(run.stdout.split())
    assert "goondan.kernel.bundle.loader" in imported
    assert not imported & {
        "yaml",
        "goondan.schemas.bundle.resources",
        "goondan.kernel.bundle.rules.check",
        "goondan.kernel.trust.judgement",
        "jsonschema_rs",
    }


#: What programs would import for a line of an error or a byte of randomness, and what only others of them need.
NOT_IMPORTED = {
    "goondan.kernel.cli.commands.run,goondan.kernel.cli.attach,goondan.kernel.cli.output": {
        "secrets",
        "shlex",
        "shutil",
        "traceback",
        "asyncio",
        "zmq",
    },
    "goondan.kernel.cli": {"goondan.kernel.cli.supervisor_ahead", "goondan.kernel.paths", "msgspec"},
    "goondan.kernel.cli.session": {"goondan.kernel.cli.observing"},
    "goondan.kernel.cli.commands.processes": {"goondan.kernel.spawn", "goondan.kernel.traces.logs"},
    "goondan.kernel.supervisor.__main__": {
        "secrets",
        "shlex",
        "shutil",
        "pathlib",
        "zmq",
        "yaml",
        "goondan.kernel.grants.powers",
        "ipaddress",
    },
    "goondan.kernel.broker.__main__": {
        "secrets",
        "shlex",
        "shutil",
        "pathlib",
        "traceback",
        "asyncio",
        "zmq",
        "jsonschema_rs",
    },
    "goondan.agentproc.start.forkserver": {"secrets", "shlex", "zmq"},
    "goondan.toolhost.app": {"secrets", "shlex", "shutil", "zmq", "argparse", "jsonschema_rs", "email.utils"},
}


@pytest.mark.skipif(os.geteuid() != 0, reason="its files in /proc are closed to all but root")
@pytest.mark.parametrize("declares", [True, False])
def test_the_broker_has_the_library_for_schemas_before_the_first_patch_if_an_extension_declares_one(
    declares: bool,
) -> None:
    def make(state_dir: str) -> KernelPlan:
        made = plan(state_dir)
        schema = {"type": "object"} if declares else None
        extension = ExtensionSpec(name="e", entry="/e.py", resource={}, config_schema=schema)
        coder = msgspec.structs.replace(made.agents["coder"], extensions=[extension])
        return msgspec.structs.replace(made, agents={**made.agents, "coder": coder})

    with bare_broker(make) as broker:
        broker.hello("client")  # it is served after that
        maps = Path(f"/proc/{broker.process.pid}/maps").read_text()
        assert ("jsonschema_rs" in maps) is declares


@pytest.mark.parametrize("modules", NOT_IMPORTED)
def test_a_program_does_not_import_what_it_seldom_needs(modules: str) -> None:
    # Each of them takes half a millisecond to three, of every start.
    program = [sys.executable, "-I", "-c", f"import sys, {modules}; print(*sys.modules)"]
    run = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30)
    assert not NOT_IMPORTED[modules] & set(run.stdout.split())


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        (["kernel/start.py", "goondan.kernel.broker", "--help"], {"typing_extensions", "inspect"}),
        (
            ["-c", "import sys; from goondan.kernel.cli import main; sys.argv[:] = ['gdn', 'ps']; main()"],
            {"typing_extensions"},
        ),
    ],
    ids=["broker", "gdn"],
)
def test_what_only_development_tools_bring_along_is_not_imported(
    tmp_path: Path, program: list[str], unneeded: set[str]
) -> None:
    environment = {"HOME": str(tmp_path), "GOONDAN_STATE_ROOT": str(tmp_path / "state")}
    command = [sys.executable, "-I", "-v", *program]  # it says of each module where it was found
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=30, check=False)
    imported = {line.split("'")[1] for line in run.stderr.splitlines() if line.startswith("import '")}
    assert "msgspec" in imported
    assert not imported & unneeded


def test_a_call_on_a_kernel_that_runs_imports_little(kernel: Sandbox) -> None:
    kernel.detach()
    command = [sys.executable, "-I", "-v", "-m", "goondan.kernel.cli", "call", "bash__exec", '{"command": "echo hi"}']
    run = subprocess.run(
        command, capture_output=True, text=True, env=kernel.env, cwd=kernel.home, timeout=30, check=True
    )
    assert "hi" in run.stdout
    imported = {line.split("'")[1] for line in run.stderr.splitlines() if line.startswith("import '")}
    assert "goondan.kernel.cli.one_message" in imported
    # What only starts a kernel, what only one that runs needs, an event loop, click, libzmq and TLS.
    assert not imported & {
        "asyncio",
        "inspect",
        "goondan.kernel.cli.session",
        "click",
        "platform",
        "zmq",
        "uvloop",
        "ssl",
        "base64",
        "hashlib",
        "secrets",
        "typing_extensions",
        "yaml",
        "jsonschema_rs",
        "sqlite3",
        "argparse",
        "goondan.kernel.spawn",
        "goondan.kernel.cli.starting",
        "goondan.kernel.cli.console.screen",
        "goondan.kernel.bundle.rules.problems",
        "goondan.kernel.traces.logs",
        "goondan.schemas.bundle.launch",
        "goondan.schemas.wire.tokens",
    }


def test_the_collector_of_garbage_seldom_looks_while_a_command_imports() -> None:
    look = "import gc; looks = []; gc.callbacks.append(lambda *of: looks.append(of))"
    look += "; import goondan.kernel.cli, goondan.kernel.cli.commands.call; print(len(looks) // 2)"
    run = subprocess.run([sys.executable, "-I", "-c", look], capture_output=True, text=True, check=True, timeout=30)
    assert int(run.stdout) < 10  # it would be twenty


def test_a_module_that_was_hidden_is_there_for_whoever_asks_later() -> None:
    look = "import sys; from goondan.kernel.start import msgspec_alone; msgspec_alone(); print(*sys.modules)"
    look += "; import typing_extensions"
    run = subprocess.run([sys.executable, "-I", "-c", look], capture_output=True, text=True, check=True, timeout=30)
    assert "msgspec" in run.stdout.split()
    assert "typing_extensions" not in run.stdout.split()


LEFT_OUT = """\
import sys
from goondan.kernel import start
start.msgspec_alone()
from goondan.kernel import ahead
from goondan.kernel.supervisor.options import parse
parse(["--bundle", sys.argv[1]])
ahead.import_shared()
assert "asyncio" in sys.modules and not {"ssl", "uvloop"} & set(sys.modules)
ahead.program_of(ahead.AGENTS)
ahead.parts("agent")
print(*sys.modules)
import asyncio, ssl, uvloop
loop, tls = uvloop.new_event_loop(), ssl.create_default_context()
try:
    loop.run_until_complete(loop.create_connection(asyncio.Protocol, "127.0.0.1", 1, ssl=tls))
except ConnectionRefusedError:  # and no TypeError: agents have TLS
    loop.close()
import socket
ours, theirs = socket.socketpair()
theirs.send(b"this is no TLS at all, and long enough for a head")
loop = asyncio.SelectorEventLoop()  # of an extension's own thread
try:
    loop.run_until_complete(loop.create_connection(asyncio.Protocol, sock=ours, ssl=tls, server_hostname="a.example"))
except ssl.SSLError:
    loop.close()
if "zmq" in sys.modules:  # an extension may use all of it
    import zmq
    one, other = zmq.Context().socket(zmq.PAIR), zmq.Context().socket(zmq.PAIR)
    other.connect(f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}")
    one.send_pyobj({"a": 1})
    assert other.recv_pyobj() == {"a": 1}
import email.utils, jsonschema_rs, msgspec, platform, uuid
assert email.utils.parseaddr("one@example.org")[1] == "one@example.org" and platform.python_version()
assert msgspec.convert(str(uuid.uuid4()), uuid.UUID).version == 4
assert jsonschema_rs.Draft202012Validator({"format": "email"}, validate_formats=True).is_valid("one@example.org")
"""


@pytest.mark.parametrize("transport", ["native", "libzmq"])
def test_a_start_imports_nothing_of_the_library_for_a_single_line(transport: str, tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    command = [sys.executable, "-I", "-c", LEFT_OUT, str(tmp_path / "goondan.yaml")]
    environment = {"GOONDAN_TRANSPORT": transport}
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=environment)
    imported = set(run.stdout.split())
    assert {"jsonschema_rs", "msgspec", "uuid", "argparse"} <= imported
    assert ("zmq" in imported) is (transport == "libzmq")
    assert imported.isdisjoint(("email.utils", "pickle", "platform", "shutil", "typing_extensions"))


FORK_SERVER = """\
import sys
from goondan.agentproc.start.forkserver import _warming
agents = "goondan.agentproc.start.app", "goondan.agentproc.turn.run", "uvloop"
print(*(name in sys.modules for name in agents))
next(_warming((), None))
print(*(name in sys.modules for name in agents))
"""


def test_a_fork_server_imports_what_agents_need_when_one_is_asked_for_or_when_there_is_time() -> None:
    command = [sys.executable, "-I", "-c", FORK_SERVER]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.splitlines() == ["False False False", "True True True"]


ROOTS_PROGRAMS = """\
import sys
sys.path.insert(0, sys.argv[1])
from goondan.toolhost.launcher import program
print(*sys.modules)
"""


def test_roots_programs_import_nothing_for_the_type_checker() -> None:
    command = [sys.executable, "-I", "-S", "-c", ROOTS_PROGRAMS, str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert set(run.stdout.split()).isdisjoint(("typing", "goondan.toolhost.launcher.requests"))


WITHOUT_TLS = """\
import sys
from goondan.kernel.start import asyncio_without_tls
asyncio_without_tls()
print("ssl" in sys.modules)
import asyncio
async def main(path):
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    async with await asyncio.start_unix_server(answer, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"heard\\n")
        print((await reader.readline()).decode().strip())
        writer.close()
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "", stdin=asyncio.subprocess.PIPE)
    print(await process.wait())
asyncio.run(main(sys.argv[1]))
from goondan.kernel.start import uvloop_without_tls
uvloop_without_tls()
print("ssl" in sys.modules)
import uvloop
uvloop.run(main(sys.argv[1] + "u"))
import ssl
print(bool(ssl.create_default_context()))
"""


def test_asyncio_and_uvloop_without_tls_do_all_else_and_tls_is_there_for_whoever_asks(short_tmp: Path) -> None:
    program = [sys.executable, "-I", "-c", WITHOUT_TLS, str(short_tmp / "s")]
    run = subprocess.run(program, capture_output=True, text=True, check=True, timeout=30)
    assert run.stdout.split() == ["False", "heard", "0", "False", "heard", "0", "True"]
    assert run.stderr == ""


#: Prints what a program imports that is forked ahead, besides what was imported before the fork.
OWN = """\
import sys
from goondan.kernel import ahead
from goondan.kernel.supervisor import __main__
from goondan.kernel.supervisor.options import parse
parse(["--bundle", sys.argv[2]])
ahead.import_shared()
before = set(sys.modules)
ahead.program_of(sys.argv[1])
print(*set(sys.modules) - before)
"""


def test_what_all_programs_import_is_imported_once_before_the_forks(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    alone = []
    for program in PROGRAMS:
        command = [sys.executable, "-I", "-c", OWN, program, str(tmp_path / "goondan.yaml")]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        alone.append(set(run.stdout.split()))
    assert all(alone)
    assert set.intersection(*alone) == set()


#: A supervisor that says which programs of its own run when it opens the bundle, and what is left of them afterwards.
RUNS_MEANWHILE = """\
import asyncio, os, sys, time
from pathlib import Path
from goondan.kernel.supervisor.life import Supervisor
from goondan.kernel.supervisor.options import parse
from goondan.kernel.supervisor.reaping import children_of_this_process
from goondan.schemas.wire.errors import fail

def command(child):
    return Path(f"/proc/{child}/cmdline").read_text().replace("\\0", " ")

def refuse(options, running):
    until = time.monotonic() + 10  # a child that is just being executed has no words of its own yet
    host = " goondan.toolhost "
    while not (started := [words for words in map(command, children_of_this_process()) if host in words]):
        assert time.monotonic() < until
        time.sleep(0.001)
    print(*started)
    raise fail("E_CONFIG_INVALID", "nothing to run")

async def main():
    return await Supervisor(parse(["--bundle", sys.argv[1]]), refuse).run()

print(asyncio.run(main()), children_of_this_process())
"""


def test_the_tool_host_starts_while_the_bundle_is_opened_and_goes_with_a_start_that_fails(short_tmp: Path) -> None:
    (short_tmp / "goondan.yaml").write_text(BUNDLE)
    program = [sys.executable, "-I", "-c", RUNS_MEANWHILE, str(short_tmp / "goondan.yaml")]
    environment = {"HOME": str(short_tmp), "XDG_RUNTIME_DIR": str(short_tmp)}
    run = subprocess.run(program, capture_output=True, text=True, check=True, env=environment, timeout=30)
    running, end = run.stdout.splitlines()
    assert " goondan.toolhost --endpoint " in running
    assert end == "2 set()"
