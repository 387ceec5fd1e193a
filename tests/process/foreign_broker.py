"""`python -m tests.process.foreign_broker SOCKET UID ENTRY`: another user who answers hello as a broker would.

Its welcome names an agent with one extension, the module at ENTRY. It says `ready` when it listens, and `hello` for
every hello, that is for every token, that it was given.
"""

from __future__ import annotations

import os
import sys

import zmq

from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec, ModelSpec
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import PROTOCOL_VERSION, Frame, Welcome


def main(path: str, uid: int, entry: str) -> None:
    """Serve until killed."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    resource = {"kind": "Extension", "metadata": {"name": "theirs"}, "spec": {"entry": entry}}
    spec = AgentSpec(
        name="main",
        model=ModelSpec(provider="embedded"),
        registry=[],
        catalog=[],
        state_dir=os.path.dirname(entry),
        revision="r",
        extensions=[ExtensionSpec(name="theirs", entry=entry, resource=resource)],
    )
    welcome = Welcome(
        version=PROTOCOL_VERSION,
        principal="agent/main/default",
        broker="theirs",
        credit=8,
        max_frame=1 << 20,
        instance_key="default",
        spec=to_raw(spec),
    )
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"ipc://{path}")
    print("ready", flush=True)
    while True:
        ident, *_, data = socket.recv_multipart()
        frame = decode(data) if data else None
        if frame is not None and frame.type == "hello":
            print("hello", flush=True)
            reply = Frame("welcome", id="w", in_reply_to=frame.id, payload=to_raw(welcome))
        else:
            reply = Frame("error", id="e", payload=to_raw(error_payload("E_HELLO_REQUIRED", "say hello")))
        socket.send_multipart([ident, encode(reply)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
