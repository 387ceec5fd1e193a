"""What an OAuth server is asked, what its answers say, and what becomes of the tokens that it has given. Pure: takes
texts and returns texts.

An issuer speaks only for itself: its document must name exactly this issuer. No endpoint in it may be plain http,
except on this machine for an issuer on this machine. Endpoints in the OAuthApp itself take precedence.

A grant has the tokens of one app and one subject. A refresh is stored before it is sent. A server that rotates refresh
tokens accepts the old one only once. So a process that is killed before it has stored the answer may have lost the only
good one. The next process tries the old one again. If the server refuses it, a person has to agree again, and is told
why.

Source: RFC 6749 (OAuth 2.0), RFC 7636 (PKCE), RFC 8628 (device code), RFC 7009 (revocation), RFC 8414 and OpenID
Connect Discovery 1.0 (documents of issuers), RFC 9207 (issuers in redirects).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeVar
from urllib.parse import parse_qsl, quote_plus, urlencode, urlsplit, urlunsplit

import msgspec
from msgspec.structs import replace

from goondan.features.oauth.wire import OAuthAppSpec, is_scope
from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.text import redaction, visible
from goondan.schemas.wire.errors import GoondanError, fail

#: The longest token (characters). The largest JSON Web Tokens of directories have tens of thousands.
MAX_TOKEN: Final = 32_768
#: The longest lifetime (seconds): a year. A longer one is taken for a mistake of the server, and cut to this.
MAX_LIFETIME_S: Final = 366 * 86_400.0
#: The most of a server's own text in our errors (characters).
MAX_DESCRIPTION: Final = 300
#: The longest address of a page that a server names (characters).
MAX_PAGE: Final = 4096
_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
#: The interval between two polls of a device code when the server names none (seconds), as in RFC 8628.
DEVICE_INTERVAL_S: Final = 5.0
#: The least and the greatest interval that a server may name (seconds).
_INTERVALS: Final = (1.0, 60.0)
_Body = TypeVar("_Body", bound=msgspec.Struct)


class Tokens(msgspec.Struct, frozen=True):
    """The tokens that a server gave."""

    #: The access token. A secret.
    access_token: str
    #: Its type.
    token_type: str
    #: How long it is good (seconds). None: the server did not say.
    lifetime_s: float | None
    #: The refresh token. A secret.
    refresh_token: str | None
    #: The scopes that were granted. None: the server did not say.
    scopes: list[str] | None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the tokens."""
        return f"Tokens(lifetime_s={self.lifetime_s!r}, scopes={self.scopes!r})"


class DeviceCode(msgspec.Struct, frozen=True):
    """The codes that a server gave for a device."""

    #: The code with which this side polls for the token. A secret.
    device_code: str
    #: The code that a person types.
    user_code: str
    #: The page where a person types it. If the server supports it, this URL contains the code already.
    page: str
    #: How long the codes are valid (seconds).
    lifetime_s: float
    #: How long to wait between two requests for the token (seconds).
    interval_s: float

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the code that is exchanged for a token."""
        return f"DeviceCode(page={self.page!r})"


class ServerRefused(Exception):
    """The server has refused, in the form of the protocol. `error` is its code, `description` its text without control
    characters.
    """

    def __init__(self, error: str, description: str) -> None:
        super().__init__(f"{error}: {description}" if description else error)
        self.error = error
        self.description = description


class _TokenBody(msgspec.Struct):
    """The body of a token endpoint's answer (RFC 6749 section 5.1)."""

    #: The access token. A secret.
    access_token: str
    #: Its type.
    token_type: str
    #: How long it is valid (seconds). Some servers send the number as a text.
    expires_in: int | float | str | None = None
    #: The refresh token. A secret.
    refresh_token: str | None = None
    #: The granted scopes, separated by spaces.
    scope: str | None = None


class _DeviceBody(msgspec.Struct):
    """The body of a device authorization endpoint's answer (RFC 8628 section 3.2)."""

    #: The code with which this side polls for the token. A secret.
    device_code: str
    #: The code that a person types.
    user_code: str
    #: The page where a person types it.
    verification_uri: str | None = None
    #: The name of the same field in drafts of the RFC.
    verification_url: str | None = None
    #: The page with the code in its URL.
    verification_uri_complete: str | None = None
    #: How long the codes are valid (seconds). Some servers send the number as a text.
    expires_in: int | float | str | None = None
    #: The interval between two polls (seconds).
    interval: int | float | str | None = None


class _ErrorBody(msgspec.Struct):
    #: The code of the error.
    error: str
    #: The same in words.
    error_description: str | None = None


# --- requests -------------------------------------------------------------------------------------------------------


def challenge_of(verifier: str) -> str:
    """The S256 challenge of a PKCE verifier."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode("ascii")).digest()).rstrip(b"=").decode("ascii")


def authorization_url(
    endpoint: str, *, client_id: str, redirect_uri: str, scopes: Iterable[str], state: str, challenge: str
) -> str:
    """The URL of the page on which a person agrees. The endpoint's own query stays, without the names used here."""
    ours = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": redirect_uri,
        "scope": " ".join(scopes),
        "state": state,
        "code_challenge": challenge,
        "code_challenge_method": "S256",
    }
    parts = urlsplit(endpoint)
    kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in ours]
    query = urlencode([*kept, *((name, value) for name, value in ours.items() if value)])
    return urlunsplit((parts.scheme, parts.netloc, parts.path, query, ""))


