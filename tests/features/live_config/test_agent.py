"""`api.live_config` in the agent: what an extension proposes, and what it is told. Real modules, whole turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.features.live_config.wire import ConfigOutcome, ConfigProposal
from goondan.schemas.bundle.effective_config import Change, Prompt, digest_of
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.test_configuration import ADD, only_notes, say
from tests.unit.agentproc.turns import Make, api_of, settle


class Broker(FakeLink):
    """A link whose broker accepts every patch, or says what `outcome` is."""

    def __init__(self, outcome: ConfigOutcome | GoondanError | None = None) -> None:
        super().__init__()
        self.outcome = outcome
        self.proposals: list[ConfigProposal] = []
        self.replies["config.propose"] = self._answer

    def _answer(self, frame: Frame) -> Any:
        proposal = from_raw(frame.payload, ConfigProposal)
        self.proposals.append(proposal)
        return self.outcome or ConfigOutcome(status="accepted", patch_id=proposal.id, revision=len(self.proposals))


@pytest.mark.requirement("CONFIG-01")
async def test_a_proposal_says_what_it_was_made_from_and_what_became_of_it_is_told(make: Make) -> None:
    link = Broker()
    runner = make(link, FakeModel(says("done")), **only_notes())
    say(runner, 4, ADD)
    api = api_of(runner, "guard")
    api.tools.register({"name": "guard.look", "description": "x", "handler": print})
    outcomes: list[Any] = []

    async def propose(ctx: Any) -> Any:
        say(runner, 9)  # the step does not know
        operations = [{"op": "add", "path": "/tools/-", "value": "Tool/guard.look"}]
        outcomes.append(await api.live_config.propose_patch({"patches": operations, "reason": "why", "scope": "agent"}))
        return ctx

    api.pipelines.mutate("step.post", propose)
    await runner.run(event_frame("e1", "go"))
    (proposal,) = link.proposals
    assert (proposal.revision, proposal.base) == (4, digest_of(runner.instance.spec))
    assert (proposal.reason, proposal.scope, proposal.extension) == ("why", "agent", "guard")
    assert proposal.registered == ["guard.look"]
    assert outcomes == [
        {"status": "accepted", "patchId": proposal.id, "effectiveFrom": "next-step", "revision": 1, "error": None}
    ]


async def test_a_rejected_one_has_the_error(make: Make) -> None:
    error = error_payload("E_CONFIG_CONFLICT", "somebody was faster")
    link = Broker(ConfigOutcome(status="rejected", patch_id="x", error=error))
    runner = make(link, FakeModel())
    propose = api_of(runner).live_config.propose_patch
    outcome = await propose({"patches": [{"op": "remove", "path": "/tools/0"}]})
    assert (outcome["status"], outcome["effectiveFrom"]) == ("rejected", "next-step")
    assert outcome["error"] == {
        "code": "E_CONFIG_CONFLICT",
        "message": "somebody was faster",
        "suggestion": error.suggestion,
    }
    link.outcome = GoondanError(error_payload("E_FORBIDDEN", "no"))
    assert (await propose({"patches": []}))["error"]["code"] == "E_FORBIDDEN"
    link.outcome = GoondanError(error_payload("E_LINK_CLOSED", "gone"))
    with pytest.raises(GoondanError, match="gone"):
        await propose({"patches": []})


@pytest.mark.parametrize(
    "proposal",
    [
        {"patches": [{"op": "move", "path": "/tools/0"}]},
        {"patches": [{"op": "add", "value": 1}]},
        {"patches": 7},
        {"patches": [{"op": "add", "path": "/x", "value": object()}]},
        {"patches": [], "scope": "swarm"},
        {"patches": [], "revision": "x"},
    ],
)
async def test_what_is_no_patch_is_rejected_where_it_is_made(make: Make, proposal: Any) -> None:
    link = Broker()
    outcome = await api_of(make(link, FakeModel())).live_config.propose_patch(proposal)
    assert outcome["error"]["code"] == "E_CONFIG_INVALID_VALUE"
    assert link.proposals == []


@pytest.mark.parametrize("proposal", [None, [], {}, {"patches": [], "patch": []}, {"ops": []}])
async def test_what_is_no_proposal_is_an_error_of_its_author(make: Make, proposal: Any) -> None:
    with pytest.raises(GoondanError) as caught:
        await api_of(make(Broker(), FakeModel())).live_config.propose_patch(proposal)
    assert caught.value.code == "E_USAGE"


async def test_a_token_that_an_extension_got_does_not_leave_the_process_in_a_patch(make: Make) -> None:
    link = Broker()
    runner = make(link, FakeModel())
    runner.instance.secrets.add("gho_0123456789abcdef")
    operation = {"op": "add", "path": "/extensions/0/config/token", "value": "Bearer gho_0123456789abcdef"}
    outcome = await api_of(runner).live_config.propose_patch({"patches": [operation]})
    assert outcome["error"]["code"] == "E_CONFIG_INVALID_VALUE"
    assert link.proposals == []


class Silent(FakeModel):
    """Never answers: the process ends before anything of the step is stored."""

    async def complete(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("stored", [True, False])
async def test_a_step_that_is_taken_up_again_proposes_the_same_patches(make: Make, stored: bool) -> None:
    async def ids(handler: Any, model: FakeModel, *, epoch: int) -> list[str]:
        link = Broker()
        link.handler = handler or link.handler
        runner = make(link, model)
        say(runner, 10 * epoch, Change(prompt=Prompt(str(epoch))))  # others have changed something meanwhile
        api = api_of(runner)

        async def propose(ctx: Any) -> Any:
            for value in ("a", "a", "b"):
                operation = {"op": "replace", "path": "/prompt/system", "value": value}
                await api.live_config.propose_patch({"patches": [operation]})
            return ctx

        api.pipelines.mutate("step.pre", propose)
        running = asyncio.ensure_future(runner.run(event_frame("e1", "go", epoch=epoch)))
        await settle(80)
        runner.abandon()
        await running
        return [proposal.id for proposal in link.proposals]

    first_model = FakeModel(wants(("c1", "notes__add", {}))) if stored else Silent()
    first = await ids(lambda tool, args: None, first_model, epoch=1)
    again = await ids(None, FakeModel(says("done")), epoch=2)
    assert len(set(first)) == 3
    assert again[:3] == first
    assert not set(again[3:]) & set(first), "the next step proposes others"


async def test_outside_of_a_step_each_proposal_is_another(make: Make) -> None:
    link = Broker()
    propose = api_of(make(link, FakeModel())).live_config.propose_patch
    for _ in range(2):
        await propose({"patches": [{"op": "remove", "path": "/tools/0"}]})
    assert len({proposal.id for proposal in link.proposals}) == 2
