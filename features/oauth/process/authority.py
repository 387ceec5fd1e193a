"""Carries out the broker's orders: tokens, logins, lists, revocations.

Rules.
- One thing at a time for each app and subject: an asker waits while a token is refreshed, and gets the new one.
- The beginning of a refresh is on disk before the request is sent (`rules.py`).
- A token is sent only to the server that it came from, and in answers to those who may have it. No log and no error
  contains it.
- A redirect is accepted once, if its state belongs to an open authorization and its issuer is right.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from shlex import quote
from typing import Any, Final
from weakref import WeakValueDictionary

from goondan.features.oauth import wire
from goondan.features.oauth.process import rules, vault
from goondan.features.oauth.process.http import Http, Redirects
from goondan.features.oauth.process.rules import Endpoints, Grant, Login, ServerRefused
from goondan.features.oauth.process.servers import LIFETIME_S, Pending, Register, Servers
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError, fail

#: How long the document of an issuer is used (seconds). Endpoints move seldom, and never without notice.
METADATA_S: Final = 3600.0
#: How long nothing is sent to a server after it has failed (seconds). So an agent in a loop does not load it.
FAILED_S: Final = 5.0
#: RFC 8628: this is added to the interval of a device code when the server asks for patience (seconds).
SLOWER_S: Final = 5.0
#: How long a device code is polled at most, whatever the server says (seconds).
MAX_DEVICE_S: Final = 1800.0
#: The longest pause between two polls of a device code (seconds).
MAX_INTERVAL_S: Final = 60.0

_SAID_YES: Final = "Thank you. The agent has what it asked for; this window can be closed."
_SAID_NO: Final = "It was not agreed to. This window can be closed."
_UNKNOWN: Final = "Nobody waits for this any more. Ask for a new address, and open that."
_WENT_WRONG: Final = "The server gave no token. Whoever waits for it is told why; this window can be closed."

log = logging.getLogger("oauth")


class Authority:
    """All tokens of one workspace.

    `open_vault` is called at the first order. It raises GoondanError when the key is not usable. `tell` is called with
    every agreement of a person. `clock` gives seconds since 1970.
    """

    def __init__(
        self,
        open_vault: Callable[[], vault.Vault],
        tell: Callable[[wire.GrantedNews], None],
        *,
        http: Http | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._open_vault = open_vault
        self._tell = tell
        self._http = http or Http()
        self._clock = clock
        self._vault: vault.Vault | None = None
        self._apps: dict[str, wire.OAuthAppSpec] = {}
        self._redirects = Redirects(self._arrived)
        self._register = Register()
        self._servers = Servers(lambda: self._held, clock)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._published: dict[str, tuple[float, wire.OAuthAppSpec, Endpoints]] = {}
        self._failures: dict[tuple[str, str], tuple[float, GoondanError]] = {}

    def serve(self, apps: dict[str, wire.OAuthAppSpec]) -> None:
        """Serve these apps from now on."""
        self._apps = apps
        for pending in self._register:
            if apps.get(pending.app.name) != pending.app:
                self._end(pending, fail("E_OAUTH_APP", f"OAuthApp/{pending.app.name} has changed meanwhile"))

    async def carry_out(self, order: wire.Order) -> Any:
        """Carry out an order, and return the payload of its `reply`. Raises GoondanError."""
        match order:
            case wire.TokenOrder():
                return await self._token(order)
            case wire.LoginOrder():
                return await self._login(order)
            case wire.WaitOrder():
                return await self._wait(order)
            case wire.RevokeOrder():
                return await self._revoke(order)
            case wire.ListOrder():
                return self._list()
            case wire.ServerOrder():
                return await self._servers.carry_out(order)

    async def close(self) -> None:
        """End everything that is under way."""
        for pending in self._register:
            self._end(pending, fail("E_OAUTH_UNAVAILABLE", "the process that holds tokens is ending"))
        self._redirects.close_all()
        self._servers.close()
        await self._http.close()

    # --- tokens

    async def _token(self, order: wire.TokenOrder) -> wire.TokenReady | wire.AuthorizationRequired:
        app = self._app(order.app)
        scopes = _asked_scopes(app, order.scopes)
        async with self._lock(app.name, order.subject):
            grant = self._held.load(app.name, order.subject)
            verdict = rules.judge(grant, app, scopes, self._clock())
            if verdict == "refresh" and grant is not None:
                try:
                    grant = await self._refresh(app, grant)
                except GoondanError:
                    if not rules.lives(grant, self._clock()):
                        raise
                verdict = rules.judge(grant, app, scopes, self._clock())
                if verdict == "refresh":  # it ends soon, but there is no better one
                    verdict = "use"
            elif verdict == "fetch":
                grant, verdict = await self._fetch(app, order.subject, scopes), "use"
            if verdict == "use" and grant is not None:
                return _ready(grant)
            reason = verdict.reason if isinstance(verdict, Login) else ""
            pending = await self._ask_person(
                app, order.subject, _with_held(app, grant, scopes), device=app.flow == "deviceCode"
            )
            pending.add_asker(order.agent, order.instance_key)
            return _required(pending, reason)

    async def _refresh(self, app: wire.OAuthAppSpec, grant: Grant) -> Grant:
        """The grant after a refresh: with a new token, or lost. Raises GoondanError when the outcome is not known."""
        key = (app.name, grant.subject)
        self._check_failures(key)
        interrupted = grant.refreshing_since is not None
        endpoint = await self._endpoint(app, "token")
        form = rules.refresh_form(grant.refresh_token or "")
        self._held.save(rules.begun(grant, self._clock()))
        with self._noting(app, key):
            try:
                tokens = await self._get_tokens(app, endpoint, form, grant.refresh_token, grant.access_token)
            except ServerRefused as refused:
                if refused.error != "invalid_grant":
                    raise
                log.warning("the refresh token of %s for %s is not accepted", app.name, visible_line(grant.subject))
                grant = rules.lost(grant, interrupted=interrupted)
            else:
                log.info("refreshed the token of %s for %s", app.name, visible_line(grant.subject))
                grant = rules.refreshed(grant, tokens, self._clock())
        self._held.save(grant)
        return grant

    async def _fetch(self, app: wire.OAuthAppSpec, subject: str, scopes: list[str]) -> Grant:
        """Get a token of the app itself."""
        key = (app.name, subject)
        self._check_failures(key)
        with self._noting(app, key):
            endpoint = await self._endpoint(app, "token")
            tokens = await self._get_tokens(app, endpoint, rules.credentials_form(scopes))
        grant = rules.granted(app, subject, tokens, scopes, self._clock())
        missing = [scope for scope in scopes if scope not in grant.scopes]
        if missing:
            raise self._note(key, fail("E_OAUTH_SCOPE", f"the server did not give {app.name}: {' '.join(missing)}"))
        self._held.save(grant)
        return grant

    async def _get_tokens(
        self, app: wire.OAuthAppSpec, endpoint: str, form: dict[str, str], *secrets: str | None
    ) -> rules.Tokens:
        """Ask the token endpoint. Raises ServerRefused, GoondanError E_OAUTH_SERVER."""
        methods = (await self._endpoints(app)).auth_methods
        form, headers = rules.with_client(app, form, methods)
        answer = await self._http.post(endpoint, form, headers)
        return rules.read_tokens(answer.status, answer.body, [app.client_secret, *secrets])

    # --- people

    async def _login(self, order: wire.LoginOrder) -> wire.AuthorizationRequired:
        if order.app.startswith(wire.SERVER_APP):
            url, until = self._servers.page(order.app)
            message = f"the MCP server wants you to log in: open {url} in a browser on this machine"
            return wire.AuthorizationRequired(url, message, [], wire.LOCAL_SUBJECT, until)
        app = self._app(order.app)
        if app.flow == "clientCredentials":
            message = f"OAuthApp/{app.name} has tokens of its own (flow: clientCredentials), to which nobody agrees"
            raise fail("E_OAUTH_APP", message, suggestion="There is nothing to do: agents get a token when they ask.")
        scopes = _asked_scopes(app, order.scopes)
        async with self._lock(app.name, order.subject):
            grant = self._held.load(app.name, order.subject)
            device = order.device or app.flow == "deviceCode"
            pending = await self._ask_person(app, order.subject, _with_held(app, grant, scopes), device=device)
            return _required(pending, "")

    async def _wait(self, order: wire.WaitOrder) -> dict[str, Any]:
        if order.app.startswith(wire.SERVER_APP):
            await self._servers.agreed(order.app)
            return {"status": "granted", "scopes": []}
        pending = self._register.find(order.app, order.subject)
        if pending is None:
            message = f"nobody is being asked for {order.app} by now"
            raise fail("E_OAUTH_UNAVAILABLE", message, suggestion="The process that asked has ended: begin anew.")
        return {"status": "granted", "scopes": await asyncio.shield(pending.outcome)}

    async def _ask_person(self, app: wire.OAuthAppSpec, subject: str, scopes: list[str], *, device: bool) -> Pending:
        """The open authorization for a person. All who ask meanwhile get the same one."""
        known = self._register.find(app.name, subject)
        if known is not None and known.serves(app, scopes, device=device, now=self._clock()):
            return known
        self._check_failures((app.name, subject))
        self._register.check_room()
        if known is not None and not known.over and known.app == app:
            scopes = [*scopes, *(scope for scope in known.scopes if scope not in scopes)]
        make = self._by_device if device else self._by_redirect
        pending = await make(app, subject, scopes)
        if known is not None:
            pending.askers |= known.askers
            self._end(known, fail("E_OAUTH_UNAVAILABLE", "another authorization has taken its place"))
        self._register.enter(pending)
        return pending

    async def _by_redirect(self, app: wire.OAuthAppSpec, subject: str, scopes: list[str]) -> Pending:
        endpoint = await self._endpoint(app, "authorization")
        await self._endpoint(app, "token")  # a missing endpoint is reported now, and not after the person has agreed
        redirect_uri = await self._redirects.open(app.redirect_uri)
        state, verifier = _unguessable(), _unguessable()
        pending = Pending(
            app,
            subject,
            scopes,
            url=rules.authorization_url(
                endpoint,
                client_id=app.client_id,
                redirect_uri=redirect_uri,
                scopes=scopes,
                state=state,
                challenge=rules.challenge_of(verifier),
            ),
            expires_at=self._clock() + LIFETIME_S,
            state=state,
            verifier=verifier,
            redirect_uri=redirect_uri,
        )
        pending.task = asyncio.create_task(self._expire(pending, LIFETIME_S))
        return pending

    async def _by_device(self, app: wire.OAuthAppSpec, subject: str, scopes: list[str]) -> Pending:
        endpoint = await self._endpoint(app, "device")
        token_endpoint = await self._endpoint(app, "token")
        methods = (await self._endpoints(app)).auth_methods
        form, headers = rules.with_client(app, rules.device_form(scopes), methods)
        with self._noting(app, (app.name, subject)):
            answer = await self._http.post(endpoint, form, headers)
            told = rules.read_device_code(answer.status, answer.body, [app.client_secret])
        pending = Pending(
            app,
            subject,
            scopes,
            url=told.page,
            expires_at=self._clock() + min(told.lifetime_s, MAX_DEVICE_S),
            user_code=told.user_code,
        )
        pending.task = asyncio.create_task(self._poll(pending, told, token_endpoint))
        return pending

    async def _expire(self, pending: Pending, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._end(pending, _too_late(pending))

    async def _poll(self, pending: Pending, told: rules.DeviceCode, endpoint: str) -> None:
        """Poll for the token of a device code, until it comes or the server refuses."""
        app, interval = pending.app, told.interval_s
        form = rules.device_token_form(told.device_code)
        until = asyncio.get_running_loop().time() + min(told.lifetime_s, MAX_DEVICE_S)
        while asyncio.get_running_loop().time() < until and not pending.over:
            await asyncio.sleep(interval)
            try:
                tokens = await self._get_tokens(app, endpoint, form, told.device_code)
            except ServerRefused as refused:
                if refused.error == "slow_down":
                    interval = min(MAX_INTERVAL_S, interval + SLOWER_S)
                elif refused.error != "authorization_pending":
                    self._end(pending, _refusal(app, refused))
            except GoondanError:  # the network failed: the next poll may succeed
                interval = min(MAX_INTERVAL_S, 2 * interval)
            else:
                with suppress(GoondanError):  # the authorization ends with this error
                    await self._agreed(pending, tokens)
        self._end(pending, _too_late(pending))

    async def _arrived(self, parameters: dict[str, str]) -> tuple[bool, str]:
        """Handle a redirect. Returns what to tell the person."""
        pending = self._register.take_state(parameters.get("state", ""))
        if pending is None:
            return False, _UNKNOWN
        app = pending.app
        try:
            endpoints = await self._endpoints(app)
            issuer = parameters.get("iss")
            if app.issuer is not None and (issuer != app.issuer if issuer is not None else endpoints.says_issuer):
                raise fail("E_OAUTH_SERVER", f"the redirect is not from {app.issuer}")
            if "error" in parameters:
                told = (rules.shown(parameters.get(name, "")) for name in ("error", "error_description"))
                raise _refusal(app, ServerRefused(*told))
            code = parameters.get("code", "")
            if not code:
                raise fail("E_OAUTH_SERVER", "the redirect brought no code")
            form = rules.code_form(code, pending.redirect_uri, pending.verifier)
            endpoint = await self._endpoint(app, "token")
            tokens = await self._get_tokens(app, endpoint, form, code, pending.verifier)
            await self._agreed(pending, tokens)
        except ServerRefused as refused:
            self._end(pending, _refusal(app, refused))
            return False, _WENT_WRONG
        except GoondanError as error:
            self._end(pending, error)
            return False, _SAID_NO if parameters.get("error") == "access_denied" else _WENT_WRONG
        return True, _SAID_YES

    async def _agreed(self, pending: Pending, tokens: rules.Tokens) -> None:
        """Store the new grant, and report it. Raises GoondanError when it cannot be stored."""
        app = pending.app
        async with self._lock(*pending.key):
            if pending.over:  # another authorization has replaced it, or the app has changed
                return
            grant = rules.granted(app, pending.subject, tokens, pending.scopes, self._clock())
            try:
                self._held.save(grant)
            except GoondanError as error:
                self._end(pending, error)
                raise
        self._failures.pop(pending.key, None)
        log.info("%s has agreed to %s: %s", visible_line(pending.subject), app.name, " ".join(grant.scopes))
        pending.agreed(grant.scopes)
        self._over(pending)
        self._tell(wire.GrantedNews(app.name, pending.subject, grant.scopes, sorted(pending.askers)))

    def _end(self, pending: Pending, error: GoondanError) -> None:
        """End an authorization without a token, if it has not ended yet."""
        if not pending.over:
            pending.failed(error)
            self._over(pending)

    def _over(self, pending: Pending) -> None:
        if pending.task is not None and pending.task is not asyncio.current_task():
            pending.task.cancel()
        if pending.user_code is None and not self._register.listening(pending.app.redirect_uri):
            # Not at once: the browser that brought the redirect first gets its page.
            asyncio.get_running_loop().call_later(1.0, self._stop_listening, pending.app.redirect_uri)

    def _stop_listening(self, redirect_uri: str | None) -> None:
        if not self._register.listening(redirect_uri):
            self._redirects.close(redirect_uri)

    # --- what operators ask

    def _list(self) -> dict[str, Any]:
        now, rows = self._clock(), []
        for grant in self._held.all():
            verdict = self._judged(grant, now)
            rows.append(
                {
                    "app": grant.app,
                    "subject": grant.subject,
                    "status": "login_required" if isinstance(verdict, Login) else "ready",
                    "scopes": grant.scopes,
                    "expiresAt": _when(grant.expires_at),
                    "refreshable": grant.refresh_token is not None,
                    "reason": verdict.reason if isinstance(verdict, Login) else None,
                }
            )
        waiting = [
            {
                "app": one.app.name,
                "subject": one.subject,
                "scopes": one.scopes,
                "authorizationUrl": one.url,
                "userCode": one.user_code,
                "expiresAt": _when(one.expires_at),
            }
            for one in self._register
            if not one.over
        ]
        return {"grants": rows, "waiting": [*waiting, *self._servers.waiting()], "apps": sorted(self._apps)}

    def _judged(self, grant: Grant, now: float) -> rules.Verdict:
        if grant.document is not None:
            return "use"  # what is in it is between the server and its worker
        app = self._apps.get(grant.app)
        if app is None:
            return Login("the bundle has no such OAuthApp any more")
        return rules.judge(grant, app, grant.scopes, now)

    async def _revoke(self, order: wire.RevokeOrder) -> dict[str, Any]:
        """Forget the tokens here in any case, and report what the server answered."""
        self._servers.forget(order.app)
        async with self._lock(order.app, order.subject):
            pending = self._register.find(order.app, order.subject)
            if pending is not None:
                self._end(pending, fail("E_OAUTH_UNAVAILABLE", "it was revoked meanwhile"))
            grant = self._held.load(order.app, order.subject)
            if grant is None:
                return {"revoked": False, "server": None}
            server = await self._revoke_there(grant)
            self._held.drop(order.app, order.subject)
            log.info("revoked %s for %s: %s", order.app, visible_line(order.subject), server)
            return {"revoked": True, "server": server}

    async def _revoke_there(self, grant: Grant) -> str:
        if grant.document is not None:
            return "not asked: revoke it in your account there"
        app = self._apps.get(grant.app)
        if app is None or (grant.server, grant.client_id) != (rules.server_of(app), app.client_id):
            return "not asked: the bundle does not name it any more"
        tokens = {"refresh_token": grant.refresh_token, "access_token": grant.access_token}
        try:
            endpoints = await self._endpoints(app)
            if endpoints.revocation is None:
                return "not asked: it has no endpoint for that"
            for kind, token in tokens.items():
                if token:
                    form, headers = rules.with_client(app, rules.revocation_form(token, kind), endpoints.auth_methods)
                    answer = await self._http.post(endpoints.revocation, form, headers)
                    if answer.status != 200:
                        return f"failed: it answered with status {answer.status}"
        except GoondanError as error:
            return f"failed: {error.info.message}"
        return "revoked"

    # --- inside

    @property
    def _held(self) -> vault.Vault:
        if self._vault is None:
            self._vault = self._open_vault()
        return self._vault

    def _lock(self, app: str, subject: str) -> asyncio.Lock:
        return self._locks.setdefault((app, subject), asyncio.Lock())

    def _app(self, name: str) -> wire.OAuthAppSpec:
        app = self._apps.get(name)
        if app is None:
            raise fail("E_OAUTH_APP", f"the bundle has no OAuthApp {name[:100]!r}")
        if app.fault is not None:
            raise fail("E_OAUTH_APP", f"OAuthApp/{name} cannot be used: {app.fault}")
        return app

    async def _endpoint(self, app: wire.OAuthAppSpec, name: str) -> str:
        """The URL of an endpoint: `authorization`, `token` or `device`. Raises GoondanError."""
        found: str | None = getattr(await self._endpoints(app), name)
        if found is None:
            field = {"device": "deviceAuthorizationUrl"}.get(name, f"{name}Url")
            message = f"OAuthApp/{app.name} does not say where its {name} endpoint is"
            raise fail("E_OAUTH_APP", message, suggestion=f"Add {field}, or the issuer if that publishes it.")
        return found

    async def _endpoints(self, app: wire.OAuthAppSpec) -> Endpoints:
        """The endpoints from the app's document and from the document of its issuer."""
        if app.issuer is None:
            return rules.own_endpoints(app)
        known = self._published.get(app.name)
        now = asyncio.get_running_loop().time()
        if known is not None and known[1] == app and now < known[0]:
            return known[2]
        status = 0
        for url in rules.document_urls(app.issuer):
            answer = await self._http.get(url)
            if answer.status == 200:
                found = rules.read_document(app, answer.body)
                self._published[app.name] = (now + METADATA_S, app, found)
                return found
            status = answer.status
        raise fail("E_OAUTH_SERVER", f"{app.issuer} publishes no metadata (status {status})")

    def _check_failures(self, key: tuple[str, str]) -> None:
        known = self._failures.get(key)
        if known is not None:
            if asyncio.get_running_loop().time() < known[0]:
                raise known[1]
            del self._failures[key]

    @contextmanager
    def _noting(self, app: wire.OAuthAppSpec, key: tuple[str, str]) -> Iterator[None]:
        """Record a failure of the server in this context. Raises GoondanError in place of ServerRefused."""
        try:
            yield
        except ServerRefused as refused:
            raise self._note(key, _refusal(app, refused)) from None
        except GoondanError as error:
            raise self._note(key, error) from None

    def _note(self, key: tuple[str, str], error: GoondanError) -> GoondanError:
        """Record that a server has failed: for a moment it is not asked again."""
        self._failures[key] = (asyncio.get_running_loop().time() + FAILED_S, error)
        log.warning("%s: %s", key[0], error.info.message)
        return error


