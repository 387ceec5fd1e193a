"""OAuth on the bus: what agents ask for, what the broker orders of the process that holds tokens, and its answers.

Where each goes: PROTOCOL-AGENTS.md, "Access tokens". Access tokens are in `TokenReady` only; refresh tokens, codes
and secrets of clients are in nothing that any peer but the holder of tokens gets.

Source: docs/oauth.md; requirements OAUTH-01, OAUTH-02, EVENTS-09.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes
from goondan.schemas.worker.logins import ServerOp

_APP: Final = "Correct the OAuthApp document; docs/oauth.md has an example for each flow."
_KEY: Final = "Put the right key back, or correct the owner and mode of the file and its folder."
_LOGIN: Final = "Run `gdn auth login mcp:PREFIX` and log in; the next step of the agent connects."
_REFUSED: Final = "Run `gdn auth login` again; if it stays so, compare the OAuthApp with the server's settings."
_SCOPE: Final = "Ask for scopes that the OAuthApp names, or add the missing ones to its `scopes`."
_SERVER: Final = "Try again later; if it stays so, check the URLs of the OAuthApp and the network."
_SUBJECT: Final = "Ask within a turn whose event says on whose behalf it is (`auth`), and for nobody else."
_UNAVAILABLE: Final = "Ask again in a moment; `gdn logs` says what the process that holds tokens did."
ERRORS: Final = add_codes(
    {
        "E_OAUTH_APP": ErrorCode(_APP, ASK, environment=True),
        "E_OAUTH_KEY": ErrorCode(_KEY, ASK, environment=True),
        "E_OAUTH_LOGIN": ErrorCode(_LOGIN, ASK, environment=True),
        "E_OAUTH_REFUSED": ErrorCode(_REFUSED, ASK, environment=True),
        "E_OAUTH_SCOPE": ErrorCode(_SCOPE, ASK, refuser="grant"),
        "E_OAUTH_SERVER": ErrorCode(_SERVER, ASK, environment=True),
        "E_OAUTH_SUBJECT": ErrorCode(_SUBJECT, ASK),
        "E_OAUTH_UNAVAILABLE": ErrorCode(_UNAVAILABLE, ASK, environment=True),
    }
)

Flow = Literal["authorizationCode", "deviceCode", "clientCredentials"]

#: The name of the process that holds tokens: in its token, in `gdn ps`, and of its log.
OAUTH: Final = "oauth"
#: The types of its frames.
FRAMES: Final = ("oauth.token", "oauth.server", "oauth.order", "oauth.granted")
#: What stands before the prefix of an MCP server where apps are named. No OAuthApp has a colon in its name.
SERVER_APP: Final = "mcp:"
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
    """One OAuthApp, resolved. URLs are https, or http to this machine."""

    #: Name of the OAuthApp.
    name: str
    #: How a person agrees.
    flow: Flow = "authorizationCode"
    #: The id of the client at the server.
    client_id: str = ""
    #: A secret: it is never logged and never stands in an error.
    client_secret: str | None = None
    #: The scopes that tokens may have.
    scopes: list[str] = []
    #: The server whose metadata has the URLs that are None here.
    issuer: str | None = None
    #: The page where a person agrees.
    authorization_url: str | None = None
    #: Where tokens come from.
    token_url: str | None = None
    #: Where device codes come from.
    device_authorization_url: str | None = None
    #: Where tokens are given back.
    revocation_url: str | None = None
    #: Where the server sends the person's browser: an address of this machine. None: a free port of 127.0.0.1.
    redirect_uri: str | None = None
    #: Why the app cannot be used. None: it can be used.
    fault: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the secret."""
        return f"OAuthAppSpec(name={self.name!r}, flow={self.flow!r}, client_id={self.client_id!r})"


class TokensSpec(Struct, frozen=True, rename="camel"):
    """The `welcome` of the process that holds tokens: the apps of the bundle by their names."""

    #: The apps, by their names.
    apps: dict[str, OAuthAppSpec]


# --- an agent asks --------------------------------------------------------------------------------------------------


