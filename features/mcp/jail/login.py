"""Logging in to a server that is reached over HTTP: the SDK's OAuth client, with a keeper and a person elsewhere.

Nothing is asked of anybody before the server has refused a request (401). What the login gives is kept by the process
that holds tokens, never here: the next worker of this server begins with it. A token that has expired is replaced by
the refresh token, at the server that gave it, before it is used.

Source: docs/design/tools.md section 11; requirements MCP-06, MCP-07.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol, TypeVar

import httpx2
import msgspec
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared import auth
from msgspec import Struct
from pydantic import BaseModel, ValidationError

from goondan.features.mcp.jail.protocol.results import Failure
from goondan.features.mcp.wire import ServerLogin
from goondan.schemas.text.redaction import redact
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerOp, ServerReply

#: The name that people read when they are asked whether they agree.
CLIENT_NAME: Final = "Goondan"
#: A token that ends sooner than this is replaced (seconds): a request takes time.
SPARE_S: Final = 30.0
#: Characters of a server's own words about a login that failed.
MAX_WORDS: Final = 1000


M = TypeVar("M", bound=BaseModel)


class Keeper(Protocol):
    """The process that holds tokens, as the worker reaches it. Raises Failure."""

    async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply: ...


class Clock(Protocol):
    """The time that a connection may take. It stands still while a person is asked."""

    def hold(self, message: str) -> None: ...

    def go_on(self) -> None: ...


class _Kept(Struct, omit_defaults=True):
    """The document of a server: models of the SDK as JSON."""

    #: The tokens.
    tokens: dict[str, Any] | None = None
    #: When the access token ends (seconds since 1970). None: the server did not say.
    expires_at: float | None = None
    #: The client, as the server has registered it.
    client: dict[str, Any] | None = None
    #: Where the server's tokens come from, as it was found out.
    metadata: dict[str, Any] | None = None
    #: The same of the resource.
    resource: dict[str, Any] | None = None
    #: The authorization server's URL.
    issuer: str | None = None


class Storage:
    """The SDK's TokenStorage. Everything is read once, and written as a whole."""

    def __init__(self, keeper: Keeper, kept: _Kept, client: auth.OAuthClientInformationFull | None) -> None:
        """`client`: the one that was registered before, which is not written down."""
        self._keeper = keeper
        self._client = client
        self.kept = kept
        self.provider: OAuthClientProvider | None = None

    async def get_tokens(self) -> auth.OAuthToken | None:
        """The tokens of an earlier worker, if they still are tokens."""
        return _model(auth.OAuthToken, self.kept.tokens)

    async def set_tokens(self, tokens: auth.OAuthToken) -> None:
        """Keep tokens, and where they can be replaced."""
        self.kept.tokens = _plain(tokens)
        self.kept.expires_at = None if tokens.expires_in is None else time.time() + tokens.expires_in
        if self.provider is not None:
            context = self.provider.context
            self.kept.metadata = _plain(context.oauth_metadata)
            self.kept.resource = _plain(context.protected_resource_metadata)
            self.kept.issuer = context.auth_server_url
        await self._save()

    async def get_client_info(self) -> auth.OAuthClientInformationFull | None:
        """The client that was registered before, or by an earlier worker."""
        return self._client or _model(auth.OAuthClientInformationFull, self.kept.client)

    async def set_client_info(self, client_info: auth.OAuthClientInformationFull) -> None:
        """Keep a registration."""
        self.kept.client = _plain(client_info)
        await self._save()

    async def _save(self) -> None:
        document = msgspec.json.encode(self.kept).decode()
        if len(document) > MAX_DOCUMENT:
            raise Failure("E_OAUTH_SERVER", f"what the login gave takes more than {MAX_DOCUMENT} bytes")
        await self._keeper.ask("save", document=document)


