"""One gate: the requests of all agents to one server with one key. Pure; times are seconds on the broker's clock.

An agent asks, waits in the queue, and gets a permit, which it gives back when its request is over. While nothing limits
a gate, nobody asks at all. What limits it is written in the Model, was learned from refusals, or was said by the
server with an answer.

The queue is in the order of asking, with one turn for each tree of agents. A tree that waits gets a turn when its first
ask began to wait. After each turn it goes behind all trees that wait now. So a tree with one ask at a time is served in
the order of asking, and one with a thousand holds nobody up.

What a server allows is learned from its refusals. A refusal does not say whether too many requests ran at once or too
many came in a minute, nor how long such a minute is. So both are estimated, and the one is blamed that was not proven
yet.
- All requests that were out when the first of them was refused belong to one episode. It ends when the server's wait is
  over, and only then is counted: what was accepted meanwhile is not refused any more.
- At once: as many as were accepted side by side in the episode, unless as many as now had been accepted before. Then
  the rate is blamed: what was accepted since the last episode, through the time until this one is over, the wait
  included. That is right for every kind of minute, whatever its length.
- Both are raised gently while requests wait for them, and lowered at the next refusal.
- Nothing of it is believed for long. A server that was refusing for a while looks like one that allows little. When it
  has refused nobody for EASE_AFTER_S, more is let out, ever faster, until it refuses again or all is forgotten.

Source: docs/design/turns.md section 13; docs/decisions/107.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Final

from msgspec import Struct

from goondan.schemas.models import model_providers, server_answers

#: Names an ask or a permit: the address of the connection, and the id that it gave.
Key = tuple[str, str]
#: A learned rate stays so far below what was measured: clocks and networks are not exact.
MARGIN: Final = 0.97
#: The first wait after a refusal that names none, and the longest (seconds). It doubles while nothing is accepted. A
#: longer one would leave a server alone that is well again.
FIRST_WAIT_S: Final = 1.0
MAX_OWN_WAIT_S: Final = 8.0
#: The longest wait that is believed (seconds).
MAX_WAIT_S: Final = 60.0
#: So many accepted requests make a measurement.
MIN_ACCEPTED: Final = 2
#: A pause of this length (seconds) with nothing out begins a new measurement: what is not asked cannot be accepted.
PAUSE_S: Final = 1.0
#: After how many accepted requests a rate is raised, and by how much at first. The step doubles while nothing is
#: refused.
RATE_SAMPLES: Final = 20
RATE_STEP: Final = 0.01
MAX_RATE_STEP: Final = 0.08
#: A rate that was refused is lowered to this share. Near it (a share) it is raised by the first step only, until it is
#: passed (a share).
LOWERED: Final = 0.92
NEAR: Final = 0.98
PASSED: Final = 1.05
#: After how many accepted requests one more may be out at once; more after each refusal of such a trial.
TRIAL_SAMPLES: Final = 20
MAX_TRIAL_SAMPLES: Final = 1600
#: So many accepted requests prove that as many at once are accepted.
PROOFS: Final = 5
#: Another broker lets nobody out for so long (seconds): who waited at this one comes back in any order.
TAKE_OVER_S: Final = 1.0
#: When the server has accepted for so long without a refusal (seconds), what was learned is eased: it doubles every
#: EASE_S. A server that still limits as before is asked too much once in that time.
EASE_AFTER_S: Final = 70.0
EASE_S: Final = 3.0
#: After so long (seconds) it is forgotten. Even the lowest rate has become thousands of times as high by then.
FORGET_S: Final = 115.0
#: The same for an agent that nobody else waits with: its refusals hold nobody up.
FORGET_ALONE_S: Final = 20.0
#: The lowest and highest rate that is learned (requests a second).
MIN_RATE: Final = 1 / 600
MAX_RATE: Final = 10_000.0


class Lesson(Struct, frozen=True, array_like=True):
    """What was learned, for another broker."""

    #: Requests at once; None: nothing is known.
    concurrent: int | None = None
    #: How many at once were accepted before.
    proven: int = 0
    #: Whether more than `concurrent` were refused.
    refused_above: bool = False
    #: Requests a second; None: nothing is known.
    rate: float | None = None
    #: Until when nobody is let out (CLOCK_BOOTTIME, seconds).
    held_until: float = 0.0


class Learned:
    """What is known of one server."""

    def __init__(self) -> None:
        self.concurrent: int | None = None
        self.rate: float | None = None
        self.held_until = 0.0
        #: Since when the server refuses everything; None: it accepts.
        self.refusing_since: float | None = None
        self.refused_at: float | None = None
        #: Since when the server accepts and refuses nothing; None: it has accepted nothing since the last refusal.
        self.well_since: float | None = None
        #: When the first of it was learned, and how many requests were refused since.
        self.since = 0.0
        self.refusals = 0
        self._proven = 0
        self._proofs: Counter[int] = Counter()
        self._refused_above = False
        self._trial_samples = TRIAL_SAMPLES
        self._at_limit = 0  # accepted since the last trial, while others waited
        self._step = RATE_STEP
        self._ceiling: float | None = None  # the rate that was refused last
        self._at_rate = 0  # accepted since the rate was raised, while others waited
        self._wait_s = FIRST_WAIT_S
        # The measurement: since the rate was blamed last.
        self._since: float | None = None
        self._accepted = 0
        self._last_out = 0.0
        # The episode: since when, and what was out then and is not refused.
        self._episode: float | None = None
        self._out: set[Key] = set()
        self._eased = False  # more than was learned had been let out when it began

    @property
    def active(self) -> bool:
        """Whether anything is known."""
        return self.refused_at is not None

    def ease(self, now: float) -> float:
        """By how much more is let out than was learned, because nobody was refused for long."""
        eased_s = 0.0 if self.well_since is None else now - self.well_since - EASE_AFTER_S
        return 1.0 if eased_s <= 0 else 2.0 ** (min(eased_s, FORGET_S) / EASE_S)

    def is_over(self, now: float, *, alone: bool, idle: bool) -> bool:
        """Whether it is time to forget all. `alone`: nobody waits for anybody else. `idle`: nobody asks at all."""
        since = self.refused_at if self.well_since is None and idle else self.well_since
        return since is not None and now - since >= (FORGET_ALONE_S if alone and not idle else FORGET_S)

    def warned(self, now: float) -> None:
        """The server has said that it accepts little more."""
        self.since = now if self.refused_at is None else self.since
        self.refused_at, self.well_since = now, None

    def lesson(self) -> Lesson:
        """What was learned."""
        return Lesson(self.concurrent, self._proven, self._refused_above, self.rate, self.held_until)

    def take_over(self, lesson: Lesson, now: float) -> None:
        """An earlier broker has learned this."""
        self.concurrent, self._proven, self._refused_above = lesson.concurrent, lesson.proven, lesson.refused_above
        self.rate = lesson.rate
        self.held_until = max(now + TAKE_OVER_S, min(lesson.held_until, now + MAX_WAIT_S))
        self.warned(now)

    # --- what happens

    def let_out(self, out: int, now: float) -> None:
        """A request goes out, with `out` others before it."""
        if self._since is None or (not out and now - self._last_out > PAUSE_S):
            self._since, self._accepted = now, 0
        self._last_out = now

    def accepted(self, level: int, now: float, *, waiting: bool, at_limit: bool) -> None:
        """A request was accepted that was the `level`-th at once. `waiting`: others wait for the rate or for the
        limit. `at_limit`: as many are out as may be.
        """
        self._last_out = now
        self._accepted += 1
        if self._episode is not None:
            return
        self.refusing_since = None
        self.well_since = now if self.well_since is None else self.well_since
        self._wait_s = FIRST_WAIT_S
        self._prove(level)
        if not waiting:
            return
        if at_limit and self.concurrent is not None:
            self._at_limit += 1
            if not self._refused_above or self._at_limit >= self._trial_samples:
                self.concurrent, self._at_limit = self.concurrent + 1, 0
        elif self.rate is not None:
            self._at_rate += 1
            if self._at_rate >= RATE_SAMPLES:
                self._raise_rate(self.rate)

    def refused(self, key: Key, let_out_at: float, out: set[Key], wait_s: float | None, now: float) -> None:
        """A request was refused that had gone out at `let_out_at`. `out` are the others that are out."""
        eased = self.ease(now) > 1
        self.warned(now)
        self.refusals += 1
        self._last_out = now
        if self._episode is not None and let_out_at <= self._episode:
            self._out.discard(key)
        elif self._episode is None:
            self._episode, self._out, self._eased = now, set(out), eased
            self.refusing_since = now if self.refusing_since is None else self.refusing_since
        wait_s = self._wait_s if wait_s is None else wait_s
        self.held_until = max(self.held_until, now + min(wait_s, MAX_WAIT_S))

    def was_out(self, key: Key) -> None:
        """A request says late that it was out when the episode began."""
        if self._episode is not None:
            self._out.add(key)

    def settle(self, now: float) -> None:
        """Learn from the episode, if it is over."""
        began = self._episode
        if began is None or now < self.held_until:
            return
        beside, self._episode, self._out = len(self._out), None, set()
        self._proofs.clear()
        if beside + 1 > self._proven:
            self._blame_concurrency(beside)
        elif self._since is not None and self._accepted >= MIN_ACCEPTED:
            self._blame_rate(began - self._since, self.held_until - began)
        if not self._accepted:
            self._wait_s = min(2 * self._wait_s, MAX_OWN_WAIT_S)
        self._at_limit = self._at_rate = 0

    def _raise_rate(self, rate: float) -> None:
        """Try a little more. Near the rate that was refused last, the steps stay small."""
        ceiling = self._ceiling
        if ceiling is not None and rate >= PASSED * ceiling:
            ceiling = self._ceiling = None
        near = ceiling is not None and rate * (1 + self._step) > NEAR * ceiling
        step = RATE_STEP if near else self._step
        self._step = min(MAX_RATE_STEP, 2 * step)
        self.rate, self._at_rate = min(MAX_RATE, rate * (1 + step)), 0

    def _prove(self, level: int) -> None:
        """A request was accepted as the `level`-th at once. One alone proves nothing: another may just have ended."""
        if level > self._proven:
            self._proofs[level] += 1
            if self._proofs[level] >= PROOFS:
                self._proven = level

    def _blame_concurrency(self, beside: int) -> None:
        if self._refused_above and not self._eased:
            self._trial_samples = min(2 * self._trial_samples, MAX_TRIAL_SAMPLES)
        # At first nothing is known of the cause, so the number grows quickly again until the next refusal.
        self._refused_above = self.concurrent is not None
        self.concurrent = self._proven = max(1, beside)

    def _blame_rate(self, busy_s: float, held_s: float) -> None:
        """Requests went out for `busy_s`, and then none for `held_s`."""
        measured = MARGIN * self._accepted / max(busy_s + held_s, 0.001)
        if self.rate is None or (held_s > busy_s and measured < self.rate):
            rate = measured
        elif self._eased:
            rate = self.rate  # too much was let out on purpose
        elif self._accepted < RATE_SAMPLES / 2:
            return  # the same excess as the last time
        else:
            rate, self._ceiling = LOWERED * self.rate, self.rate
        self.rate = min(MAX_RATE, max(MIN_RATE, rate))
        self._step = RATE_STEP
        self._since, self._accepted = None, 0


#: The minute of `requestsPerMinute` and `tokensPerMinute` (seconds), a little longer than the server's: a request takes
#: different times to get there.
MINUTE_S: Final = 61.0
#: A permit ends by itself after this time (seconds). Longer answers are rare, and one too many at once is refused.
PERMIT_S: Final = 900.0
#: When the first refusal closes a gate, everybody has this time (seconds) to say what is out.
REPORT_S: Final = 0.5
#: The broker looks at gates so seldom (seconds) that requests which were due meanwhile go out together.
CATCH_UP_S: Final = 0.25
#: One connection may hold everybody up for so long (seconds) before another one is refused as well.
MAX_BLAME_S: Final = 120.0


class Ask(Struct, eq=False):
    """A request that waits to go out, or is out: then the agent has a permit for it."""

    #: Its name.
    key: Key
    #: The event that its work began with.
    tree: str
    #: When it began to wait (seconds). A request that was refused keeps its place.
    since: float
    #: The tokens that it will read, as far as is known.
    tokens: int = 0
    #: How long it waits for a server that refuses everybody (seconds).
    patience_s: float = 60.0
    #: It does not go out before this time (seconds).
    not_before: float = 0.0
    #: Whether requests of others waited or were out when it came.
    others: bool = False
    #: When it went out, once it is out (seconds).
    out_since: float = 0.0
    #: As the how manyth at once it went out.
    level: int = 1

    def __lt__(self, other: Ask) -> bool:
        return (self.since, self.key) < (other.since, other.key)


class _Tree(Struct, eq=False):
    """The asks of one tree, and when its turn is: the earlier, the sooner."""

    #: When its turn is.
    turn: float
    #: The oldest first.
    asks: list[Ask] = []


class Queue:
    """All asks that wait."""

    def __init__(self) -> None:
        self._asks: dict[Key, Ask] = {}
        self._trees: dict[str, _Tree] = {}
        #: (turn, tree) of every tree, and what is left of earlier turns.
        self._turns: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._asks)

    def __iter__(self) -> Iterator[Ask]:
        return iter(self._asks.values())

    def get(self, key: Key) -> Ask | None:
        """The ask of this name, if it waits."""
        return self._asks.get(key)

    def add(self, ask: Ask) -> None:
        """Let an ask wait. Another one of the same name is replaced."""
        self.remove(ask.key)
        self._asks[ask.key] = ask
        tree = self._trees.get(ask.tree)
        if tree is None or ask.since < tree.turn:
            tree = tree or self._trees.setdefault(ask.tree, _Tree(ask.since))
            tree.turn = ask.since
            heappush(self._turns, (tree.turn, ask.tree))
        insort(tree.asks, ask)

    def remove(self, key: Key) -> Ask | None:
        """Take an ask out of the line."""
        ask = self._asks.pop(key, None)
        if ask is not None:
            tree = self._trees[ask.tree]
            tree.asks.remove(ask)
            if not tree.asks:
                del self._trees[ask.tree]
        return ask

    def first(self, now: float) -> Ask | None:
        """The ask whose turn it is. None: nobody waits, or everybody has to wait for a time of its own."""
        held: list[tuple[float, str]] = []
        found: Ask | None = None
        while self._turns:
            turn, name = self._turns[0]
            tree = self._trees.get(name)
            if tree is None or tree.turn != turn:
                heappop(self._turns)
                continue
            found = next((ask for ask in tree.asks if ask.not_before <= now), None)
            if found is not None:
                break
            held.append(heappop(self._turns))
        for entry in held:
            heappush(self._turns, entry)
        return found

    def serve(self, ask: Ask, now: float) -> None:
        """The ask goes out. Its tree goes behind all others."""
        self.remove(ask.key)
        tree = self._trees.get(ask.tree)
        if tree is not None:
            tree.turn = max(now, tree.asks[0].since)
            heappush(self._turns, (tree.turn, ask.tree))

    def places(self) -> dict[Key, int]:
        """How many go out before each ask, if nobody else comes."""
        order = [(rank, tree.turn, ask) for tree in self._trees.values() for rank, ask in enumerate(tree.asks)]
        return {ask.key: place for place, (_, _, ask) in enumerate(sorted(order))}


class _Room(Struct):
    """What a server said it still accepts, until when."""

    #: Requests or tokens.
    left: int
    #: Until it accepts more (seconds).
    until: float


class Gate:
    """The state of one gate. `limits` are those of its Model documents."""

    def __init__(self, limits: model_providers.ModelLimits) -> None:
        self.limits = limits
        self.queue = Queue()
        self.permits: dict[Key, Ask] = {}
        #: What was learned.
        self.learned = Learned()
        #: (when, key, tokens) of what went out in the last minute, while limits a minute are written.
        self._minute: deque[list[float | int | Key]] = deque()
        self._minute_tokens = 0
        self._requests: _Room | None = None
        self._tokens: _Room | None = None
        self._paced_at = 0.0  # the last request went out then, as far as the learned rate counts it
        self._met_at = 0.0  # when requests of two connections were here last
        #: Connection -> for how long its refusals have held everybody up since another one was refused (seconds).
        self._blame: dict[str, float] = {}

    @property
    def limited(self) -> bool:
        """Whether agents have to ask."""
        return self.limits != _NONE or self.learned.active

    def held_until(self, now: float) -> float:
        """Until when nobody is let out (seconds)."""
        return max(self.learned.held_until, self._next(now))

    # --- what agents say

    def ask(self, ask: Ask) -> None:
        """A request wants to go out."""
        mine = ask.key[0]
        ask.others = any(key[0] != mine for key in self.permits) or any(other.key[0] != mine for other in self.queue)
        self.queue.add(ask)

    def is_out(self, permit: Ask) -> None:
        """A request is out that this gate has not let out: it had been open, or another broker let it out."""
        if permit.key not in self.permits:
            self.permits[permit.key] = permit
            self.learned.was_out(permit.key)

    def withdraw(self, key: Key) -> None:
        """Whoever asked or got a permit is gone: nothing is known of its request."""
        self.queue.remove(key)
        self.permits.pop(key, None)

    def over(
        self, key: Key, now: float, *, accepted: bool, tokens: int | None, news: server_answers.RateLimits | None
    ) -> None:
        """A request is over. `accepted`: the server has answered it. `tokens` are those that it used, None: not known.
        `news` is what the server said of its limits.
        """
        self.queue.remove(key)
        permit = self.permits.pop(key, None)
        if permit is None:
            return
        if accepted:
            most = self._most_at_once(now)
            at_limit = most is not None and len(self.permits) + 1 >= most
            self.learned.accepted(permit.level, now, waiting=len(self.queue) > 0, at_limit=at_limit)
        if tokens is not None:
            self._correct(key, tokens)
        if news is not None:
            self.hear(key, news, now, sum(other.out_since > permit.out_since for other in self.permits.values()))

    def refused(self, key: Key, wait_s: float | None, now: float) -> Ask | None:
        """A request was refused. Returns its permit, which it has no more; None when it had none."""
        permit = self.permits.pop(key, None)
        out_since = now if permit is None else permit.out_since
        if not self._believes(key[0], FIRST_WAIT_S if wait_s is None else wait_s):
            return permit
        first = not self.learned.active
        self.learned.refused(key, out_since, set(self.permits), wait_s, now)
        if first:
            self.learned.held_until = max(self.learned.held_until, now + REPORT_S)
        return permit

    def hear(self, key: Key, news: server_answers.RateLimits, now: float, unseen: int = 0) -> None:
        """The server said what it still accepts. `unseen` requests went out later than the one that heard it."""
        if news.requests_left is not None:
            self._requests = self._room(key, news.requests_left - unseen, news.requests_reset_ms, now, self._requests)
        if news.tokens_left is not None:
            self._tokens = self._room(key, news.tokens_left, news.tokens_reset_ms, now, self._tokens)

    def warned(self, key: Key, news: server_answers.RateLimits, now: float) -> None:
        """The server said through an open gate that it accepts little more. From now on agents ask."""
        self.learned.warned(now)
        self.hear(key, news, now)

    # --- what it decides

    def take(self, now: float) -> list[Ask]:
        """Let out what may go now, in order."""
        self.learned.settle(now)
        self._forget_minute(now)
        taken: list[Ask] = []
        while (ask := self.queue.first(now)) is not None and self._may(ask, now):
            self.queue.serve(ask, now)
            taken.append(self._let_out(ask, now))
        return taken

    def given_up(self, now: float) -> list[Ask]:
        """The asks that have waited too long for a server that refuses everybody. They do not wait any more."""
        since = self.learned.refusing_since
        if since is None:
            return []
        over = [ask for ask in self.queue if now - max(since, ask.since) >= ask.patience_s]
        for ask in over:
            self.queue.remove(ask.key)
        return over

    def forget_old(self, now: float) -> None:
        """Forget what was learned when it is time. To be called at every tick."""
        here = [*self.permits, *(ask.key for ask in self.queue)]
        if len({address for address, _ in here}) > 1:
            self._met_at = now
        alone = now - self._met_at >= FORGET_ALONE_S
        if self.learned.is_over(now, alone=alone, idle=not here) and self._has_room(1, now):
            self.forget()

    def forget(self) -> None:
        """Forget what was learned."""
        self.learned, self._requests, self._tokens = Learned(), None, None

    def expired(self, now: float) -> Iterable[Ask]:
        """The permits whose time is over."""
        return [permit for permit in self.permits.values() if now - permit.out_since >= PERMIT_S]

    # --- another broker

    def lesson(self, now: float) -> tuple[Lesson, int, int]:
        """What another broker has to know: what was learned, and the requests and tokens of the last minute."""
        self._forget_minute(now)
        return self.learned.lesson(), len(self._minute), self._minute_tokens

    def take_over(self, lesson: Lesson | None, requests: int, tokens: int, now: float) -> None:
        """An earlier broker has left this. What went out in its last minute counts as if it went out now."""
        if lesson is not None:
            self.learned.take_over(lesson, now)
            self._paced_at = now
        if self.limits.requests_per_minute is not None or self.limits.tokens_per_minute is not None:
            for index in range(requests):
                self._count(("", ""), tokens if index == 0 else 0, now)

    # --- inside

    def _may(self, ask: Ask, now: float) -> bool:
        limits = self.limits
        most = self._most_at_once(now)
        if now < self.learned.held_until or (most is not None and len(self.permits) >= most):
            return False
        if now < self._next(now):
            return False
        if limits.requests_per_minute is not None and len(self._minute) >= limits.requests_per_minute:
            return False
        used = self._minute_tokens  # what is larger than the limit itself goes out alone: the server decides
        if limits.tokens_per_minute is not None and used and used + ask.tokens > limits.tokens_per_minute:
            return False
        return self._has_room(ask.tokens, now)

    def _has_room(self, tokens: int, now: float) -> bool:
        """Whether the server accepts one more request, as far as it has said."""
        return _fits(self._requests, 1, now) and _fits(self._tokens, tokens, now)

    def _let_out(self, ask: Ask, now: float) -> Ask:
        ask.out_since, ask.level = now, len(self.permits) + 1
        self.learned.let_out(len(self.permits), now)
        self.permits[ask.key] = ask
        if ask.others:
            self._met_at = now
        if self.learned.rate is not None:
            self._paced_at = max(self._next(now), now - CATCH_UP_S)
        for room, amount in ((self._requests, 1), (self._tokens, ask.tokens)):
            if room is not None:
                room.left -= amount
        if self.limits.requests_per_minute is not None or self.limits.tokens_per_minute is not None:
            self._count(ask.key, ask.tokens, now)
        return ask

    def _next(self, now: float) -> float:
        """When the next request may go out, by the learned rate."""
        rate = self.learned.rate
        return 0.0 if rate is None else self._paced_at + 1 / (rate * self.learned.ease(now))

    def _most_at_once(self, now: float) -> int | None:
        written, learned = self.limits.max_concurrent, self.learned.concurrent
        if learned is not None:
            learned = int(learned * self.learned.ease(now))
        if written is None or learned is None:
            return learned if written is None else written
        return min(written, learned)

    def _believes(self, connection: str, wait_s: float) -> bool:
        """Whether a connection may hold everybody up. One alone may hold up others for some time only."""
        known = (*(ask.key for ask in self.queue), *self.permits)
        if all(address == connection for address, _ in known):
            return True
        if connection not in self._blame:
            self._blame = {connection: 0.0}
        self._blame[connection] += min(wait_s, MAX_WAIT_S)
        return self._blame[connection] <= MAX_BLAME_S

    def _room(self, key: Key, left: int, reset_ms: int | None, now: float, known: _Room | None) -> _Room | None:
        if reset_ms is None or reset_ms > MAX_WAIT_S * 1000:
            return known  # the server refuses by itself when it is time
        if left <= 0 and not self._believes(key[0], reset_ms / 1000):
            return known
        return _Room(max(0, left), now + reset_ms / 1000)

    def _count(self, key: Key, tokens: int, now: float) -> None:
        self._minute.append([now, key, tokens])
        self._minute_tokens += tokens

    def _correct(self, key: Key, tokens: int) -> None:
        """The tokens of a request of the last minute are known now."""
        for entry in reversed(self._minute):
            if entry[1] == key:
                self._minute_tokens += tokens - int(entry[2])  # type: ignore[arg-type]
                entry[2] = tokens
                return

    def _forget_minute(self, now: float) -> None:
        while self._minute and now - float(self._minute[0][0]) >= MINUTE_S:  # type: ignore[arg-type]
            self._minute_tokens -= int(self._minute.popleft()[2])  # type: ignore[arg-type]


_NONE: Final = model_providers.ModelLimits()


def _fits(room: _Room | None, amount: int, now: float) -> bool:
    return room is None or now >= room.until or room.left >= amount
