"""The accounts of budgets: what each tree of work has used, and whether it may use more. A pure state machine.

Each account of a chain (amounts.py) is charged with the whole amount, and each can refuse.

Rules.
- A tool call is counted when it starts, and stays counted. A call that is sent again under its callId is the same call.
- A model call first holds the most that it may use, and is settled with the amount that it used. When there is no room
  for it, it waits while others hold an amount that they may give back. When nobody does, it is refused, or it may write
  only as much as there is room for.
- A held amount counts as spent when the turn loses its process or ends: nobody knows whether the call was made.
- Tool calls are too frequent to write each of them. The journal has a number that is above the real count. After the
  death of a broker, as many calls count as could have been made, never fewer (`slack`).
- While a person is asked about a call of the tree, the time of the tree stands still.
- When one dimension is spent, no call of this chain starts any more. If only `toolCalls` is spent, models may still be
  asked, so that they can tell what they have found.

Source: docs/decisions/070.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal

from msgspec import Struct, structs

from goondan.features.budgets.broker import amounts
from goondan.schemas.wire.usage import FREE, Prices

#: A shorter answer (tokens) is of no use: a model call that could write only less is refused.
MIN_OUTPUT: Final = 256
#: Tool calls that may be counted ahead of the journal: one in so many of the lowest limit, and so many at most. That is
#: also what a broker that is killed costs a budget.
SLACK_PART: Final = 50
MAX_SLACK: Final = 64
#: Model calls that one turn may have under way.
MAX_HOLDS: Final = 16
#: Tool calls of one event that are counted and whose results are not stored: each of them takes memory, and a part of
#: every record of its tree. An agent has some hundred open at once.
MAX_CHARGED: Final = 4096
#: Bytes of the digest that stands for a tool call.
DIGEST_BYTES: Final = 8
#: The limits of tool calls.
_TOOL_LIMITS: Final[tuple[amounts.Dimension, ...]] = ("calls", "toolCalls")
#: Without limits.
_UNLIMITED: Final = amounts.Limits()

#: Why a call has to wait.
#: - `journal`: the journal must first have a higher number.
#: - `others`: others may give back what they hold.
#: - `results`: results of earlier calls must first be stored.
Wait = Literal["journal", "others", "results"]


class _Standing(Struct):
    """The time of a tree stands still because a person is asked."""

    #: How many calls the person is asked about.
    items: int
    #: Since when (milliseconds since 1970).
    since_ms: int


class Accounts:
    """All trees. Times are milliseconds since 1970."""

    def __init__(self) -> None:
        self.trees: dict[str, amounts.Tree] = {}
        self.limits: dict[str, amounts.Limits] = {}
        self.prices: dict[tuple[str, str], Prices] = {}
        #: Trees that have changed, so that the journal needs a new record.
        self.dirty: dict[amounts.Tree, None] = {}
        #: Model calls that were under way in an earlier broker. The record of a tree may come after them.
        self.restored_holds: list[amounts.BudgetHold] = []
        #: Trees whose time stands still, by their roots. Some have no account yet.
        self._standing: dict[str, _Standing] = {}
        #: Trees that are over; the one that ended first is first.
        self.ended: dict[amounts.Tree, None] = {}

    def revise(self, limits: Mapping[str, amounts.Limits], prices: Mapping[tuple[str, str], Prices]) -> None:
        """Use these limits and prices of the bundle from now on: limits by agent, prices by agent and Model document
        ("": the agent's own Model).
        """
        self.limits, self.prices = dict(limits), dict(prices)
        for tree in self.trees.values():
            for account in tree.accounts.values():
                account.limits = self.limits.get(account.agent, _UNLIMITED)

    # --- chains

    def chain_of(self, root: str, path: tuple[str, ...], agent: str, at_ms: int) -> amounts.AccountChain | None:
        """The accounts that a turn of `agent` is charged to; None when there are none."""
        own = agent if agent in self.limits and agent not in path else None
        if not path and own is None:
            return None
        tree = self.trees.get(root)
        if tree is None:
            tree = self.trees[root] = amounts.Tree(root, at_ms)
        if tree.ended_ms is not None:
            tree.ended_ms = None
            self.ended.pop(tree, None)
        tree.paths[agent] = path
        names = path if own is None else (*path, own)
        return amounts.AccountChain(tree, path, [self._account(tree, name) for name in names])

    def path_of(self, root: str | None, agent: str) -> tuple[str, ...]:
        """The path of the last event of an agent in this tree."""
        tree = None if root is None else self.trees.get(root)
        return () if tree is None else tree.paths.get(agent, ())

    def _account(self, tree: amounts.Tree, agent: str) -> amounts.Account:
        account = tree.accounts.get(agent)
        if account is None:
            account = tree.accounts[agent] = amounts.Account(agent, self.limits.get(agent, _UNLIMITED))
        return account

    # --- time

    def lasted_ms(self, tree: amounts.Tree, now_ms: int) -> int:
        """The time that a tree has used (milliseconds), without the time for which it stood still."""
        standing = self._standing.get(tree.root)
        until = now_ms if standing is None else max(tree.began_ms, standing.since_ms)
        return max(0, until - tree.began_ms - tree.stood_ms)

    def stand_still(self, root: str, since_ms: int) -> None:
        """A person is asked about one more call of this tree."""
        tree = self.trees.get(root)
        if tree is not None:  # after a crash: what the journal has counted of it already
            since_ms = max(since_ms, tree.stood_until_ms)
            if not tree.known:  # the next broker has to know whose time stands still
                self.dirty[tree] = None
        standing = self._standing.get(root)
        if standing is None:
            self._standing[root] = _Standing(1, since_ms)
        else:
            standing.items += 1
            standing.since_ms = min(standing.since_ms, since_ms)

    def go_on(self, root: str, now_ms: int) -> None:
        """A person is no longer asked about one of these calls. Its time is counted, also while others still wait."""
        standing = self._standing.get(root)
        if standing is None:
            return
        tree = self.trees.get(root)
        if tree is not None:
            tree.stood_ms += max(0, now_ms - max(tree.began_ms, standing.since_ms))
            tree.stood_until_ms = now_ms
            self.dirty[tree] = None
        standing.items -= 1
        standing.since_ms = now_ms
        if not standing.items:
            del self._standing[root]

    # --- what is spent

    def spent(self, chain: amounts.AccountChain, now_ms: int) -> amounts.Shortage | None:
        """The budget that has nothing left; None when all have something. A spent `toolCalls` alone does not count."""
        for account in chain.accounts:
            for dimension, limit in account.limits.rows.items():
                if dimension == "toolCalls":
                    continue
                if dimension == "wallSeconds":
                    used = self.lasted_ms(chain.tree, now_ms)
                else:
                    used = account.spent.of(dimension)
                if dimension in ("calls", "modelCalls"):  # a call that is under way is one, whatever it takes
                    used += account.held.of(dimension)
                if used >= limit:
                    return amounts.Shortage(account, dimension, limit, used)
        return None

    # --- tool calls

    def charge_tool(
        self, chain: amounts.AccountChain, spender: str, event_id: str, call_id: str, now_ms: int
    ) -> amounts.Shortage | Wait | None:
        """Count a tool call that is about to start. None: it may start. So may a call that was counted before."""
        tree = chain.tree
        digest = digest_of(event_id, call_id)
        counted = tree.charged.setdefault(event_id, set())
        if digest in counted:
            return None
        if len(counted) >= MAX_CHARGED:
            return "results"
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        for account in chain.accounts:
            limit = account.limits.rows.get("toolCalls")
            if limit is not None and account.spent.tool_calls >= limit:
                return amounts.Shortage(account, "toolCalls", limit, account.spent.tool_calls)
        if tree.counted >= min(tree.ceilings):
            if len(tree.ceilings) == 1:
                self.dirty[tree] = None
            return "journal"
        for account in chain.accounts:  # `charge` would add up five fields, and this is done for every tool call
            account.spent.tool_calls += 1
            account.by.setdefault(spender, amounts.Spend()).tool_calls += 1
        counted.add(digest)
        tree.counted += 1
        if 2 * (tree.ceilings[-1] - tree.counted) <= tree.slack:  # half of what the last record allows is used
            self.dirty[tree] = None
        return None

    def stored(self, chain: amounts.AccountChain, event_id: str, call_ids: Iterable[str]) -> None:
        """The results of these calls are stored, so nobody sends the calls again."""
        if counted := chain.tree.charged.get(event_id):
            counted.difference_update(digest_of(event_id, call_id) for call_id in call_ids)

    # --- model calls

    def price(self, agent: str, model: str) -> Prices:
        """What this Model of an agent costs; a name that is not among its Models stands for its own."""
        own = self.prices.get((agent, ""), FREE)
        return self.prices.get((agent, model), own)

    def reserve(
        self,
        chain: amounts.AccountChain,
        spender: str,
        event_id: str,
        hold_id: str,
        wanted: tuple[int, int],
        now_ms: int,
        model: str = "",
    ) -> amounts.BudgetHold | amounts.Shortage | Wait:
        """Hold the amount that a model call may use. `wanted`: tokens that it reads, tokens that it may write. `model`:
        the document of the Model.
        """
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        read, output = wanted
        prices = self.price(spender, model)

        def takes(written: int) -> amounts.Spend:
            return amounts.Spend(1, 0, read, written, prices.cost(read, written))

        least = min(output, MIN_OUTPUT)
        fewest, most, room = takes(least), takes(output), output
        for account in chain.accounts:
            for dimension, limit in account.limits.rows.items():
                if dimension == "toolCalls":
                    continue
                spent, held = account.spent.of(dimension), account.held.of(dimension)
                left = limit - spent
                if left < fewest.of(dimension):
                    return amounts.Shortage(account, dimension, limit, spent, fewest.of(dimension))
                if left - held < most.of(dimension):
                    if held:
                        return "others"
                    costs = partial(_taken, takes, dimension)
                    room = min(room, least + bisect_right(range(least, output), left, key=costs) - 1)
        hold = amounts.BudgetHold(
            root=chain.tree.root,
            event_id=event_id,
            id=hold_id,
            agent=spender,
            accounts=list(chain.names),
            amount=takes(room),
        )
        self._hold(chain.tree, hold)
        return hold

    def _hold(self, tree: amounts.Tree, hold: amounts.BudgetHold) -> None:
        tree.holds[hold.id] = hold
        for name in hold.accounts:
            self._account(tree, name).held.add(hold.amount)

    def settle(self, hold: amounts.BudgetHold, amount: amounts.Spend | None) -> None:
        """A model call has used `amount`. None: nobody knows, so the whole held amount counts. An empty `Spend()`: the
        call was not made.
        """
        tree = self.trees[hold.root]
        if tree.holds.pop(hold.id, None) is None:
            return
        for name in hold.accounts:
            account = tree.accounts[name]
            account.held.add(hold.amount, -1)
            account.charge(hold.agent, hold.amount if amount is None else amount)
        tree.over.append(hold.id)
        self.dirty[tree] = None

    def lose_calls(self, tree: amounts.Tree, event_id: str | None = None) -> None:
        """No process holds the turn of this event any more, or of any event of the tree: model calls that are under
        way count as spent.
        """
        for hold in list(tree.holds.values()):
            if event_id in (None, hold.event_id):
                self.settle(hold, None)

    # --- ends

    def tree_over(self, tree: amounts.Tree, now_ms: int) -> None:
        """The tree has no unfinished event. Its amounts are kept for people who look, and for pending work."""
        if tree.ended_ms is None:
            tree.ended_ms = now_ms
            self.ended[tree] = None
            self.dirty[tree] = None

    def forget(self, tree: amounts.Tree) -> None:
        """Nobody needs the tree any more."""
        self.trees.pop(tree.root, None)
        self.ended.pop(tree, None)
        self.dirty.pop(tree, None)

    # --- the journal

    def record(self, tree: amounts.Tree) -> tuple[amounts.BudgetTree, list[str]]:
        """The next record of the tree, and the model calls that are over. Until the journal has a newer record, `slack`
        more tool calls may be counted.
        """
        self.dirty.pop(tree, None)
        tree.known = True
        tree.slack = slack_of(tree)
        tree.ceilings.append(tree.counted + tree.slack)
        over, tree.over = tree.over, []
        record = amounts.BudgetTree(
            root=tree.root,
            began_ms=tree.began_ms,
            accounts={
                name: {spender: structs.replace(amount) for spender, amount in account.by.items()}
                for name, account in tree.accounts.items()
            },
            paths={agent: list(path) for agent, path in tree.paths.items()},
            charged={event_id: b"".join(sorted(digests)) for event_id, digests in tree.charged.items() if digests},
            slack=tree.slack,
            ended_ms=tree.ended_ms,
            stood_ms=tree.stood_ms,
            stood_until_ms=tree.stood_until_ms,
        )
        return record, over

    def restore(self, record: amounts.BudgetTree) -> None:
        """Restore a tree from the journal. Tool calls that may have been counted after the record count as made."""
        tree = self.trees[record.root] = amounts.Tree(record.root, record.began_ms)
        tree.paths = {agent: tuple(path) for agent, path in record.paths.items()}
        tree.charged = {
            event_id: {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
            for event_id, data in record.charged.items()
        }
        tree.ended_ms = record.ended_ms
        tree.stood_ms, tree.stood_until_ms = record.stood_ms, record.stood_until_ms
        for name, by in record.accounts.items():
            account = self._account(tree, name)
            for spender, amount in by.items():
                account.charge(spender, amount)
        if tree.ended_ms is not None:
            self.ended[tree] = None
        tree.slack, tree.known = record.slack, True

    def restored(self) -> None:
        """The whole journal was read: model calls that were under way are held again, and tool calls that an earlier
        broker may have counted ahead count as made.
        """
        for hold in self.restored_holds:
            tree = self.trees.get(hold.root)
            if tree is None:  # a tree is written before its first model call, so that was damaged
                tree = self.trees[hold.root] = amounts.Tree(hold.root, 0)
            self._hold(tree, hold)
        self.restored_holds.clear()
        for tree in self.trees.values():
            ahead, tree.slack = tree.slack, 0  # what comes now waits for a record of its own
            if tree.ended_ms is not None:
                continue
            for account in tree.accounts.values():
                rooms = [
                    limit - account.spent.of(dimension) - account.held.of(dimension)
                    for dimension, limit in account.limits.rows.items()
                    if dimension in _TOOL_LIMITS
                ]
                if (counted := min([ahead, *rooms])) > 0:
                    account.charge(amounts.UNKNOWN, amounts.Spend(tool_calls=counted))
            self.dirty[tree] = None


def _taken(takes: Callable[[int], amounts.Spend], dimension: amounts.Dimension, written: int) -> int:
    """How much of a dimension a call takes that writes so many tokens."""
    return takes(written).of(dimension)


def slack_of(tree: amounts.Tree) -> int:
    """How many tool calls of a tree may be counted ahead of the journal; 0 for a tree that is over."""
    if tree.ended_ms is not None:
        return 0
    limits = [
        limit
        for account in tree.accounts.values()
        for dimension, limit in account.limits.rows.items()
        if dimension in _TOOL_LIMITS
    ]
    return min([MAX_SLACK, *(max(1, limit // SLACK_PART) for limit in limits)])


def digest_of(event_id: str, call_id: str) -> bytes:
    """The digest that stands for a call of an event."""
    name = f"{event_id}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
