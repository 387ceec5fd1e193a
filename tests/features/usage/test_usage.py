"""`gdn usage`: what is read of the files, and how it is put together and shown."""

from __future__ import annotations

import datetime
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import TurnUsage, answer_payload
from goondan.agentproc.machine.turn import End
from goondan.features.usage.api import Found, Sum, day_of, look, report
from goondan.features.usage.command import render
from goondan.kernel.cli.output import money, usage_line
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.traces.turn_notes import ModelDetail, encode_detail
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.usage import Part, Usage, Used

DAY = "2026-11-23"


def at(hour: int, day: str = DAY) -> str:
    return f"{day}T{hour:02}:00:00.000Z"


def call(model: str = "openai/m", read: int = 1000, day: str = DAY, **more: object) -> tuple[str, ModelDetail]:
    priced = {"money": read * 3000, "currency": "USD"}
    return at(9, day), ModelDetail(step=1, model=model, input_tokens=read, output_tokens=10, **{**priced, **more})  # type: ignore[arg-type]


def turn(
    folder: Path, agent: str, event: str, trace: str, calls: list[tuple[str, ModelDetail]], *, ends: bool = True
) -> None:
    """One turn with these model calls, as an agent stores it."""
    store = ConversationStore(instance_dir(str(folder), agent, "k"))
    used = TurnUsage()
    for when, detail in calls:
        used.count(detail, when)
    store.adopt(1)
    with store.write(final=True):
        store.begin_turn(event, f"t-{event}", 1, calls[0][0], trace_id=trace * 32)
        for when, detail in calls:
            store.note(f"t-{event}", "model.answered", when, encode_detail(detail))
        if ends:
            end = End(status="completed", steps=1, response="x", finish_reason="stop")
            answer = answer_payload(end, f"t-{event}", event, at(10), trace * 32, used)
            store.finish_turn(event, f"t-{event}", "completed", at(10), steps=1, answer=answer, used=used.parts)
    store.close()


def test_sums_by_day_model_agent_and_tree(tmp_path: Path) -> None:
    turn(tmp_path, "lead", "e1", "a", [call(), call("openai/n", 500, "2026-11-22", money=None, currency=None)])
    turn(tmp_path, "lead", "e2", "b", [call(read=7, cached_tokens=5, reasoning_tokens=4)])
    turn(tmp_path, "worker", "e3", "a", [call(read=100)], ends=False)
    found = look(str(tmp_path), turns=True)

    def rows(by: str, since: str | None = None) -> list[tuple[object, ...]]:
        document = report(found, by, since)  # type: ignore[arg-type]
        key = "traceId" if by == "tree" else by
        return [(row[key], row["modelCalls"], row["inputTokens"], row.get("cost")) for row in document["rows"]]

    assert rows("day") == [(DAY, 3, 1107, 0.003321), ("2026-11-22", 1, 500, None)]
    assert rows("model") == [("openai/m", 3, 1107, 0.003321), ("openai/n", 1, 500, None)]
    assert rows("agent") == [("lead", 3, 1507, 0.003021), ("worker", 1, 100, 0.0003)]
    assert rows("tree") == [("b" * 32, 1, 7, 0.000021), ("a" * 32, 3, 1600, 0.0033)]
    assert rows("day", DAY) == [(DAY, 3, 1107, 0.003321)]
    assert rows("tree", "2026-11-24") == []
    for by in ("day", "model", "agent", "tree"):
        total = report(found, by, None)["total"]
        assert (total["inputTokens"], total["cachedTokens"], total["reasoningTokens"]) == (1607, 5, 4)
        assert total["cost"] == 0.003321
    (tree,) = [row for row in report(found, "tree", None)["rows"] if row["traceId"] == "a" * 32]
    assert (tree["turns"], tree["agents"], tree["eventId"]) == (2, ["lead", "worker"], "e1")
    assert look(str(tmp_path), turns=False).sums == found.sums


def test_sums_stay_when_turns_are_gone_and_damaged_files_are_named(tmp_path: Path) -> None:
    turn(tmp_path, "lead", "e1", "a", [call()])
    path = Path(instance_dir(str(tmp_path), "lead", "k"), "conversation.db")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM turns")
        db.execute("DELETE FROM runtime_events")
        db.execute("INSERT INTO meta VALUES ('usage/2026-11-23/USD/openai/x', 'nonsense'), ('usage/nonsense', 7)")
    found = look(str(tmp_path), turns=True)
    assert ([one.used.input_tokens for one in found.sums], found.turns, found.unread) == ([1000], [], [])
    broken = tmp_path / "instances" / "a" / "k"
    broken.mkdir(parents=True)
    (broken / "conversation.db").write_bytes(b"x" * 5000)
    found = look(str(tmp_path), turns=False)
    assert [one.used.input_tokens for one in found.sums] == [1000]
    assert ["conversation.db" in text for text in found.unread] == [True]
    assert "not read: " in render(report(found, "day", None))[-1]


def test_what_a_person_sees() -> None:
    euros = Sum("b\x1b[2J", Part(DAY, "openai/e", "EUR"), Used(1, 2_000, 3, 0, 0, 0, 1_500_000_000))
    dollars = Sum("a", Part(DAY, "openai/m", "USD"), Used(2, 1_234_567, 890, 1_000_000, 0, 12, 123_456_789))
    found = Found([dollars, euros])
    assert render(report(found, "agent", None)) == [
        "agent     calls         in     cached  out  reasoning                  cost",
        "a             2  1,234,567  1,000,000  890         12             $0.123457",
        "b\\x1b[2J      1      2,000          0    3          0              1.50 EUR",
        "total         3  1,236,567  1,000,000  893         12  1.50 EUR + $0.123457",
    ]
    assert render(report(Found(), "day", DAY)) == [f"no model was asked since {DAY}"]
    assert [money(cost, None) for cost in (0, 2.5, 1234, 0.0000004)] == ["$0.00", "$2.50", "$1,234.00", "$0.00"]


def test_the_line_behind_an_answer() -> None:
    usage = Usage(input_tokens=1204, output_tokens=40, cached_tokens=980, reasoning_tokens=12, model_calls=1, cost=0.5)
    assert usage_line(usage, "openai/m") == "1,204 tokens in (980 cached), 40 out (12 reasoning), $0.50, openai/m"
    assert usage_line(Usage(input_tokens=0, output_tokens=4, model_calls=1), "x\x1b") == "0 tokens in, 4 out, x\\x1b"


@pytest.mark.parametrize(
    ("text", "day"), [("2026-02-28", "2026-02-28"), ("today", DAY), ("1d", DAY), ("7d", "2026-11-17"), ("0d", DAY)]
)
def test_days(text: str, day: str) -> None:
    assert day_of(text, datetime.date(2026, 11, 23)) == day


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "-1d", "9999999d", "9999d" * 9])
def test_what_is_no_day(text: str) -> None:
    with pytest.raises(GoondanError) as caught:
        day_of(text, datetime.date(2026, 11, 23))
    assert caught.value.info.code == "E_USAGE"
