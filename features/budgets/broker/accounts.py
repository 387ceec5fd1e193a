"""The accounts of budgets: what each tree of work has used, and whether it may use more. A pure state machine.

A tree is all work that began with one event (`rootEvent`). An account is the budget of one agent in one tree. A chain
has the accounts that a turn is charged to: that of its own agent, and those of all agents whose turns led to it. Each
account is charged with the whole amount, and each can refuse.

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
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct, structs

from goondan.features.budgets.broker.amounts import BudgetHold, BudgetTree, Dimension, Limits, Spend
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
#: The name of the spender when nobody knows who it was: a killed broker had counted the calls ahead.
UNKNOWN: Final = ""

#: Why a call has to wait.
#: - `journal`: the journal must first have a higher number.
#: - `others`: others may give back what they hold.
#: - `results`: results of earlier calls must first be stored.
Wait = Literal["journal", "others", "results"]


class Shortage(Struct, frozen=True):
    """Why nothing more is given. Money is in billionths, `wallSeconds` in milliseconds."""

    #: The budget that is used up.
    account: Account
    #: The dimension of it that is used up.
    dimension: Dimension
    #: The limit of this dimension.
    limit: int
    #: How much of it is spent.
    spent: int
    #: How much the call would have taken; 0 when nothing at all is left.
    wanted: int = 0


class Account:
    """The budget of one agent in one tree. `limits` is None when the bundle does not limit the agent any more."""

    __slots__ = ("agent", "by", "held", "limits", "spent")

    def __init__(self, agent: str, limits: Limits | None) -> None:
        self.agent = agent
        self.limits = limits
        self.spent = Spend()
        self.held = Spend()
        #: The amounts in `spent` by the agent that spent them.
        self.by: dict[str, Spend] = {}

    def charge(self, spender: str, amount: Spend) -> None:
        """Add an amount that this agent has spent."""
        self.spent.add(amount)
        own = self.by.get(spender)
        if own is None:
            own = self.by[spender] = Spend()
        own.add(amount)


class AccountChain:
    """The accounts that a turn is charged to. `path`: the agents whose budgets led to it, the outermost first."""

    __slots__ = ("accounts", "path", "tree")

    def __init__(self, tree: Tree, path: tuple[str, ...], accounts: list[Account]) -> None:
        self.tree = tree
        self.path = path
        self.accounts = accounts

    @property
    def names(self) -> tuple[str, ...]:
        """The agents of these accounts. They are the path of the work that follows from this turn."""
        return tuple(account.agent for account in self.accounts)


class Hold(Struct, frozen=True):
    """A model call that is under way."""

    #: Its id; no other model call has it.
    id: str
    #: The event whose turn makes it.
    event_id: str
    #: The agent that makes it.
    spender: str
    #: The accounts that it is charged to.
    chain: AccountChain
    #: The most that it may use. Its `output_tokens` are what was granted.
    amount: Spend


class Tree:
    """All work that began with one event. `began_ms`: when the event was accepted (milliseconds since 1970)."""

    __slots__ = (
        "accounts",
        "began_ms",
        "ceiling",
        "ceilings",
        "chains",
        "charged",
        "counted",
        "ended_ms",
        "holds",
        "known",
        "paths",
        "root",
        "slack",
        "stood_ms",
        "stood_until_ms",
        "told",
    )

    def __init__(self, root: str, began_ms: int) -> None:
        self.root = root
        self.began_ms = began_ms
        #: When its last event ended; None while it has unfinished events.
        self.ended_ms: int | None = None
        #: How long its time has stood still (milliseconds).
        self.stood_ms = 0
        #: Up to which moment that is counted (milliseconds since 1970).
        self.stood_until_ms = 0
        self.accounts: dict[str, Account] = {}
        self.chains: dict[tuple[tuple[str, ...], str | None], AccountChain] = {}
        self.holds: dict[str, Hold] = {}
        #: The path of each agent's last event. The end of pending work needs it, because it knows only the root.
        self.paths: dict[str, tuple[str, ...]] = {}
        #: Event -> counted tool calls of its unfinished turn, which may be sent again.
        self.charged: dict[str, set[bytes]] = {}
        #: Tool calls that this broker has counted, and how many of them the journal was told of.
        self.counted = self.told = 0
        #: The highest count that each record allows: the record in the journal, and those on their way there.
        self.ceilings: deque[int] = deque([0])
        #: The lowest of these.
        self.ceiling = 0
        #: How many calls the last record allows beyond its own number.
        self.slack = 0
        #: True when the journal was told of this tree.
        self.known = False


class _Standing(Struct):
    """The time of a tree stands still because a person is asked."""

    #: How many calls the person is asked about.
    items: int
    #: Since when (milliseconds since 1970).
    since_ms: int


class Accounts:
    """All trees. Times are milliseconds since 1970."""

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self.limits: dict[str, Limits] = {}
        self.prices: dict[tuple[str, str], Prices] = {}
        #: Trees that have changed, so that the journal needs a new record.
        self.dirty: dict[Tree, None] = {}
        #: Model calls that nobody will settle: their records in the journal can go.
        self.lost: list[Hold] = []
        self._held: list[BudgetHold] = []
        #: Trees whose time stands still, by their roots. Some have no account yet.
        self._standing: dict[str, _Standing] = {}
        #: Trees that are over; the one that ended first is first.
        self.ended: dict[Tree, None] = {}

    def revise(self, limits: Mapping[str, Limits], prices: Mapping[tuple[str, str], Prices]) -> None:
        """Use these limits and prices of the bundle from now on: limits by agent, prices by agent and Model document
        ("": the agent's own Model).
        """
        self.limits, self.prices = dict(limits), dict(prices)
        for tree in self.trees.values():
            for account in tree.accounts.values():
                account.limits = self.limits.get(account.agent)

    # --- chains

    def chain_of(self, root: str, path: tuple[str, ...], agent: str, at_ms: int) -> AccountChain | None:
        """The accounts that a turn of `agent` is charged to; None when there are none."""
        own = agent if agent in self.limits and agent not in path else None
        if not path and own is None:
            return None
        tree = self.trees.get(root)
        if tree is None:
            tree = self.trees[root] = Tree(root, at_ms)
        if tree.ended_ms is not None:
            tree.ended_ms = None
            self.ended.pop(tree, None)
        tree.paths[agent] = path
        chain = tree.chains.get((path, own))
        if chain is None:
            names = path if own is None else (*path, own)
            chain = tree.chains[path, own] = AccountChain(tree, path, [self._account(tree, name) for name in names])
        return chain

    def path_of(self, root: str | None, agent: str) -> tuple[str, ...]:
        """The path of the last event of an agent in this tree."""
        tree = None if root is None else self.trees.get(root)
        return () if tree is None else tree.paths.get(agent, ())

    def _account(self, tree: Tree, agent: str) -> Account:
        account = tree.accounts.get(agent)
        if account is None:
            account = tree.accounts[agent] = Account(agent, self.limits.get(agent))
        return account

    # --- time

    def lasted_ms(self, tree: Tree, now_ms: int) -> int:
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

    def spent(self, chain: AccountChain, now_ms: int) -> Shortage | None:
        """The budget that has nothing left; None when all have something. A spent `toolCalls` alone does not count."""
        lasted_ms = self.lasted_ms(chain.tree, now_ms)
        for account in chain.accounts:
            limits = account.limits
            if limits is None:
                continue
            spent, held = account.spent, account.held
            if limits.calls is not None and spent.calls + held.calls >= limits.calls:
                return Shortage(account, "calls", limits.calls, spent.calls + held.calls)
            if limits.model_calls is not None and spent.model_calls + held.model_calls >= limits.model_calls:
                return Shortage(account, "modelCalls", limits.model_calls, spent.model_calls + held.model_calls)
            if limits.tokens is not None and spent.tokens >= limits.tokens:
                return Shortage(account, "tokens", limits.tokens, spent.tokens)
            if limits.input_tokens is not None and spent.input_tokens >= limits.input_tokens:
                return Shortage(account, "inputTokens", limits.input_tokens, spent.input_tokens)
            if limits.output_tokens is not None and spent.output_tokens >= limits.output_tokens:
                return Shortage(account, "outputTokens", limits.output_tokens, spent.output_tokens)
            if limits.money is not None and spent.money >= limits.money:
                return Shortage(account, "money", limits.money, spent.money)
            if limits.wall_ms is not None and lasted_ms >= limits.wall_ms:
                return Shortage(account, "wallSeconds", limits.wall_ms, lasted_ms)
        return None

    # --- tool calls

    def charge_tool(
        self, chain: AccountChain, spender: str, event_id: str, call_id: str, now_ms: int
    ) -> Shortage | Wait | None:
        """Count a tool call that is about to start. None: it may start. So may a call that was counted before."""
        tree = chain.tree
        digest = digest_of(event_id, call_id)
        counted = tree.charged.get(event_id)
        if counted is not None and digest in counted:
            return None
        if counted is not None and len(counted) >= MAX_CHARGED:
            return "results"
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        for account in chain.accounts:
            limit = None if account.limits is None else account.limits.tool_calls
            if limit is not None and account.spent.tool_calls >= limit:
                return Shortage(account, "toolCalls", limit, account.spent.tool_calls)
        if tree.counted >= tree.ceiling:
            if len(tree.ceilings) == 1:
                self.dirty[tree] = None
            return "journal"
        for account in chain.accounts:
            account.spent.tool_calls += 1
            own = account.by.get(spender)
            if own is None:
                own = account.by[spender] = Spend()
            own.tool_calls += 1
        if counted is None:
            counted = tree.charged[event_id] = set()
        counted.add(digest)
        tree.counted += 1
        if 2 * (tree.counted - tree.told) >= tree.slack:
            self.dirty[tree] = None
        return None

    def stored(self, chain: AccountChain, event_id: str, call_ids: Iterable[str]) -> None:
        """The results of these calls are stored, so nobody sends the calls again."""
        counted = chain.tree.charged.get(event_id)
        if counted is not None:
            counted.difference_update(digest_of(event_id, call_id) for call_id in call_ids)

    # --- model calls

    def price(self, agent: str, model: str) -> Prices:
        """What this Model of an agent costs; a name that is not among its Models stands for its own."""
        own = self.prices.get((agent, ""), FREE)
        return self.prices.get((agent, model), own)

    def reserve(
        self,
        chain: AccountChain,
        spender: str,
        event_id: str,
        hold_id: str,
        wanted: tuple[int, int],
        now_ms: int,
        model: str = "",
    ) -> Hold | Shortage | Wait:
        """Hold the amount that a model call may use. `wanted`: tokens that it reads, tokens that it may write. `model`:
        the document of the Model.
        """
        tree = chain.tree
        if (shortage := self.spent(chain, now_ms)) is not None:
            return shortage
        read, output = wanted
        least = min(output, MIN_OUTPUT)
        prices = self.price(spender, model)
        room = output
        for account in chain.accounts:
            given = self._room(account, read, output, least, prices)
            if not isinstance(given, int):
                return given
            room = min(room, given)
        amount = Spend(1, 0, read, room, prices.cost(read, room))
        hold = tree.holds[hold_id] = Hold(hold_id, event_id, spender, chain, amount)
        for account in chain.accounts:
            account.held.add(amount)
        return hold

    def _room(self, account: Account, read: int, output: int, least: int, prices: Prices) -> int | Shortage | Wait:
        """How many tokens a model may write by this account: `output`, or fewer."""
        limits, spent, held = account.limits, account.spent, account.held
        if limits is None:
            return output
        rows: list[tuple[Dimension, int | None, int, int, int, int]] = [
            ("tokens", limits.tokens, spent.tokens, held.tokens, read, 1),
            ("inputTokens", limits.input_tokens, spent.input_tokens, held.input_tokens, read, 0),
            ("outputTokens", limits.output_tokens, spent.output_tokens, held.output_tokens, 0, 1),
        ]
        room = output
        for dimension, limit, of_spent, of_held, fixed, each in rows:
            if limit is None:
                continue
            left = limit - of_spent
            if left < fixed + each * least:
                return Shortage(account, dimension, limit, of_spent, fixed + each * least)
            if left - of_held < fixed + each * output:
                if of_held:
                    return "others"
                room = min(room, left - fixed)
        if limits.money is not None:
            left, cost = limits.money - spent.money, prices.cost(read, least)
            if left < cost:
                return Shortage(account, "money", limits.money, spent.money, cost)
            if left - held.money < prices.cost(read, output):
                if held.money:
                    return "others"
                affordable = prices.affordable_output(left - prices.cost(read, 0) - 1)
                room = room if affordable is None else max(least, min(room, affordable))
        return room

    def settle(self, hold: Hold, amount: Spend | None) -> None:
        """A model call has used `amount`. None: nobody knows, so the whole held amount counts. An empty `Spend()`: the
        call was not made.
        """
        tree = hold.chain.tree
        if tree.holds.pop(hold.id, None) is None:
            return
        for account in hold.chain.accounts:
            account.held.take(hold.amount)
            account.charge(hold.spender, hold.amount if amount is None else amount)
        self.dirty[tree] = None

    def lose_calls(self, chain: AccountChain, event_id: str) -> None:
        """No process holds the turn of this event any more: its model calls that are under way count as spent."""
        for hold in [hold for hold in chain.tree.holds.values() if hold.event_id == event_id]:
            self.lose(hold)

    def lose(self, hold: Hold) -> None:
        """Nobody will settle this model call: the whole held amount counts."""
        self.settle(hold, None)
        self.lost.append(hold)

    # --- ends

    def event_over(self, chain: AccountChain, event_id: str) -> None:
        """The event has ended, so nobody sends calls of its turn again."""
        chain.tree.charged.pop(event_id, None)

    def tree_over(self, tree: Tree, now_ms: int) -> None:
        """The tree has no unfinished event. Its amounts are kept for people who look, and for pending work."""
        if tree.ended_ms is None:
            tree.ended_ms = now_ms
            self.ended[tree] = None
            self.dirty[tree] = None

    def forget(self, tree: Tree) -> None:
        """Nobody needs the tree any more."""
        self.trees.pop(tree.root, None)
        self.ended.pop(tree, None)
        self.dirty.pop(tree, None)

    # --- the journal

    def record(self, tree: Tree) -> BudgetTree:
        """The next record of the tree. Until the journal has a newer one, `slack` more tool calls may be counted."""
        self.dirty.pop(tree, None)
        tree.known = True
        tree.told, tree.slack = tree.counted, slack_of(tree)
        tree.ceilings.append(tree.counted + tree.slack)
        tree.ceiling = min(tree.ceilings)
        return BudgetTree(
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

    @staticmethod
    def written(tree: Tree) -> None:
        """The journal has the next record of this tree."""
        tree.ceilings.popleft()
        tree.ceiling = min(tree.ceilings)

    def restore(self, record: BudgetTree) -> Tree:
        """Restore a tree from the journal. Tool calls that may have been counted after the record count as made."""
        tree = self.trees[record.root] = Tree(record.root, record.began_ms)
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
        return tree

    def restore_hold(self, record: BudgetHold) -> None:
        """Remember a model call that was under way. The record of its tree may come later."""
        self._held.append(record)

    def adopt_holds(self) -> None:
        """All trees are restored: hold the model calls that were under way again."""
        for record in self._held:
            tree = self.trees.get(record.root)
            if tree is None:  # a tree is written before its first model call, so that was damaged
                tree = self.trees[record.root] = Tree(record.root, 0)
            chain = AccountChain(tree, tuple(record.accounts), [self._account(tree, name) for name in record.accounts])
            tree.holds[record.id] = Hold(record.id, record.event_id, record.agent, chain, record.amount)
            for account in chain.accounts:
                account.held.add(record.amount)
        self._held.clear()

    def restored(self) -> None:
        """The whole journal was read: calls that an earlier broker may have counted ahead count as made."""
        for tree in self.trees.values():
            ahead, tree.slack = tree.slack, 0  # what comes now waits for a record of its own
            if tree.ended_ms is not None:
                continue
            for account in tree.accounts.values():
                limits = account.limits
                rooms = [ahead]
                if limits is not None and limits.tool_calls is not None:
                    rooms.append(limits.tool_calls - account.spent.tool_calls)
                if limits is not None and limits.calls is not None:
                    rooms.append(limits.calls - account.spent.calls - account.held.calls)
                if (counted := min(rooms)) > 0:
                    account.charge(UNKNOWN, Spend(tool_calls=counted))
            self.dirty[tree] = None


def slack_of(tree: Tree) -> int:
    """How many tool calls of a tree may be counted ahead of the journal; 0 for a tree that is over."""
    if tree.ended_ms is not None:
        return 0
    slack = MAX_SLACK
    for account in tree.accounts.values():
        limits = account.limits
        for limit in () if limits is None else (limits.calls, limits.tool_calls):
            if limit is not None:
                slack = min(slack, max(1, limit // SLACK_PART))
    return slack


def digest_of(event_id: str, call_id: str) -> bytes:
    """The digest that stands for a call of an event."""
    name = f"{event_id}\0{call_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
