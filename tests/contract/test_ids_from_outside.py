"""Ids that models, recordings and clients choose: none of them says what a call belongs to, or takes an id of ours.

A model server names its calls. One that is against its user may name a call as if a script (code mode) had made it, so
that a person's yes to the script is one to that call, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.messages import AssistantData
from goondan.agentproc.machine.turn import Begin, ModelAnswered, RunTool, Store, ToolFinished, Turn
from goondan.agentproc.providers.base import ModelAnswer
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.schemas.bundle.address import is_given_id
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame
from tests.unit.agentproc.fakes import ok
from tests.unit.agentproc.turns import Make, Runners
from tests.unit.agentproc.vendor_formats import (
    begin,
    body,
    chunk,
    delta,
    read_anthropic,
    read_openai,
    read_responses,
    tool,
)
from tests.unit.kernel.broker.approving import Bench, code_of

#: Ids with a meaning of ours in them, and other strange ones.
BAD = ["s>51", "s>1>2", "c~2", "c?1", "t1/c1", "@turn.x", "@step1.", "c1\n", "c 1", "ключ", "\ud800", "", "i" * 129]


def anthropic(call_id: str) -> ModelAnswer:
    return read_anthropic(
        begin(0, type="tool_use", id=call_id, name="bash__exec", input={}),
        delta(0, type="input_json_delta", partial_json="{}"),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    )


def openai(call_id: str) -> ModelAnswer:
    return read_openai(chunk(tool_calls=[tool(0, call_id, "bash__exec", "{}")]), chunk("tool_calls"))


def responses(call_id: str) -> ModelAnswer:
    item = {"type": "function_call", "call_id": call_id, "name": "bash__exec", "arguments": "{}"}
    return read_responses(
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"status": "completed", "output": [item]}},
    )


def paired(provider: str, request: Any) -> list[str]:
    """The ids of the calls in a request; each has to have its result."""
    if provider == "anthropic":
        blocks = [block for entry in request["messages"] if isinstance(entry["content"], list)
                  for block in entry["content"]]  # fmt: skip
        asked = [block["id"] for block in blocks if block["type"] == "tool_use"]
        assert asked == [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    elif provider == "openai":
        asked = [call["id"] for entry in request["messages"] for call in entry.get("tool_calls", [])]
        assert asked == [entry["tool_call_id"] for entry in request["messages"] if entry["role"] == "tool"]
    else:
        asked = [entry["call_id"] for entry in request["input"] if entry.get("type") == "function_call"]
        assert asked == [e["call_id"] for e in request["input"] if e.get("type") == "function_call_output"]
    return asked


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path))
    runners = Runners(tmp_path)
    yield runners.build
    await runners.close()


@given(st.text(max_size=300))
def test_the_rule(text: str) -> None:
    plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.:-"
    assert is_given_id(text, 128) is (0 < len(text) <= 128 and all(letter in plain for letter in text))


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.feature("recordings"))])
@pytest.mark.parametrize(("provider", "read"), [("anthropic", anthropic), ("openai", openai), ("responses", responses)])
def test_a_strange_id_of_a_model_is_replaced_and_call_and_result_stay_a_pair(
    provider: str, read: Callable[[str], ModelAnswer], again: bool
) -> None:
    for given_id in [*BAD, "toolu_01A", "functions.x:0"]:
        turn = Turn("t1", max_steps=9)
        turn.handle(Begin("go"), "now")
        answer = read(given_id)
        if again:
            forms: Any = import_module("goondan.features.recordings.agent.replayed")
            answer = forms.model_answer(forms.recorded_answer(answer), lambda args: args)
        stored, run = turn.handle(ModelAnswered(answer.text, answer.calls), "now")
        assert isinstance(stored, Store)
        assert isinstance(run, RunTool)
        name = run.part.tool_call_id
        assert name == (given_id if is_given_id(given_id, 128) else "call_1_1"), given_id
        assert run.within is None
        assert isinstance(stored.message.data, AssistantData)
        result = next(one for one in turn.handle(ToolFinished(name, ok(1)), "now") if isinstance(one, Store))
        assert len(paired(provider, body([stored.message, result.message], provider))) == 1


# --- the broker


def test_no_call_is_within_one_whose_tool_may_make_none() -> None:
    bench = Bench({"rules": []})
    client, host = bench.client(), bench.host()
    bench.ask(client)
    agent = bench.agent()
    agent.take()
    bench.now += RETURN_S
    assert code_of(agent.call({"command": "ls"}, "t1/open")) is None
    assert len(host.take("tool.call")) == 1
    for within in ("t1/never", "t1/open", ""):
        assert code_of(agent.call({"command": "ls"}, "t1/x", within=within)) == "E_FORBIDDEN"
    assert host.take("tool.call") == []


def test_a_client_takes_no_id_that_agents_and_tool_hosts_give() -> None:
    bench = Bench()
    client = bench.client(operator=False)
    for event_id in [name for name in BAD if name.isprintable()] + ["t1/c1~completed", "e-1~requeued", "e-1:answer"]:
        payload = to_raw(AgentEvent(id=event_id, type="user.message", created_at="now", input="x"))
        frame = Frame("event", to="reviewer", instance_key="k", event_id=event_id, payload=payload)
        taken = [told.stage for told in client.say(frame) if told.type == "ack"] == ["accepted"]
        assert taken is (event_id == "i" * 129), event_id
