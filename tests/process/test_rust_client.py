"""The client in Rust: recorded frames and sequences, its certificate, and what Ctrl-C does.

Without Debian's cargo it is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame
from tests.kernel_fixture import PATIENCE_S, wait_until
from tests.polyglot_clients import BUILD_S, cargo, rust
from tests.process.bare_broker import bare_broker

#: The first of them builds it.
pytestmark = pytest.mark.timeout(BUILD_S + 60)


def test_the_recorded_frames_and_sequences_are_replayed() -> None:
    rust()
    done = cargo("test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.feature("certify")
def test_it_is_certified() -> None:
    from tests.features.certify.process.certificates import certify

    certify([str(rust()), "certified"], {"Frames", "Payloads"})  # calls of tools are in another document


def test_an_interrupt_cancels_the_question(short_tmp: Path) -> None:
    program = rust()
    with bare_broker() as broker:
        token = broker.run_dir / "client.token"
        token.touch(mode=0o600)
        token.write_text(broker.token("client", operator=True))
        digest = hashlib.sha256(os.fsencode(short_tmp.resolve())).hexdigest()[:16]
        record = short_tmp / "workspaces" / digest / "kernel" / "kernel.json"
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"runDir": str(broker.run_dir)}))
        environment = {**os.environ, "GOONDAN_STATE_ROOT": str(short_tmp)}
        asking = subprocess.Popen(
            [program, short_tmp, "coder", "hi"], env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            peer = broker.hello("client", operator=True)
            events = to_raw({"op": "events", "agent": "coder", "instanceKey": "default"})

            def waits() -> bool:
                reply = peer.ask(Frame("admin", id="a", payload=events))
                return reply.type == "reply" and bool(msgspec.msgpack.decode(reply.payload)["events"])

            wait_until(waits, what="the question is accepted")
            asking.send_signal(signal.SIGINT)
            _, error = asking.communicate(timeout=PATIENCE_S)
        finally:
            asking.kill()
            asking.wait()
        assert (asking.returncode, error.partition(":")[0]) == (1, "E_CANCELLED")
        assert not waits()
