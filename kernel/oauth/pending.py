"""People who are being asked: one authorization for each app and subject, from the first question to its outcome.

Nothing of it is on disk. A process that ends takes it along; who asks for a token after that is told to ask the person
anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

from schemas.errors import GoondanError, fail
from schemas.oauth import OAuthAppSpec

#: Authorizations that are not over; more are refused. Each is a person who was asked.
MAX_PENDING: Final = 256
#: Agent instances that hear of one outcome; later ones ask again anyway.
MAX_ASKERS: Final = 1024
#: How long a person has to agree to a redirect (seconds).
LIFETIME_S: Final = 600.0
#: When less time is left than this, an asker gets a new request (seconds): a person needs a while.
SPARE_S: Final = 60.0


class Pending:
    """One authorization. Times are seconds since 1970.

    `outcome` has the scopes that were agreed to, or raises why there are none. `state` and `verifier` belong to a
    redirect, `user_code` to a device code; what they have in common is the page to open, `url`.
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
        self.app = app
        self.subject = subject
        self.scopes = scopes
        self.url = url
        self.expires_at = expires_at
        self.state = state
        self.verifier = verifier
        self.redirect_uri = redirect_uri
        self.user_code = user_code
        self.askers: set[tuple[str, str]] = set()
        #: The part of it that runs by itself: the polling of a device code, or the end of its time.
        self.task: asyncio.Task[None] | None = None
        self.outcome: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(_looked_at)

    def __repr__(self) -> str:
        """As in a log or a traceback: without state and verifier."""
        return f"Pending(app={self.app.name!r}, subject={self.subject!r}, scopes={self.scopes!r})"

    @property
    def key(self) -> tuple[str, str]:
        """The app and the subject."""
        return self.app.name, self.subject

    @property
    def over(self) -> bool:
        """Whether it has its outcome."""
        return self.outcome.done()

    def serves(self, app: OAuthAppSpec, scopes: Iterable[str], *, device: bool, now: float) -> bool:
        """Whether somebody who asks for these scopes now can be sent to the same page."""
        return (
            not self.over
            and self.app == app
            and (self.user_code is not None) == device
            and set(scopes) <= set(self.scopes)
            and now + SPARE_S < self.expires_at
        )

    def add_asker(self, agent: str, instance_key: str) -> None:
        """This instance waits for the outcome."""
        if len(self.askers) < MAX_ASKERS:
            self.askers.add((agent, instance_key))

    def agreed(self, scopes: list[str]) -> None:
        """It ends well."""
        if not self.over:
            self.outcome.set_result(scopes)

    def failed(self, error: GoondanError) -> None:
        """It ends without a token."""
        if not self.over:
            self.outcome.set_exception(error)


class Register:
    """All of them, the last one of each app and subject."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Pending] = {}

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._by_key.values()))

    def find(self, app: str, subject: str) -> Pending | None:
        """The last one, also when it is over."""
        return self._by_key.get((app, subject))

    def check_room(self) -> None:
        """Raises GoondanError E_OVERLOADED when too many people are being asked."""
        if sum(not one.over for one in self) >= MAX_PENDING:
            raise fail("E_OVERLOADED", f"{MAX_PENDING} people are being asked for their agreement already")

    def enter(self, pending: Pending) -> None:
        """The one of its app and subject from now on. Those that are over go where there are many."""
        if len(self._by_key) >= 2 * MAX_PENDING:
            for one in self:
                if one.over:
                    del self._by_key[one.key]
        self._by_key[pending.key] = pending

    def take_state(self, state: str) -> Pending | None:
        """The open one with this state, which counts once; None when there is none."""
        import hmac

        found = None
        for one in self:
            known = one.state
            if known is not None and hmac.compare_digest(known.encode(), state.encode("utf-8", "replace")):
                found = one
        if found is None or found.over:
            return None
        found.state = None
        return found

    def listening(self, redirect_uri: str | None) -> bool:
        """Whether anybody still waits for a redirect that an app with this redirectUri asked for."""
        return any(not one.over and one.user_code is None and one.app.redirect_uri == redirect_uri for one in self)


def _looked_at(outcome: asyncio.Future[list[str]]) -> None:
    """An outcome that nobody waits for is no mistake."""
    if not outcome.cancelled():
        outcome.exception()
