"""`python -m tests.process.agent_family`: a supervisor in small, for tests of the fork server.

It becomes a subreaper, starts `goondan.agentproc.start.forkserver` and obeys one JSON line at a time on stdin. It
answers each with one on stdout: {"fork": {…}} a request with a ready descriptor, {"raw": HEX} any packet,
{"reap": PID}, {"server": 0}. At the end of stdin it leaves, and so does its family.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from goondan.schemas.system.startup import become_subreaper
from goondan.schemas.wire.forkserver import MAX_PACKET, ForkReply, ForkRequest, decode_reply, encode_packet

#: How long an agent may take to say that it is ready, or why not (seconds).
PATIENCE_S = 30.0


class Family:
    def __init__(self) -> None:
        become_subreaper()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ready_r, ready_w = os.pipe()
        fd = theirs.fileno()
        command = [
            sys.executable,
            "-m",
            "goondan.agentproc.start.forkserver",
            "--socket-fd",
            str(fd),
            "--ready-fd",
            str(ready_w),
        ]
        self.server = subprocess.Popen([*command, "--parent-pid", str(os.getpid())], pass_fds=[fd, ready_w])
        theirs.close()
        os.close(ready_w)
        assert os.read(ready_r, 1) == b"\n", "the fork server ended before it was ready"
        os.close(ready_r)
        self.seq = 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if "fork" in order:
            return self.fork(order["fork"])
        if "burst" in order:
            return self.burst(order["burst"])
        if "raw" in order:
            self.channel.send(bytes.fromhex(order["raw"]))
            return self.reply()
        if "reap" in order:
            return {"status": os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])}
        return {"server": self.server.pid, "children": self.children()}

    def fork(self, fields: dict[str, Any]) -> dict[str, Any]:
        self.seq += 1
        request = ForkRequest(**{"seq": self.seq, "parent_pid": os.getpid(), **fields})
        ready_r, ready_w = os.pipe()
        began = time.perf_counter()
        socket.send_fds(self.channel, [encode_packet(request)], [ready_w])
        os.close(ready_w)
        answer = self.reply()
        said = b""
        while (
            answer.get("pid") and select.select([ready_r], [], [], PATIENCE_S)[0] and (chunk := os.read(ready_r, 4096))
        ):
            said += chunk
        os.close(ready_r)
        return {**answer, "ms": (time.perf_counter() - began) * 1000, "said": said.decode(), "asked": self.seq}

    def burst(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """All of them are there before the fork server looks."""
        os.kill(self.server.pid, signal.SIGSTOP)
        for fields in requests:
            self.seq += 1
            self.channel.send(encode_packet(ForkRequest(**{"seq": self.seq, "parent_pid": os.getpid(), **fields})))
        os.kill(self.server.pid, signal.SIGCONT)
        return {"replies": [self.reply() for _ in requests], "last": self.seq}

    def reply(self) -> dict[str, Any]:
        reply: ForkReply = decode_reply(self.channel.recv(MAX_PACKET))
        return {"seq": reply.seq, "pid": reply.pid, "error": reply.error}

    @staticmethod
    def children() -> list[int]:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
            return [int(pid) for pid in listed.read().split()]


def main() -> None:
    family = Family()
    print(json.dumps({"pid": os.getpid(), "server": family.server.pid}), flush=True)
    for line in sys.stdin:
        print(json.dumps(family.obey(json.loads(line))), flush=True)
    family.server.kill()


if __name__ == "__main__":
    main()