class Login(httpx2.Auth):
    """The `auth` of the worker's HTTP client. Makes the SDK's provider when the server refuses a request."""

    requires_response_body = True

    def __init__(self, endpoint: str, config: ServerLogin, keeper: Keeper, clock: Clock) -> None:
        self._endpoint = endpoint
        self._config = config
        self._keeper = keeper
        self._clock = clock
        #: Why the last login came to nothing.
        self.failure: Failure | None = None
        self._provider: OAuthClientProvider | None = None
        #: The address that a browser comes back to.
        self._address = ""

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Send a request; log in when it is refused. Raises Failure, which `failure` is then."""
        if self._provider is None:
            response = yield request
            if response.status_code != httpx2.codes.UNAUTHORIZED:
                return
        self.failure = None
        try:
            provider = self._provider = self._provider or await self._made()
        except Failure as failure:
            self.failure = failure
            raise
        flow = provider.async_auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        except OAuthFlowError as error:  # its subclasses are what a registration or a token endpoint refused
            words = redact(str(error)[:MAX_WORDS], self._config.client_secret)
            self.failure = Failure("E_OAUTH_SERVER", f"the login to {self._endpoint} failed: {words}")
            raise self.failure from None
        except Failure as failure:
            self.failure = failure
            raise
        finally:
            await flow.aclose()

    async def _made(self) -> OAuthClientProvider:
        config = self._config
        kept = _kept((await self._keeper.ask("load")).document)
        if config.flow == "clientCredentials":
            return self._with_credentials(kept)
        address = config.redirect_uri or _redirect_of(kept)
        redirect_uri = self._address = (await self._keeper.ask("redirect", url=address)).redirect_uri or ""
        if config.client_id is None and _redirect_of(kept) not in (None, redirect_uri):
            kept.client = None  # it was registered with an address whose port is somebody else's by now
        client = None
        if config.client_id is not None:
            client = auth.OAuthClientInformationFull(
                client_id=config.client_id,
                client_secret=config.client_secret,
                redirect_uris=[redirect_uri],  # type: ignore[list-item] # pydantic makes a URL of it
                token_endpoint_auth_method="client_secret_basic" if config.client_secret else "none",
                issuer=config.issuer,
            )
        storage = Storage(self._keeper, kept, client)
        provider = _Provider(
            self._endpoint,
            auth.OAuthClientMetadata(
                client_name=CLIENT_NAME,
                redirect_uris=[redirect_uri],  # type: ignore[list-item]
                grant_types=["authorization_code", "refresh_token"],
                scope=None if config.scopes is None else " ".join(config.scopes),
            ),
            storage,
            self._send_person,
            self._wait_for_person,
            config.client_metadata_url,
        )
        storage.provider = provider
        return provider

    def _with_credentials(self, kept: _Kept) -> OAuthClientProvider:
        config = self._config
        if config.client_id is None or config.client_secret is None:
            raise Failure("E_OAUTH_APP", "the flow clientCredentials needs clientId and clientSecret")
        return ClientCredentialsOAuthProvider(
            self._endpoint,
            Storage(self._keeper, kept, None),
            config.client_id,
            config.client_secret,
            scope=None if config.scopes is None else " ".join(config.scopes),
            issuer=config.issuer,
        )

    async def _send_person(self, url: str) -> None:
        # This address was opened when the worker began, and is closed when a redirect has come: a second login of the
        # same worker, for more scopes or for tokens that nobody replaces, needs it again.
        if (await self._keeper.ask("redirect", url=self._address)).redirect_uri != self._address:
            message = f"{self._address} is taken by now; the next connection has another address"
            raise Failure("E_OAUTH_UNAVAILABLE", message)
        self._clock.hold((await self._keeper.ask("authorize", url=url)).message or "")

    async def _wait_for_person(self) -> auth.AuthorizationCodeResult:
        try:
            reply = await self._keeper.ask("wait")
        finally:
            self._clock.go_on()
        return auth.AuthorizationCodeResult(code=reply.code or "", state=reply.state, iss=reply.issuer)


class _Provider(OAuthClientProvider):
    """The SDK's provider, which also knows what an earlier worker had found out."""

    async def _initialize(self) -> None:
        await super()._initialize()
        storage = self.context.storage
        assert isinstance(storage, Storage)
        kept = storage.kept
        # Without these a token that has expired is used once more, and a refresh goes to an address that is guessed.
        if kept.expires_at is not None:
            self.context.token_expiry_time = kept.expires_at - SPARE_S
        self.context.oauth_metadata = _model(auth.OAuthMetadata, kept.metadata)
        self.context.protected_resource_metadata = _model(auth.ProtectedResourceMetadata, kept.resource)
        self.context.auth_server_url = kept.issuer


def _kept(document: str | None) -> _Kept:
    """What an earlier worker has kept. Nothing, where it cannot be read: then a person is asked again."""
    try:
        return msgspec.json.decode(document or "{}", type=_Kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Kept()


def _redirect_of(kept: _Kept) -> str | None:
    """The address that the kept client was registered with."""
    uris = (kept.client or {}).get("redirect_uris")
    return uris[0] if isinstance(uris, list) and uris and isinstance(uris[0], str) else None


def _plain(model: BaseModel | None) -> dict[str, Any] | None:
    return None if model is None else model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _model(kind: type[M], value: dict[str, Any] | None) -> M | None:
    try:
        return None if value is None else kind.model_validate(value)
    except ValidationError:
        return None
