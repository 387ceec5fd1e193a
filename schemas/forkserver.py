"""The fork server's protocol: the kernel asks for agent processes, one msgpack map a packet, on an inherited socket.

The socket is AF_UNIX SOCK_SEQPACKET; the supervisor keeps one end, `python -m agentproc.forkserver --socket-fd N` has
the other. Any number of requests may be under way; each gets exactly one reply with its `seq`. A packet that is no
request is answered with `seq` 0 and an error. When the supervisor's end is closed the fork server exits.

WARM is the one packet that has no reply: the kernel is ready, and what makes agents smaller can be done now.

A request may bring one descriptor (SCM_RIGHTS): the agent writes a newline to it when the broker has welcomed it.
Descriptors named by `--keep-fd` stay open in every agent.

Source: docs/design/processes.md section 3.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct, msgpack

#: A request holds two paths, a token and an instance key; anything larger is a mistake.
MAX_PACKET: Final = 65536
#: Nil in msgpack.
WARM: Final = b"\xc0"


class ForkRequest(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Start one agent process as a child of `parent_pid`, which must be a subreaper above the fork server.

    `endpoint` and `token` are what its link needs; `log_path` receives its stderr (appended, mode 0600; without it
    stderr is the fork server's). `agent` and `instance_key` name it in its log; what it may do is in the token.
    `broker_uid` is the user of the broker: of nobody else a welcome is taken. None is the user of the agent process.
    """

    seq: int
    agent: str
    instance_key: str
    endpoint: str
    token: str
    parent_pid: int
    log_path: str | None = None
    broker_uid: int | None = None


class ForkReply(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """`pid` of the agent process, or why there is none. A pid says that it was forked, not that it was welcomed."""

    seq: int
    pid: int | None = None
    error: str | None = None


encode_packet: Any = msgpack.Encoder().encode
decode_request = msgpack.Decoder(ForkRequest).decode
decode_reply = msgpack.Decoder(ForkReply).decode
