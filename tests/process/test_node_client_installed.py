"""`npm i ./clients/node` into an empty folder is enough, for whoever runs the tests and for an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containment.ordinary_user import ORDINARY_USER, run_as_user
from tests.kernel_fixture import ROOT
from tests.machine import FOUND
from tests.node_fixture import node_client

#: In an empty folder beside `clients/node`: installs the client, and asks a broker of the same user.
PROGRAM = """
import json, os, subprocess, sys, threading
from pathlib import Path
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from tests.process.bare_broker import bare_broker

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
empty = folder / "empty"
empty.mkdir()
environment = {**os.environ, "HOME": str(folder), **settings}
install = ["npm", "i", "--fetch-retries=0", "--no-audit", "--no-fund", "--loglevel=error", "../clients/node"]
subprocess.run(install, cwd=empty, env=environment, check=True)
(empty / "ask.mjs").write_text('''
import { connect } from "goondan-client";
const gdn = await connect({ runDir: process.argv[2] });
console.log((await gdn.ask("coder", "who are you?")).text);
await gdn.close();
''')
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

    agent.socket.setsockopt(27, 30_000)  # RCVTIMEO: node starts slowly on a busy machine
    thread = threading.Thread(target=answer)
    thread.start()
    subprocess.run(["node", "ask.mjs", str(broker.run_dir)], cwd=empty, env=environment, check=True, timeout=30)
    thread.join()
"""


@pytest.mark.parametrize("ordinary", [False, True], ids=["whoever runs the tests", "an ordinary user"])
def test_an_empty_folder_is_enough(ordinary: bool, short_tmp: Path) -> None:
    leave = shutil.ignore_patterns("node_modules", "test")
    shutil.copytree(node_client(), short_tmp / "clients" / "node", ignore=leave)
    settings = {name: value for name, value in FOUND.items() if name == "PATH" or name.lower().endswith("_proxy")}
    if ordinary:
        for path in short_tmp.rglob("*"):
            shutil.chown(path, *([ORDINARY_USER] * 2 if os.geteuid() == 0 else [os.geteuid(), os.getegid()]))
        done = run_as_user(PROGRAM, short_tmp, json.dumps(settings))
    else:
        command = [sys.executable, "-c", PROGRAM, str(short_tmp), json.dumps(settings)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    if "npm ERR" in done.stderr or "npm error" in done.stderr:
        pytest.skip(f"npm could not install the packages: {done.stderr[-300:]}")
    assert done.stdout.splitlines()[-1] == f"uid {(os.geteuid() or ORDINARY_USER) if ordinary else os.geteuid()}", (
        done.stderr
    )
