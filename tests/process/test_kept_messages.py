"""A message that fails because the disk is full, or the model server is not there, is kept and can be sent again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from tests.bundles import documents
from tests.kernel_fixture import sandbox, wait_until
from tests.process.scripted_model import scripted_model

#: In a mount namespace of its own: the disk of the state fills up while a tool works.
FULL = """
import json, subprocess, sys
from pathlib import Path
from tests.kernel_fixture import sandbox, wait_until

COMMAND = "touch began; while [ -e wait ]; do sleep 0.02; done; head -c 600000 /dev/urandom | base64 -w 0"
with sandbox() as kernel:
    state = Path(kernel.env["GOONDAN_STATE_ROOT"])
    state.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(state)], check=True)
    try:
        kernel.detach()
        kernel.gdn("send", "/bash__exec command='touch wait'")
        text = "/bash__exec " + json.dumps({"command": COMMAND})
        sending = kernel.popen("send", text, "--event-id", "m1", "--json")
        began = wait_until(lambda: next(state.glob("workspaces/*/instances/*/*/workspace/began"), 0), what="it")
        filler = state / "filler"
        with open(filler, "ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        (began.parent / "wait").unlink()
        ended = json.loads(sending.communicate(timeout=60)[0])
        filler.unlink()
        letters = kernel.gdn("dead", "list", "--json").json["events"]
        requeue = lambda: kernel.gdn("dead", "requeue", "m1", "--json").json.get("newEventId")
        again = wait_until(requeue, what="the broker to see that there is room")
        done = lambda: kernel.gdn("trace", again, "--json").json.get("status") == "completed"
        wait_until(done, what="the end of what was sent again")
        print(json.dumps([ended["error"]["code"], [[row["eventId"], row["cause"]] for row in letters]]))
        kernel.gdn("stop")
    finally:
        subprocess.run(["umount", "-l", str(state)], check=False)
"""


@pytest.mark.feature("dead_letters")
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs a mount of its own")
def test_what_fails_for_want_of_space_is_answered_when_there_is_room() -> None:
    script = ["unshare", "-m", sys.executable, "-c", FULL]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith('["E_DISK_FULL", [["m1", "E_DISK_FULL: '), done.stdout


BUNDLE = documents(
    'Model absent {provider: openai, model: m, endpoint: "http://127.0.0.1:PORT/v1", retry: {busyS: 0}}',
    "Agent main {modelConfig: {modelRef: Model/absent}}",
    "Swarm swarm {entryAgent: Agent/main}",
)


@pytest.mark.feature("dead_letters")
def test_what_fails_without_a_model_server_is_answered_when_there_is_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        port = taken.getsockname()[1]
        with sandbox(BUNDLE.replace("PORT", str(port)), {"OPENAI_API_KEY": "k"}) as kernel:
            kernel.detach()
            failed = kernel.gdn("send", "hello", "--event-id", "m1")
            assert failed.status == 1
            assert "E_MODEL_FAILED" in failed.err
            assert "the message is kept: gdn dead requeue m1 sends it again" in failed.err
            same = kernel.gdn("send", "hello", "--event-id", "m1", "--json").json
            assert same["error"]["code"] == "E_MODEL_FAILED", "the same id is the same message, and it was answered"
            taken.close()
            with scripted_model(port) as model:
                model.scripts["hello"] = ["hello yourself"]
                model.otherwise = "hello yourself"
                kernel.gdn("dead", "requeue", "m1")

                def answered() -> bool:
                    return bool(kernel.gdn("trace", "m1~requeued", "--json").json.get("status") == "completed")

                wait_until(answered, what="the answer")
            assert kernel.gdn("dead", "list").out == "no message was given up\n"
