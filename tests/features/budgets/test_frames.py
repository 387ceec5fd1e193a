"""Budgets in the broker: who is charged, what is refused and to whom that is said, and what survives a death."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.features.budgets.broker import Budgets
from goondan.features.budgets.broker.amounts import AccountChain
from goondan.features.budgets.wire import FEATURE, BudgetGranted, BudgetLimits, BudgetReserve, BudgetSettle
from goondan.kernel.broker.state.entities import TOOLS, Connection
from goondan.kernel.cli.rules.waits import render
from goondan.schemas.bundle.launch import KernelPlan, ModelSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, Frame
from goondan.schemas.wire.usage import Pricing
from tests.unit.kernel.broker.swarm import TOOL
from tests.unit.kernel.broker.swarm import plan as swarm_plan
from tests.unit.kernel.broker.test_durability import admin, subjects
from tests.unit.kernel.broker.world import World, part_of, request, run, said

PRICED = ModelSpec(provider="embedded", pricing=Pricing(input_per_million=1000.0, output_per_million=2000.0))


def budgeted(**limits: BudgetLimits) -> World:
    """`coder/k` works on `e1`, whose agents have these budgets, and has made no call of its own yet."""
    world = World()
    world.plan = with_limits(swarm_plan(), limits)
    world.router = world._new_router()
    for actor in world.actors():
        actor.wire.cut(reconnect=True)
    world.clients[0].ask("e1", calls=0)
    # The agent of the world would end its turn at once: here the test speaks for it.
    instance = None
    for _ in range(40):
        for actor in world.actors():
            if actor not in world.agents.values():
                world.flow(actor)
            elif instance is None or instance.leased is None:
                world.pump_up(actor)
                if instance is None or instance.conn is None:
                    world.pump_down(actor)
        world.supervisor.reconcile()
        instance = world.router.bus.mailbox.instances.get(("coder", "k"))
    assert instance is not None
    assert instance.leased is not None
    return world


def in_a_call(**limits: BudgetLimits) -> World:
    """`coder/k` works on `e1`, whose agents have these budgets, and waits for the result of its first call."""
    world = World()
    world.plan = with_limits(swarm_plan(), limits)
    world.router = world._new_router()
    for actor in world.actors():
        actor.wire.cut(reconnect=True)
    world.clients[0].ask("e1")
    run(world, 20)
    for _ in range(5):
        world.advance(0.1)
        run(world)
    assert list(world.host.running) == ["coder/k/e1/0"]
    return world


def child_works(world: World, calls: int) -> None:
    """`reviewer/k` makes its calls one after another, and answers."""
    for number in range(calls):
        for _ in range(5):
            world.advance(0.1)
            run(world)
        call_id = next(name for name in world.host.running if name.endswith(f"/{number}") and "reviewer" in name)
        del world.host.running[call_id]
        world.host.kept[call_id] = "ran"
        world.host.give(call_id)
    run(world, 10)


def with_limits(plan: KernelPlan, limits: dict[str, BudgetLimits]) -> KernelPlan:
    agents = {
        name: structs.replace(spec, parts={FEATURE: to_raw(limits[name])} if name in limits else {}, model=PRICED)
        for name, spec in plan.agents.items()
    }
    return structs.replace(plan, agents=agents)


def speaker(world: World, agent: str = "coder", key: str = "k") -> Connection:
    return world.peer(agent, key)


def tell(world: World, frame: Frame, agent: str = "coder", event_id: str = "e1") -> list[Frame]:
    """A frame of the turn, and what its agent hears because of it."""
    frame.event_id = event_id
    frame.epoch = world.router.bus.mailbox.instances[agent, "k"].epoch
    return [told for told in said(world, speaker(world, agent), frame) if told.type != "ping"]


def call(world: World, call_id: str, agent: str = "coder", event_id: str = "e1", **more: Any) -> str | None:
    """A tool call; the code of what it is refused with. Sent again while the journal is behind, as a link does it."""
    for _ in range(3):
        frame = Frame("tool.call", id=f"f-{call_id}", call_id=call_id, tool=TOOL, payload=to_raw({}), **more)
        code = next((error_of(told).code for told in tell(world, frame, agent, event_id) if told.type == "error"), None)
        if code != "E_OVERLOADED":
            return code
    raise AssertionError("the journal never came")


def error_of(frame: Frame) -> ErrorPayload:
    assert frame.type == "error", frame
    return from_raw(frame.payload, ErrorPayload)


def reserve(
    world: World, name: str, read: int = 100, output: int = 1000, *, kind: str = "model", **where: Any
) -> BudgetGranted | ErrorPayload | None:
    asked = {"id": name, "kind": kind, "inputTokens": read, "outputTokens": output}
    told = tell(world, Frame("budget.reserve", id=f"r-{name}", payload=to_raw(asked)), **where)
    if not told:
        return None
    (answer,) = told
    assert answer.in_reply_to == f"r-{name}"
    return error_of(answer) if answer.type == "error" else from_raw(answer.payload, BudgetGranted)


def settle(world: World, name: str, read: int = 0, output: int = 0, **more: Any) -> list[Frame]:
    where = {key: more.pop(key) for key in ("agent", "event_id") if key in more}
    said_ = BudgetSettle(name, input_tokens=read, output_tokens=output, **more)
    told = tell(world, Frame("budget.settle", id=f"s-{name}", payload=to_raw(said_)), **where)
    assert f"s-{name}" in [frame.in_reply_to for frame in told]
    return [frame for frame in told if frame.in_reply_to != f"s-{name}"]


def spent(world: World, agent: str = "coder", what: str = "spent", event_id: str = "e1") -> dict[str, float]:
    (tree,) = admin(world, "budget", eventId=event_id)["trees"]
    (found,) = [budget for budget in tree["budgets"] if budget["agent"] == agent]
    amounts: dict[str, float] = found[what]
    return amounts


def ask(world: World, name: str, target: str = "reviewer", *, waits: bool = True) -> list[Frame]:
    """`coder/k` asks in its turn."""
    frame = request(name, target, call_id=None, calls=3, asynchronous=not waits)
    return said(world, speaker(world), frame)


def chain_at(world: World, event_id: str) -> AccountChain | None:
    """What an event that is not over is charged to."""
    return part_of(world.router, Budgets).chains.get(world.router.bus.mailbox.events[event_id])


def test_an_agent_without_a_budget_is_told_nothing_and_nothing_is_written() -> None:
    world = budgeted()
    assert chain_at(world, "e1") is None
    assert call(world, "c1") is None
    assert reserve(world, "m1") == BudgetGranted()
    assert not [subject for subject in subjects(world) if subject.startswith("budget")]
    assert part_of(world.router, Budgets).accounts.trees == {}


def test_tool_calls_are_counted_once_each_and_refused_with_the_whole_story() -> None:
    world = budgeted(coder=BudgetLimits(tool_calls=2))
    assert [call(world, name) for name in ("c1", "c2", "c1")] == [None, None, None]
    assert call(world, "c3") == "E_BUDGET_SPENT"
    told = tell(world, Frame("tool.call", id="f", call_id="c4", tool=TOOL, payload=to_raw({})))
    error = error_of(told[0])
    assert error.message == "the budget of agent 'coder' is spent: 2 of 2 tool calls (coder 2)"
    assert "gdn budget e1" in (error.suggestion or "")
    assert "c4" not in world.router.bus.calls.open
    assert isinstance(reserve(world, "m1"), BudgetGranted), "the model may say what it has"


def test_a_model_call_is_held_settled_and_priced() -> None:
    world = budgeted(coder=BudgetLimits(tokens=10_000, money=20.0))
    granted = reserve(world, "m1", 1_000, 2_000)
    assert isinstance(granted, BudgetGranted)
    assert granted.output_tokens == 2_000
    assert [(row.whose, row.dimension, row.left, row.limit) for row in granted.left] == [
        ("coder", "tokens", 7_000.0, 10_000.0),
        ("coder", "money", 15.0, 20.0),
    ]
    assert spent(world, what="held")["tokens"] == 3_000
    settle(world, "m1", 900, 100)
    amounts = spent(world)
    assert (amounts["modelCalls"], amounts["inputTokens"], amounts["outputTokens"]) == (1, 900, 100)
    assert admin(world, "budget")["trees"][0]["budgets"][0]["currency"] == "USD"
    assert amounts["money"] == pytest.approx(0.9 + 0.2)
    settle(world, "m1", 5_000, 4_000)
    assert spent(world)["tokens"] == 1_000, "said twice, it counts once"
    assert isinstance(reserve(world, "m2", 1_000, 2_000), BudgetGranted)
    assert isinstance(reserve(world, "m2", 1_000, 2_000), BudgetGranted)
    assert spent(world, what="held")["tokens"] == 3_000, "asked twice, it holds once"
    settle(world, "m2", 9_000, 9_000)
    assert isinstance(reserve(world, "m3", 1, 1), ErrorPayload), "it took more than it held"


def test_any_number_of_tokens_at_any_price_can_be_stored() -> None:
    world = budgeted(coder=BudgetLimits(calls=100))
    dear = structs.replace(PRICED, pricing=Pricing(input_per_million=10.0**9, output_per_million=10.0**9))
    spec = world.plan.agents["coder"]
    world.plan = structs.replace(world.plan, agents={**world.plan.agents, "coder": structs.replace(spec, model=dear)})
    part_of(world.router, Budgets).revise(world.plan)
    for number in range(20):
        assert isinstance(reserve(world, f"m{number}", 10**9, 10**9), BudgetGranted)
        settle(world, f"m{number}", 10**9, 10**9)
    assert (spent(world)["money"], spent(world)["tokens"]) == (10**9, 40 * 10**9)
    assert admin(world, "budget")["trees"][0]["budgets"][0]["currency"] is None, "it has no limit of money"
    world.kill_broker()
    assert (spent(world)["money"], spent(world)["tokens"]) == (10**9, 40 * 10**9)


def test_a_call_is_settled_at_the_price_of_the_model_that_was_asked() -> None:
    world = budgeted(coder=BudgetLimits(money=20.0))
    spec = world.plan.agents["coder"]
    pricing = Pricing(input_per_million=1.0, output_per_million=2.0)
    spare = structs.replace(PRICED, document="spare", pricing=pricing)
    world.plan = structs.replace(
        world.plan, agents={**world.plan.agents, "coder": structs.replace(spec, fallback=[spare])}
    )
    world.router.bus.plan = world.plan
    part_of(world.router, Budgets).revise(world.plan)
    frame = Frame("budget.reserve", id="r-m1", payload=to_raw(BudgetReserve("m1", "model", 1_000, 2_000, "spare")))
    (told,) = tell(world, frame)
    assert from_raw(told.payload, BudgetGranted).left[0].left == pytest.approx(20 - 0.005)
    tell(
        world,
        Frame(
            "budget.settle",
            id="s",
            payload=to_raw(BudgetSettle("m1", input_tokens=900, output_tokens=100, model="spare")),
        ),
    )
    assert spent(world)["money"] == pytest.approx(0.0009 + 0.0002)


@pytest.mark.feature("waits")
def test_who_waits_for_a_budget_is_shown() -> None:
    world = budgeted(coder=BudgetLimits(tokens=5_000))
    assert isinstance(reserve(world, "m1", 1_000, 3_000), BudgetGranted)
    assert reserve(world, "m2", 1_000, 2_000) is None
    assert reserve(world, "m3", 1_000, 2_000) is None
    world.now += 2
    waits = [row for row in admin(world, "why")["waits"] if row["kind"] == "budget"]
    assert [(row["agent"], row["eventId"], row["root"]) for row in waits] == [("coder", "e1", "e1")] * 2
    assert "waits for what others may give back to the budget of e1" in "\n".join(
        render({"waits": waits, "more": 0, "cycles": [], "stuck": []})
    )


def test_what_waits_for_others_is_answered_when_one_has_settled_in_the_order_in_which_it_came() -> None:
    world = budgeted(coder=BudgetLimits(tokens=5_000))
    assert isinstance(reserve(world, "m1", 1_000, 3_000), BudgetGranted)
    assert reserve(world, "m2", 1_000, 2_000) is None
    assert reserve(world, "m3", 1_000, 2_000) is None
    told = settle(world, "m1", 500, 500)
    assert [frame.in_reply_to for frame in told] == ["r-m2"]
    assert settle(world, "m3", unused=True) == [], "it gives up waiting"
    assert settle(world, "m2", 1_000, 2_000) == []
    short = reserve(world, "m4", 900, 2_000)
    assert isinstance(short, ErrorPayload)
    assert short.message == (
        "the budget of agent 'coder' is spent: 4,000 of 5,000 tokens (coder 4,000); "
        "the next model call of 'coder' may take 1,156 tokens"
    )


def test_a_call_that_was_not_made_is_given_back_and_one_of_unknown_size_counts_as_it_was_held() -> None:
    world = budgeted(coder=BudgetLimits(model_calls=2, tokens=10_000))
    reserve(world, "m1", 1_000, 2_000)
    settle(world, "m1", unused=True)
    assert spent(world)["modelCalls"] == 0
    reserve(world, "m2", 1_000, 2_000)
    settle(world, "m2", known=False)
    assert (spent(world)["modelCalls"], spent(world)["tokens"]) == (1, 3_000)


@pytest.mark.parametrize("killed", ["agent", "broker", "both"])
def test_what_a_crash_hides_is_spent(killed: str) -> None:
    world = budgeted(coder=BudgetLimits(calls=100, tokens=10_000))
    assert call(world, "c1") is None
    assert isinstance(reserve(world, "m1", 1_000, 2_000), BudgetGranted)
    assert call(world, "c2") is None
    if killed in ("broker", "both"):
        world.kill_broker()
        assert spent(world, what="held")["tokens"] == 3_000
    if killed in ("agent", "both"):
        world.kill_agent(world.agents["coder", "k"])
    if killed == "broker":
        connection_back(world)
        settle(world, "m1", 100, 100)
        assert spent(world)["tokens"] == 200, "the agent lives and says what it came to"
        assert call(world, "c1") is None
    else:
        run(world, 20)
        world.advance(0.3)
        assert spent(world)["tokens"] == 3_000
        assert spent(world, what="held")["tokens"] == 0
    amounts = spent(world)
    assert amounts["modelCalls"] == 1
    assert 2 <= amounts["toolCalls"] <= 2 + 2, "a broker's death costs a fiftieth at most"


def connection_back(world: World) -> None:
    """The agent, which lives, says hello to the new broker with what it holds."""
    agent = world.agents["coder", "k"]
    agent.held = Frame(
        "event", event_id="e1", epoch=next(iter(world.router.bus.mailbox.events.values())).instance.epoch
    )
    for _ in range(20):
        for actor in world.actors():
            while world.pump_up(actor) or (actor is not agent and world.pump_down(actor)):
                pass
        if agent.peer.phase != "ready":
            world.pump_down(agent)
        if world.router.bus.mailbox.instances["coder", "k"].leased is not None:
            return
    raise AssertionError("it did not come back")


def test_a_resumed_call_is_counted_once_also_by_another_broker() -> None:
    world = budgeted(coder=BudgetLimits(tool_calls=50))
    for name in ("c1", "c2", "c3"):
        assert call(world, name) is None
    world.kill_broker()
    connection_back(world)
    before = spent(world)["toolCalls"]
    assert before <= 4
    for name in ("c1", "c2", "c3"):
        assert call(world, name, first_sent_ms=1) is None
    assert spent(world)["toolCalls"] == before
    assert call(world, "new", first_sent_ms=1) is None
    assert spent(world)["toolCalls"] == before + 1, "whoever says that it is old is not believed"


def test_a_child_is_charged_to_the_asker_too_and_stops_with_it() -> None:
    world = in_a_call(coder=BudgetLimits(tool_calls=4, calls=5))
    ask(world, "r1")
    chain = chain_at(world, "r1")
    assert chain is not None
    assert chain.names == ("coder",)
    child_works(world, 3)
    assert spent(world, what="by")["reviewer"]["toolCalls"] == 3  # type: ignore[index]
    assert spent(world)["toolCalls"] == 4
    assert call(world, "c1") == "E_BUDGET_SPENT"
    assert isinstance(reserve(world, "m1"), BudgetGranted)
    refused = ask(world, "r2")
    assert error_of(refused[0]).code == "E_BUDGET_SPENT", "nothing more of the tree starts"
    assert "5 of 5 calls (reviewer 3, coder 1)" in error_of(refused[0]).message


def test_what_is_asked_without_waiting_is_charged_and_its_answer_is_the_askers_own_work() -> None:
    world = in_a_call(coder=BudgetLimits(calls=100), reviewer=BudgetLimits(calls=50))
    ask(world, "r1", waits=False)
    chain = chain_at(world, "r1")
    assert chain is not None
    assert chain.names == ("coder", "reviewer")
    world.kill_broker()
    chain = chain_at(world, "r1")
    assert chain is not None
    assert chain.names == ("coder", "reviewer"), "the journal knows whose budgets led to it"
    child_works(world, 3)
    chain = chain_at(world, "r1:answer")
    assert chain is not None
    assert chain.names == ("coder",)


def test_what_a_handler_asks_and_the_end_of_pending_work_are_charged_too() -> None:
    world = in_a_call(coder=BudgetLimits(calls=100))
    (host,) = world.router.bus.presence.connections[TOOLS].values()
    asked = request("r1", call_id="coder/k/e1/0")
    assert [frame.type for frame in said(world, host, asked)] == ["ack"]
    chain = chain_at(world, "r1")
    assert chain is not None
    assert chain.names == ("coder",)
    ended = AgentEvent(id="p1", type="tool.completed", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame("event", id="p", to="reviewer", instance_key="k", event_id="p1", payload=to_raw(ended))
    frame.root_event = "e1"
    assert [told.type for told in said(world, host, frame)] == ["ack"]
    chain = chain_at(world, "p1")
    assert chain is not None
    assert chain.names == ("coder",), "the account knows because of whom the reviewer works"


def test_a_tree_that_is_over_is_kept_and_what_goes_on_of_it_is_counted_with_it() -> None:
    world = budgeted(coder=BudgetLimits(calls=100))
    assert call(world, "c1") is None
    assert isinstance(reserve(world, "m1"), BudgetGranted)
    settle(world, "m1", 10, 10)
    world.host.work()
    world.settle()
    assert "e1" not in world.router.bus.mailbox.events
    world.kill_broker()
    (tree,) = admin(world, "budget", eventId="e1")["trees"]
    assert tree["endedMs"] is not None
    assert tree["budgets"][0]["spent"]["calls"] == 2, "no broker counted ahead of an account that is closed"
    assert admin(world, "budget")["trees"] == [tree]
    assert admin(world, "budget", eventId="no such") == {"error": "E_EVENT_NOT_FOUND"}


def test_an_event_that_waits_has_no_account_yet_and_its_time_counts_from_its_acceptance() -> None:
    world = budgeted(coder=BudgetLimits(wall_seconds=60))
    for number in range(3):
        world.clients[0].ask(f"later-{number}")
    run_others(world)
    assert [chain_at(world, f"later-{number}") for number in range(3)] == [None] * 3
    assert list(part_of(world.router, Budgets).accounts.trees) == ["e1"]
    world.kill_broker()
    assert part_of(world.router, Budgets).chains == {}, "nothing was counted yet"
    world.now += 40
    connection_back(world)
    granted = reserve(world, "m1")
    assert isinstance(granted, BudgetGranted), "the turn that runs is charged under the next broker, too"
    assert 0 < (granted.left_ms or 0) <= 20_000


def run_others(world: World) -> None:
    """Frames flow but for what the agent would do by itself."""
    for _ in range(5):
        for actor in world.actors():
            while world.pump_up(actor) or (actor not in world.agents.values() and world.pump_down(actor)):
                pass


#: What reserves nothing, and settles nothing.
RUBBISH: list[Any] = [
    None,
    5,
    [1, 2],
    "m",
    {},
    {"id": "m"},
    {"kind": "model"},
    {"id": "", "kind": "model"},
    {"id": "a/b", "kind": "model"},
    {"id": "x" * 300, "kind": "tool"},
    {"id": 5, "kind": "model"},
    {"id": "m", "kind": "Model"},
    {"id": "m", "kind": None},
    *({"id": "m", "kind": "model", "inputTokens": wrong} for wrong in (-1, 1.5, "1", True)),
    *({"id": "m", "kind": "model", "outputTokens": wrong} for wrong in (2**63, float("nan"), float("inf"))),
]


def test_a_hijacked_agent_gets_nothing_by_other_words() -> None:
    world = budgeted(coder=BudgetLimits(calls=2))
    assert call(world, "c1") is None
    assert call(world, "c2") is None
    for event_id, epoch in (("e1", -1), ("e1", 0), ("e1", 2**40), ("e2", 1), (None, None)):
        wrong = Frame("budget.reserve", id="w", event_id=event_id, epoch=epoch)
        wrong.payload = to_raw(BudgetReserve("m", "model"))
        assert [told.type for told in said(world, speaker(world), wrong) if told.in_reply_to == "w"] == ["error"]
    for number, rubbish in enumerate(RUBBISH):
        (told,) = tell(world, Frame("budget.reserve", id=f"r{number}", payload=to_raw(rubbish)))
        assert error_of(told).code == "E_FRAME_INVALID", rubbish
        tell(world, Frame("budget.settle", id=f"s{number}", payload=to_raw(rubbish)))
    tell(world, Frame("budget.settle", id="never", payload=to_raw(BudgetSettle("m1", unused=True))))
    (told,) = tell(world, Frame("budget.settle", id="long", payload=to_raw(BudgetSettle("x" * 65))))
    assert error_of(told).code == "E_FRAME_INVALID"
    assert spent(world)["calls"] == 2
    assert call(world, "c1", first_sent_ms=1) is None, "that one runs already"
    assert call(world, "c9", first_sent_ms=1) == "E_BUDGET_SPENT"


def test_a_full_disk_refuses_a_model_call_and_holds_nothing() -> None:
    world = budgeted(coder=BudgetLimits(calls=10))
    world.full = True
    short = reserve(world, "m1")
    assert isinstance(short, ErrorPayload)
    assert short.code == "E_DISK_FULL"
    world.full = False
    assert spent(world, what="held")["calls"] == 0
    assert isinstance(reserve(world, "m2"), BudgetGranted)


def test_time_that_is_left_shortens_calls() -> None:
    world = budgeted(coder=BudgetLimits(wall_seconds=60))
    granted = reserve(world, "m1")
    assert isinstance(granted, BudgetGranted)
    assert 0 < (granted.left_ms or 0) <= 60_000
    settle(world, "m1")
    world.now += 59
    assert call(world, "c1", deadline_ms=120_000) is None
    assert world.router.bus.calls.open["c1"].deadline_ms is not None
    assert world.router.bus.calls.open["c1"].deadline_ms <= 1_000
    world.now += 2
    assert call(world, "c2") == "E_BUDGET_SPENT"
    short = reserve(world, "m2")
    assert isinstance(short, ErrorPayload)
    assert "61 of 60 seconds" in short.message or "62 of 60 seconds" in short.message


def test_a_bundle_that_raises_a_limit_is_believed_at_once() -> None:
    world = budgeted(coder=BudgetLimits(calls=1))
    assert call(world, "c1") is None
    assert call(world, "c2") == "E_BUDGET_SPENT"
    part_of(world.router, Budgets).revise(with_limits(swarm_plan(), {"coder": BudgetLimits(calls=2)}))
    assert call(world, "c2") is None


def test_a_revision_brings_the_first_budget_and_one_that_has_none_forgets_no_account() -> None:
    world = World()
    budgets = part_of(world.router, Budgets)
    assert not budgets.applies()
    world.router._revise(with_limits(swarm_plan(), {"coder": BudgetLimits(calls=2)}))
    world.clients[0].ask("e1")
    run(world)
    assert [event.id for event in budgets.chains] == ["e1"]
    world.router._revise(swarm_plan())
    bus = world.router.bus
    bus.out[:] = [one for one in bus.out if one[0] == TOOLS]  # all others of the world know no revisions
    assert budgets.applies()
    world.settle()
    assert "e1" in world.clients[0].answers
    assert not budgets.chains
