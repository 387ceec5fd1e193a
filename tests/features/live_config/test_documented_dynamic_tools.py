"""The example of the extension document of v0.9 in which a patch has a dynamic tool shown, with its effect."""

from __future__ import annotations

import pytest

from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.live_config.broker.rules import Proposer, judge
from goondan.features.live_config.wire import ConfigOutcome, ConfigProposal
from goondan.schemas.bundle.effective_config import LiveChanges, declared, digest_of, reachable_tools
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.extensions.test_documented_examples import DYNAMIC, Examples, examples
from tests.unit.agentproc.extensions.test_points import result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants

__all__ = ["examples"]

OFFERED = (
    DYNAMIC
    + """
    async def offer(ctx):
        if ctx.step.index == 0:
            api.instance.shared["outcome"] = await api.live_config.propose_patch({
                "patches": [{"op": "add", "path": "/tools/-", "value": {"kind": "Tool", "name": "myExt.echo"}}],
                "reason": "the model may echo from now on",
            })
        return ctx

    api.pipelines.mutate("step.post", offer)
"""
)


class JudgingLink(FakeLink):
    """A link whose broker judges patches by the real rules, and keeps no journal."""

    runner: TurnRunner

    def __init__(self) -> None:
        super().__init__()
        self.replies["config.propose"] = self._judge

    def _judge(self, frame: Frame) -> ConfigOutcome:
        proposal, spec = from_raw(frame.payload, ConfigProposal), self.runner.instance.spec
        proposer = Proposer(False, reachable_tools(spec), proposal.registered)
        judged = judge(spec, declared(spec), proposal.patches, proposer)
        in_force = LiveChanges(revision=1, base=digest_of(spec), changes=[judged.change])
        self.runner.instance.config.take(to_raw(in_force))
        return ConfigOutcome(status="accepted", patch_id=proposal.id, revision=1)


@pytest.mark.requirement("CONFIG-02", "CONFIG-01")
async def test_a_dynamic_tool_is_offered_when_a_patch_names_it(examples: Examples) -> None:
    link = JudgingLink()
    model = FakeModel(wants(("a", "notes__add", {})), wants(("b", "myExt__echo", {"message": "hello"})), says("done"))
    link.runner = runner = await examples.start(link, model, exposes=False, dynamic=OFFERED)
    await runner.run(event_frame("e1", "go"))
    outcome = runner.instance.extensions._shared["outcome"]
    assert (outcome["status"], outcome["effectiveFrom"], outcome["error"]) == ("accepted", "next-step", None)
    shown = [[tool.name for tool in request.tools] for request in model.requests]
    own = ["bash__exec", "notes__add"]
    assert shown == [own, *[[*own, "myExt__echo"]] * 2]
    assert from_raw(result_of(runner, "b").output or b"", object) == {"echoed": "hello"}
