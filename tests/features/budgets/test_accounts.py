"""The accounts of budgets by itself: whatever happens in whatever order, no budget gives more than it has."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from goondan.features.budgets.broker.accounts import MAX_SLACK, MIN_OUTPUT, Accounts, slack_of
from goondan.features.budgets.broker.amounts import AccountChain, BudgetHold, BudgetTree, Limits, Shortage, Spend, Tree
from goondan.kernel.broker.state.records import encode
from goondan.schemas.wire.usage import Prices

ROOT = "root"
#: Agent, path of its turns: `lead` asks `worker`, which has a budget of its own, and `helper`, which has none.
TURNS = {"e-lead": ("lead", ()), "e-worker": ("worker", ("lead",)), "e-helper": ("helper", ("lead",))}
LIMITS = {
    "lead": Limits({"calls": 40, "tokens": 60_000, "money": 90_000_000}),
    "worker": Limits({"modelCalls": 9, "toolCalls": 12, "inputTokens": 20_000, "outputTokens": 15_000}),
}
PRICES = {("lead", ""): Prices(1_000_000_000, 2_000_000_000), ("worker", ""): Prices(500_000_000, 500_000_000)}


class Budgeted(RuleBasedStateMachine):
    """A broker that may die at any moment, its journal, and agents that may die, repeat themselves and lie."""

    @initialize()
    def begin(self) -> None:
        self.journal: dict[str, bytes] = {}
        #: Writes on their way to the disk, in order: what they put (None: remove), and whose record it is.
        self.writes: deque[dict[str, bytes | None]] = deque()
        #: Calls that really happened, by agent: what a budget is about.
        self.tools: dict[tuple[str, str], None] = {}
        self.models: dict[str, str] = {}
        self.granted: dict[str, BudgetHold] = {}
        self.number = 0
        self.boot()

    def boot(self) -> None:
        self.accounts = Accounts()
        self.accounts.revise(LIMITS, PRICES)
        for data in self.journal.values():
            record = msgspec.msgpack.decode(data, type=BudgetTree | BudgetHold)
            if isinstance(record, BudgetTree):
                self.accounts.restore(record)
            elif isinstance(record, BudgetHold):
                self.accounts.restored_holds.append(record)
        self.accounts.restored()
        self.flush()

    def chain_of(self, event_id: str) -> AccountChain:
        agent, path = TURNS[event_id]
        chain = self.accounts.chain_of(ROOT, path, agent, 0)
        assert chain is not None
        return chain

    @property
    def tree(self) -> Tree:
        return self.chain_of("e-lead").tree

    def flush(self) -> None:
        for tree in list(self.accounts.dirty):
            record, over = self.accounts.record(tree)
            self.writes.append({**{f"hold:{name}": None for name in over}, "tree": encode(record)})

    # --- what happens

    @rule(event_id=st.sampled_from(sorted(TURNS)), call=st.integers(0, 40))
    def tool_call(self, event_id: str, call: int) -> None:
        """A tool call, perhaps one that was made before: then it attaches, and does not run twice."""
        verdict = self.accounts.charge_tool(self.chain_of(event_id), TURNS[event_id][0], event_id, str(call), 0)
        self.flush()
        if verdict is None:
            self.tools[event_id, str(call)] = None

    @rule(event_id=st.sampled_from(sorted(TURNS)), read=st.integers(0, 9_000), wish=st.integers(1, 9_000))
    def model_call(self, event_id: str, read: int, wish: int) -> None:
        self.number += 1
        name = f"{event_id}/{self.number}"
        hold = self.accounts.reserve(self.chain_of(event_id), TURNS[event_id][0], event_id, name, (read, wish), 0)
        if not isinstance(hold, BudgetHold):
            return
        assert min(wish, MIN_OUTPUT) <= hold.amount.output_tokens <= wish
        if not self.tree.known:
            self.accounts.dirty[self.tree] = None
            self.flush()
        self.writes.append({f"hold:{name}": encode(hold)})
        self.granted[name] = hold

    @rule(data=st.data(), outcome=st.sampled_from(["used", "unknown", "unused", "repeated"]))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        """The agent says what a call came to, if it was ever told that it may make it."""
        names = sorted(name for name in self.granted if name in self.models or outcome == "unused")
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        hold = self.tree.holds.get(name)
        if hold is None:
            return  # a repeat, or counted as lost
        amount = hold.amount
        part = data.draw(st.floats(0, 1))
        used = Spend(1, 0, int(amount.input_tokens * part), int(amount.output_tokens * part), int(amount.money * part))
        if outcome == "unused":
            if name in self.models:
                return  # it was made
            self.accounts.settle(hold, Spend())
        else:
            self.accounts.settle(hold, None if outcome == "unknown" else used)
            self.accounts.settle(hold, used)  # twice counts once
        self.flush()
        self.granted.pop(name, None)

    @rule(event_id=st.sampled_from(sorted(TURNS)))
    def agent_dies(self, event_id: str) -> None:
        self.accounts.lose_calls(self.tree, event_id)
        for name in [name for name, hold in self.granted.items() if hold.event_id == event_id]:
            del self.granted[name]
        self.flush()

    @rule(event_id=st.sampled_from(sorted(TURNS)), calls=st.sets(st.integers(0, 40)))
    def results_stored(self, event_id: str, calls: set[int]) -> None:
        """Results are stored: calls whose ids are new from now on."""
        done = [call for call in calls if (event_id, str(call)) in self.tools]
        self.accounts.stored(self.chain_of(event_id), event_id, map(str, done))
        for call in done:  # the next one under this id would be another call
            del self.tools[event_id, str(call)]
            self.number += 1
            self.tools[event_id, f"done-{self.number}"] = None

    @rule(count=st.integers(1, 4))
    def disk(self, count: int) -> None:
        """Writes become durable, in order; a model call whose hold is durable is made."""
        for _ in range(min(count, len(self.writes))):
            write = self.writes.popleft()
            for key, data in write.items():
                if data is None:
                    self.journal.pop(key, None)
                else:
                    self.journal[key] = data
                    name = key.removeprefix("hold:")
                    if key != name and name in self.granted:
                        self.models[name] = self.granted[name].agent
            if "tree" in write:
                self.tree.written(kept=True)

    @rule()
    def broker_dies(self) -> None:
        """What was on its way to the disk is lost, and so is what the broker had in memory."""
        self.writes.clear()
        self.granted.clear()
        self.boot()
        self.granted = dict(self.tree.holds)

    # --- what must hold

    @invariant()
    def nothing_exceeds_its_limit(self) -> None:
        for account in self.tree.accounts.values():
            assert account.limits is not None
            for dimension, limit in account.limits.rows.items():
                taken = account.spent.of(dimension) + account.held.of(dimension)
                assert taken <= limit, (account.agent, dimension, taken, limit)
            total = Spend()
            for amount in account.by.values():
                total.add(amount)
            assert total == account.spent
            held = Spend()
            for hold in self.tree.holds.values():
                if account.agent in hold.accounts:
                    held.add(hold.amount)
            assert held == account.held

    @invariant()
    def calls_that_happened_are_within_the_limits(self) -> None:
        of_worker = [key for key in self.tools if key[0] == "e-worker"]
        worker_models = [agent for agent in self.models.values() if agent == "worker"]
        assert len(self.tools) + len(self.models) <= 40
        assert len(of_worker) <= 12
        assert len(worker_models) <= 9

    @invariant()
    def what_happened_is_counted(self) -> None:
        lead = self.tree.accounts["lead"]
        assert len(self.tools) <= lead.spent.tool_calls
        assert len(self.models) <= lead.spent.model_calls + lead.held.model_calls


Budgeted.TestCase.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
TestBudgeted = Budgeted.TestCase


def accounts(limits: dict[str, Limits], prices: dict[tuple[str, str], Prices] | None = None) -> Accounts:
    made = Accounts()
    made.revise(limits, prices or {})
    return made


def line_of(made: Accounts, agent: str = "lead", path: tuple[str, ...] = (), root: str = ROOT) -> AccountChain:
    chain = made.chain_of(root, path, agent, 1_000)
    assert chain is not None
    return chain


def durable(made: Accounts, tree: Tree) -> BudgetTree:
    record, _ = made.record(tree)
    tree.written(kept=True)
    return record


def test_who_has_no_budget_and_is_asked_by_nobody_with_one_has_no_line() -> None:
    made = accounts({"lead": Limits({"calls": 1})})
    assert made.chain_of(ROOT, (), "helper", 0) is None
    assert made.trees == {}
    assert line_of(made, "helper", ("lead",)).names == ("lead",)
    assert line_of(made, root="another").tree is not line_of(made).tree, "the next message begins anew"
    assert line_of(made, "lead", ("lead",)).names == ("lead",), "an agent that is asked by itself is charged once"


def test_a_child_is_charged_to_its_own_budget_and_to_all_above_it() -> None:
    made = accounts({"lead": Limits({"toolCalls": 3}), "worker": Limits({"toolCalls": 2})})
    lead, worker = line_of(made), line_of(made, "worker", ("lead",))
    durable(made, lead.tree)
    durable(made, lead.tree)

    def call(chain: AccountChain, agent: str, name: str) -> Shortage | str | None:
        verdict = made.charge_tool(chain, agent, "e", name, 0)
        durable(made, chain.tree)
        return verdict

    assert [call(worker, "worker", name) for name in "ab"] == [None, None]
    short = call(worker, "worker", "c")
    assert isinstance(short, Shortage)
    assert (short.account.agent, short.dimension, short.limit, short.spent) == ("worker", "toolCalls", 2, 2)
    assert call(lead, "lead", "d") is None
    short = call(lead, "lead", "e")
    assert isinstance(short, Shortage)
    assert short.account.agent == "lead"
    assert {name: amount.tool_calls for name, amount in short.account.by.items()} == {"worker": 2, "lead": 1}
    assert call(worker, "worker", "a") is None, "a call that was counted may be sent again"


def test_a_model_call_waits_while_others_may_give_back_and_is_refused_when_nobody_can() -> None:
    made = accounts({"lead": Limits({"tokens": 10_000})})
    chain = line_of(made)
    first = made.reserve(chain, "lead", "e1", "e1/1", (1_000, 4_000), 0)
    assert isinstance(first, BudgetHold)
    assert made.reserve(chain, "lead", "e2", "e2/1", (2_000, 4_000), 0) == "others"
    made.settle(first, Spend(1, 0, 900, 100, 0))
    second = made.reserve(chain, "lead", "e2", "e2/1", (2_000, 4_000), 0)
    assert isinstance(second, BudgetHold)
    made.settle(second, Spend(1, 0, 2_000, 4_000, 0))
    third = made.reserve(chain, "lead", "e2", "e2/2", (2_000, 4_000), 0)
    assert isinstance(third, BudgetHold)
    assert third.amount.output_tokens == 1_000, "nobody holds anything: it may write what there is room for"
    made.settle(third, Spend(1, 0, 2_000, 900, 0))
    short = made.reserve(chain, "lead", "e2", "e2/3", (50, 4_000), 0)
    assert isinstance(short, Shortage)
    assert (short.dimension, short.spent, short.wanted) == ("tokens", 9_900, 50 + MIN_OUTPUT)


def test_a_call_that_is_under_way_counts() -> None:
    made = accounts({"lead": Limits({"calls": 2})})
    chain = line_of(made)
    durable(made, chain.tree)
    assert isinstance(made.reserve(chain, "lead", "e1", "e1/1", (1, 1), 0), BudgetHold)
    assert made.charge_tool(chain, "lead", "e2", "a", 0) is None
    durable(made, chain.tree)
    for verdict in (
        made.reserve(chain, "lead", "e2", "e2/1", (1, 1), 0),
        made.charge_tool(chain, "lead", "e2", "b", 0),
    ):
        assert isinstance(verdict, Shortage)
        assert (verdict.dimension, verdict.spent) == ("calls", 2)


def test_money_is_what_the_model_costs() -> None:
    prices = Prices(3_000_000_000, 15_000_000_000, 300_000_000, 3_750_000_000)
    assert prices.cost(1_000_000, 0) == 3_000_000_000
    assert prices.cost(0, 1, 1, 1) == -(-(15_000_000_000 + 300_000_000 + 3_750_000_000) // 1_000_000)
    made = accounts({"lead": Limits({"money": 10_000_000})}, {("lead", ""): prices})  # a hundredth of a unit
    chain = line_of(made)
    hold = made.reserve(chain, "lead", "e", "e/1", (1_000, 8_192), 0)
    assert isinstance(hold, BudgetHold)
    assert hold.amount.output_tokens == 466, "7 of 10 thousandths at 15 for a million"
    assert hold.amount.money <= 10_000_000
    made.settle(hold, Spend(1, 0, 1_000, 400, prices.cost(1_000, 400)))
    short = made.reserve(chain, "lead", "e", "e/2", (1_000, 8_192), 0)
    assert isinstance(short, Shortage)
    assert (short.dimension, short.spent) == ("money", 9_000_000)


def test_time_counts_from_the_first_event_and_ends_everything() -> None:
    made = accounts({"lead": Limits({"wallSeconds": 60_000})})
    chain = line_of(made)
    durable(made, chain.tree)
    assert made.charge_tool(chain, "lead", "e", "a", 60_999) is None
    short = made.charge_tool(chain, "lead", "e", "b", 61_000)
    assert isinstance(short, Shortage)
    assert short.dimension == "wallSeconds"
    assert isinstance(made.reserve(chain, "lead", "e", "e/1", (1, 1), 61_000), Shortage)


def test_tool_calls_that_are_spent_leave_the_model_its_calls_and_nothing_else_does() -> None:
    made = accounts({"lead": Limits({"modelCalls": 2, "toolCalls": 1})})
    chain = line_of(made)
    durable(made, chain.tree)
    assert made.charge_tool(chain, "lead", "e", "a", 0) is None
    durable(made, chain.tree)
    assert isinstance(made.charge_tool(chain, "lead", "e", "b", 0), Shortage)
    for number in (1, 2):
        hold = made.reserve(chain, "lead", "e", f"e/{number}", (1, 1), 0)
        assert isinstance(hold, BudgetHold)
        made.settle(hold, None)
    assert isinstance(made.reserve(chain, "lead", "e", "e/3", (1, 1), 0), Shortage)
    made.revise({"lead": Limits({"modelCalls": 2, "toolCalls": 5})}, {})
    short = made.charge_tool(chain, "lead", "e", "c", 0)
    assert isinstance(short, Shortage)
    assert short.dimension == "modelCalls"


@pytest.mark.parametrize(
    ("limits", "slack"),
    [
        (Limits({"calls": 100}), 2),
        (Limits({"calls": 10}), 1),
        (Limits({"calls": 2_000, "toolCalls": 1_000}), 20),
        (Limits({"calls": 1_000_000}), MAX_SLACK),
        (Limits({"tokens": 100}), MAX_SLACK),
    ],
)
def test_a_broker_that_dies_loses_a_fiftieth_of_a_budget_at_most(limits: Limits, slack: int) -> None:
    made = accounts({"lead": limits})
    chain = line_of(made)
    assert slack_of(chain.tree) == slack
    assert made.charge_tool(chain, "lead", "e", "a", 0) == "journal", "the journal knows nothing of it yet"
    record = durable(made, chain.tree)
    for number in range(slack):
        assert made.charge_tool(chain, "lead", "e", f"a{number}", 0) is None
    assert made.charge_tool(chain, "lead", "e", "one more", 0) == "journal"
    again = accounts({"lead": limits})
    again.restore(record)
    again.restored()
    tree = again.trees[ROOT]
    assert tree.accounts["lead"].spent.tool_calls == slack


def test_what_a_tree_that_is_over_goes_on_with_waits_for_the_journal() -> None:
    """Else calls could be counted ahead of a record that allows none."""
    made = accounts({"lead": Limits({"calls": 100})})
    chain = line_of(made)
    durable(made, chain.tree)
    made.tree_over(chain.tree, 5)
    made.record(chain.tree)  # on its way: it allows none ahead
    assert made.chain_of(ROOT, (), "lead", 9) == chain
    assert chain.tree.ended_ms is None
    assert made.charge_tool(chain, "lead", "e", "a", 0) == "journal"
    chain.tree.written(kept=True)
    assert made.charge_tool(chain, "lead", "e", "a", 0) == "journal"
    durable(made, chain.tree)
    assert made.charge_tool(chain, "lead", "e", "a", 0) is None
