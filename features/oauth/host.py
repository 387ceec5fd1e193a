"""What the workers of servers ask about their logins: passed on as `oauth.server`, for their own server only.

Source: docs/oauth.md; schemas/PROTOCOL-AGENTS.md, "Access tokens".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.logins import ServerWish


def about_login(server: str, agent: str | None, asked: Raw) -> Frame:
    """See toolhost/calls/asks.py, MakeServerAsk. The names in `asked` do not count."""
    return Frame("oauth.server", payload=to_raw(replace(from_raw(asked, ServerWish), server=server, agent=agent)))


ASKS: Final[Mapping[str, Callable[[str, str | None, Raw], Frame]]] = {"login": about_login}
