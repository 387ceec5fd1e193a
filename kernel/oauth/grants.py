"""Grants: the tokens of one app and one subject, and what to do when one is asked for. Pure.

A refresh is written down before it is sent. A server that rotates refresh tokens takes the old one once, so a process
that is killed before the answer is stored may have lost the only good one. The next process tries the old one once
more; if the server does not take it, a person has to agree again, and is told why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from kernel.oauth.protocol import Tokens
from schemas.oauth import OAuthAppSpec

#: A token that ends sooner than this is replaced (seconds): what it is used for takes time. Of short-lived ones, half.
SPARE_S: Final = 60.0
#: One that ends sooner than this is given to nobody, also where no other can be had (seconds).
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
    #: When it came.
    obtained_at: float = 0.0
    #: How long it is good (seconds). None: the server did not say.
    lifetime_s: float | None = None
    #: The refresh token. A secret.
    refresh_token: str | None = None
    #: When a refresh began whose outcome is not stored yet. None: no refresh is open.
    refreshing_since: float | None = None
    #: Why there is no token any more. The other fields of tokens are then empty.
    lost: str | None = None
    #: Of an MCP server: what its worker keeps, as the worker wrote it (kernel/oauth/servers.py). A secret.
    document: str | None = None

    def __repr__(self) -> str:
        """As in a log or a traceback: without the tokens."""
        return f"Grant(app={self.app!r}, subject={self.subject!r}, scopes={self.scopes!r}, lost={self.lost!r})"

    @property
    def expires_at(self) -> float | None:
        """When the access token ends; None when nobody knows."""
        return None if self.lifetime_s is None else self.obtained_at + self.lifetime_s


class Use(msgspec.Struct, frozen=True):
    """The access token is good."""


class Refresh(msgspec.Struct, frozen=True):
    """Get another one by the refresh token."""


class Fetch(msgspec.Struct, frozen=True):
    """Get one of the app's own."""


class Login(msgspec.Struct, frozen=True):
    """A person has to agree, for this reason."""

    reason: str


Verdict = Use | Refresh | Fetch | Login


def server_of(app: OAuthAppSpec) -> str:
    """The server that the tokens of an app belong to: its issuer, else its token endpoint."""
    return app.issuer or app.token_url or ""


def judge(grant: Grant | None, app: OAuthAppSpec, scopes: Iterable[str], now: float) -> Verdict:
    """What to do when a token with these scopes is asked for. `grant` is what is held for its subject."""
    if app.flow == "clientCredentials":
        if grant is not None and _is_of(grant, app) and set(scopes) <= set(grant.scopes) and _is_fresh(grant, now):
            return Use()
        return Fetch()
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
        return Use()
    if grant.refresh_token is not None:
        return Refresh()
    return Login("the token has ended, and the server gave no other to follow it")


def lives(grant: Grant, now: float) -> bool:
    """Whether the access token is good for some seconds more, though it is time to replace it."""
    return bool(grant.access_token) and grant.expires_at is not None and now + LAST_S < grant.expires_at


def begun(grant: Grant, now: float) -> Grant:
    """A refresh begins: to be stored before anything is sent."""
    return replace(grant, refreshing_since=now)


def granted(app: OAuthAppSpec, subject: str, tokens: Tokens, asked: Iterable[str], now: float) -> Grant:
    """Somebody has agreed, or the app has a token of its own. A server that names no scopes gave those asked for."""
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
    """A refresh was answered. Without another refresh token the old one stays good."""
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
    """The server does not take the refresh token. `interrupted`: a refresh before this one has no stored outcome."""
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
    if now < grant.obtained_at:  # a clock that was set back: nobody knows how old it is
        return False
    return now + min(SPARE_S, grant.lifetime_s / 2) < grant.obtained_at + grant.lifetime_s
