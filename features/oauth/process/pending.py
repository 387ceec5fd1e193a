"""Open authorizations: one for each app and subject, from the first request to its outcome.

They are only in memory. When the process ends, they are lost. The next request for a token then asks the person again.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from goondan.features.oauth.wire import OAuthAppSpec
from goondan.schemas.wire.errors import GoondanError, fail

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
