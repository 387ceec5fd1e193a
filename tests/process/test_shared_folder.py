"""A swarm with `workdir: shared`: where its agents work, with and without a person's folder, and over a restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.scripted_model import ScriptedModel, scripted_model

HEAD = (
    documents(
        "Model scripted {provider: openai, model: m, endpoint: ENDPOINT}",
    )
    + "---\n"
)
AGENT = documents(
    "Agent NAME {modelConfig: {modelRef: Model/scripted}, prompt: {system: You are NAME.}, "
    "tools: [Tool/agents, Tool/bash, Tool/file-system]MORE}",
)
SWARM = documents(
    "Swarm team {entryAgent: Agent/planner, workdir: shared}",
)
SLOW = (
    "for i in $(seq 200); do echo line $i >> out.txt; [ $i != 100 ] || touch half; "
    "while [ -e half ] && [ ! -e go ]; do sleep 0.02; done; done"
)
WHOLE = 'seq -f "line %g" 200 > .out && mv .out out.txt; rm -f half'


class Team:
    """A running kernel and its model."""

    def __init__(self, kernel: Sandbox, model: ScriptedModel) -> None:
        self.kernel, self.model = kernel, model

    def script(self, said: str, *answers: Any) -> None:
        """What an agent does that is told `said`: a text, or one call, (tool, arguments). The calls are c0, c1, …"""
        self.model.scripts[said] = [
            one if isinstance(one, str) else [(f"c{number}", *one)] for number, one in enumerate(answers)
        ]

    def send(self, said: str, *options: str) -> Any:
        return self.kernel.gdn("send", "planner", said, "--json", *options).json

    def workspace(self, agent: str, key: str) -> Path:
        (state,) = self.kernel.home.glob("state/workspaces/*")
        return state / "instances" / agent / key / "workspace"


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Three agents that share, and one that does not."""
    with scripted_model() as model:
        text = HEAD.replace("ENDPOINT", model.base)
        for name in ("planner", "coder", "reviewer", "hermit"):
            text += AGENT.replace("NAME", name).replace("MORE", ", workdir: own" if name == "hermit" else "") + "---\n"
        with sandbox(text + SWARM, {"OPENAI_API_KEY": "k"}) as kernel:
            kernel.detach()
            yield Team(kernel, model)


def shell(command: str) -> tuple[str, dict[str, Any]]:
    return "bash__exec", {"command": command}


def ask(target: str, said: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "agents__request", {"target": target, "input": said, **more}


@pytest.mark.parametrize("named", [False, True])
def test_what_one_writes_the_next_one_reads(team: Team, named: bool) -> None:
    """Over two agents, and over an instance of another key; who says `own` works alone."""
    key = f"chain-{named}"
    place = team.kernel.home / key if named else team.workspace("planner", key)
    if named:
        place.mkdir()
    team.script(f"{key} plan", shell("echo plan > plan"), ask("coder", f"{key} code"), shell("cat review"), "done")
    look = ask("reviewer", f"{key} look", instanceKey=f"{key}-r")
    team.script(f"{key} code", shell("cat plan; echo code > code"), look, ask("hermit", f"{key} alone"), "coded")
    team.script(f"{key} look", shell("cat plan code > review; rm code"), "looked")
    team.script(f"{key} alone", shell("ls; echo x > alone"), "alone")
    answer = team.send(f"{key} plan", "--instance", key, *(("--workdir", str(place)) if named else ()))
    assert answer["response"] == "done", answer
    assert team.model.results(f"{key} code")["c2"]["response"] == "alone"
    assert sorted(path.name for path in place.iterdir()) == ["plan", "review"]
    assert (place / "review").read_text() == "plan\ncode\n"
    assert (team.workspace("hermit", key) / "alone").read_text() == "x\n"


def test_an_answer_that_comes_later_is_worked_on_there(team: Team) -> None:
    place = team.kernel.home / "later"
    place.mkdir()
    team.script("later plan", ask("coder", "later code", **{"async": True}), "asked")
    team.script("later code", shell("echo code > code; while [ ! -e go ]; do sleep 0.02; done"), "coded")
    team.script("later answer", shell("cp code copied"), "copied")
    answered = team.model.answer

    def answer(body: dict[str, Any]) -> Any:
        users = [message for message in body["messages"] if message["role"] == "user"]
        if "later code" not in str(users[-1]) and "coded" in str(users[-1]):
            users[-1]["content"] = "later answer"
        return answered(body)

    team.model.answer = answer  # type: ignore[method-assign]
    try:
        assert team.send("later plan", "--instance", "later", "--workdir", str(place))["response"] == "asked"
        (place / "go").touch()
        wait_until((place / "copied").exists, what="the turn of the answer")
    finally:
        team.model.answer = answered  # type: ignore[method-assign]


def test_a_restart_in_the_middle_of_a_write(team: Team) -> None:
    """The kernel is killed; the coder is told that nobody knows, writes anew, and the planner reads the whole."""
    place = team.kernel.home / "killed"
    place.mkdir()
    team.script("killed plan", ask("coder", "killed code"), shell("wc -l < out.txt; tail -n 1 out.txt"), "whole")
    team.script("killed code", shell(SLOW), shell(WHOLE), "coded")
    sending = team.kernel.popen("send", "planner", "killed plan", "--instance", "killed", "--workdir", str(place))
    wait_until((place / "half").exists, what="half of the file")
    os.kill(team.kernel.pid("supervisor"), signal.SIGKILL)
    sending.communicate(timeout=30)
    assert (place / "out.txt").read_text().count("\n") == 100
    team.kernel.detach()
    wait_until(lambda: len(team.model.requests.get("killed plan", [])) >= 3, 40, "the planner's last step")
    results = team.model.results("killed plan")
    assert results["c1"]["stdout"] == "200\nline 200\n"
    assert [path.name for path in sorted(place.iterdir())] == ["out.txt"]
    assert (place / "out.txt").read_text() == "".join(f"line {number}\n" for number in range(1, 201))
    told = str(team.model.requests["killed code"][-2]["messages"])
    assert "E_TOOL_OUTCOME_UNKNOWN" in told