class TokenRequest(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `oauth.token`."""

    #: Name of an OAuthApp.
    app: str
    #: The scopes that the token needs. None: all that the app names.
    scopes: list[str] | None = None
    #: Whose token it is. It can only be the turn's own. None means that one.
    subject: str | None = None


class TokenReady(Struct, frozen=True, rename="camel", omit_defaults=True, tag="ready", tag_field="status"):
    """The `reply`: a token."""

    #: The token.
    access_token: str
    #: Its type, for example `Bearer`.
    token_type: str
    #: The scopes that it has.
    scopes: list[str]
    #: Whose token it is.
    subject: str
    #: When it expires: RFC 3339 in UTC. None: the server did not say.
    expires_at: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the token."""
        return f"TokenReady(scopes={self.scopes!r}, subject={self.subject!r}, expires_at={self.expires_at!r})"


class AuthorizationRequired(
    Struct, frozen=True, rename="camel", omit_defaults=True, tag="authorization_required", tag_field="status"
):
    """The `reply`: a person has to agree first."""

    #: The page where the person agrees.
    authorization_url: str
    #: All of this in words.
    message: str
    #: The scopes that the person is asked for.
    scopes: list[str]
    #: The person who is asked.
    subject: str
    #: Until when the person can agree: RFC 3339 in UTC.
    expires_at: str
    #: Of a device code: what the person types on that page.
    user_code: str | None = None


class Granted(Struct, frozen=True, rename="camel"):
    """Payload of `oauth.granted` to an agent, and of the event `auth.granted`."""

    #: Name of the OAuthApp.
    oauth_app_ref: str
    #: The person who agreed.
    subject: str
    #: The scopes that were granted.
    scopes: list[str]


# --- the broker orders ----------------------------------------------------------------------------------------------


class TokenOrder(Struct, frozen=True, rename="camel", omit_defaults=True, tag="token", tag_field="order"):
    """An agent instance asks for a token."""

    #: Name of the OAuthApp.
    app: str
    #: Whose token it is.
    subject: str
    #: The agent that asks.
    agent: str
    #: Its instance.
    instance_key: str
    #: The scopes that the token needs. None: all that the app names.
    scopes: list[str] | None = None


class LoginOrder(Struct, frozen=True, rename="camel", omit_defaults=True, tag="login", tag_field="order"):
    """Begin to ask a person, even when there is a token already."""

    #: Name of the OAuthApp.
    app: str
    #: The person who is asked.
    subject: str
    #: Ask by a code that the person types on another device.
    device: bool = False
    #: The scopes to ask for. None: all that the app names.
    scopes: list[str] | None = None


class WaitOrder(Struct, frozen=True, rename="camel", tag="wait", tag_field="order"):
    """Answer when the person has agreed or refused, or the time is over."""

    #: The OAuthApp.
    app: str
    #: The subject whose tokens they are.
    subject: str


class ListOrder(Struct, frozen=True, rename="camel", tag="list", tag_field="order"):
    """What is held, without any token."""


class RevokeOrder(Struct, frozen=True, rename="camel", tag="revoke", tag_field="order"):
    """Forget the tokens of a subject, and have the server forget them."""

    #: The OAuthApp.
    app: str
    #: The subject whose tokens they are.
    subject: str


class ServerOrder(
    Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, tag="server", tag_field="order"
):
    """Do this for the worker of an MCP server."""

    #: What is asked for.
    op: ServerOp
    #: The server's prefix.
    server: str
    #: Its endpoint. What was saved for another endpoint is not given.
    endpoint: str
    #: As in ServerWish.
    document: str | None = None
    #: As in ServerWish.
    url: str | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the document, and without a page, which has a state in it."""
        return f"ServerOrder(op={self.op!r}, server={self.server!r})"


Order = TokenOrder | LoginOrder | WaitOrder | ListOrder | RevokeOrder | ServerOrder


class GrantedNews(Struct, frozen=True, rename="camel"):
    """Payload of `oauth.granted` to the broker."""

    #: Name of the OAuthApp.
    app: str
    #: The person who agreed.
    subject: str
    #: The scopes that were granted.
    scopes: list[str]
    #: The instances that have asked: agent and instance key of each.
    instances: list[tuple[str, str]]


#: What agents and the tool host see, for the exported schema.
EXPORTED: Final = (TokenRequest, TokenReady, AuthorizationRequired, Granted)
