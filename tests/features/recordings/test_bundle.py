"""Recorded runs in bundles and in the environment: who is answered from one, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.features.recordings.bundle import (
    CALLS_VARIABLE,
    MODEL_VARIABLE,
    PROMPT_VARIABLE,
    RECORD_VARIABLE,
    REPLAY_VARIABLE,
)
from goondan.features.recordings.wire import Recording, RecordingsPart, ReplaySpec, encode
from goondan.kernel.bundle.loader import inspect_bundle, open_bundle
from goondan.kernel.bundle.rules.plan import replanned
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ModelSpec
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import OPERATOR_AGENT
from tests.unit.kernel.bundle.conftest import GOOD, bundled, package

__all__ = ["bundled", "package"]

REPLAYED = GOOD.replace("provider: embedded", "provider: replay\n  recording: run.jsonl")
VENDOR = GOOD.replace("provider: embedded", "provider: openai\n  model: m\n  contextTokens: 4096")


def bundle(folder: Path, text: str, recording: bytes | None = encode(Recording(1, "helper"))) -> str:
    (folder / "tools").mkdir()
    (folder / "tools" / "words.py").write_text("handlers = {}\n")
    (folder / "goondan.yaml").write_text(text)
    if recording is not None:
        (folder / "run.jsonl").write_bytes(recording)
    return str(folder / "goondan.yaml")


def part_of(agent: AgentSpec) -> RecordingsPart | None:
    raw = agent.parts.get("recordings")
    return None if raw is None else from_raw(raw, RecordingsPart)


def plan_of(folder: Path, text: str, env: dict[str, str]) -> KernelPlan:
    opened = open_bundle(bundle(folder, text), state_dir="/state", env=env, handlers=False)
    return replanned(opened.plan, env)


def test_a_model_names_a_recording_of_the_bundle(tmp_path: Path, bundled: object) -> None:
    plan = plan_of(tmp_path, REPLAYED, {})
    path = str(tmp_path / "run.jsonl")
    agent = plan.agents["helper"]
    assert (agent.model.provider, agent.model.file) == ("replay", path)
    assert part_of(agent) == RecordingsPart(replay=ReplaySpec(recording=path))
    assert (agent.confined, agent.own_state) == (True, False)
    assert path in plan.protected, "no tool writes to it"
    assert part_of(plan.agents[OPERATOR_AGENT]) is None


@pytest.mark.parametrize(
    ("text", "recording", "code", "words"),
    [
        (REPLAYED, None, "E_CONFIG_INVALID_VALUE", "the file does not exist"),
        (REPLAYED, b"hello\n", "E_CONFIG_INVALID_VALUE", "cannot be read: line 1"),
        (REPLAYED.replace("run.jsonl", "../run.jsonl"), b"", "E_CONFIG_INVALID_VALUE", "leads out of the bundle"),
        (REPLAYED.replace("\n  recording: run.jsonl", ""), b"", "E_CONFIG_MISSING_FIELD", "needs a recording"),
    ],
)
def test_a_bad_recording_is_reported(
    tmp_path: Path, bundled: object, text: str, recording: bytes | None, code: str, words: str
) -> None:
    found = inspect_bundle(bundle(tmp_path, text, recording), state_dir=None, env={}, handlers=False)
    assert [(problem.code, words in problem.message) for problem in found.errors] == [(code, True)]


def test_a_swarm_that_repeats_a_run_needs_no_key(tmp_path: Path, bundled: object) -> None:
    plan = plan_of(tmp_path, VENDOR, {REPLAY_VARIABLE: "/r.jsonl"})
    agent = plan.agents["helper"]
    assert agent.model == ModelSpec(provider="replay", model="m", context_tokens=4096, file="/r.jsonl")
    assert part_of(agent) == RecordingsPart(replay=ReplaySpec(recording="/r.jsonl"))
    assert (agent.confined, agent.own_state) == (True, True)
    assert part_of(plan.agents[OPERATOR_AGENT]) is None


def test_another_model_or_prompt_is_asked_and_tools_answer_from_the_recording(tmp_path: Path, bundled: object) -> None:
    (tmp_path / "prompt.md").write_text("Be short.")
    other = "---\napiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: other}\nspec: {provider: openai, model: o}\n"
    env = {REPLAY_VARIABLE: "/r.jsonl", MODEL_VARIABLE: "Model/other", CALLS_VARIABLE: "1", "OPENAI_API_KEY": "k"}
    agent = plan_of(tmp_path, VENDOR + other, {**env, PROMPT_VARIABLE: str(tmp_path / "prompt.md")}).agents["helper"]
    assert (agent.model.provider, agent.model.model, agent.system) == ("openai", "o", "Be short.")
    assert part_of(agent) == RecordingsPart(replay=ReplaySpec(recording="/r.jsonl", only_calls=True))
    assert (agent.confined, agent.own_state) == (True, True)


def test_a_prompt_that_is_not_there_is_bad_usage(tmp_path: Path, bundled: object) -> None:
    env = {REPLAY_VARIABLE: "/r.jsonl", PROMPT_VARIABLE: "/nowhere", "OPENAI_API_KEY": "k"}
    with pytest.raises(GoondanError, match="the prompt /nowhere cannot be read") as caught:
        plan_of(tmp_path, VENDOR, env)
    assert caught.value.code == "E_USAGE"


def test_a_run_is_recorded_of_every_agent_but_the_operators(tmp_path: Path, bundled: object) -> None:
    plan = plan_of(tmp_path, GOOD, {RECORD_VARIABLE: "1234"})
    assert {name: part_of(agent) for name, agent in plan.agents.items()} == {
        "helper": RecordingsPart(record="1234"),
        OPERATOR_AGENT: None,
    }
    assert not plan.agents["helper"].confined
