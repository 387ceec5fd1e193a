"""Tokens of MCP servers that are reached over HTTP: kept for their workers, and the person's part of a login.

The worker of a server speaks OAuth with that server and keeps nothing (features/mcp/jail/). Its document is here,
encrypted like every grant, and is given for the endpoint that it was saved for and for no other. The worker has no
browser: a person is sent to its page from here, and what the browser brings back goes to the worker.

A page is named by a hostile server. So it must be https or on this machine, must have a state that nobody guesses, and
must send the browser back to the address that was opened for this very server.

Open authorizations, also those of apps (authority.py), are only in memory: one for each app and subject, from the first
request to its outcome. When the process ends, they are lost. The next request for a token then asks the person again.

Source: docs/oauth.md; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from goondan.features.oauth.process import http, rules
from goondan.features.oauth.process.vault import Vault
from goondan.features.oauth.wire import LOCAL_SUBJECT, SERVER_APP, OAuthAppSpec, ServerOrder
from goondan.schemas.models.origins import origin_of
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerReply, is_redirect

# --- what is under way ------------------------------------------------------------------------------------------------


#: The most open authorizations. More are refused. Each stands for a person who was asked.
MAX_PENDING: Final = 256
#: The most agent instances that are told one outcome. Later ones ask again anyway.
MAX_ASKERS: Final = 1024
#: How long a person has to agree to a redirect (seconds).
LIFETIME_S: Final = 600.0
#: When less time is left than this, an asker gets a new authorization (seconds), because a person needs a while.
SPARE_S: Final = 60.0


_T = TypeVar("_T")


class Asked(Generic[_T]):
    """A person was sent to a page, `url`. `outcome` has what came of it, or raises why nothing did. `state` is the
    unguessable part of a redirect that belongs to it; None: it has been taken, or there is none. `expires_at`: seconds
    since 1970.
    """

    def __init__(self, url: str, expires_at: float, state: str | None) -> None:
        self.url = url
        self.expires_at = expires_at
        self.state = state
        self.outcome: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(_looked_at)

    @property
    def over(self) -> bool:
        """Whether there is an outcome."""
        return self.outcome.done()

    def agreed(self, brought: _T) -> None:
        """The person has agreed."""
        if not self.over:
            self.outcome.set_result(brought)

    def failed(self, error: GoondanError) -> None:
        """It ends without what was asked for."""
        if not self.over:
            self.outcome.set_exception(error)


_Any = TypeVar("_Any", bound=Asked[Any])


def with_state(asked: Iterable[_Any], state: str) -> _Any | None:
    """The open one with this state. All are compared, each in the same time."""
    found = None
    for one in asked:
        if one.state is not None and hmac.compare_digest(
            one.state.encode("utf-8", "replace"), state.encode("utf-8", "replace")
        ):
            found = one
    return None if found is None or found.over else found


def _looked_at(outcome: asyncio.Future[Any]) -> None:
    """Mark the exception of an outcome as seen. An outcome that nobody waits for is no fault."""
    if not outcome.cancelled():
        outcome.exception()


class Pending(Asked[list[str]]):
    """One authorization. Its outcome are the scopes that were agreed to. `state` and `verifier` belong to a redirect,
    `user_code` to a device code.
    """

    def __init__(
        self,
        app: OAuthAppSpec,
        subject: str,
        scopes: list[str],
        *,
        url: str,
        expires_at: float,
        state: str | None = None,
        verifier: str = "",
        redirect_uri: str = "",
        user_code: str | None = None,
    ) -> None:
        super().__init__(url, expires_at, state)
        self.app = app
        self.subject = subject
        self.scopes = scopes
        self.verifier = verifier
        self.redirect_uri = redirect_uri
        self.user_code = user_code
        self.askers: set[tuple[str, str]] = set()
        #: The task of the authorization: it polls a device code, or waits for the end of the time.
        self.task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without state and verifier."""
        return f"Pending(app={self.app.name!r}, subject={self.subject!r}, scopes={self.scopes!r})"

    @property
    def key(self) -> tuple[str, str]:
        """The app and the subject."""
        return self.app.name, self.subject

    def serves(self, app: OAuthAppSpec, scopes: Iterable[str], *, device: bool, now: float) -> bool:
        """Whether a new asker for these scopes can be sent to the same page."""
        return (
            not self.over
            and self.app == app
            and (self.user_code is not None) == device
            and set(scopes) <= set(self.scopes)
            and now + SPARE_S < self.expires_at
        )

    def add_asker(self, agent: str, instance_key: str) -> None:
        """Add an instance that waits for the outcome."""
        if len(self.askers) < MAX_ASKERS:
            self.askers.add((agent, instance_key))


