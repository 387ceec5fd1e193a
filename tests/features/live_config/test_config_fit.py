"""Patches for all of an agent beside those of its instances: what is in force fits every schema, in every instance."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.live_config import broker as service_module
from goondan.features.live_config.broker import patches as patches_module
from goondan.features.live_config.wire import ConfigOutcome
from goondan.schemas.bundle.extensions import check_config
from goondan.schemas.wire.codec import from_raw
from tests.features.live_config.test_patches import Live, add, code_of, remove, replace
from tests.unit.kernel.broker.swarm import EXTENSIONS

#: `high` needs `unit`, and there is room for three.
SCHEMA = {
    "type": "object",
    "properties": {"level": {"type": "integer", "maximum": 3}},
    "dependentRequired": {"high": ["unit"]},
    "maxProperties": 3,
}
AT = "/extensions/0/config"
INVALID = "E_CONFIG_INVALID_VALUE"


def live(*keys: str, schema: dict[str, Any] = SCHEMA, **config: Any) -> Live:
    """Instances of an agent whose extension `one` declares a schema."""
    made = Live(*keys)
    resource = {"kind": "Extension", "metadata": {"name": "one"}, "spec": {"entry": "x.py", "config": config}}
    one = msgspec.structs.replace(EXTENSIONS[0], config=config, resource=resource, config_schema=schema)
    made.becomes(extensions=[one, *EXTENSIONS[1:]])
    return made


def fits(made: Live, key: str) -> bool:
    return not check_config(SCHEMA, made.config(key)["extensions"][0]["config"])


def test_a_patch_for_all_that_does_not_fit_beside_the_patch_of_one_instance_is_refused() -> None:
    made = live("k", "other", unit="m")
    assert made.propose(add(f"{AT}/high", 1)).status == "accepted"
    outcome = made.propose(remove(f"{AT}/unit"), key="other", scope="agent")
    assert (outcome.status, code_of(outcome)) == ("rejected", INVALID)
    assert outcome.error is not None and "instance 'k'" in outcome.error.message
    assert fits(made, "k")
    # The other way round the instance's is the later one.
    made = live("k", "other", unit="m")
    assert made.propose(remove(f"{AT}/unit"), key="other", scope="agent").status == "accepted"
    assert made.code(add(f"{AT}/high", 1)) == INVALID


def test_an_instance_that_sleeps_is_looked_at_as_well_and_after_a_restart() -> None:
    made = live("k", "other", unit="m")
    assert made.propose(add(f"{AT}/high", 1)).status == "accepted"
    made.world.kill_agent(made.world.agents["coder", "k"])
    made.restart()
    assert made.code(remove(f"{AT}/unit"), key="other", scope="agent") == INVALID
    assert made.operator(remove(f"{AT}/unit"))["error"]["code"] == INVALID


def test_a_revert_for_all_that_an_instance_needs_is_refused() -> None:
    made = live("k", "other")
    given = made.propose(add(f"{AT}/unit", "m"), key="other", scope="agent")
    assert made.propose(add(f"{AT}/high", 1)).status == "accepted"
    error = made.admin(op="config.revert", patchId=given.patch_id)
    assert error.code == INVALID
    assert fits(made, "k")
    (own,) = [patch["patchId"] for patch in made.admin(op="config.list")["patches"] if patch["instanceKey"] == "k"]
    assert made.admin(op="config.revert", patchId=own)["status"] == "accepted"
    assert made.admin(op="config.revert", patchId=given.patch_id)["status"] == "accepted"


def test_an_extension_that_is_put_back_for_all_has_to_fit_everywhere() -> None:
    made = live("k", "other", unit="m")
    assert made.propose(add(f"{AT}/high", 1)).status == "accepted"
    assert made.operator(remove("/extensions/0"))["status"] == "accepted"
    back = {"kind": "Extension", "name": "one", "config": {}}
    assert made.operator(add("/extensions/-", back))["error"]["code"] == INVALID
    assert made.operator(add("/extensions/-", "Extension/one"))["status"] == "accepted"


def test_an_instance_that_did_not_fit_before_holds_nobody_up() -> None:
    made = live("k", "other", unit="m")
    assert made.propose(add(f"{AT}/high", 1)).status == "accepted"
    one = msgspec.structs.replace(made.spec.extensions[0], config={})  # the bundle's next revision has no unit
    made.becomes(extensions=[one, *made.spec.extensions[1:]])
    assert not fits(made, "k")
    assert made.propose(add(f"{AT}/level", 2), key="other", scope="agent").status == "accepted"
    assert made.code(add(f"{AT}/level", 9), key="other", scope="agent") == INVALID


def test_what_is_on_its_way_to_the_disk_counts() -> None:
    """The broker judges the next patch while the journal writes this one."""
    made = live("k", "other", unit="m")
    made.world.slow_disk = True
    assert made.send(add(f"{AT}/high", 1)) == []
    (reply,) = [frame for frame in made.send(remove(f"{AT}/unit"), key="other", scope="agent") if frame.type == "reply"]
    assert code_of(from_raw(reply.payload, ConfigOutcome)) == INVALID
    assert made.send(remove(f"{AT}/unit")) != [], "nor in the instance itself"
    made.world.slow_disk = False
    made.world.disk_catches_up()
    assert fits(made, "k")


def test_bytes_of_both_together_fit_into_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches_module, "MAX_CHANGES_BYTES", 1000)
    made = Live("k", "other")
    assert made.propose(replace("/prompt/system", "x" * 700)).status == "accepted"
    outcome = made.propose(add("/extensions/1/config/y", "y" * 700), key="other", scope="agent")
    assert code_of(outcome) == "E_CONFIG_LIMIT"
    assert outcome.error is not None and "instance 'k'" in outcome.error.message
    assert made.propose(add("/extensions/1/config/y", "y" * 700), key="other").status == "accepted"


def test_what_an_agent_may_have_judged_is_bounded_and_what_a_person_may_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "MAX_JUDGED_INSTANCES", 2)
    made = live("a", "b", "c", unit="m")
    for key in ("a", "b", "c"):
        assert made.propose(add(f"{AT}/high", 1), key=key).status == "accepted"
    assert made.code(add(f"{AT}/level", 1), scope="agent", key="a") == "E_CONFIG_LIMIT"
    assert made.propose(add("/extensions/1/config/y", 1), scope="agent", key="a").status == "accepted", "no schema"
    assert made.operator(add(f"{AT}/level", 1))["status"] == "accepted"


STEP = st.tuples(
    st.sampled_from(["a", "b", "all", "operator"]),
    st.sampled_from(["high", "unit", "level", "more"]),
    st.sampled_from(["set", "set", "set", "remove", "remove", "bad", "whole", "revert", "restart"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=14))
def test_whatever_is_proposed_and_taken_back_every_instance_fits(steps: list[tuple[str, str, str]]) -> None:
    """a and b propose for themselves, `all` for every instance, an operator for every instance."""
    made = live("a", "b", unit="m")
    accepted: list[str] = []
    for number, (who, name, what) in enumerate(steps):
        key = who if who in ("a", "b") else "a"
        if what == "restart":
            made.restart()
            continue
        if what == "revert":
            if accepted:
                made.admin(op="config.revert", patchId=accepted[number % len(accepted)])
        else:
            config = made.config(key)["extensions"][0]["config"]
            value = 9 if what == "bad" else 1
            operation = replace(AT, {name: value}) if what == "whole" else add(f"{AT}/{name}", value)
            if what == "remove":
                operation = remove(f"{AT}/{name if name in config else next(iter(config), name)}")
            if who == "operator":
                told = made.operator(operation)
                if isinstance(told, dict) and told["status"] == "accepted":
                    accepted.append(told["patchId"])
            else:
                outcome = made.propose(operation, key=key, scope="agent" if who == "all" else "instance")
                if outcome.status == "accepted":
                    accepted.append(outcome.patch_id)
        assert fits(made, "a"), (who, name, what)
        assert fits(made, "b"), (who, name, what)
