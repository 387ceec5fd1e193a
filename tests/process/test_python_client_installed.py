"""The client for Python where nothing else is installed, and beside the kernel of an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.containment.ordinary_user import run_as_user
from tests.kernel_fixture import ROOT, Sandbox
from tests.process.installed import BASE, VERSION

ASK = """
import asyncio, sys
from goondan_client import connect

async def main():
    async with connect() as gdn:
        print((await gdn.ask("main", '/bash__exec {"command": "echo $((6*7))"}')).text)

asyncio.run(main())
with connect(run_dir=sys.argv[1]) as gdn:
    print(gdn.call("bash__exec", {"command": "echo hi"}).output["stdout"].strip())
print("goondan" in sys.modules)
"""

OF_A_USER = """
import os, sys, threading
from pathlib import Path
from goondan_client import connect
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from tests.process.bare_broker import bare_broker

with bare_broker() as broker:
    token = broker.run_dir / "client.token"
    token.touch(0o600)
    token.write_text(broker.token("client"))
    agent = broker.hello("agent", agent="coder", instance_key="default")

    def answer():
        event = agent.receive()
        said = Answer(turn_id="t", status="completed", response=f"uid {os.geteuid()}")
        done = Frame("ack", id="d", stage="done", event_id=event.event_id, epoch=event.epoch)
        done.payload = to_raw(AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z", answer=said))
        agent.ask(done)

    with connect(run_dir=broker.run_dir) as gdn:
        thread = threading.Thread(target=answer)
        thread.start()
        print(gdn.ask("coder", "who are you?").text)
        thread.join()
"""


def _wheel(folder: Path) -> Path:
    """The wheel, as pip builds it from the sources. Skips where pip cannot fetch what builds it."""
    source = folder / "source"
    shutil.copytree(ROOT / "clients" / "python", source, ignore=shutil.ignore_patterns("__pycache__", "build"))
    command = [BASE, "-I", "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(source)]
    files = sorted(source.rglob("*"))
    made = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert sorted(source.rglob("*")) == files, "who may only read a clone can install from it"
    if made.returncode != 0:
        pytest.skip(f"pip builds no wheel here: {made.stderr.strip()[-200:]}")
    return next(folder.glob("*.whl"))


def test_an_environment_with_pyzmq_and_msgspec_is_enough(kernel: Sandbox, tmp_path: Path) -> None:
    packages = tmp_path / "env" / "lib" / VERSION / "site-packages"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(_wheel(tmp_path)) as wheel:
        wheel.extractall(packages)
    found = {path.name for path in (packages / "goondan_client").iterdir()}
    assert {"py.typed", "machine.py", "certified.py"} <= found
    assert "Requires-Dist: pyzmq" in next(packages.glob("*.dist-info/METADATA")).read_text()
    assert next(packages.glob("*.dist-info/licenses/LICENSE")).stat().st_size > 10_000
    from importlib.util import find_spec

    for name in ("zmq", "msgspec"):
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        (packages / name).symlink_to(Path(spec.origin).parent)
        libraries = Path(spec.origin).parents[1] / "pyzmq.libs"
        if name == "zmq" and libraries.exists():
            (packages / "pyzmq.libs").symlink_to(libraries)
    (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = {Path(BASE).parent}\n")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(BASE)
    run_dir = kernel.gdn("run", "--detach", "--json").json["runDir"]
    said = subprocess.run(
        [python, "-I", "-c", ASK, run_dir], cwd=kernel.home, env=kernel.env, capture_output=True, text=True, timeout=40
    )
    assert (said.stdout.split("\n"), said.stderr) == (["42", "hi", "False", ""], "")
    assert kernel.gdn("stop").status == 0


def test_beside_the_kernel_of_an_ordinary_user(short_tmp: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'clients' / 'python')!r})\n{OF_A_USER}"
    said = run_as_user(program, short_tmp)
    assert said.stdout == f"uid {os.geteuid() or 65534}\n", said.stderr
