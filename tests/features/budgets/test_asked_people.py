"""The time of a budget stands still while a person is asked: in the accounts, and in a broker whose agent is gated."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from goondan.features.budgets.broker.accounts import Accounts
from goondan.features.budgets.broker.amounts import AccountChain, BudgetTree, Limits, Shortage
from goondan.features.budgets.wire import BudgetLimits
from goondan.kernel.broker.state.records import encode
from goondan.schemas.wire.codec import to_raw
from tests.features.budgets.test_accounts import ROOT, accounts, line_of
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, code_of

RM = {"command": "rm -rf build"}


def timed() -> tuple[Accounts, AccountChain]:
    made = accounts({"lead": Limits({"wallSeconds": 60_000})})
    return made, line_of(made)


def restored(made: Accounts, chain: AccountChain) -> Accounts:
    """The accounts of the next broker."""
    record = msgspec.msgpack.decode(encode(made.record(chain.tree)[0]), type=BudgetTree)
    assert isinstance(record, BudgetTree)
    again = accounts(dict(made.limits))
    again.restore(record)
    again.restored()
    return again


def test_time_stands_still_as_long_as_any_person_is_asked() -> None:
    made, chain = timed()
    made.stand_still(ROOT, 11_000)
    made.stand_still(ROOT, 20_000)
    assert made.lasted_ms(chain.tree, 500_000) == 10_000
    made.go_on(ROOT, 30_000)
    assert made.lasted_ms(chain.tree, 500_000) == 10_000, "a person is asked about another call still"
    made.go_on(ROOT, 500_000)
    assert made.lasted_ms(chain.tree, 500_000) == 10_000
    assert made.spent(chain, 549_999) is None
    short = made.spent(chain, 550_000)
    assert isinstance(short, Shortage)
    assert (short.dimension, short.spent) == ("wallSeconds", 60_000)
    made.go_on(ROOT, 600_000)  # nobody was asked
    assert made.lasted_ms(chain.tree, 600_000) == 110_000


def test_a_crash_while_people_are_asked_counts_nothing_twice() -> None:
    made, chain = timed()
    made.stand_still(ROOT, 11_000)
    made.stand_still(ROOT, 20_000)
    made.go_on(ROOT, 30_000)
    again = restored(made, chain)
    again.stand_still(ROOT, 20_000)  # as the journal has that item
    tree = again.trees[ROOT]
    assert again.lasted_ms(tree, 400_000) == 10_000
    again.go_on(ROOT, 400_000)
    assert again.lasted_ms(tree, 400_000) == 10_000
    assert again.lasted_ms(tree, 401_000) == 11_000


def budgeted() -> tuple[Bench, Peer, Peer, Peer]:
    """A gated agent with a minute, whose call waits for a person after 10 s."""
    bench = Bench(ASK)
    coder = bench.plan.agents["coder"]
    gated = structs.replace(coder, parts={**coder.parts, "budgets": to_raw(BudgetLimits(wall_seconds=60))})
    bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, "coder": gated})
    bench.router = bench._router()
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    bench.later(10)
    assert code_of(agent.call(RM)) == "E_APPROVAL_WAITS"
    return bench, client, agent, host


def used_s(client: Peer) -> float:
    (tree,) = client.admin(op="budget", eventId="e1")["trees"]
    (account,) = tree["budgets"]
    used: Any = account["spent"]["wallSeconds"]
    return float(used)


@pytest.mark.feature("approvals")
def test_an_hour_of_a_person_takes_nothing_of_a_minute() -> None:
    bench, client, agent, host = budgeted()
    bench.later(1800)
    assert used_s(client) == 10
    assert client.admin(op="approve.answer", id="t1/c1", decision="yes")["state"] == "approved"
    bench.later(5)
    agent = bench.agent()  # the first one has left long since
    agent.call(RM)
    (call,) = host.take("tool.call")
    assert call.deadline_ms is not None
    assert 44_000 < call.deadline_ms <= 45_000, "15 s of the minute are used"
    assert used_s(client) == 15


@pytest.mark.feature("approvals")
def test_a_broker_that_is_killed_counts_no_second_in_which_a_person_was_asked() -> None:
    bench, client, agent, host = budgeted()
    bench.later(900)
    bench.restart()
    client = bench.client()
    assert used_s(client) == 10
    bench.later(900)
    assert client.admin(op="approve.answer", id="t1/c1", decision="no")["state"] == "denied"
    bench.restart()
    client = bench.client()
    assert 10 < used_s(client) < 15, "since then it runs again"


@pytest.mark.feature("approvals")
def test_what_expires_or_ends_lets_the_time_go_on() -> None:
    bench, client, agent, host = budgeted()
    bench.later(3599)
    assert used_s(client) == 10
    bench.later(2)  # nobody answered within the hour
    bench.later(20)
    assert 30 <= used_s(client) < 34
