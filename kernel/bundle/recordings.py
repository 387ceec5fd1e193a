"""Recorded runs in a bundle and in the environment: which agents are answered from a recording, and from which.

A Model with `provider: replay` names a file of the bundle. `gdn replay` names a file for the whole swarm in the
environment of the kernel that it starts, and `gdn record` there asks for a recording. Pure.

Source: docs/design/bundle.md section 6; docs/replay.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from goondan.kernel.bundle.lookup import Files, Unreadable
from goondan.kernel.bundle.problems import Report
from goondan.kernel.bundle.shape import Document
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody

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
    """The recorded run that a whole swarm repeats."""

    #: The file: an absolute path.
    recording: str
    #: The Model of all agents, as a reference; "": none was named.
    model: str
    #: The file of the entry agent's prompt; "": its own.
    prompt: str
    #: Of models' answers only the tool calls are compared.
    only_calls: bool

    @property
    def asks_models(self) -> bool:
        """Whether models are asked. Otherwise the recording answers."""
        return bool(self.model or self.prompt)


def repeated(env: Mapping[str, str]) -> Repeated | None:
    """What the environment says; None: no run is repeated."""
    recording = env.get(REPLAY_VARIABLE, "")
    if not recording:
        return None
    model, prompt = env.get(MODEL_VARIABLE, ""), env.get(PROMPT_VARIABLE, "")
    only_calls = env.get(CALLS_VARIABLE) == "1"
    return Repeated(recording=recording, model=model, prompt=prompt, only_calls=only_calls)


def recorded_model(repeat: Repeated, body: ModelBody, params: Mapping[str, Any]) -> ModelSpec:
    """What answers an agent in the place of its Model. What that says about requests and their cost counts as in the
    run; `params` are the agent's own.
    """
    return ModelSpec(
        provider="replay",
        model=body.model,
        params={**body.params, **params},
        pricing=body.pricing,
        context_tokens=body.context_tokens,
        recording=repeat.recording,
    )


def find_recording(document: Document, body: ModelBody, files: Files, report: Report) -> str | None:
    """The recording that a Model names: an absolute path. None after an error, and for another provider."""
    if body.provider != "replay":
        return None
    if not body.recording:
        hint = "Write one with gdn record FILE MESSAGE, and add recording: FILE."
        place = document.place("spec", "provider")
        report.error("E_CONFIG_MISSING_FIELD", "provider replay needs a recording", place, hint)
        return None
    text, place = document.text("spec", "recording"), document.place("spec", "recording")
    found = files.find(body.recording)
    if found.fault is not None:
        report.error("E_CONFIG_INVALID_VALUE", f"the recording {text} cannot be used: {found.fault}", place)
        return None
    try:
        files.check_recording(found.path)
    except Unreadable as error:
        report.error("E_CONFIG_INVALID_VALUE", str(error), place, "Record the run again: gdn record FILE MESSAGE.")
        return None
    return found.path
