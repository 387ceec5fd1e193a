"""A bundle with rules never runs without them because something of this feature is missing."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
from msgspec import structs

from goondan import features
from goondan.agentproc.turn import parts as agent_parts
from goondan.features import FEATURES
from goondan.kernel.broker import __main__ as broker
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from tests.features.approvals.test_bundle import OWN, using
from tests.unit.kernel.broker.approving import ASK, policy
from tests.unit.kernel.broker.swarm import plan
from tests.unit.kernel.bundle.conftest import Look

RULES = {"approvals": to_raw([policy(ASK)])}
WITHOUT = tuple(feature for feature in FEATURES if feature.name != "approvals")


def test_without_its_row_the_broker_refuses_a_plan_with_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    base = plan()
    ruled = structs.replace(base, agents={"coder": structs.replace(base.agents["coder"], parts=RULES)})
    broker.refuse_unclaimed(ruled)
    monkeypatch.setattr(broker, "FEATURES", WITHOUT)
    broker.refuse_unclaimed(base)
    with pytest.raises(GoondanError, match="approvals") as refused:
        broker.refuse_unclaimed(ruled)
    assert refused.value.code == "E_CONFIG_UNSUPPORTED"


def test_without_its_row_a_bundle_with_rules_is_no_bundle(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEATURES", WITHOUT)
    own = OWN + using("{}").replace("Extension/approval", "Extension/guard")
    for bundle, code in ((using("{default: ask}"), "E_CONFIG_MISSING_REF"), (own, "E_CONFIG_UNSUPPORTED")):
        (error,) = look(bundle).errors
        assert error.code == code
        assert "approval" in error.message


def test_without_its_row_an_agent_refuses_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "FEATURES", WITHOUT)
    instance = MagicMock()
    known = agent_parts.Features(instance, agent_parts.kinds.__wrapped__())
    spec = structs.replace(plan().agents["coder"], parts=RULES)
    with pytest.raises(GoondanError, match="approvals") as refused:
        known.refuse_unclaimed(spec)
    assert refused.value.code == "E_FEATURE_MISSING"
