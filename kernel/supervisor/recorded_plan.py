"""The plan of a swarm that is recorded, or that repeats a recorded run, as the environment of its kernel says.

Source: docs/design/commands.md section 11; docs/design/turns.md section 12.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec.structs import replace

from goondan.kernel.bundle.files import read_file
from goondan.kernel.bundle.lookup import MAX_PROMPT_BYTES, Unreadable
from goondan.kernel.bundle.recordings import RECORD_VARIABLE, repeated
from goondan.schemas.bundle.launch import KernelPlan, ReplaySpec
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR_AGENT


def with_recordings(plan: KernelPlan, env: Mapping[str, str]) -> KernelPlan:
    """The plan of a swarm that is recorded, or that repeats a run, as the environment says. Nobody is asked to approve
    a call that is not made.

    Raises GoondanError E_USAGE for a prompt that cannot be read.
    """
    repeat, run = repeated(env), env.get(RECORD_VARIABLE, "")
    if repeat is None and not run:
        return plan
    agents = dict(plan.agents)
    for name, spec in plan.agents.items():
        if name == OPERATOR_AGENT:
            continue
        if repeat is not None:
            asked = spec.approvals if spec.replay is None else spec.replay.approvals
            replayed = ReplaySpec(
                recording=repeat.recording, only_calls=repeat.only_calls, approvals=asked, own_state=True
            )
            spec = replace(spec, replay=replayed, approvals=[])
        agents[name] = replace(spec, record=run)
    if repeat is not None and repeat.prompt and plan.entry_agent:
        agents[plan.entry_agent] = replace(agents[plan.entry_agent], system=_prompt(repeat.prompt))
    return replace(plan, agents=agents)


def _prompt(path: str) -> str:
    try:
        return read_file(os.path.abspath(path), MAX_PROMPT_BYTES).decode("utf-8")
    except (Unreadable, UnicodeDecodeError) as error:
        raise fail("E_USAGE", f"the prompt {path} cannot be read: {error}") from None
