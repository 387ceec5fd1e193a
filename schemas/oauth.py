"""OAuth on the bus: what agents ask for, what the broker orders of the process that holds tokens, and its answers.

Where each goes: PROTOCOL.md, "Access tokens". Access tokens are in `TokenReady` only; refresh tokens, codes and secrets
of clients are in nothing that any peer but the holder of tokens gets.

Source: docs/oauth.md; requirements OAUTH-01, OAUTH-02, EVENTS-09.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct

Flow = Literal["authorizationCode", "deviceCode", "clientCredentials"]

#: How a reference to an OAuthApp begins.
REF_PREFIX: Final = "OAuthApp/"
#: The subject of a token that is the app's own (`flow: clientCredentials`): nobody has agreed to it.
APP_SUBJECT: Final = "app"
#: The subject of turns that began with a message of an operator who named nobody: the person who runs the kernel.
LOCAL_SUBJECT: Final = "local"
#: The event that extensions hear when somebody has agreed.
GRANTED_EVENT: Final = "auth.granted"
#: Characters of a subject, and of a scope: ids of directories and URLs are shorter.
MAX_SUBJECT: Final = 256
MAX_SCOPE: Final = 256
#: Scopes of one request: vendors have some hundred, and one app a few.
MAX_SCOPES: Final = 64


def is_scope(text: str) -> bool:
    """Whether a text can be a scope: visible ASCII but for quote and backslash, as RFC 6749 has it."""
    return 0 < len(text) <= MAX_SCOPE and all("!" <= letter <= "~" and letter not in '"\\' for letter in text)


def is_subject(text: str) -> bool:
    """Whether a text can name a subject: 1 to 256 characters, all of them visible or blanks."""
    return 0 < len(text) <= MAX_SUBJECT and text.isprintable()


class OAuthAppSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One OAuthApp, resolved. `client_secret` is a secret: never logged, never in an error.

    URLs are https, or http to this machine. What is None comes from the metadata of `issuer`, if there is one.
    `redirect_uri` is on this machine; None: a free port of 127.0.0.1. `fault` says why the app cannot be used.
    """

    name: str
    flow: Flow = "authorizationCode"
    client_id: str = ""
    client_secret: str | None = None
    scopes: list[str] = []
    issuer: str | None = None
    authorization_url: str | None = None
    token_url: str | None = None
    device_authorization_url: str | None = None
    revocation_url: str | None = None
    redirect_uri: str | None = None
    fault: str | None = None

    def __repr__(self) -> str:
        """As in a log or a traceback: without the secret."""
        return f"OAuthAppSpec(name={self.name!r}, flow={self.flow!r}, client_id={self.client_id!r})"


class TokensSpec(Struct, frozen=True, rename="camel"):
    """What the process that holds tokens is told in `welcome`: the apps of the bundle by their names."""

    apps: dict[str, OAuthAppSpec]


# --- an agent asks --------------------------------------------------------------------------------------------------


class TokenRequest(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `oauth.token`. `app` is the name of an OAuthApp, `scopes` None for all that the app names. `subject`
    can only be the turn's own; None means that.
    """

    app: str
    scopes: list[str] | None = None
    subject: str | None = None


class TokenReady(Struct, frozen=True, rename="camel", omit_defaults=True, tag="ready", tag_field="status"):
    """The `reply`: a token. `expires_at` is RFC 3339 in UTC, None when the server did not say."""

    access_token: str
    token_type: str
    scopes: list[str]
    subject: str
    expires_at: str | None = None

    def __repr__(self) -> str:
        """As in a log or a traceback: without the token."""
        return f"TokenReady(scopes={self.scopes!r}, subject={self.subject!r}, expires_at={self.expires_at!r})"


class AuthorizationRequired(
    Struct, frozen=True, rename="camel", omit_defaults=True, tag="authorization_required", tag_field="status"
):
    """The `reply`: a person has to agree first. `authorization_url` is the page for that, `user_code` what to type
    there (device code only), `expires_at` until when (RFC 3339 in UTC), `message` all of it in words.
    """

    authorization_url: str
    message: str
    scopes: list[str]
    subject: str
    expires_at: str
    user_code: str | None = None


class Granted(Struct, frozen=True, rename="camel"):
    """Payload of `oauth.granted` to an agent, and of the event `auth.granted`."""

    oauth_app_ref: str
    subject: str
    scopes: list[str]


# --- the broker orders ----------------------------------------------------------------------------------------------


class TokenOrder(Struct, frozen=True, rename="camel", omit_defaults=True, tag="token", tag_field="order"):
    """A token for this subject, asked for by this agent instance."""

    app: str
    subject: str
    agent: str
    instance_key: str
    scopes: list[str] | None = None


class LoginOrder(Struct, frozen=True, rename="camel", omit_defaults=True, tag="login", tag_field="order"):
    """Begin to ask a person, whether or not there is a token. `device`: by a code that is typed elsewhere."""

    app: str
    subject: str
    device: bool = False
    scopes: list[str] | None = None


class WaitOrder(Struct, frozen=True, rename="camel", tag="wait", tag_field="order"):
    """Answer when the person has agreed or refused, or the time is over."""

    app: str
    subject: str


class ListOrder(Struct, frozen=True, rename="camel", tag="list", tag_field="order"):
    """What is held, without any token."""


class RevokeOrder(Struct, frozen=True, rename="camel", tag="revoke", tag_field="order"):
    """Forget the tokens of a subject, and have the server forget them."""

    app: str
    subject: str


Order = TokenOrder | LoginOrder | WaitOrder | ListOrder | RevokeOrder


class GrantedNews(Struct, frozen=True, rename="camel"):
    """Payload of `oauth.granted` to the broker. `instances` have asked: agent and instance key of each."""

    app: str
    subject: str
    scopes: list[str]
    instances: list[tuple[str, str]]