class Register:
    """The last authorization of each app and subject."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Pending] = {}

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._by_key.values()))

    def find(self, app: str, subject: str) -> Pending | None:
        """The last authorization, also when it is over."""
        return self._by_key.get((app, subject))

    def check_room(self) -> None:
        """Check that there is room. Raises GoondanError E_OVERLOADED when too many people are being asked."""
        if sum(not one.over for one in self) >= MAX_PENDING:
            raise fail("E_OVERLOADED", f"{MAX_PENDING} people are being asked for their agreement already")

    def enter(self, pending: Pending) -> None:
        """Make this the last authorization of its app and subject. When there are many, those that are over are
        dropped.
        """
        if len(self._by_key) >= 2 * MAX_PENDING:
            for one in self:
                if one.over:
                    del self._by_key[one.key]
        self._by_key[pending.key] = pending

    def take_state(self, state: str) -> Pending | None:
        """The open authorization with this state. None when there is none. A state is accepted once."""
        found = with_state(self, state)
        if found is not None:
            found.state = None
        return found

    def listening(self, redirect_uri: str | None) -> bool:
        """Whether an open authorization waits for a redirect to this redirectUri."""
        return any(not one.over and one.user_code is None and one.app.redirect_uri == redirect_uri for one in self)


#: Characters of a state: fewer could be guessed by a program of another user of this machine.
MIN_STATE: Final = 16
MAX_STATE: Final = 1024
#: Characters of a code, and of an issuer.
MAX_CODE: Final = 8192

_SAID_YES: Final = "Thank you. What the server gave is being checked now; this window can be closed."
_SAID_NO: Final = "It was not agreed to. This window can be closed."
_UNKNOWN: Final = "Nobody waits for this any more. Ask for a new address, and open that."

#: How long a listener stays after its redirect came (seconds): the browser gets its page, and may ask for an icon.
LEAVE_S: Final = 1.0

#: A server and its endpoint.
_Key = tuple[str, str]


class _Login(Asked[dict[str, str]]):
    """A person was sent to a page of a server's. Its outcome is what the browser brought."""

    def __init__(self, key: _Key, url: str, state: str, expires_at: float) -> None:
        super().__init__(url, expires_at, state)
        self.key = key
        self.timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """As in a log or a traceback: without the page, which has the state in it."""
        return f"_Login(key={self.key!r})"


