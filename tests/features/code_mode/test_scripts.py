"""What scripts of code mode may call, and what has become of their calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from goondan.agentproc.machine.messages import MAX_TOOL_CALL_ID
from goondan.features.code_mode.agent.scripts import (
    MAX_NAMED,
    MAX_SEARCHES,
    MAX_UNHEARD,
    Record,
    Scripts,
    inner_id,
    told,
)
from goondan.features.code_mode.wire import CODE_TOOL
from goondan.schemas.bundle.address import is_given_id
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.questions import MAX_INNER_CALLS


def refused(ask: Callable[..., object], *arguments: str) -> str:
    with pytest.raises(GoondanError) as raised:
        ask(*arguments)
    return raised.value.info.code


def test_a_script_makes_so_many_calls_and_has_so_many_open() -> None:
    scripts = Scripts()
    scripts.begin("c1")
    for number in range(1, MAX_UNHEARD + 1):
        assert scripts.call("c1", "a__b") == number
    assert refused(scripts.call, "c1", "a__b") == "E_TOOL_LIMIT"
    for number in range(MAX_UNHEARD + 1, MAX_INNER_CALLS + 1):
        assert scripts.ended("c1", number - MAX_UNHEARD)
        assert scripts.call("c1", "a__b") == number
    assert scripts.ended("c1", MAX_INNER_CALLS)
    assert refused(scripts.call, "c1", "a__b") == "E_TOOL_LIMIT"


def test_no_script_runs_a_script_and_none_calls_before_it_begins_or_after_its_end() -> None:
    scripts = Scripts()
    assert refused(scripts.call, "c1", "a__b") == "E_CALL_ENDED"
    assert refused(scripts.search, "c1") == "E_CALL_ENDED"
    scripts.begin("c1")
    assert refused(scripts.call, "c1", CODE_TOOL) == "E_FORBIDDEN"
    assert scripts.call("c1", "a__b") == 1
    assert scripts.over("c1") == [1]
    assert scripts.over("c1") == []
    assert refused(scripts.call, "c1", "a__b") == "E_CALL_ENDED"
    assert not scripts.ended("c1", 1), "nobody waits for it"


def test_a_script_searches_so_often() -> None:
    scripts = Scripts()
    scripts.begin("c1")
    for _ in range(MAX_SEARCHES):
        scripts.search("c1")
    assert refused(scripts.search, "c1") == "E_TOOL_LIMIT"
    assert scripts.call("c1", "a__b") == 1, "calls are counted on their own"


@given(st.text(min_size=1, max_size=130), st.integers(1, MAX_INNER_CALLS))
def test_no_id_from_outside_is_that_of_an_inner_call(script: str, number: int) -> None:
    assert not is_given_id(inner_id(script, number), MAX_TOOL_CALL_ID)


class Machine(RuleBasedStateMachine):
    """Whatever a hostile script asks, and in whatever order its calls end."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = Scripts()
        self.open: dict[str, set[int]] = {}
        self.given: dict[str, set[int]] = {}

    @rule(name=st.sampled_from("ab"))
    def begin(self, name: str) -> None:
        self.scripts.begin(name)
        if name not in self.open:
            self.open[name], self.given[name] = set(), set()

    @rule(name=st.sampled_from("abc"), tool=st.sampled_from(["x__y", CODE_TOOL, ""]))
    def call(self, name: str, tool: str) -> None:
        if name not in self.open or tool == CODE_TOOL or len(self.open[name]) >= MAX_UNHEARD:
            assert refused(self.scripts.call, name, tool)
        else:
            answer = self.scripts.call(name, tool)
            assert answer not in self.given[name]
            self.given[name].add(answer)
            self.open[name].add(answer)

    @rule(name=st.sampled_from("abc"), number=st.integers(0, 40))
    def end(self, name: str, number: int) -> None:
        assert self.scripts.ended(name, number) is (number in self.open.get(name, ()))
        self.open.get(name, set()).discard(number)

    @rule(name=st.sampled_from("abc"))
    def over(self, name: str) -> None:
        assert self.scripts.over(name) == sorted(self.open.pop(name, ()))
        self.given.pop(name, None)

    @invariant()
    def running(self) -> None:
        assert all(self.scripts.is_running(name) is (name in self.open) for name in "abc")


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_what_is_told_names_each_call_once_with_its_outcome() -> None:
    records = [
        Record(1, "began", "github__create", '{"title":"A"}'),
        Record(2, "began", "github__create", '{"title":"B"}'),
        Record(1, "ok"),
        Record(3, "began", "json__count", "{}"),
        Record(3, "error"),
    ]
    text = told(records)
    assert text == (
        'Calls that had finished: github__create {"title":"A"}; json__count {} (error). '
        'Calls whose outcome is not known: github__create {"title":"B"}.'
    )
    assert told([]) == ""


def test_what_is_told_is_short_however_many_calls_there_were() -> None:
    same = [Record(number, outcome, "x__y", "{}") for number in range(1, 3001) for outcome in ("began", "ok")]
    assert told(same) == "Calls that had finished: x__y {} (3000 times)."
    many = [Record(number, outcome, "x__y", f"[{number}]") for number in range(1, 3001) for outcome in ("began", "ok")]
    text = told(many)
    assert f"{3000 - MAX_NAMED} earlier ones; " in text
    assert text.endswith("x__y [3000].")
    assert len(text) < 4000
