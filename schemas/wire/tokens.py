"""Launch tokens: who a connection may speak for, signed with the kernel's secret.

A token is `base64url(claims msgpack).base64url(HMAC-SHA256)`. The broker verifies it without any state, so tokens
stay good across a restart of the broker; a new kernel makes a new secret, so they end with the kernel. `launch`
numbers the starts of one principal: once the supervisor has reported a launch as ended, its token is refused.

Source: docs/design/wire.md section 3.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final, Literal

import msgspec
from msgspec import Struct

from goondan.schemas.wire.errors import fail

TokenClass = Literal["agent", "toolhost", "client", "control"]
SECRET_BYTES: Final = 32
#: Longer strings are refused before anything is computed.
_MAX_TOKEN: Final = 2048


class Claims(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a token says."""

    #: For what kind of peer it is.
    cls: TokenClass
    #: Of class agent: the agent. Of class control: None for the supervisor, and the name of a program of a feature.
    agent: str | None = None
    #: Of class agent: its instance.
    instance_key: str | None = None
    #: The number of the launch that got the token.
    launch: int = 0
    #: The revision of the bundle that the launch was for.
    revision: str = ""
    #: The client may name workdirs.
    operator: bool = False
    #: The user of this machine whose token it is. Only that user, and root, can read it.
    uid: int | None = None


def mint(secret: bytes, claims: Claims) -> str:
    """Sign `claims`."""
    body = msgspec.msgpack.encode(claims)
    return _b64(body) + "." + _b64(hmac.digest(secret, body, hashlib.sha256))


def verify(secret: bytes, token: str) -> Claims:
    """The claims of a genuine token. Raises GoondanError E_TOKEN_INVALID; the message never repeats the token."""
    body, _, mac = token.partition(".") if len(token) <= _MAX_TOKEN and token.isascii() else ("", "", "")
    try:
        raw, given = _unb64(body), _unb64(mac)
        if hmac.compare_digest(hmac.digest(secret, raw, hashlib.sha256), given):
            return msgspec.msgpack.decode(raw, type=Claims)
    except (ValueError, msgspec.DecodeError):
        pass
    raise fail("E_TOKEN_INVALID", "the token was not made by this kernel")


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _unb64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
