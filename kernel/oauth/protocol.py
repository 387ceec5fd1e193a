"""Requests to an OAuth server and what its answers say. Pure: texts in, texts out.

Source: RFC 6749 (OAuth 2.0), RFC 7636 (PKCE), RFC 8628 (device code), RFC 7009 (revocation).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import parse_qsl, quote_plus, urlencode, urlsplit, urlunsplit

import msgspec

from schemas.errors import GoondanError, fail
from schemas.oauth import OAuthAppSpec, is_scope
from schemas.origins import is_open, origin_of
from schemas.redaction import redact
from schemas.visible import visible_line

#: Characters of a token that are kept: the largest JSON Web Tokens of directories have some ten thousand.
MAX_TOKEN: Final = 32_768
#: A lifetime that is longer is taken for a mistake of the server, and as this (seconds): a year.
MAX_LIFETIME_S: Final = 366 * 86_400.0
#: Characters of a server's own words in our errors.
MAX_DESCRIPTION: Final = 300
#: Characters of the address of a page that a server names.
MAX_PAGE: Final = 4096
_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
#: How often to ask for a device code's token when the server does not say (seconds), as RFC 8628 has it.
DEVICE_INTERVAL_S: Final = 5.0
#: The bounds of what a server may say about that (seconds).
_INTERVALS: Final = (1.0, 60.0)


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
        """As in a log or a traceback: without the tokens."""
        return f"Tokens(lifetime_s={self.lifetime_s!r}, scopes={self.scopes!r})"


class DeviceCode(msgspec.Struct, frozen=True):
    """The codes that a server gave for a device."""

    #: The code that this side asks for the token with. A secret.
    device_code: str
    #: The code that a person types.
    user_code: str
    #: The page where a person types it. Where the server can do that, the code is in this URL already.
    page: str
    #: How long the codes are good (seconds).
    lifetime_s: float
    #: How long to wait between two requests for the token (seconds).
    interval_s: float

    def __repr__(self) -> str:
        """As in a log or a traceback: without the code that tokens are given for."""
        return f"DeviceCode(page={self.page!r})"


class ServerRefused(Exception):
    """The server said no, by the protocol. `error` is its code, `description` its words, harmless to show."""

    def __init__(self, error: str, description: str) -> None:
        super().__init__(f"{error}: {description}" if description else error)
        self.error = error
        self.description = description


class _TokenBody(msgspec.Struct):
    access_token: str
    token_type: str
    expires_in: int | float | str | None = None
    refresh_token: str | None = None
    scope: str | None = None


class _DeviceBody(msgspec.Struct):
    device_code: str
    user_code: str
    verification_uri: str | None = None
    verification_url: str | None = None  # as some wrote it before the RFC was one
    verification_uri_complete: str | None = None
    expires_in: int | float | str | None = None
    interval: int | float | str | None = None


class _ErrorBody(msgspec.Struct):
    error: str
    error_description: str | None = None


# --- requests -------------------------------------------------------------------------------------------------------


def challenge_of(verifier: str) -> str:
    """The S256 challenge of a PKCE verifier."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode("ascii")).digest()).rstrip(b"=").decode("ascii")


def authorization_url(
    endpoint: str, *, client_id: str, redirect_uri: str, scopes: Iterable[str], state: str, challenge: str
) -> str:
    """The page on which a person agrees. The endpoint's own query stays, without the names used here."""
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
    """A token for the code that the redirect brought."""
    return {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": redirect_uri,
        "code_verifier": verifier,
    }


def refresh_form(refresh_token: str) -> dict[str, str]:
    """Another token. Without `scope`: what was granted stays."""
    return {"grant_type": "refresh_token", "refresh_token": refresh_token}


def credentials_form(scopes: Iterable[str]) -> dict[str, str]:
    """A token of the app's own."""
    return {"grant_type": "client_credentials", **_scope(scopes)}


def device_form(scopes: Iterable[str]) -> dict[str, str]:
    """Codes for a person who agrees on another device."""
    return _scope(scopes)


def device_token_form(device_code: str) -> dict[str, str]:
    """A token, if that person has agreed."""
    return {"grant_type": _DEVICE_GRANT, "device_code": device_code}


def revocation_form(token: str, kind: str) -> dict[str, str]:
    """The token is to count no more. `kind` is `access_token` or `refresh_token`."""
    return {"token": token, "token_type_hint": kind}


def with_client(
    app: OAuthAppSpec, form: Mapping[str, str], methods: Iterable[str] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """The form and the headers of a request in which the client says who it is. `methods` are those that the server
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
    """What a token endpoint answered. `secrets` are hidden in what is told of an error.

    Raises ServerRefused, and GoondanError E_OAUTH_SERVER for what is no answer of the protocol.
    """
    if status != 200:
        raise _refusal(status, body, secrets)
    try:
        told = msgspec.json.decode(body, type=_TokenBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _no_answer("the answer of the token endpoint is no token") from None
    if told.token_type.lower() != "bearer":
        raise _no_answer(f"the server gave a token of the type {shown(told.token_type, secrets)}, not Bearer")
    for token in (told.access_token, told.refresh_token):
        if token is not None and not _is_token(token):
            raise _no_answer("the server gave a token that cannot be one")
    scopes = None if told.scope is None else [scope for scope in told.scope.split(" ") if is_scope(scope)]
    lifetime = _seconds(told.expires_in)
    return Tokens(told.access_token, "Bearer", lifetime, told.refresh_token, scopes)


def read_device_code(status: int, body: bytes, secrets: Iterable[str | None]) -> DeviceCode:
    """What a device authorization endpoint answered. Raises as `read_tokens`."""
    if status != 200:
        raise _refusal(status, body, secrets)
    try:
        told = msgspec.json.decode(body, type=_DeviceBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _no_answer("the answer of the device authorization endpoint is none") from None
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
    """A server's own words as one harmless line without secrets."""
    return visible_line(redact(text[: 4 * MAX_DESCRIPTION], *secrets))[:MAX_DESCRIPTION]


def _refusal(status: int, body: bytes, secrets: Iterable[str | None]) -> Exception:
    try:
        told = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _no_answer(f"the server answered with status {status}")
    if status >= 500:  # its trouble, and no word about what was sent
        return _no_answer(f"the server answered with status {status}: {shown(told.error, secrets)}")
    return ServerRefused(shown(told.error, secrets)[:64], shown(told.error_description or "", secrets))


def _no_answer(message: str) -> GoondanError:
    return fail("E_OAUTH_SERVER", message)


def _is_token(text: str) -> bool:
    """Whether it may go into a header: visible ASCII."""
    return 0 < len(text) <= MAX_TOKEN and all("!" <= letter <= "~" for letter in text)


def _seconds(value: float | str | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    if number is None or not number > 0:  # also NaN
        return None
    return min(number, MAX_LIFETIME_S)
