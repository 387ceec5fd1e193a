"""What model calls have used: counted with the note of each, once, and kept with the end of the turn."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.conversation.store import MAX_PARTS_OF_A_DAY, OTHER_MODELS, ConversationStore
from goondan.agentproc.machine.answers import used_by
from goondan.agentproc.providers.base import ModelAnswer, Usage
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.usage import Part, Pricing, Used, read_used
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, the_answer, until

PRICING = Pricing(
    input_per_million=3, output_per_million=15, cached_input_per_million=0.3, cache_write_per_million=3.75
)
PRICED = ModelSpec(provider="openai", model="m", api_key="sk-0123456789abcdef", pricing=PRICING)


def using(answer: ModelAnswer, usage: Usage, model: str | None = None) -> ModelAnswer:
    return ModelAnswer(
        text=answer.text, calls=answer.calls, finish_reason=answer.finish_reason, usage=usage, model=model
    )


def kept(folder: Path) -> dict[Part, Used]:
    """What the instance keeps, whatever the day is."""
    store = ConversationStore(instance_dir(str(folder), "coder", "k"))
    try:
        rows = store.rows("SELECT name, value FROM meta WHERE name LIKE 'usage/%'")
    finally:
        store.close()
    found: dict[Part, Used] = {}
    for name, value in rows:
        _, day, currency, model = name.split("/", 3)
        assert len(day) == 10
        used = read_used(value)
        assert used is not None
        found[Part("", model, None if currency == "-" else currency)] = used
    return found


async def test_an_answer_says_what_its_turn_has_used_and_the_instance_keeps_the_sum(make: Make, tmp_path: Path) -> None:
    first = Usage(1000, 50, cached_tokens=600, cache_write_tokens=100, reasoning_tokens=20)
    model = FakeModel(
        using(wants(("a", "bash__exec", {"command": "x"})), first, "m-2026"),
        using(says("done"), Usage(1200, 10), "m-2026"),
        using(says("more"), Usage(7, 1), "m"),
    )
    link = FakeLink()
    runner = make(link, model, model=PRICED)
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert answer.model == "openai/m-2026"
    usage = answer.usage
    assert usage is not None
    assert (usage.model_calls, usage.input_tokens, usage.output_tokens) == (2, 2200, 60)
    assert (usage.cached_tokens, usage.cache_write_tokens, usage.reasoning_tokens) == (600, 100, 20)
    # 300 fresh, 600 cached, 100 written, 50 out; then 1200 fresh, 10 out
    assert usage.cost == (300 * 3 + 600 * 0.3 + 100 * 3.75 + 50 * 15 + 1200 * 3 + 10 * 15) / 1e6
    assert usage.currency is None
    await runner.run(event_frame("e2", "go"))
    assert {part: (used.model_calls, used.input_tokens, used.money) for part, used in kept(tmp_path).items()} == {
        Part("", "openai/m-2026", "USD"): (2, 2200, round(usage.cost * 1e9)),
        Part("", "openai/m", "USD"): (1, 7, (7 * 3 + 15) * 1000),
    }


async def test_who_resumes_a_turn_counts_what_was_used_before(make: Make, tmp_path: Path) -> None:
    before = FakeLink(lambda tool, args: None)
    runner = make(before, FakeModel(using(wants(("a", "bash__exec", {"command": "x"})), Usage(1000, 50))), model=PRICED)
    task = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(before.open_calls)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await runner.close()
    assert kept(tmp_path) == {}
    after = FakeLink()
    await make(after, FakeModel(using(says("done"), Usage(10, 1))), model=PRICED).run(event_frame("e1", "go", epoch=2))
    usage = the_answer(after).usage
    assert usage is not None
    assert (usage.model_calls, usage.input_tokens, usage.output_tokens) == (2, 1010, 51)
    assert [used.input_tokens for used in kept(tmp_path).values()] == [1010]


async def test_a_turn_that_failed_has_used_what_its_calls_have(make: Make, link: FakeLink, tmp_path: Path) -> None:
    script = (using(wants(("a", "bash__exec", {"command": "x"})), Usage(1000, 50)), fail("E_MODEL_FAILED", "no"))
    await make(link, FakeModel(*script), model=PRICED).run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, answer.model) == ("failed", "openai/m")
    assert answer.usage is not None
    assert (answer.usage.model_calls, answer.usage.input_tokens) == (2, 1000)
    assert [used.model_calls for used in kept(tmp_path).values()] == [2]


async def test_a_turn_that_was_left_for_good_is_counted_with_the_next(make: Make, tmp_path: Path) -> None:
    before = FakeLink(lambda tool, args: None)
    runner = make(before, FakeModel(using(wants(("a", "bash__exec", {"command": "x"})), Usage(1000, 50))), model=PRICED)
    task = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(before.open_calls)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await runner.close()
    await make(FakeLink(), FakeModel(using(says("done"), Usage(10, 1))), model=PRICED).run(
        event_frame("e2", "go", epoch=2)
    )
    assert [used.input_tokens for used in kept(tmp_path).values()] == [1010]


async def test_nobody_counts_the_console(make: Make, link: FakeLink, tmp_path: Path) -> None:
    await make(link, FakeModel(says("hello"))).run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.model, answer.usage, kept(tmp_path)) == ("embedded", None, {})


async def test_a_server_that_names_its_model_anew_each_time_fills_no_file(make: Make, tmp_path: Path) -> None:
    many = MAX_PARTS_OF_A_DAY + 5
    runner = make(
        FakeLink(), FakeModel(*(using(says("x"), Usage(1, 1), f"m{number}") for number in range(many))), model=PRICED
    )
    for number in range(many):
        await runner.run(event_frame(f"e{number}", "go"))
    sums = kept(tmp_path)
    assert len(sums) == MAX_PARTS_OF_A_DAY + 1
    assert sums[Part("", f"openai/{OTHER_MODELS}", "USD")].model_calls == 5
    assert sum(used.input_tokens for used in sums.values()) == many


number = st.integers(-(2**70), 2**70)


@given(number, number, number, number, number)
def test_whatever_a_server_reports_the_parts_are_within_the_whole(
    read: int, written: int, cached: int, put: int, thought: int
) -> None:
    used = used_by(Usage(read, written, cached, put, thought))
    assert 0 <= used.cached_tokens + used.cache_write_tokens <= used.input_tokens <= 1_000_000_000
    assert 0 <= used.reasoning_tokens <= used.output_tokens <= 1_000_000_000
    assert used.cost(PRICING) >= 0
