"""What the workers of servers ask about their logins: passed on as `oauth.server`, for their own server only.

Source: docs/oauth.md; schemas/PROTOCOL-AGENTS.md, "Access tokens".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from goondan.schemas.wire import codec, frames
from goondan.schemas.worker.logins import ServerWish


def about_login(server: str, agent: str | None, asked: Raw) -> frames.Frame:
    """See toolhost/calls/asks.py, MakeServerAsk. The names in `asked` do not count."""
    return frames.Frame(
        "oauth.server", payload=codec.to_raw(replace(codec.from_raw(asked, ServerWish), server=server, agent=agent))
    )


ASKS: Final[Mapping[str, Callable[[str, str | None, Raw], frames.Frame]]] = {"login": about_login}
