"""What operators patch besides what extensions may, and the schema that the config of an extension has to fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from goondan.features.live_config.broker.patches import MAX_PATCHES
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.frames import ErrorPayload
from goondan.schemas.wire.usage import Pricing
from tests.features.live_config.test_patches import Live, add, remove, replace
from tests.unit.kernel.broker.swarm import EXTENSIONS


def with_model(live: Live, **changes: Any) -> None:
    """The bundle gives `coder` this model."""
    live.becomes(model=ModelSpec(**{"provider": "anthropic", "model": "haiku", **changes}))


def test_an_operator_changes_the_model_and_the_steps_of_a_turn_from_the_next_step_on() -> None:
    live = Live("k", "other")
    with_model(live)
    patches = [replace("/model/model", "opus"), replace("/policy/maxStepsPerTurn", 99)]
    assert live.operator(*patches, instanceKey="k")["status"] == "accepted"
    config = live.admin(op="config.show", agent="coder", instanceKey="k")["config"]
    assert (config["model"], config["policy"]) == (
        {"provider": "anthropic", "model": "opus"},
        {"maxStepsPerTurn": 99},
    )
    assert live.config("k")["model"]["model"] == "opus"
    assert live.config("other")["model"]["model"] == "haiku"
    live.restart()
    assert live.config("k")["policy"] == {"maxStepsPerTurn": 99}
    assert live.code(replace("/model/model", "sonnet")) == "E_CHANGESET_DENIED", "an extension may not"
    # What was set again goes first when there is no more room.
    for number in range(MAX_PATCHES + 5):
        assert live.operator(replace("/model/model", f"m{number}"), instanceKey="k")["status"] == "accepted"


def test_a_model_of_another_provider_is_not_asked_for_what_was_set_before() -> None:
    live = Live()
    with_model(live)
    live.operator(replace("/model/model", "opus"))
    assert live.config()["model"]["model"] == "opus"
    with_model(live, provider="openai", model="gpt")
    assert live.config()["model"] == {"provider": "openai", "model": "gpt"}
    (patch,) = live.admin(op="config.list")["patches"]
    assert patch["idle"] == ["the agent's model is one of openai, not of anthropic"]


def test_what_no_kernel_changes_while_it_runs_names_the_way() -> None:
    live = Live()
    with_model(live)
    for operation in (
        replace("/model/provider", "openai"),
        add("/model/endpoint", "http://127.0.0.1:1"),
        add("/model/apiKey", "k"),
        replace("/model", {"provider": "openai", "model": "gpt"}),
        add("/policy/maxLiveAgents", 9),
        add("/sandbox", {"network": "public"}),
        add("/permissions/-", "agents"),
        replace("/agent", "reviewer"),
        replace("/swarm", "x"),
        replace("/extensions/0/entry", "evil.py"),
        replace("/extensions/3/config/transport", {"command": ["sh"]}),
    ):
        told = live.operator(operation)
        assert (told["status"], told["error"]["code"]) == ("rejected", "E_CHANGESET_DENIED"), operation
        assert "gdn restart" in told["error"]["suggestion"]


def test_an_operators_value_is_checked_as_well() -> None:
    live = Live()
    with_model(live)
    steps: list[Any] = [0, 1001, -1, 1.5, True, "5", None, [5], 2**63, 1e300]
    wrong = [replace("/policy/maxStepsPerTurn", value) for value in steps]
    wrong += [replace("/model/model", value) for value in ("", "two words", 7)]
    for operation in (*wrong, remove("/policy/maxStepsPerTurn")):
        assert live.operator(operation)["error"]["code"] == "E_CONFIG_INVALID_VALUE", operation
    assert live.operator(remove("/model"))["error"]["code"] == "E_CHANGESET_DENIED"
    for value in (1, 1000):
        assert live.operator(replace("/policy/maxStepsPerTurn", value))["status"] == "accepted"


def test_a_model_with_a_price_is_changed_together_with_it() -> None:
    live = Live()
    with_model(live, pricing=Pricing(input_per_million=1.0, output_per_million=2.0))
    told = live.operator(replace("/model/model", "opus"))
    assert told["error"]["code"] == "E_CHANGESET_DENIED"
    assert "price" in told["error"]["message"]


# --- the form of a config ---------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"level": {"type": "integer"}, "mode": {"enum": ["a", "b"]}, "nested": {}, "secret": {}},
    "additionalProperties": False,
    "if": {"properties": {"mode": {"const": "b"}}, "required": ["mode"]},
    "then": {"properties": {"level": {"minimum": 5}}},
}


def with_schema(live: Live) -> None:
    """The extension `one` declares what its config looks like."""
    one = msgspec.structs.replace(EXTENSIONS[0], config_schema=SCHEMA)
    live.becomes(extensions=[one, *EXTENSIONS[1:]])


@pytest.mark.parametrize("operator", [False, True])
def test_a_config_that_does_not_fit_its_schema_is_refused_before_it_is_in_force(operator: bool) -> None:
    live = Live()
    with_schema(live)
    wrong = [replace("/extensions/0/config/level", "high-secret-value")]
    if operator:
        told = live.operator(*wrong)
        error = msgspec.convert(told["error"], ErrorPayload)
    else:
        outcome = live.propose(*wrong)
        assert outcome.error is not None
        error = outcome.error
    assert error.code == "E_CONFIG_INVALID_VALUE"
    assert "Extension/one" in error.message
    assert "config.level" in error.message
    assert "high-secret-value" not in error.message
    assert live.revision() == 0
    assert live.code(add("/extensions/0/config/unknown", 1)) == "E_CONFIG_INVALID_VALUE"
    assert live.propose(replace("/extensions/0/config/level", 2)).status == "accepted"
    assert live.propose(replace("/extensions/1/config", {"anything": 1})).status == "accepted", "it declares none"


def test_patches_that_fit_alone_and_not_together_are_refused_also_by_a_revert() -> None:
    live = Live()
    with_schema(live)
    assert live.propose(replace("/extensions/0/config/level", 7), id="level").status == "accepted"
    # Made from the configuration without the other: they touch different things, and together they would not fit.
    assert live.propose(add("/extensions/0/config/mode", "b"), id="mode").status == "accepted"
    refused = live.admin(op="config.revert", patchId="level")
    assert refused.code == "E_CONFIG_INVALID_VALUE"
    assert live.config()["extensions"][0]["config"]["level"] == 7
    assert live.admin(op="config.revert", patchId="mode")["status"] == "accepted"
    assert live.admin(op="config.revert", patchId="level")["status"] == "accepted"
    old = live.revision()
    assert live.propose(add("/extensions/0/config/mode", "b"), id="again").error is not None, "the level is 1"
    assert live.propose(replace("/extensions/0/config/level", 9), revision=old).status == "accepted"
