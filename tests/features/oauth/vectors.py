"""Recorded frames about OAuth tokens."""

from __future__ import annotations

from goondan.features.oauth.wire import AuthorizationRequired, Granted, TokenOrder, TokenReady, TokenRequest
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.logins import ServerReply, ServerWish
from tests.contract.vectors.bad import TIME

KINDS = (TokenRequest, TokenOrder, TokenReady, AuthorizationRequired, Granted, ServerWish, ServerReply)


def frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    scopes = ["calendar.read"]
    page = "https://login.example.com/authorize?state=1"
    asked = AuthorizationRequired(page, "ann has to agree", scopes, "ann", TIME, "WDJB-MJHT")
    return [
        (
            "oauth.token",
            Frame("oauth.token", id="x.21", payload=to_raw(TokenRequest("calendar", scopes))),
            "TokenRequest",
        ),
        (
            "oauth.order",
            Frame("oauth.order", id="b.21", payload=to_raw(TokenOrder("calendar", "ann", "coder", "u1", scopes))),
            "TokenOrder",
        ),
        (
            "reply to oauth.token: a token",
            Frame(
                "reply",
                id="b.22",
                in_reply_to="x.21",
                payload=to_raw(TokenReady("at-1", "Bearer", scopes, "ann", TIME)),
            ),
            "TokenReady",
        ),
        (
            "reply to oauth.token: somebody has to agree",
            Frame("reply", id="b.23", in_reply_to="x.21", payload=to_raw(asked)),
            "AuthorizationRequired",
        ),
        (
            "oauth.granted",
            Frame("oauth.granted", id="b.24", payload=to_raw(Granted("OAuthApp/calendar", "ann", scopes))),
            "Granted",
        ),
        (
            "oauth.server",
            Frame("oauth.server", id="h.25", payload=to_raw(ServerWish(op="authorize", server="tracker", url=page))),
            "ServerWish",
        ),
        (
            "reply to oauth.server: the browser has come back",
            Frame(
                "reply",
                id="b.25",
                in_reply_to="h.25",
                payload=to_raw(ServerReply(code="c-1", state="0123456789abcdef", issuer="https://login.example.com")),
            ),
            "ServerReply",
        ),
    ]