def _asked_scopes(app: wire.OAuthAppSpec, scopes: list[str] | None) -> list[str]:
    """The requested scopes, each once. Raises GoondanError E_OAUTH_SCOPE for a scope that the app does not name."""
    if scopes is None:
        return list(dict.fromkeys(app.scopes))
    other = [scope for scope in scopes if scope not in app.scopes]
    if other:
        message = f"OAuthApp/{app.name} does not name these scopes: {visible_line(' '.join(other))[:200]}"
        raise fail("E_OAUTH_SCOPE", message)
    return list(dict.fromkeys(scopes))


def _with_held(app: wire.OAuthAppSpec, grant: Grant | None, scopes: Iterable[str]) -> list[str]:
    """The scopes that a person is asked for: the requested ones, and those agreed to before that the app still
    names.
    """
    held = [] if grant is None else [scope for scope in grant.scopes if scope in app.scopes]
    return list(dict.fromkeys([*scopes, *held]))


def _ready(grant: Grant) -> wire.TokenReady:
    return wire.TokenReady(
        access_token=grant.access_token,
        token_type=grant.token_type,
        scopes=grant.scopes,
        subject=grant.subject,
        expires_at=_when(grant.expires_at),
    )


def _required(pending: Pending, reason: str) -> wire.AuthorizationRequired:
    command = f"gdn auth login {pending.app.name} --subject {quote(pending.subject)}"
    if pending.user_code is not None:
        how = f"open {pending.url} and give the code {pending.user_code}"
    else:
        how = f"open {pending.url} in a browser on this machine"
    because = f" ({reason})" if reason else ""
    return wire.AuthorizationRequired(
        authorization_url=pending.url,
        message=f"{pending.subject} has to agree to {pending.app.name}{because}: {how}, or run `{command}`",
        scopes=pending.scopes,
        subject=pending.subject,
        expires_at=_when(pending.expires_at) or "",
        user_code=pending.user_code,
    )


def _refusal(app: wire.OAuthAppSpec, refused: ServerRefused) -> GoondanError:
    return fail("E_OAUTH_REFUSED", f"the server refuses {app.name}: {refused}")


def _too_late(pending: Pending) -> GoondanError:
    return fail("E_OAUTH_REFUSED", f"nobody has agreed to {pending.app.name} in time")


def _unguessable() -> str:
    """43 characters of 256 random bits."""
    return base64.urlsafe_b64encode(os.urandom(32)).rstrip(b"=").decode("ascii")


def _when(at: float | None) -> str | None:
    return None if at is None else rfc3339_seconds(at)