def code_form(code: str, redirect_uri: str, verifier: str) -> dict[str, str]:
    """The form that exchanges the code of a redirect for a token."""
    return {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": redirect_uri,
        "code_verifier": verifier,
    }


def refresh_form(refresh_token: str) -> dict[str, str]:
    """The form that asks for another token. Without `scope` the granted scopes stay."""
    return {"grant_type": "refresh_token", "refresh_token": refresh_token}


def credentials_form(scopes: Iterable[str]) -> dict[str, str]:
    """The form that asks for a token of the app itself."""
    return {"grant_type": "client_credentials", **_scope(scopes)}


def device_form(scopes: Iterable[str]) -> dict[str, str]:
    """The form that asks for the codes for a person who agrees on another device."""
    return _scope(scopes)


def device_token_form(device_code: str) -> dict[str, str]:
    """The form that asks for a token, if that person has agreed."""
    return {"grant_type": _DEVICE_GRANT, "device_code": device_code}


def revocation_form(token: str, kind: str) -> dict[str, str]:
    """The form that revokes a token. `kind` is `access_token` or `refresh_token`."""
    return {"token": token, "token_type_hint": kind}


def with_client(
    app: OAuthAppSpec, form: Mapping[str, str], methods: Iterable[str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The form and the headers of a request with the authentication of the client. `methods` are those that the server
    names (`token_endpoint_auth_methods_supported`), None when it names none.
    """
    if app.client_secret is None:
        return {**form, "client_id": app.client_id}, {}
    known = None if methods is None else frozenset(methods)
    if known is not None and "client_secret_basic" not in known and "client_secret_post" in known:
        return {**form, "client_id": app.client_id, "client_secret": app.client_secret}, {}
    pair = f"{quote_plus(app.client_id)}:{quote_plus(app.client_secret)}"
    return dict(form), {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"}


def _scope(scopes: Iterable[str]) -> dict[str, str]:
    text = " ".join(scopes)
    return {"scope": text} if text else {}


# --- answers --------------------------------------------------------------------------------------------------------


def read_tokens(status: int, body: bytes, secrets: Iterable[str | None]) -> Tokens:
    """Read the answer of a token endpoint. `secrets` are hidden in texts of errors.

    Raises ServerRefused, and GoondanError E_OAUTH_SERVER for an answer that is not of the protocol.
    """
    if status != 200:
        raise _refusal(status, body, secrets)
    told = _decoded(body, _TokenBody)
    if told is None:
        raise _no_answer("the answer of the token endpoint is no token")
    if told.token_type.lower() != "bearer":
        raise _no_answer(f"the server gave a token of the type {shown(told.token_type, secrets)}, not Bearer")
    for token in (told.access_token, told.refresh_token):
        if token is not None and not _is_token(token):
            raise _no_answer("the server gave a token that cannot be one")
    scopes = None if told.scope is None else [scope for scope in told.scope.split(" ") if is_scope(scope)]
    lifetime = _seconds(told.expires_in)
    return Tokens(told.access_token, "Bearer", lifetime, told.refresh_token, scopes)


def read_device_code(status: int, body: bytes, secrets: Iterable[str | None]) -> DeviceCode:
    """Read the answer of a device authorization endpoint. Raises the errors of `read_tokens`."""
    if status != 200:
        raise _refusal(status, body, secrets)
    told = _decoded(body, _DeviceBody)
    if told is None:
        raise _no_answer("the answer of the device authorization endpoint is none")
    page = told.verification_uri or told.verification_url or ""
    whole = told.verification_uri_complete or page
    if not all(is_page(url) for url in (page, whole)) or not _is_token(told.device_code):
        raise _no_answer("the answer of the device authorization endpoint names no page")
    code = told.user_code
    if not 0 < len(code) <= 64 or not code.isprintable():
        raise _no_answer("the answer of the device authorization endpoint has no code for a person")
    low, high = _INTERVALS
    interval = min(high, max(low, _seconds(told.interval) or DEVICE_INTERVAL_S))
    return DeviceCode(told.device_code, code, whole, _seconds(told.expires_in) or 600.0, interval)


def is_page(url: str) -> bool:
    """Whether a URL that a server gave may be shown to a person as a page to open."""
    if len(url) > MAX_PAGE or not url.isascii() or not url.isprintable() or " " in url:
        return False
    origin = origin_of(url)
    return origin is not None and not is_open(origin)


def shown(text: str, secrets: Iterable[str | None] = ()) -> str:
    """A server's text as one line without secrets and control characters."""
    return visible.visible_line(redaction.redact(text[: 4 * MAX_DESCRIPTION], *secrets))[:MAX_DESCRIPTION]


def _refusal(status: int, body: bytes, secrets: Iterable[str | None]) -> Exception:
    told = _decoded(body, _ErrorBody)
    if told is None:
        return _no_answer(f"the server answered with status {status}")
    if status >= 500:  # the server has failed; that says nothing about the request
        return _no_answer(f"the server answered with status {status}: {shown(told.error, secrets)}")
    return ServerRefused(shown(told.error, secrets)[:64], shown(told.error_description or "", secrets))


def _decoded(body: bytes, form: type[_Body]) -> _Body | None:
    """What a server has sent, in this form; None when it has another one."""
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _no_answer(message: str) -> GoondanError:
    return fail("E_OAUTH_SERVER", message)


def _is_token(text: str) -> bool:
    """Whether a text may go into a header: visible ASCII only."""
    return 0 < len(text) <= MAX_TOKEN and all("!" <= letter <= "~" for letter in text)


def _seconds(value: float | str | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    if number is None or not number > 0:  # also NaN
        return None
    return min(number, MAX_LIFETIME_S)


# --- endpoints ------------------------------------------------------------------------------------------------------


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The URLs of a server. None: not known."""

    #: The page where a person agrees.
    authorization: str | None = None
    #: The endpoint for tokens.
    token: str | None = None
    #: The endpoint for device codes.
    device: str | None = None
    #: The endpoint that revokes tokens.
    revocation: str | None = None
    #: The methods with which a client may authenticate. None: not known.
    auth_methods: list[str] | None = None
    #: Whether each redirect names the issuer (`iss`).
    says_issuer: bool = False


class _Document(msgspec.Struct):
    """The document of an issuer. The names are those of RFC 8414."""

    #: The issuer that the document is about.
    issuer: str
    #: The page where a person agrees.
    authorization_endpoint: str | None = None
    #: The endpoint for tokens.
    token_endpoint: str | None = None
    #: The endpoint for device codes.
    device_authorization_endpoint: str | None = None
    #: The endpoint that revokes tokens.
    revocation_endpoint: str | None = None
    #: The methods with which a client may authenticate at the token endpoint.
    token_endpoint_auth_methods_supported: list[str] | None = None
    #: The PKCE methods of the server.
    code_challenge_methods_supported: list[str] | None = None
    #: Whether each redirect names the issuer (RFC 9207).
    authorization_response_iss_parameter_supported: bool = False


def may_contact(url: str) -> bool:
    """Whether requests may go to this URL: https, or plain http to this machine, without user and fragment."""
    origin = origin_of(url)
    parts = urlsplit(url)
    return origin is not None and not is_open(origin) and parts.username is None and not parts.fragment


def is_here(url: str) -> bool:
    """Whether a URL is plain http to this machine."""
    return urlsplit(url).scheme == "http" and may_contact(url)


def document_urls(issuer: str) -> list[str]:
    """The URLs at which an issuer may publish its document: that of OpenID Connect, and that of RFC 8414."""
    parts = urlsplit(issuer)
    path = parts.path.rstrip("/")
    places = [f"{path}/.well-known/openid-configuration", f"/.well-known/oauth-authorization-server{path}"]
    return [urlunsplit((parts.scheme, parts.netloc, place, "", "")) for place in places]


def read_document(app: OAuthAppSpec, body: bytes) -> Endpoints:
    """The endpoints of an app from its issuer's document. Raises GoondanError E_OAUTH_SERVER."""
    issuer = app.issuer or ""
    told = _decoded(body, _Document)
    if told is None:
        raise _no_answer(f"what {issuer} publishes is no metadata of an OAuth server")
    if told.issuer != issuer:
        raise fail("E_OAUTH_SERVER", f"the metadata at {issuer} is of another issuer")
    methods = told.code_challenge_methods_supported
    if app.flow == "authorizationCode" and methods is not None and "S256" not in methods:
        raise fail("E_OAUTH_SERVER", f"{issuer} does not support PKCE with S256")
    found = {
        "authorization": told.authorization_endpoint,
        "token": told.token_endpoint,
        "device": told.device_authorization_endpoint,
        "revocation": told.revocation_endpoint,
    }
    for name, url in found.items():
        if url is not None and (not may_contact(url) or (is_here(url) and not is_here(issuer))):
            raise fail("E_OAUTH_SERVER", f"the {name} endpoint that {issuer} names may not be used: it is no https URL")
    own = own_endpoints(app)
    return Endpoints(
        authorization=own.authorization or found["authorization"],
        token=own.token or found["token"],
        device=own.device or found["device"],
        revocation=own.revocation or found["revocation"],
        auth_methods=told.token_endpoint_auth_methods_supported,
        says_issuer=told.authorization_response_iss_parameter_supported,
    )


def own_endpoints(app: OAuthAppSpec) -> Endpoints:
    """The endpoints in the OAuthApp itself."""
    return Endpoints(
        authorization=app.authorization_url,
        token=app.token_url,
        device=app.device_authorization_url,
        revocation=app.revocation_url,
    )


# --- grants -----------------------------------------------------------------------------------------------------------


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
