"""The kind OAuthApp: its form, what is wrong with a document, the client that it describes, and whom people are
sent to. Pure.

A variable that is not set is no mistake of the bundle: the app cannot be used then, and whoever asks is told.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta

from goondan.features.oauth.wire import OAuthAppSpec, is_scope
from goondan.kernel.bundle.rules import problems, shape, variables
from goondan.kernel.grants.powers import Power, TokenServer
from goondan.schemas.bundle.resources import API_V1ALPHA1, Metadata, Strict, Text, ValueLike, ValueSource
from goondan.schemas.models.origins import is_open, origin_of
from goondan.schemas.worker.logins import is_redirect


class OAuthAppBody(Strict, frozen=True, kw_only=True):
    """An OAuth client that extensions ask for tokens. URLs are https, or http to this machine."""

    authorization_url: Annotated[Text | None, Meta(description="Where a person agrees.")] = None
    token_url: Annotated[Text | None, Meta(description="Where tokens come from.")] = None
    client_id: Annotated[ValueLike, Meta(description="The client's id.")]
    client_secret: Annotated[ValueLike | None, Meta(description="Its secret, if the server wants one.")] = None
    scopes: Annotated[list[Text], Meta(description="What may be asked for, and is asked for by default.")] = []
    issuer: Annotated[
        Text | None, Meta(description="Publishes the URLs that are left out; what it says must come from it.")
    ] = None
    flow: Annotated[
        Literal["authorizationCode", "deviceCode", "clientCredentials"],
        Meta(description="How a token is got: a person in a browser, a code typed elsewhere, or the app by itself."),
    ] = "authorizationCode"
    device_authorization_url: Annotated[Text | None, Meta(description="Where device codes come from.")] = None
    revocation_url: Annotated[Text | None, Meta(description="Where tokens are given back.")] = None
    redirect_uri: Annotated[
        Text | None,
        Meta(description="Where the browser comes back to: on 127.0.0.1 or localhost. By default on any free port."),
    ] = None


class OAuthApp(Strict, frozen=True):
    """An OAuthApp document of v0.9."""

    api_version: Literal["agents.example.io/v1alpha1"]
    kind: Literal["OAuthApp"]
    #: Its name.
    metadata: Metadata
    spec: OAuthAppBody


#: Fields with URLs that requests go to, or people.
_URLS: Final = {
    "authorizationUrl": "authorization_url",
    "tokenUrl": "token_url",
    "deviceAuthorizationUrl": "device_authorization_url",
    "revocationUrl": "revocation_url",
    "issuer": "issuer",
}
#: What a flow needs, unless an issuer publishes it.
_NEEDED: Final = {
    "authorizationCode": ("authorizationUrl", "tokenUrl"),
    "deviceCode": ("deviceAuthorizationUrl", "tokenUrl"),
    "clientCredentials": ("tokenUrl",),
}


class OAuthAppKind:
    """What the core asks of the kind (kernel/bundle/rules/kinds.py)."""

    name: Final = "OAuthApp"
    part: Final = "oauth"
    documents: Final = {API_V1ALPHA1: OAuthApp}
    secrets: Final[Mapping[tuple[str, str], str]] = {
        ("spec", "clientId"): "client",
        ("spec", "clientSecret"): "client",
    }

    def check(self, document: shape.Document, body: OAuthAppBody, report: problems.Report, *, whole: bool) -> None:
        """Report what is wrong with a document."""
        variables.check_value(document, body.client_id, ("spec", "clientId"), report)
        variables.check_value(document, body.client_secret, ("spec", "clientSecret"), report)
        if whole:
            check_oauth_app(document, body, report)

    def resolve(self, name: str, body: OAuthAppBody, env: Mapping[str, str]) -> OAuthAppSpec:
        """The client, with its secret."""
        return resolve_oauth_app(name, body, env)

    def powers(self, document: shape.Document, body: OAuthAppBody) -> Iterable[Power]:
        """Who asks people to sign in, and gets the client's secret."""
        named = variables.variables_of(document.node, self.name, "")
        keys = sorted({name for name, use in named if use == "client"}) or [""]
        urls: list[str | None] = [body.issuer, *(getattr(body, name) for name in _URLS.values())]
        for origin in dict.fromkeys(origin_of(url) or url[:200] for url in urls if url is not None):
            for key in keys:
                yield TokenServer(origin, key)