class Servers:
    """The MCP servers of one workspace. `vault` opens what is on disk; `clock` gives seconds since 1970."""

    def __init__(self, vault: Callable[[], Vault], clock: Callable[[], float]) -> None:
        self._vault = vault
        self._clock = clock
        self._redirects = http.Redirects(self._arrived)
        #: The address that is open for each server, and the name by which `Redirects` knows it.
        self._addresses: dict[_Key, tuple[str, str | None]] = {}
        self._asked: dict[_Key, _Login] = {}

    async def carry_out(self, order: ServerOrder) -> ServerReply:
        """Raises GoondanError."""
        key = (order.server, order.endpoint)
        match order.op:
            case "load":
                return ServerReply(document=self._load(key))
            case "save":
                self._save(key, order.document)
                return ServerReply()
            case "redirect":
                return ServerReply(redirect_uri=await self._redirect(key, order.url))
            case "authorize":
                return self._authorize(key, order.url or "")
            case "wait":
                return await self._wait(key)

    def waiting(self) -> list[dict[str, Any]]:
        """Who is being asked, for `gdn auth list`."""
        return [
            {
                "app": SERVER_APP + asked.key[0],
                "subject": LOCAL_SUBJECT,
                "scopes": [],
                "authorizationUrl": asked.url,
                "userCode": None,
                "expiresAt": rfc3339_seconds(asked.expires_at),
            }
            for asked in self._asked.values()
            if not asked.over
        ]

    def page(self, app: str) -> tuple[str, str]:
        """The page that a person is asked to open for `mcp:PREFIX`, and until when. Raises GoondanError E_OAUTH_APP."""
        found = self._of(app)
        if found is None:
            message = f"{app} asks nobody at the moment"
            suggestion = "A server asks when an agent connects to it: start a turn of an agent that has it."
            raise fail("E_OAUTH_APP", message, suggestion=suggestion)
        return found.url, rfc3339_seconds(found.expires_at)

    async def agreed(self, app: str) -> None:
        """Wait until the person has come back. Raises GoondanError."""
        found = self._of(app)
        if found is None:
            raise fail("E_OAUTH_UNAVAILABLE", f"nobody is being asked for {app} by now")
        await asyncio.shield(found.outcome)

    def forget(self, app: str) -> None:
        """The tokens of this server were revoked: whoever is being asked need not answer."""
        found = self._of(app)
        if found is not None:
            self._end(found, fail("E_OAUTH_UNAVAILABLE", "it was revoked meanwhile"))

    def close(self) -> None:
        """End everything that is under way."""
        for asked in list(self._asked.values()):
            self._end(asked, fail("E_OAUTH_UNAVAILABLE", "the process that holds tokens is ending"))
        self._redirects.close_all()

    # --- inside

    def _load(self, key: _Key) -> str | None:
        grant = self._vault().load(SERVER_APP + key[0], LOCAL_SUBJECT)
        return None if grant is None or grant.server != key[1] else grant.document

    def _save(self, key: _Key, document: str | None) -> None:
        app = SERVER_APP + key[0]
        if document is None:
            self._vault().drop(app, LOCAL_SUBJECT)
            return
        if len(document.encode("utf-8", "surrogatepass")) > MAX_DOCUMENT:
            raise fail("E_OAUTH_SERVER", f"the tokens of {app} take more than {MAX_DOCUMENT} bytes")
        self._vault().save(
            rules.Grant(
                app=app,
                subject=LOCAL_SUBJECT,
                server=key[1],
                client_id="",
                obtained_at=self._clock(),
                document=document,
            )
        )

    async def _redirect(self, key: _Key, before: str | None) -> str:
        """The address for this server. The one that its client was registered with is taken where it is free."""
        asyncio.get_running_loop().call_later(LIFETIME_S, self._leave, key)
        known = self._addresses.get(key)
        if known is not None and (before is None or before == known[0]):
            return known[0]
        if len(self._addresses) >= MAX_PENDING and key not in self._addresses:
            raise fail("E_OVERLOADED", f"{MAX_PENDING} servers have addresses for redirects already")
        if before is not None and is_redirect(before) and urlsplit(before).port is not None:
            with suppress(GoondanError):  # the port is somebody else's by now
                opened = await self._redirects.open(before)
                self._addresses[key] = (opened, before)
                return opened
        opened = await self._redirects.open(None)
        self._addresses[key] = (opened, None)
        return opened

    def _authorize(self, key: _Key, url: str) -> ServerReply:
        state = self._checked_page(key, url)
        before = self._asked.pop(key, None)
        if before is not None:
            self._end(before, fail("E_OAUTH_UNAVAILABLE", "another authorization has taken its place"))
        if len(self._asked) >= MAX_PENDING:
            raise fail("E_OVERLOADED", f"{MAX_PENDING} people are being asked for their agreement already")
        asked = self._asked[key] = _Login(key, url, state, self._clock() + LIFETIME_S)
        late = fail("E_OAUTH_REFUSED", f"nobody has agreed to {SERVER_APP}{key[0]} in time")
        asked.timer = asyncio.get_running_loop().call_later(LIFETIME_S, self._end, asked, late)
        # Without the page: what is said here goes to an agent and its log, and the page has the state in it.
        message = (
            f"the MCP server {key[0]} ({key[1]}) wants you to log in at {origin_of(url)}: "
            f"`gdn auth login {SERVER_APP}{key[0]}` shows the page"
        )
        return ServerReply(message=message, expires_at=rfc3339_seconds(asked.expires_at))

    def _checked_page(self, key: _Key, url: str) -> str:
        """The state of a page that a person may be sent to. Raises GoondanError E_OAUTH_SERVER."""
        if not rules.is_page(url):
            raise fail("E_OAUTH_SERVER", f"the MCP server {key[0]} names a login page that is none")
        asked = parse_qs(urlsplit(url).query, keep_blank_values=True)
        states, addresses = asked.get("state", []), asked.get("redirect_uri", [])
        known = self._addresses.get(key)
        if known is None or addresses != [known[0]]:
            raise fail("E_OAUTH_SERVER", f"the login page of the MCP server {key[0]} does not lead back here")
        if len(states) != 1 or not MIN_STATE <= len(states[0]) <= MAX_STATE:
            raise fail("E_OAUTH_SERVER", f"the login page of the MCP server {key[0]} has no state")
        return states[0]

    async def _wait(self, key: _Key) -> ServerReply:
        asked = self._asked.get(key)
        if asked is None:
            raise fail("E_OAUTH_UNAVAILABLE", f"nobody is being asked for {SERVER_APP}{key[0]} by now")
        brought = await asyncio.shield(asked.outcome)
        if self._asked.get(key) is asked:  # a code counts once, and so does who takes it
            del self._asked[key]
        return ServerReply(code=brought["code"], state=asked.state, issuer=brought.get("iss"))

    async def _arrived(self, parameters: dict[str, str]) -> tuple[bool, str]:
        """A redirect: what to tell the person."""
        found = with_state(self._asked.values(), parameters.get("state", ""))
        if found is None:
            return False, _UNKNOWN
        name = SERVER_APP + found.key[0]
        if "error" in parameters:
            told = ": ".join(rules.shown(parameters[part]) for part in _SAID if parameters.get(part))
            self._end(found, fail("E_OAUTH_REFUSED", f"the server refuses {name}: {told}"))
            return False, _SAID_NO
        code, issuer = parameters.get("code", ""), parameters.get("iss", "")
        if not 0 < len(code) <= MAX_CODE or len(issuer) > MAX_CODE:
            self._end(found, fail("E_OAUTH_SERVER", f"the redirect of {name} brought no code"))
            return False, _UNKNOWN
        found.agreed({"code": code} | ({"iss": issuer} if "iss" in parameters else {}))
        self._settled(found)
        return True, _SAID_YES

    def _of(self, app: str) -> _Login | None:
        """Who is being asked for `mcp:PREFIX`."""
        return next((asked for asked in self._asked.values() if SERVER_APP + asked.key[0] == app), None)

    def _end(self, asked: _Login, error: GoondanError) -> None:
        asked.failed(error)
        self._settled(asked)

    def _settled(self, asked: _Login) -> None:
        if asked.timer is not None:
            asked.timer.cancel()
            asked.timer = None
            asyncio.get_running_loop().call_later(LEAVE_S, self._leave, asked.key)

    def _leave(self, key: _Key) -> None:
        """Listen no more for this server, unless somebody is asked."""
        asked = self._asked.get(key)
        if key not in self._addresses or (asked is not None and not asked.over):
            return
        _, name = self._addresses.pop(key)
        if all(other != name for _, other in self._addresses.values()):
            self._redirects.close(name)


_SAID: Final = ("error", "error_description")
