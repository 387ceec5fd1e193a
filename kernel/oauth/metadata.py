"""The endpoints of an OAuth server: from the OAuthApp, and from the document that its issuer publishes. Pure.

An issuer speaks only for itself: its document must name exactly this issuer. No endpoint in it may be plain http,
except on this machine for an issuer on this machine. Endpoints in the OAuthApp itself take precedence.

Source: RFC 8414, OpenID Connect Discovery 1.0, RFC 9207.
"""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

import msgspec

from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.oauth import OAuthAppSpec
from goondan.schemas.wire.errors import fail


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
    try:
        told = msgspec.json.decode(body, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise fail("E_OAUTH_SERVER", f"what {issuer} publishes is no metadata of an OAuth server") from None
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