KIND: Final = OAuthAppKind()


def check_oauth_app(document: shape.Document, body: OAuthAppBody, report: problems.Report) -> None:
    """Report what is wrong with an OAuthApp."""
    for field, name in _URLS.items():
        url = getattr(body, name)
        if url is not None and not is_server_url(url):
            message = f"{document.text('spec', field)} is no https URL, nor http to this machine"
            hint = "Write for example https://login.example.com/token, without a user and without #."
            report.error("E_CONFIG_INVALID_VALUE", message, document.place("spec", field), hint)
    if body.issuer is not None and "?" in body.issuer:
        message = "an issuer has no query"
        report.error("E_CONFIG_INVALID_VALUE", message, document.place("spec", "issuer"))
    for field in _NEEDED[body.flow]:
        if body.issuer is None and getattr(body, _URLS[field]) is None:
            message = f"flow {body.flow} needs {field}"
            hint = f"Add {field}, or the issuer if that publishes it."
            report.error("E_CONFIG_MISSING_FIELD", message, document.key("spec"), hint)
    if body.flow == "clientCredentials" and body.client_secret is None:
        message = "flow clientCredentials needs clientSecret: the app says by it who it is"
        report.error(
            "E_CONFIG_MISSING_FIELD", message, document.key("spec"), "Add clientSecret: {valueFrom: {env: …}}."
        )
    for index, scope in enumerate(body.scopes):
        if scope and not is_scope(scope):
            at: problems.Path = ("spec", "scopes", index)
            message = (
                f"{document.text(*at)} is no scope: it has blanks, quotes, backslashes or other letters than ASCII"
            )
            report.error(
                "E_CONFIG_INVALID_VALUE", message, document.place(*at), "Write each scope as an item of its own."
            )
    if body.redirect_uri is not None and not is_redirect(body.redirect_uri):
        message = f"{document.text('spec', 'redirectUri')} is no address that can be listened on here"
        hint = "Write for example http://127.0.0.1:8765/callback."
        report.error("E_CONFIG_INVALID_VALUE", message, document.place("spec", "redirectUri"), hint)


def resolve_oauth_app(name: str, body: OAuthAppBody, env: Mapping[str, str]) -> OAuthAppSpec:
    """The client, with its secret."""
    faults: list[str] = []
    client_id = _value(body.client_id, env, faults)
    secret = None if body.client_secret is None else _value(body.client_secret, env, faults)
    return OAuthAppSpec(
        name=name,
        flow=body.flow,
        client_id=client_id,
        client_secret=secret,
        scopes=list(dict.fromkeys(body.scopes)),
        issuer=body.issuer,
        authorization_url=body.authorization_url,
        token_url=body.token_url,
        device_authorization_url=body.device_authorization_url,
        revocation_url=body.revocation_url,
        redirect_uri=body.redirect_uri,
        fault=faults[0] if faults else None,
    )


def is_server_url(url: str) -> bool:
    """Whether requests with secrets may go there."""
    origin = origin_of(url)
    return (
        origin is not None
        and not is_open(origin)
        and all("!" <= letter <= "~" for letter in url)
        and "#" not in url
        and "@" not in url.split("/")[2]
    )


def _value(value: ValueLike, env: Mapping[str, str], faults: list[str]) -> str:
    if not isinstance(value, ValueSource):
        found, what = value, "an empty text is given"
    elif value.value_from is None:
        found, what = value.value or "", "an empty text is given"
    else:
        name = value.value_from.env
        found, what = env.get(name, ""), f"the environment variable {name} is not set"
    if not found:
        faults.append(what)
    return found.strip()


#: What extensions have of it (kinds.api_members).
API: Final = {"oauth": frozenset(("get_access_token",))}
