"""A recording of a stranger, repeated with `gdn replay`: nothing outside of the replay's own state is acted on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from goondan.features.recordings import wire as recordings
from goondan.features.recordings.wire import RecordedStep, read_lines, whole_requests
from goondan.kernel.broker.routing.router import CONFINED
from goondan.kernel.broker.state.entities import AGENTS
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame
from tests.kernel_fixture import sandbox
from tests.unit.kernel.broker.world import World, code, out, request, tell, working

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: prompts}
spec: {entry: ./extensions/prompts.py}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: assistant}
spec:
  modelConfig: {modelRef: Model/console}
  prompt: {systemRef: prompts/system.md}
  tools: [Tool/bash, Tool/agents, Tool/self-restart]
  extensions: [Extension/prompts]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: demo}
spec:
  entryAgent: Agent/assistant
  agents: [{ref: Agent/assistant}]
"""
EXTENSION = """\
from pathlib import Path

HOME = Path("PLACE")


def register(api):
    async def update(ctx, input):
        opened = await api.swarm_bundle.open_changeset()
        Path(opened["workdir"], "prompts/system.md").write_text("OWNED")
        return await api.swarm_bundle.commit_changeset({"changesetId": opened["changesetId"], "message": "owned"})

    def pay(ctx, input):
        HOME.joinpath("paid").write_text(input["to"])
        return "paid"

    counted = []

    def count(ctx, input):
        counted.append(input)
        return len(counted)

    async def tried(name, asked):
        try:
            await asked
            said = "done"
        except Exception as error:
            said = error.info.code
        with HOME.joinpath("tried").open("a") as file:
            file.write(f"{name} {said} {len(counted)}\\n")

    async def step(ctx):
        await tried("open", api.swarm_bundle.open_changeset())
        await tried("commit", api.swarm_bundle.commit_changeset({"changesetId": "c1", "message": "m"}))
        await tried("token", api.oauth.get_access_token({"oauthAppRef": "OAuthApp/mail"}))
        return await ctx.next()

    for name, handler in (("update", update), ("pay", pay)):
        api.tools.register({"name": f"myExt.{name}", "description": "Acts.", "handler": handler})
    api.tools.register({"name": "myExt.count", "description": "Counts.", "handler": count, "inReplay": True})
    api.pipeline.register("step", step)
"""


