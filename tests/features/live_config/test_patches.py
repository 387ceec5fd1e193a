"""Live configuration in the broker: who may patch what, one after the other, kept by the journal."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from goondan.features.live_config.broker import MAX_PROPOSALS, LiveConfigs
from goondan.features.live_config.broker.patches import MAX_PATCHES, MAX_REJECTED
from goondan.features.live_config.wire import ConfigOutcome, ConfigProposal
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, Connection
from goondan.schemas.bundle.effective_config import LiveChanges, apply_changes, declared, digest_of, shown
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, KernelPlan, ToolSource
from goondan.schemas.wire.codec import encode, from_raw, to_raw
from goondan.schemas.wire.frames import ErrorPayload, Frame
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.swarm import EXTENSIONS, TOOLS
from tests.unit.kernel.broker.world import World, out, part_of, run, tell


def with_extensions(plan: KernelPlan) -> KernelPlan:
    """`coder` has extensions, and may call notes__add besides what its catalog has."""
    registry = [CatalogItem(name=name, source=ToolSource("config", name.partition("__")[0])) for name in TOOLS]
    coder = msgspec.structs.replace(
        plan.agents["coder"],
        registry=registry,
        catalog=["bash__exec"],
        allow_registry=["notes__*"],
        system="Be kind.",
        extensions=EXTENSIONS,
    )
    return msgspec.structs.replace(plan, agents={**plan.agents, "coder": coder})


class Live:
    """A world whose agent `coder` has extensions, and what is asked of it."""

    def __init__(self, *keys: str) -> None:
        self.world = World()
        self.world.plan = with_extensions(self.world.plan)
        self.world.kill_broker()
        run(self.world)
        self.count = 0
        for key in keys or ("k",):
            self.start(key)

    def start(self, key: str) -> None:
        """A live process of the instance."""
        world = self.world
        world.launches += 1
        world.agents["coder", key] = Agent(world, "coder", key, world.launches)
        run(world)
        assert self.connection(key) is not None

    @property
    def bus(self) -> Bus:
        return self.world.router.bus

    @property
    def spec(self) -> AgentSpec:
        return self.bus.plan.agents["coder"]

    def connection(self, key: str = "k") -> Connection:
        return self.world.peer("coder", key)

    def send(self, *operations: dict[str, Any], key: str = "k", **fields: Any) -> list[Frame]:
        """What leaves the broker for agents when an extension proposes these operations."""
        self.count += 1
        proposal = {
            "id": f"p{self.count}",
            "patches": list(operations),
            "revision": self.revision(key),
            "base": digest_of(self.spec),
            "extension": "one",
            **fields,
        }
        frame = Frame("config.propose", id=f"f{self.count}", payload=to_raw(proposal))
        return tell(self.world, frame, self.connection(key))

    def propose(self, *operations: dict[str, Any], key: str = "k", **fields: Any) -> ConfigOutcome:
        frames = self.send(*operations, key=key, **fields)
        reply = frames[-1]
        assert reply.type == "reply", from_raw(reply.payload, ErrorPayload)
        return from_raw(reply.payload, ConfigOutcome)

    def code(self, *operations: dict[str, Any], key: str = "k", **fields: Any) -> str:
        """Why it is rejected."""
        outcome = self.propose(*operations, key=key, **fields)
        assert outcome.status == "rejected"
        return code_of(outcome)

    def changes(self, key: str = "k") -> LiveChanges:
        return part_of(self.world.router, LiveConfigs).changes("coder", key) or LiveChanges()

    def welcomed(self, key: str) -> LiveChanges:
        """What the agent is told with its `welcome`."""
        return from_raw(part_of(self.world.router, LiveConfigs).welcome(self.connection(key))["config"], LiveChanges)

    def revision(self, key: str = "k") -> int:
        return self.changes(key).revision

    def config(self, key: str = "k") -> dict[str, Any]:
        """The effective configuration of an instance."""
        return shown(self.spec, apply_changes(declared(self.spec), self.changes(key).changes))

    def tools(self, key: str = "k") -> list[str]:
        return [tool["name"] for tool in self.config(key)["tools"]]

    def admin(self, **asked: Any) -> Any:
        """What an operator is answered."""
        connection = next(iter(self.bus.presence.connections[CLIENTS].values()))
        connection.claims = msgspec.structs.replace(connection.claims, operator=True)
        self.count += 1
        frames = tell(self.world, Frame("admin", id=f"a{self.count}", payload=to_raw(asked)), connection)
        (frame,) = [frame for frame in frames if frame.in_reply_to == f"a{self.count}"]
        return from_raw(frame.payload, dict if frame.type == "reply" else ErrorPayload)

    def operator(self, *operations: dict[str, Any], **more: Any) -> Any:
        """What an operator is answered who proposes these operations for `coder`."""
        asked = {"op": "config.propose", "id": f"o{self.count}", "agent": "coder", "patches": list(operations)}
        return self.admin(**asked, **more)

    def restart(self) -> None:
        self.world.kill_broker()
        run(self.world)

    def becomes(self, **changes: Any) -> None:
        """The bundle has changed this of `coder`, and the broker starts again."""
        spec = msgspec.structs.replace(self.spec, **changes)
        self.world.plan = msgspec.structs.replace(self.world.plan, agents={**self.world.plan.agents, "coder": spec})
        self.restart()


def code_of(outcome: ConfigOutcome) -> str:
    assert outcome.error is not None
    return outcome.error.code


def add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def replace(path: str, value: Any) -> dict[str, Any]:
    return {"op": "replace", "path": path, "value": value}


def remove(path: str) -> dict[str, Any]:
    return {"op": "remove", "path": path}


# --- accepted ---------------------------------------------------------------------------------------------------------


def test_an_accepted_patch_is_journaled_then_pushed_then_answered() -> None:
    live = Live()
    frames = live.send(add("/tools/-", "Tool/notes"), reason="notes are needed")
    assert [frame.type for frame in frames] == ["config.changed", "reply"]
    pushed = from_raw(frames[0].payload, LiveChanges)
    assert (pushed.revision, pushed.base) == (1, digest_of(live.spec))
    outcome = from_raw(frames[1].payload, ConfigOutcome)
    assert outcome == ConfigOutcome(status="accepted", patch_id="p1", revision=1)
    assert live.tools() == ["bash", "notes"]


def test_nothing_is_told_before_the_journal_has_it_and_a_full_disk_changes_nothing() -> None:
    live = Live()
    live.world.full = True
    (refused,) = live.send(add("/tools/-", "Tool/notes"), id="p")
    assert from_raw(refused.payload, ErrorPayload).code == "E_DISK_FULL"
    assert live.tools() == ["bash"]
    live.world.full = False
    assert live.propose(add("/tools/-", "Tool/notes"), id="p").status == "accepted"


def test_prompt_order_and_config_of_extensions() -> None:
    live = Live()
    assert live.propose(replace("/prompt/system", "Be brief.")).status == "accepted"
    assert live.propose(replace("/extensions/0/config/nested/a", 2), add("/extensions/0/config/x", [1])).revision == 2
    names = ["two", "gate", "one", "remote"]
    assert live.propose(replace("/extensions", [f"Extension/{name}" for name in names])).status == "accepted"
    config = live.config()
    assert config["prompt"] == {"system": "Be brief."}
    assert [item["name"] for item in config["extensions"]] == names
    assert config["extensions"][2]["config"] == {"level": 1, "nested": {"a": 2, "b": [1]}, "x": [1]}
    assert live.propose(replace("/prompt/system", "Use ${HOME}.")).status == "accepted", "nothing is filled in there"
    assert live.propose(remove("/prompt/system")).status == "accepted"
    assert live.config()["prompt"] == {"system": None}
    assert live.propose(remove("/tools/0")).status == "accepted"
    assert live.tools() == []


def test_a_change_keeps_nothing_that_was_not_changed() -> None:
    """The configuration of an extension may hold what the environment said: the record must not have a copy of it."""
    live = Live()
    config = copy.deepcopy(live.config()["extensions"])
    config[0]["config"]["level"] = 9
    assert live.propose(replace("/extensions", config)).status == "accepted"
    (edit,) = live.changes().changes[0].configs
    assert (edit.extension, edit.path, edit.value) == ("one", ["level"], 9)
    assert live.changes().changes[0].extensions is None


def test_an_instance_has_its_own_unless_all_of_the_agent_are_meant() -> None:
    live = Live("k", "other")
    live.propose(add("/tools/-", "Tool/notes"))
    assert (live.tools("k"), live.tools("other")) == (["bash", "notes"], ["bash"])
    frames = live.send(replace("/prompt/system", "All."), scope="agent")
    assert [frame.type for frame in frames] == ["config.changed", "config.changed", "reply"]
    assert [live.config(key)["prompt"]["system"] for key in ("k", "other")] == ["All.", "All."]


def test_dormant_instances_get_it_when_they_come() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"), scope="agent")
    live.start("late")
    assert live.tools("late") == ["bash", "notes"]
    actor = live.world.agents["coder", "late"]
    assert live.welcomed("late").revision == 1
    assert actor is not None


def test_dynamic_tools_that_the_agent_says_it_has() -> None:
    live = Live()
    assert live.code(add("/tools/-", "Tool/myExt.echo")) == "E_CONFIG_MISSING_REF"
    outcome = live.propose(add("/tools/-", {"kind": "Tool", "name": "myExt.echo"}), registered=["myExt.echo"])
    assert outcome.status == "accepted"
    assert live.tools() == ["bash", "myExt__echo"]
    assert live.propose(add("/tools/-", "Tool/skills__list"), registered=["skills.list"]).status == "accepted"


# --- refused ----------------------------------------------------------------------------------------------------------

DENIED = [
    replace("/model/model", "opus"),
    replace("/model", {}),
    replace("/policy/maxStepsPerTurn", 99),
    add("/policy", {}),
    remove("/policy"),
    add("/sandbox", {"network": "public"}),
    add("/permissions/-", "agents"),
    replace("/agent", "reviewer"),
    replace("/swarm", "x"),
    replace("", {}),
    add("/tools/-", "Tool/secret"),
    replace("/extensions/0/name", "two"),
    replace("/extensions/0/entry", "evil.py"),
    replace("/extensions/2/config/rules", []),
    replace("/extensions/2/config", {}),
    remove("/extensions/0"),
    replace("/extensions", []),
    remove("/extensions/2"),
    add("/extensions/-", {"kind": "Extension", "name": "evil", "config": {}}),
    replace("/extensions/3/config/transport", {"command": ["sh"]}),
    add("/extensions/3/config/sandbox", {"network": "public"}),
]


@pytest.mark.parametrize("operation", DENIED, ids=lambda operation: f"{operation['op']}{operation['path']}")
def test_what_is_not_an_extensions_to_change(operation: dict[str, Any]) -> None:
    live = Live()
    before = live.config()
    assert live.code(operation) == "E_CHANGESET_DENIED"
    assert live.config() == before
    assert live.connection().allowed == {"bash__exec", "notes__add"}


WRONG = [
    ([add("/tools/-", "Tool/nothing")], "E_CONFIG_MISSING_REF"),
    ([add("/tools/7", "Tool/notes")], "E_CONFIG_INVALID_VALUE"),
    ([add("/tools/01", "Tool/notes")], "E_CONFIG_INVALID_VALUE"),
    ([remove("/tools/-")], "E_CONFIG_INVALID_VALUE"),
    ([add("/tools/-", 7)], "E_CONFIG_INVALID_VALUE"),
    ([add("/tools/-", "Agent/coder")], "E_CONFIG_INVALID_VALUE"),
    ([replace("/tools", "bash")], "E_CONFIG_INVALID_VALUE"),
    ([replace("/prompt/system", 7)], "E_CONFIG_INVALID_VALUE"),
    ([add("/prompt/user", "x")], "E_CONFIG_INVALID_VALUE"),
    ([replace("/prompt/~system", "x")], "E_CONFIG_INVALID_VALUE"),
    ([{"op": "add", "path": "/tools/-"}], "E_CONFIG_INVALID_VALUE"),
    ([replace("/extensions/0/config", 7)], "E_CONFIG_INVALID_VALUE"),
    ([replace("/extensions/0/config/level", "${KEY}")], "E_CONFIG_INVALID_VALUE"),
    ([add("/extensions/0/config/key", {"valueFrom": {"env": "KEY"}})], "E_CONFIG_INVALID_VALUE"),
    ([replace("/extensions/0/config/level", b"bytes")], "E_CONFIG_INVALID_VALUE"),
    ([add("/extensions/-", "Extension/one")], "E_CONFIG_DUPLICATE"),
    ([], "E_CONFIG_INVALID_VALUE"),
    ([add("/tools/-", "Tool/notes")] * 65, "E_CONFIG_INVALID_VALUE"),
]


@pytest.mark.parametrize(("operations", "code"), WRONG)
def test_what_is_no_sound_patch(operations: list[dict[str, Any]], code: str) -> None:
    live = Live()
    assert live.code(*operations) == code
    assert live.revision() == 0


def test_a_patch_is_whole_or_nothing() -> None:
    live = Live()
    assert live.code(replace("/prompt/system", "x"), add("/tools/-", "Tool/secret")) == "E_CHANGESET_DENIED"
    assert live.config()["prompt"]["system"] == "Be kind."


def test_an_agent_without_extensions_has_nobody_who_could_propose() -> None:
    live = Live()
    world = live.world
    world.clients[0].ask("r", "reviewer")
    run(world)
    conn = world.peer("reviewer", "k")
    proposal = ConfigProposal(id="x", patches=[], revision=0, base="")
    (error,) = tell(world, Frame("config.propose", id="f", payload=to_raw(proposal)), conn)
    assert from_raw(error.payload, ErrorPayload).code == "E_FORBIDDEN"


def test_the_key_of_a_model_does_not_get_into_the_record() -> None:
    live = Live()
    model = msgspec.structs.replace(live.spec.model, api_key="sk-very-secret-1")
    live.bus.plan.agents["coder"] = msgspec.structs.replace(live.spec, model=model)
    assert live.code(add("/extensions/0/config/k", "a sk-very-secret-1 b")) == "E_CONFIG_INVALID_VALUE"
    live.propose(add("/extensions/0/config/k", "v"), reason="since sk-very-secret-1 is old")
    (_, patch) = live.admin(op="config.list")["patches"]
    assert patch["reason"] == "since *** is old"
    assert b"very-secret" not in b"".join(row.data for row in live.world.journal.rows())


# --- one after the other ----------------------------------------------------------------------------------------------


def test_what_was_made_from_an_older_revision_merges_if_nothing_else_touched_it() -> None:
    live = Live()
    live.propose(remove("/tools/0"))
    # Index 0 was bash when this was made, and is nothing now. What it adds is added all the same.
    assert live.propose(add("/tools/1", "Tool/notes"), revision=0).status == "accepted"
    assert live.tools() == ["notes"]
    assert live.propose(replace("/prompt/system", "x"), revision=0).status == "accepted"
    assert live.code(replace("/prompt/system", "y"), revision=0) == "E_CONFIG_CONFLICT"
    assert live.code(remove("/tools/0"), revision=0) == "E_CONFIG_CONFLICT"
    assert live.config()["prompt"]["system"] == "x"


def test_the_whole_of_a_list_is_touched_by_who_names_it_whole() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"))
    assert live.code(replace("/tools", []), revision=0) == "E_CONFIG_CONFLICT"
    assert live.propose(replace("/tools", [])).status == "accepted"


def test_what_was_made_from_what_another_bundle_said_is_refused() -> None:
    live = Live()
    assert live.code(replace("/prompt/system", "x"), base="other") == "E_CONFIG_CONFLICT"


def test_fifty_at_once_are_serial_and_none_is_lost() -> None:
    """Nobody has heard of the others: each is made from revision 0, and all are there before the journal has one."""
    live = Live()
    connection = live.connection()
    outcomes: dict[str, ConfigOutcome] = {}
    for number in range(50):
        operation = add(f"/extensions/{number % 2}/config/k{number // 2 % 20}", number)
        fields = {"id": f"c{number}", "patches": [operation], "revision": 0, "base": digest_of(live.spec)}
        data = decode_frame("config.propose", f"c{number}", fields)
        live.world.router.receive(connection, data, live.world.now)
    for frame in out(live.world, connection.cls):
        if frame.type == "reply":
            outcomes[str(frame.in_reply_to)] = from_raw(frame.payload, ConfigOutcome)
    accepted = [name for name, outcome in outcomes.items() if outcome.status == "accepted"]
    assert len(outcomes) == 50
    assert len(accepted) == 40
    codes = {outcome.error.code for outcome in outcomes.values() if outcome.error is not None}
    assert codes == {"E_CONFIG_CONFLICT"}
    revisions = [outcomes[name].revision for name in accepted]
    assert len(set(revisions)) == 40
    configs = [item["config"] for item in live.config()["extensions"]]
    held = [value for config in configs for key, value in config.items() if key.startswith("k")]
    assert sorted(held) == sorted(int(name[1:]) for name in accepted)


def decode_frame(kind: str, name: str, payload: Any) -> bytes:
    return encode(Frame(kind, id=name, payload=to_raw(payload)))


def test_the_same_proposal_under_the_same_id_is_one_patch() -> None:
    live = Live()
    first = live.propose(add("/tools/-", "Tool/notes"), id="same", revision=0)
    assert live.propose(add("/tools/-", "Tool/notes"), id="same", revision=0) == first
    assert len(live.changes().changes) == 1
    live.start("other")
    frames = live.send(add("/tools/-", "Tool/notes"), key="other", id="same")
    assert from_raw(frames[-1].payload, ErrorPayload).code == "E_FORBIDDEN"


def test_many_proposals_are_told_to_wait() -> None:
    live = Live()
    for _ in range(MAX_PROPOSALS):
        live.send(remove("/tools/9"))
    (error,) = live.send(remove("/tools/9"))
    info = from_raw(error.payload, ErrorPayload)
    assert (info.code, info.retry_after_ms is not None) == ("E_OVERLOADED", True)
    live.world.now += 61
    assert live.code(remove("/tools/9")) == "E_CONFIG_INVALID_VALUE"


# --- kept -------------------------------------------------------------------------------------------------------------


def test_patches_reverts_and_rejections_outlive_the_broker() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"))
    live.propose(replace("/prompt/system", "x"), reason="why")
    live.code(add("/tools/-", "Tool/secret"))
    assert live.admin(op="config.revert", patchId="p1")["status"] == "accepted"
    before = live.config(), live.revision(), live.admin(op="config.list")
    live.restart()
    assert (live.config(), live.revision(), live.admin(op="config.list")) == before
    assert [patch["status"] for patch in before[2]["patches"]] == ["reverted", "accepted", "rejected"]
    assert live.tools() == ["bash"]
    assert live.propose(add("/tools/-", "Tool/notes"), id="p9").revision == live.revision()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_broker_that_dies_in_the_write_has_the_patch_whole_or_not_at_all(when: Any) -> None:
    live = Live()
    live.world.dies = when
    operations = [add("/tools/-", "Tool/notes"), replace("/prompt/system", "x")]
    proposal = {
        "id": "p",
        "patches": operations,
        "revision": 0,
        "base": digest_of(live.spec),
    }
    live.world.router.receive(live.connection(), decode_frame("config.propose", "f", proposal), live.world.now)
    live.world.after_round()
    run(live.world)
    whole = when == "after"
    assert live.tools() == (["bash", "notes"] if whole else ["bash"])
    assert live.config()["prompt"]["system"] == ("x" if whole else "Be kind.")
    # Sent again, it is the same patch.
    assert live.propose(*operations, id="p", revision=0).status == "accepted"
    assert len(live.changes().changes) == 1


def test_the_patches_of_an_instance_go_with_it() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"))
    live.propose(replace("/prompt/system", "x"), scope="agent")
    part_of(live.world.router, LiveConfigs).forget("coder", "k")
    live.world.commit()
    assert live.tools() == ["bash"]
    live.restart()
    assert live.tools() == ["bash"]
    assert live.config()["prompt"]["system"] == "x"


def test_what_was_set_again_is_forgotten_first_and_the_rest_is_refused() -> None:
    live = Live()
    at = "/extensions/1/config"
    for number in range(MAX_PATCHES + 20):
        assert live.propose(replace("/prompt/system", str(number))).status == "accepted"
        whole = replace(at, {"level": number}) if number % 2 else add(f"{at}/level", number)
        assert live.propose(whole).status == "accepted"
    assert live.config()["prompt"]["system"] == str(MAX_PATCHES + 19)
    assert len(live.admin(op="config.list")["patches"]) == MAX_PATCHES
    live.restart()
    assert live.config()["prompt"]["system"] == str(MAX_PATCHES + 19)
    assert live.code(replace("/prompt/system", "y"), revision=3) == "E_CONFIG_CONFLICT"
    outcomes = [live.propose(add(f"/extensions/0/config/k{number}", 1)) for number in range(MAX_PATCHES)]
    assert code_of(outcomes[-1]) == "E_CONFIG_LIMIT"


def test_long_prompts_one_after_the_other_fit() -> None:
    live = Live()
    for number in range(40):
        assert live.propose(replace("/prompt/system", f"{number}" + "x" * 20_000)).status == "accepted"
    assert len(live.changes().changes) < 14
    outcomes = [live.propose(add(f"/extensions/0/config/k{number}", "x" * 40_000)) for number in range(12)]
    assert code_of(outcomes[-1]) == "E_CONFIG_LIMIT"


def test_rejected_proposals_are_remembered_in_bounds() -> None:
    live = Live()
    for _ in range(MAX_REJECTED + 5):
        live.code(remove("/tools/9"))
    assert len(live.admin(op="config.list")["patches"]) == MAX_REJECTED


# --- the operator -----------------------------------------------------------------------------------------------------


def test_an_operator_may_add_any_tool_and_the_instance_may_call_it() -> None:
    live = Live("k", "other")
    assert live.operator(add("/tools/-", "Tool/secret"), instanceKey="k")["status"] == "accepted"
    assert live.tools() == ["bash", "secret"]
    assert "secret__tool" in live.connection("k").allowed
    assert "secret__tool" not in live.connection("other").allowed
    live.restart()
    assert "secret__tool" in live.connection("k").allowed
    assert "secret__tool" not in live.connection("other").allowed


def test_an_operator_takes_out_extensions_and_puts_them_back_but_brings_no_code() -> None:
    live = Live()
    assert live.operator(remove("/extensions/2"))["status"] == "accepted"
    assert [item["name"] for item in live.config()["extensions"]] == ["one", "two", "remote"]
    assert live.operator(add("/extensions/0", "Extension/gate"))["status"] == "accepted"
    assert [item["name"] for item in live.config()["extensions"]] == ["gate", "one", "two", "remote"]
    refused = live.operator(replace("/extensions/3/config/transport", "x"))
    assert refused["error"]["code"] == "E_CHANGESET_DENIED"


def test_a_revert_is_a_decision_of_its_own() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"))
    live.propose(add("/extensions/0/config/x", 1))
    frames = live.admin(op="config.revert", patchId="p1")
    assert (frames["status"], frames["revision"]) == ("accepted", 3)
    assert live.tools() == ["bash"]
    assert live.config()["extensions"][0]["config"]["x"] == 1
    # Whoever has not heard of it is in conflict, as with any other patch.
    assert live.code(remove("/tools/1"), revision=2) == "E_CONFIG_CONFLICT"
    assert live.admin(op="config.revert", patchId="p1")["revision"] == 3
    assert live.admin(op="config.revert", patchId="nothing").code == "E_PATCH_NOT_FOUND"
    for wrong in ("", "*", "../p1", "P1x", 5, None, ["a"], "x" * 10_000):
        assert live.admin(op="config.revert", patchId=wrong).code.startswith("E_"), wrong


def test_the_audit_says_who_when_what_and_what_came_of_it() -> None:
    live = Live()
    live.world.clients[0].ask("e1", "coder")
    run(live.world)
    live.propose(add("/tools/-", "Tool/notes"), reason="needed")
    (patch,) = live.admin(op="config.list", agent="coder", instanceKey="k")["patches"]
    assert {name: patch[name] for name in ("patchId", "agent", "instanceKey", "by", "byInstance", "extension")} == {
        "patchId": "p1", "agent": "coder", "instanceKey": "k", "by": "agent", "byInstance": "k", "extension": "one",
    }  # fmt: skip
    assert (patch["eventId"], patch["reason"], patch["madeFrom"], patch["status"]) == ("e1", "needed", 0, "accepted")
    assert patch["asked"] == ["add /tools/-"]
    assert patch["change"] == {"tools": {"added": ["notes"]}}
    assert patch["atMs"] == int(live.world.now * 1000)
    assert live.admin(op="config.list", agent="reviewer")["patches"] == []


def test_what_is_shown_of_a_configuration_has_no_values_of_the_bundle_in_it() -> None:
    live = Live()
    live.propose(add("/extensions/0/config/x", 1), add("/tools/-", "Tool/notes"))
    told = live.admin(op="config.show", agent="coder", instanceKey="k")
    assert told["revision"] == 1
    assert told["config"]["extensions"][0] == {"kind": "Extension", "name": "one", "patched": {"x": 1}}
    assert told["config"]["tools"][1] == {"kind": "Tool", "name": "notes"}
    assert live.admin(op="config.show", agent="nobody").code == "E_AGENT_NOT_FOUND"


def test_a_client_that_is_no_operator_is_refused() -> None:
    live = Live()
    connection = next(iter(live.bus.presence.connections[CLIENTS].values()))
    connection.claims = msgspec.structs.replace(connection.claims, operator=False)
    (error,) = [
        frame
        for frame in tell(live.world, Frame("admin", id="x", payload=to_raw({"op": "config.list"})), connection)
        if frame.in_reply_to == "x"
    ]
    assert from_raw(error.payload, ErrorPayload).code == "E_FRAME_INVALID"


# --- another bundle ---------------------------------------------------------------------------------------------------


def test_patches_act_on_the_bundle_that_comes_as_far_as_there_is_something() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"), replace("/prompt/system", "x"))
    live.propose(add("/extensions/0/config/level", 5))
    spec = msgspec.structs.replace(
        live.spec, registry=live.spec.registry[:1], catalog=["bash__exec"], system="New.", extensions=EXTENSIONS[1:]
    )
    plan = msgspec.structs.replace(live.bus.plan, agents={**live.bus.plan.agents, "coder": spec})
    live.world.router._revise(plan)
    assert live.tools() == ["bash"]
    assert live.config()["prompt"]["system"] == "x"
    told = [from_raw(frame.payload, LiveChanges) for frame in out(live.world, AGENTS) if frame.type == "config.changed"]
    assert [from_raw(one.spec, AgentSpec) for one in told] == [spec], "nobody but the agent that is another one"
    assert (told[0].base, told[0].revision) == (digest_of(spec), 2), "the bundle's part and the patches, in one"
    assert [line.partition(" is without effect: ")[2] for line in live.bus.notices] == [
        "Tool/notes is not in the bundle any more",
        "the agent has no Extension/one",
    ]
    live.world.router._revise(with_extensions(plan))
    assert live.tools() == ["bash", "notes"]
    assert live.config()["extensions"][0]["config"]["level"] == 5


def test_a_tool_that_extensions_may_not_add_any_more_is_not_added_any_more() -> None:
    live = Live()
    live.propose(add("/tools/-", "Tool/notes"))
    spec = msgspec.structs.replace(live.spec, allow_registry=[])
    live.world.router._revise(msgspec.structs.replace(live.bus.plan, agents={**live.bus.plan.agents, "coder": spec}))
    assert live.tools() == ["bash"]
    assert live.connection().allowed == {"bash__exec"}


def test_a_welcome_without_patches_carries_nothing() -> None:
    live = Live()
    assert part_of(live.world.router, LiveConfigs).changes("coder", "k") is None
    assert part_of(live.world.router, LiveConfigs).welcome(live.connection()) == {}
