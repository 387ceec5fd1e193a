"""Recorded runs in a bundle and in the environment: which agents are answered from a recording, and from which.

A Model with `provider: replay` names a file of the bundle. `gdn replay` names a file for the whole swarm in the
environment of the kernel that it starts, and `gdn record` there asks for a recording. Every start of a kernel imports
this module, and few have to do with a recording: so the structs of one are imported where they are used.

Source: docs/design/bundle.md section 6; docs/design/commands.md section 11; docs/replay.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from goondan.features.recordings import NAME
from goondan.features.recordings import PROVIDER as REPLAY
from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.rules import checked, lookup, problems, shape
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ModelSpec
from goondan.schemas.bundle.resources import ModelBody
from goondan.schemas.wire import codec, errors, frames

if TYPE_CHECKING:
    from goondan.features.recordings.wire import ReplaySpec

#: The name of the run that is recorded.
RECORD_VARIABLE: Final = "GOONDAN_RECORD"
#: The recording that the whole swarm repeats: an absolute path.
REPLAY_VARIABLE: Final = "GOONDAN_REPLAY"
#: The Model that is asked in place of the recording, for every agent.
MODEL_VARIABLE: Final = "GOONDAN_REPLAY_MODEL"
#: A file with another system prompt for the entry agent. Models are asked then.
PROMPT_VARIABLE: Final = "GOONDAN_REPLAY_PROMPT"
#: "1": of models' answers only the tool calls are compared.
CALLS_VARIABLE: Final = "GOONDAN_REPLAY_CALLS"


class Repeated(Struct, frozen=True, kw_only=True):
    """The recorded run that a whole swarm repeats (kernel/bundle/rules/kinds.py: Instead)."""

    #: The file: an absolute path.
    recording: str
    #: The Model of all agents, as a reference; "": none was named.
    model_ref: str
    #: The file of the entry agent's prompt; "": its own.
    prompt: str
    #: Of models' answers only the tool calls are compared.
    only_calls: bool

    def model(self, body: ModelBody, params: Mapping[str, Any]) -> ModelSpec | None:
        """The recording in the place of a Model; None when models are asked. What the Model says about requests and
        their cost counts as in the run; `params` are the agent's own.
        """
        if self.model_ref or self.prompt:
            return None
        return ModelSpec(
            provider=REPLAY,
            model=body.model,
            params={**body.params, **params},
            pricing=body.pricing,
            context_tokens=body.context_tokens,
            file=self.recording,
        )


class Replay:
    """What the core asks of the provider (kernel/bundle/rules/kinds.py: OwnProvider)."""

    name: Final = REPLAY
    text: Final = "a recorded run"

    def find_file(
        self, document: shape.Document, body: ModelBody, files: lookup.Files, report: problems.Report
    ) -> str | None:
        """The recording that a Model names: an absolute path. None after an error."""
        if not body.recording:
            hint = "Write one with gdn record FILE MESSAGE, and add recording: FILE."
            place = document.place("spec", "provider")
            report.error("E_CONFIG_MISSING_FIELD", "provider replay needs a recording", place, hint)
            return None
        from goondan.features.recordings.wire import read_recording

        text, place = document.text("spec", "recording"), document.place("spec", "recording")
        found = files.find(body.recording)
        if found.fault is not None:
            report.error("E_CONFIG_INVALID_VALUE", f"the recording {text} cannot be used: {found.fault}", place)
            return None
        try:
            read_recording(found.path, lambda part: False)
        except errors.GoondanError as error:
            hint = "Record the run again: gdn record FILE MESSAGE."
            report.error("E_CONFIG_INVALID_VALUE", error.info.message, place, hint)
            return None
        return found.path

    def instead(self, env: Mapping[str, str]) -> Repeated | None:
        """What the environment says; None: no run is repeated."""
        recording = env.get(REPLAY_VARIABLE, "")
        if not recording:
            return None
        return Repeated(
            recording=recording,
            model_ref=env.get(MODEL_VARIABLE, ""),
            prompt=env.get(PROMPT_VARIABLE, ""),
            only_calls=env.get(CALLS_VARIABLE) == "1",
        )


PROVIDER: Final = Replay()


def agent_spec(spec: AgentSpec, agent: checked.CheckedAgent) -> AgentSpec:
    """The specification of an agent. One whose Model is a recording is confined, and no person is asked about calls
    that are not made.
    """
    if spec.model.provider != REPLAY:
        return spec
    from goondan.features.recordings.wire import ReplaySpec

    return _with_part(spec, replay=ReplaySpec(recording=spec.model.file))


def replan(plan: KernelPlan, env: Mapping[str, str]) -> KernelPlan:
    """The plan of a swarm that is recorded, or that repeats a run, as the environment says.

    Raises GoondanError E_USAGE for a prompt that cannot be read.
    """
    repeat, run = PROVIDER.instead(env), env.get(RECORD_VARIABLE, "")
    if repeat is None and not run:
        return plan
    agents = {
        name: spec if name == frames.OPERATOR_AGENT else _repeating(spec, repeat, run)
        for name, spec in plan.agents.items()
    }
    if repeat is not None and repeat.prompt and plan.entry_agent:
        agents[plan.entry_agent] = replace(agents[plan.entry_agent], system=_prompt(repeat.prompt))
    return replace(plan, agents=agents)


def _repeating(spec: AgentSpec, repeat: Repeated | None, run: str) -> AgentSpec:
    from goondan.features.recordings.wire import RecordingsPart, ReplaySpec

    raw = spec.parts.get(NAME)
    before = None if raw is None else codec.from_raw(raw, RecordingsPart).replay
    if repeat is None:
        return _with_part(spec, replay=before, record=run)
    replay = ReplaySpec(recording=repeat.recording, only_calls=repeat.only_calls)
    return replace(_with_part(spec, replay=replay, record=run), own_state=True)


def _with_part(spec: AgentSpec, *, replay: ReplaySpec | None, record: str = "") -> AgentSpec:
    from goondan.features.recordings.wire import RecordingsPart

    parts = {**spec.parts, NAME: codec.to_raw(RecordingsPart(record=record, replay=replay))}
    return replace(spec, parts=parts, confined=replay is not None)


def _prompt(path: str) -> str:
    try:
        return read_file(os.path.abspath(path), lookup.MAX_PROMPT_BYTES).decode("utf-8")
    except (lookup.Unreadable, UnicodeDecodeError) as error:
        raise errors.fail("E_USAGE", f"the prompt {path} cannot be read: {error}") from None
