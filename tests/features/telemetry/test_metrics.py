"""`/metrics`, read by the parser of the package that Prometheus' own client has."""

from __future__ import annotations

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import TurnUsage
from goondan.features.telemetry import door
from goondan.kernel.supervisor_client import ProcessInfo, Reply
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.traces.turn_notes import ModelDetail
from goondan.schemas.wire.errors import GoondanError, fail
from tests.features.telemetry.turns import at

STATS = {
    "broker": "b", "counters": {"events": 5, 'a"b\n': 1}, "connections": {"agent": 2}, "places": {"all": 8, "held": 1},
    "instances": 3, "mailboxBytes": 70,
}  # fmt: skip
WHY = {"waits": [{"kind": "model", "forMs": 9000}, {"kind": "model", "forMs": 1000}], "more": 0}


def caller(pattern: str) -> Any:
    """Whose token leads to these agents."""
    return SimpleNamespace(may_speak_to=lambda agent: fnmatchcase(agent, pattern))


def call(model: str = "openai/m", read: int = 1000, cached: int = 0) -> ModelDetail:
    money = read * 3000
    return ModelDetail(step=1, model=model, input_tokens=read, cached_tokens=cached, money=money, currency="USD")


def turn(folder: Path, agent: str, event: str, calls: list[ModelDetail]) -> None:
    """A turn of an agent with these model calls."""
    store, used = ConversationStore(instance_dir(str(folder), agent, "k")), TurnUsage()
    for each in calls:
        used.count(each, at(0))
    store.adopt(1)
    with store.write(final=True):
        store.begin_turn(event, f"t-{event}", 1, at(0))
        store.finish_turn(event, f"t-{event}", "completed", at(9), steps=1, answer=None, used=used.parts)
    store.close()


class Swarm:
    """A kernel that answers, or is gone."""

    def __init__(self, folder: Path) -> None:
        self.state_dir = str(folder)
        self.asked: list[str] = []
        self.gone = False

    async def admin(self, request: dict[str, Any]) -> Any:
        self.asked.append(request["op"])
        if self.gone:
            raise fail("E_KERNEL_NOT_RUNNING", "no kernel")
        return {"stats": STATS, "why": WHY}[request["op"]]


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    rows = [ProcessInfo(role="agent", name="main", pid=os.getpid(), status="running", since="", restarts=2)] * 2
    rows.append(ProcessInfo(role="broker", name="broker", pid=None, status="waiting", since="", restarts=1))
    monkeypatch.setattr(door, "ask_supervisor", lambda *_: Reply(processes=rows))
    return Swarm(tmp_path)


async def scraped(way: Any, whose: str = "*") -> dict[str, dict[tuple[str, ...], float]]:
    """The samples by their names and labels."""
    answer = await way.handler(SimpleNamespace(caller=caller(whose)))
    assert answer.media_type.startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in series
            series[labels] = sample.value
    return found


async def test_numbers_of_the_broker_of_processes_and_of_models(swarm: Any, tmp_path: Path) -> None:
    turn(tmp_path, "main", "e1", [call(read=7, cached=5), call("openai/n", 500)])
    turn(tmp_path, "other", "e2", [call(read=100)])
    (way,) = door.routes(swarm)
    seen = await scraped(way)
    assert seen["goondan_up"] == {(): 1}
    assert seen["goondan_broker_events_total"][("events",)] == 5
    assert len(seen["goondan_broker_events_total"]) == 2
    assert seen["goondan_broker_size"] == {("instances",): 3, ("mailboxBytes",): 70}
    assert seen["goondan_waits"] == {("model",): 2}
    assert seen["goondan_process_restarts_total"] == {("main", "agent"): 4, ("", "broker"): 1}
    assert seen["goondan_process_memory_bytes"][("main", "agent")] > 1 << 20
    assert seen["goondan_model_tokens_total"][("main", "input", "openai/m")] == 7
    assert seen["goondan_model_tokens_total"][("main", "cached", "openai/m")] == 5
    assert seen["goondan_model_cost_total"][("other", "USD", "openai/m")] == pytest.approx(0.0003)
    assert seen["process_resident_memory_bytes"][()] > 1 << 20  # the door's own


async def test_many_scrapes_are_one_look_and_an_agent_is_shown_to_those_who_may_speak_to_it(
    swarm: Any, tmp_path: Path
) -> None:
    turn(tmp_path, "main", "e1", [call()])
    turn(tmp_path, "hidden", "e2", [call()])
    (way,) = door.routes(swarm)
    few = await scraped(way, "ma*")
    every = await scraped(way)
    assert swarm.asked == ["stats", "why"]
    assert {agent for agent, _ in few["goondan_model_calls_total"]} == {"main"}
    assert {agent for agent, _ in every["goondan_model_calls_total"]} == {"main", "hidden"}
    assert way.role == "look"


async def test_an_agent_may_be_called_other(swarm: Any, tmp_path: Path) -> None:
    turn(tmp_path, "other", "e1", [call()])
    (way,) = door.routes(swarm)
    assert "goondan_model_calls_total" not in await scraped(way, "main")


async def test_a_deleted_instance_stays_counted_and_a_kernel_that_is_gone_is_down(
    swarm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "FRESH_S", 0.0)
    turn(tmp_path, "main", "e1", [call(read=7)])
    (way,) = door.routes(swarm)
    before = await scraped(way)
    for path in (tmp_path / "instances").glob("*/*/conversation.db*"):
        path.unlink()
    swarm.gone = True
    after = await scraped(way)
    assert after["goondan_model_calls_total"] == before["goondan_model_calls_total"]
    assert after["goondan_up"] == {(): 0}
    assert "goondan_waits" not in after


async def test_series_are_bounded_in_number_and_length(
    swarm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_SERIES", 3)
    turn(tmp_path, "main", "e1", [call(f"openai/{number}\x1b\u202e" + "x" * 300) for number in range(9)])
    (way,) = door.routes(swarm)
    seen = (await scraped(way))["goondan_model_calls_total"]
    assert len(seen) == 4
    assert seen[(door.REST, door.REST)] == 6
    assert all(len(model) <= door.MAX_LABEL and model.isprintable() for _, model in seen)


async def test_without_the_package_it_says_what_to_install(swarm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    (way,) = door.routes(swarm)
    with pytest.raises(GoondanError) as refused:
        await scraped(way)
    assert refused.value.info.suggestion == "Install goondan-kernel[telemetry]."
