"""The fork server's protocol: the kernel asks for agent processes, one msgpack map a packet, on an inherited socket.

The socket is AF_UNIX SOCK_SEQPACKET. The supervisor keeps one end, and `python -m goondan.agentproc.start.forkserver
--socket-fd N` has the other. Any number of requests may be under way; each gets exactly one reply with its `seq`. A
packet that is no request is answered with `seq` 0 and an error. When the supervisor's end is closed the fork server
exits.

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
    """Start one agent process."""

    #: The number of the request. The reply has the same.
    seq: int
    #: Name of the agent, for its log. What the process may do is in the token.
    agent: str
    #: Key of the instance, for its log.
    instance_key: str
    #: Address of the broker's socket.
    endpoint: str
    #: The token of its link.
    token: str
    #: Its parent, which is also that of the fork server.
    parent_pid: int
    #: The file that receives its stderr (appended, mode 0600). None: its stderr is that of the fork server.
    log_path: str | None = None
    #: The user of the broker. The process takes a `welcome` from nobody else. None: the user of the process.
    broker_uid: int | None = None


class ForkReply(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The answer to a ForkRequest."""

    #: The number of the request.
    seq: int
    #: The pid of the agent process. It says that the process was forked, not that it was welcomed.
    pid: int | None = None
    #: Why there is no process.
    error: str | None = None


encode_packet: Any = msgpack.Encoder().encode
decode_request = msgpack.Decoder(ForkRequest).decode
decode_reply = msgpack.Decoder(ForkReply).decode
