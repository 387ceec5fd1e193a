"""How long the model of a turn works and waits, and whether the turn makes progress. Pure; the time is an argument.

A turn may last as long as it likes. It is ended when a model is asked and sends nothing: no text, no arguments, no
thinking. Data that a server sends only to keep a connection alive does not count.

Only the time of a model at work counts. A tool call has a deadline of its own, which includes everything that it waits
for (a callee, a place, a permit). Extensions are trusted code, and may wait for a person. Between two tries nobody is
asked, so that time does not count. The next try continues the count of the one before, so retries do not give a server
more time.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from goondan.agentproc.providers.base import FailedTry, ModelNews
from goondan.schemas.traces.turn_notes import MAX_NOTED_MESSAGE, MAX_TRIES, TryDetail
from goondan.schemas.wire import errors, frames

#: A person is told when a model has sent nothing for so long (seconds), and again after so long: shorter waits nobody
#: notices, and what was told may be lost.
NOTICE_S: Final = 2.0
NOTICE_AGAIN_S: Final = 10.0


class StallClock:
    """How long the model of one turn has sent nothing. Times are seconds on any clock that never goes back."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._quiet_s = 0.0  # without content, up to `_counted_to`
        self._counted_to: float | None = None  # None: nobody is asked now
        self._last: float | None = None  # of the last content, or of the beginning
        self._told = -1.0  # when a person was told

    def begin(self, now: float) -> None:
        """A model call begins."""
        self._quiet_s, self._counted_to, self._last = 0.0, now, now

    def asking(self, now: float) -> None:
        """A try goes out."""
        if self._counted_to is None and self._last is not None:
            self._counted_to = now

    def waiting(self, now: float) -> None:
        """No try is out."""
        if self._counted_to is not None:
            self._quiet_s += now - self._counted_to
            self._counted_to = None

    def content(self, now: float) -> None:
        """The model has sent more."""
        if self._last is not None:
            self._quiet_s, self._counted_to, self._last = 0.0, now, now

    def end(self) -> None:
        """The model call is over."""
        self._counted_to = self._last = None

    @property
    def due(self) -> float | None:
        """The time at which the turn stalls if nothing happens before; None while nobody is asked."""
        return None if self._counted_to is None else self._counted_to + self.limit_s - self._quiet_s

    @property
    def look_at(self) -> float | None:
        """When to look: the turn has stalled then, or a person is to be told. None while nobody is asked."""
        due, last, counted_to = self.due, self._last, self._counted_to
        if due is None or last is None or counted_to is None:
            return None
        since = max(last, counted_to)  # of a later try from its beginning on
        return min(due, since + NOTICE_S if self._told < since else self._told + NOTICE_AGAIN_S)

    def notice(self, now: float) -> float | None:
        """How long the model has sent nothing (seconds), if a person is to be told now. It counts as told."""
        look_at = self.look_at
        if self._last is None or look_at is None or now < look_at:
            return None
        self._told = now
        return now - self._last

    def silent_since(self, now: float) -> float | None:
        """The time of the last content, or of the beginning, if the turn has stalled; otherwise None."""
        return self._last if self.due is not None and self.due <= now else None


def stalled(model: str, step: int, silence_s: float, limit_s: float, at: str) -> frames.ErrorPayload:
    """The error of a turn that has stalled. `at` is the time now (RFC 3339 in UTC). `silence_s` is the time since the
    model last sent something, or since it was asked.
    """
    since = datetime.fromisoformat(at) - timedelta(seconds=silence_s)
    return errors.error_payload(
        "E_TURN_STALLED",
        f"the turn made no progress for {limit_s:g} s: step {step} waited for the model {model}, which has sent no "
        f"content since {since.strftime('%Y-%m-%dT%H:%M:%SZ')}",
    )


class ModelAttempts(Struct):
    """How often a model was asked for one answer, how long no request ran in between, and how long it waited for others
    (seconds).
    """

    #: How often it was asked.
    count: int = 0
    #: How long no request ran in between.
    paused_s: float = 0.0
    #: How long it waited for others.
    waited_s: float = 0.0
    #: The tries that failed and were followed by another one, the first MAX_TRIES of them.
    tries: list[TryDetail] = []
    #: The last news but content.
    last: ModelNews | None = None
    #: Since when no request runs.
    since: float | None = None

    def hear(self, news: ModelNews, now: float) -> None:
        """Count the provider's news at `now` (seconds)."""
        if isinstance(news, FailedTry):
            if len(self.tries) < MAX_TRIES:
                self.tries.append(
                    TryDetail(errors.cut_message(news.error, MAX_NOTED_MESSAGE), round(news.wait_s * 1000))
                )
            return
        if news == "held":
            self.last = news
            return
        if self.since is not None:
            if self.last == "queued":
                self.waited_s += now - self.since
            else:
                self.paused_s += now - self.since
        if news == "asking":
            self.count += 1
        self.since = None if news == "asking" else now
        self.last = news
