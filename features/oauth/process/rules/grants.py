"""Grants: the tokens of one app and one subject, and the decision when a token is asked for. Pure.

A refresh is stored before it is sent. A server that rotates refresh tokens accepts the old one only once. So a process
that is killed before it has stored the answer may have lost the only good one. The next process tries the old one
again. If the server refuses it, a person has to agree again, and is told why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from goondan.features.oauth.process.rules.protocol import Tokens
from goondan.features.oauth.wire import OAuthAppSpec

#: A token that ends sooner than this is replaced (seconds), because using it takes time. For short-lived tokens it is
#: half of their life.
SPARE_S: Final = 60.0
#: A token that ends sooner than this is not given out, even when there is no other (seconds).
LAST_S: Final = 5.0


class Grant(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The tokens of one app and one subject. Times are seconds since 1970."""

    #: Name of the OAuthApp.
    app: str
    #: Whose tokens they are.
    subject: str
    #: The server that the refresh token may be sent to.
    server: str
    #: The client that the refresh token was given to.
    client_id: str
    #: The scopes that were granted.
    scopes: list[str] = []
    #: The access token. A secret.
    access_token: str = ""
    #: Its type.
    token_type: str = "Bearer"  # noqa: S105 - a word of the protocol
    #: When the access token came.
    obtained_at: float = 0.0
    #: How long it is valid (seconds). None: the server did not say.
    lifetime_s: float | None = None
    #: The refresh token. A secret.
    refresh_token: str | None = None
    #: When a refresh began whose outcome is not stored yet. None: no refresh is open.
    refreshing_since: float | None = None
    #: Why there is no token any more. The other fields of tokens are then empty.
    lost: str | None = None
    #: Of an MCP server: what its worker keeps, as the worker wrote it (features/oauth/process/servers.py). A secret.
    document: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the tokens."""
        return f"Grant(app={self.app!r}, subject={self.subject!r}, scopes={self.scopes!r}, lost={self.lost!r})"

    @property
    def expires_at(self) -> float | None:
        """When the access token ends. None when it is not known."""
        return None if self.lifetime_s is None else self.obtained_at + self.lifetime_s


class Login(msgspec.Struct, frozen=True):
    """A person has to agree, for this reason."""

    #: Why.
    reason: str


#: `use` the access token, get another one by `refresh`, `fetch` a token of the app itself, or a person has to agree.
Verdict = Literal["use", "refresh", "fetch"] | Login


def server_of(app: OAuthAppSpec) -> str:
    """The server that the tokens of an app belong to: its issuer if it names one, otherwise its token endpoint."""
    return app.issuer or app.token_url or ""


def judge(grant: Grant | None, app: OAuthAppSpec, scopes: Iterable[str], now: float) -> Verdict:
    """Decide what to do when a token with these scopes is asked for. `grant` is the stored grant of the subject."""
    if app.flow == "clientCredentials":
        if grant is not None and _is_of(grant, app) and set(scopes) <= set(grant.scopes) and _is_fresh(grant, now):
            return "use"
        return "fetch"
    if grant is None:
        return Login("nobody has agreed to it yet")
    if not _is_of(grant, app):
        return Login("what was agreed to was for another server or another client")
    if grant.lost is not None:
        return Login(grant.lost)
    missing = [scope for scope in scopes if scope not in grant.scopes]
    if missing:
        return Login(f"it was not agreed to these scopes: {' '.join(missing)}")
    if _is_fresh(grant, now):
        return "use"
    if grant.refresh_token is not None:
        return "refresh"
    return Login("the token has ended, and the server gave no other to follow it")


def lives(grant: Grant, now: float) -> bool:
    """Whether the access token is valid for some more seconds, although it should be replaced."""
    return bool(grant.access_token) and grant.expires_at is not None and now + LAST_S < grant.expires_at


def begun(grant: Grant, now: float) -> Grant:
    """The grant when a refresh begins. Store it before the refresh is sent."""
    return replace(grant, refreshing_since=now)


def granted(app: OAuthAppSpec, subject: str, tokens: Tokens, asked: Iterable[str], now: float) -> Grant:
    """The grant after a person has agreed, or after the app got a token of its own. A server that names no scopes has
    granted the requested ones.
    """
    return Grant(
        app=app.name,
        subject=subject,
        server=server_of(app),
        client_id=app.client_id,
        scopes=list(asked) if tokens.scopes is None else tokens.scopes,
        access_token=tokens.access_token,
        token_type=tokens.token_type,
        obtained_at=now,
        lifetime_s=tokens.lifetime_s,
        refresh_token=tokens.refresh_token,
    )


def refreshed(grant: Grant, tokens: Tokens, now: float) -> Grant:
    """The grant after the answer to a refresh. If the answer has no refresh token, the old one stays valid."""
    return replace(
        grant,
        scopes=grant.scopes if tokens.scopes is None else tokens.scopes,
        access_token=tokens.access_token,
        token_type=tokens.token_type,
        obtained_at=now,
        lifetime_s=tokens.lifetime_s,
        refresh_token=tokens.refresh_token or grant.refresh_token,
        refreshing_since=None,
    )


def lost(grant: Grant, *, interrupted: bool) -> Grant:
    """The grant after the server has refused the refresh token. `interrupted`: an earlier refresh has no stored
    outcome.
    """
    why = "the server does not accept the token that was kept any more"
    if interrupted:
        why = "a refresh was interrupted, and the server does not accept the token from before it"
    return replace(grant, access_token="", refresh_token=None, lifetime_s=None, refreshing_since=None, lost=why)


def _is_of(grant: Grant, app: OAuthAppSpec) -> bool:
    return (grant.server, grant.client_id) == (server_of(app), app.client_id)


def _is_fresh(grant: Grant, now: float) -> bool:
    if not grant.access_token:
        return False
    if grant.lifetime_s is None:
        return True
    if now < grant.obtained_at:  # the clock was set back, so the age of the token is not known
        return False
    return now + min(SPARE_S, grant.lifetime_s / 2) < grant.obtained_at + grant.lifetime_s