def _recording(path: Path, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """One turn, whose model makes these calls and says `done`. Its requests may be any."""
    place = {"agent": "assistant", "instance": "default", "turn": 1}
    asked = [{"id": f"c{at}", "name": name, "args": args} for at, (name, args) in enumerate(calls)]
    lines: list[dict[str, Any]] = [
        {"kind": "recording", "format": 1, "entryAgent": "assistant"},
        {"kind": "turn", **place, "input": "go", "outside": 1, "status": "completed", "response": "done"},
        {"kind": "step", **place, "step": 1, "entries": ["***"] * 2, "answer": {"calls": asked}},
    ]
    for call in asked:
        told = {"step": 1, "id": call["id"], "tool": call["name"], "args": call["args"]}
        lines.append({"kind": "call", **place, **told, "result": {"status": "ok", "output": {"status": "ok"}}})
    entries = ["***"] * (1 + len(calls))
    lines.append({"kind": "step", **place, "step": 2, "shared": 2, "entries": entries, "answer": {"text": "done"}})
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.feature("changesets", "oauth", "restart")
def test_a_recording_of_a_stranger_acts_on_nothing() -> None:
    from tests.features.changesets.process.changeset_bundles import FILES, Checkout

    with sandbox(BUNDLE) as kernel:
        code = EXTENSION.replace("PLACE", str(kernel.home))
        files = {**FILES, "goondan.yaml": BUNDLE, "extensions/prompts.py": code}
        bundle = Checkout(kernel.bundle.parent, kernel.bundle.parent, files)
        opened = kernel.home / "project"
        opened.mkdir()
        state = Path(kernel.env["GOONDAN_STATE_ROOT"])
        (state / "policy.yaml").write_text(f"spawn: {{workdirs: [{json.dumps(str(opened))}]}}\n")
        head, before = bundle.head, sorted(state.rglob("*"))
        _recording(
            kernel.home / "run.jsonl",
            [
                ("myExt__update", {}),
                ("myExt__pay", {"to": "mallory"}),
                ("myExt__count", {}),
                ("bash__exec", {"command": f"touch {kernel.home}/made"}),
                ("agents__spawn", {"target": "assistant", "instanceKey": "x", "cwd": str(opened / "new")}),
                ("self-restart__request", {"reason": "because"}),
            ],
        )

        result = kernel.gdn("replay", "run.jsonl", "--json", timeout=60)

        assert (result.status, result.json["difference"]) == (0, None), result.out + result.err
        assert (bundle.head, bundle.status, bundle.remains) == (head, "", [])
        assert (bundle.root / "prompts/system.md").read_text() == FILES["prompts/system.md"]
        assert not (kernel.home / "paid").exists(), "a tool of an extension has acted"
        assert not (kernel.home / "made").exists()
        assert list(opened.iterdir()) == [], "a folder that the policy opens was used"
        refused = "open E_FORBIDDEN {0}\ncommit E_FORBIDDEN {0}\ntoken E_FORBIDDEN {0}\n"
        assert (kernel.home / "tried").read_text() == refused.format(0) + refused.format(1), "and one tool runs"
        assert sorted(state.rglob("*")) == before


# --- what the broker takes from an agent that is answered from a recording ------------------------------------------

#: Frames that act on nothing but the replay itself: its turns, their budget, and words about them.
INNER = {
    *("ping", "pong", "log", "ack", "bye", "shutdown_ack", "runtime.event", "agents.list", "agents.catalog"),
    *("budget.reserve", "budget.settle", "model.permit", "model.over", "model.out"),
    *("tool.cancel", "tool.answer", "mcp.detach"),
}
#: Those that depend on whom or what they name.
JUDGED = {"event", "agents.spawn", "config.propose"}
REFUSED = {"approval.ask", "tool.call"}
#: Those of other features.
OF_OTHERS = {"restart", "changeset.open", "changeset.commit", "oauth.token", "mcp.attach", "mcp.list"}


def _replaying(*, own_state: bool = False) -> World:
    """`coder` is answered from a recording and has a turn; `reviewer` is asked as always."""
    world = working()
    spec, conn = world.plan.agents["coder"], world.router.bus.mailbox.instances["coder", "k"].conn
    world.plan.agents["coder"] = structs.replace(spec, confined=True, own_state=own_state)
    assert conn is not None and world.router._handlers_of(conn) is world.router._handlers[CONFINED]
    conn.handlers = world.router._handlers[CONFINED]
    return world


def _say(world: World, frame: Frame) -> list[Frame]:
    conn = world.peer()
    out(world, AGENTS)
    return tell(world, frame, conn)


@pytest.mark.feature("budgets", "changesets", "gates", "live_config", "mcp", "oauth", "restart")
def test_each_frame_of_an_agent_is_decided_upon() -> None:
    world = World()
    decided = INNER | JUDGED | REFUSED | OF_OTHERS
    assert set(world.router._handlers[AGENTS]) == decided
    assert set(world.router._handlers[CONFINED]) == decided


@pytest.mark.parametrize(
    "kind",
    [
        *sorted(REFUSED),
        pytest.param("restart", marks=pytest.mark.feature("restart")),
        pytest.param("changeset.open", marks=pytest.mark.feature("changesets")),
        pytest.param("changeset.commit", marks=pytest.mark.feature("changesets")),
        pytest.param("oauth.token", marks=pytest.mark.feature("oauth")),
        pytest.param("mcp.attach", marks=pytest.mark.feature("mcp")),
        pytest.param("mcp.list", marks=pytest.mark.feature("mcp")),
    ],
)
def test_the_broker_does_nothing_outside_for_a_recording(kind: str) -> None:
    world = _replaying()
    assert code(_say(world, Frame(kind, id="f", call_id="t/c", tool="bash__exec"))) == "E_FORBIDDEN"


@pytest.mark.parametrize("own_state", [False, True])
def test_only_agents_of_the_recording_are_asked(own_state: bool) -> None:
    world = _replaying(own_state=own_state)
    assert code(_say(world, request(call_id=None))) == "E_FORBIDDEN"
    assert code(_say(world, Frame("agents.spawn", id="s", to="reviewer", instance_key="n"))) == "E_FORBIDDEN"
    assert ("reviewer", "k") not in world.router.bus.mailbox.instances
    (ack,) = _say(world, request("r2", to="coder", key="other", call_id=None))
    assert (ack.type, ack.stage) == ("ack", "accepted")


@pytest.mark.feature("live_config")
@pytest.mark.parametrize("own_state", [False, True])
def test_only_an_own_state_is_patched(own_state: bool) -> None:
    asked = _say(_replaying(own_state=own_state), Frame("config.propose", id="p"))
    assert code(asked) == ("E_FRAME_INVALID" if own_state else "E_FORBIDDEN")


# --- a file that is made to cost much -------------------------------------------------------------------------------


def test_requests_that_share_more_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_ENTRIES", 100)
    place: dict[str, Any] = {"agent": "a", "instance": "i", "turn": 1}
    first = RecordedStep(**place, step=1, entries=["x"] * 30)
    more = [RecordedStep(**place, step=2 + at, shared=30) for at in range(3)]
    assert len(list(whole_requests([first, *more[:2]]))) == 3
    with pytest.raises(GoondanError, match="more than 100 entries"):
        list(whole_requests([first, *more]))


def test_an_error_has_no_code_of_the_recordings_own_making() -> None:
    step = {"kind": "step", "agent": "a", "instance": "i", "turn": 1, "step": 1, "fault": {"message": "m"}}
    for made in ("E_X\\nE_Y", "\\u001b[2J", "", "E_" + "A" * 100):
        step["fault"] = {"code": made, "message": "m"}
        lines = json.dumps({"kind": "recording", "format": 1}) + "\n" + json.dumps(step)
        with pytest.raises(GoondanError, match="line 2"):
            read_lines(lines.encode(), "r", lambda part: True)
