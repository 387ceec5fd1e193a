"""`gdn run --watch`: what a change of the bundle affects restarts, and nothing else; and restarts of one agent."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, wait_until

WORDS = """\
handlers = {"say": lambda ctx, input: "NUMBER"}
"""
BUNDLE = documents(
    "Model console {provider: embedded}",
    "Tool words {entry: ./tools/words/words.py, exports: [{name: say, description: Says it, "
    "parameters: {type: object, properties: {}}}]}",
    "Agent main {modelConfig: {modelRef: Model/console}, prompt: {systemRef: ./prompt.md}, tools: [Tool/bash, "
    "Tool/words]}",
    "Agent other {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}",
    "Swarm swarm {entryAgent: Agent/main, agents: [{ref: Agent/main}, {ref: Agent/other}]}",
)


@dataclass
class Watched:
    """A kernel that follows its bundle, and the `gdn run` that tells of it."""

    kernel: Sandbox
    run: subprocess.Popen[bytes]

    def say(self, line: str) -> None:
        assert self.run.stdin is not None
        self.run.stdin.write(line.encode() + b"\n")
        self.run.stdin.flush()

    def hear(self) -> str:
        assert self.run.stdout is not None
        return self.run.stdout.readline().decode().rstrip("\n")

    def news(self) -> str:
        """The next line about the bundle."""
        assert self.run.stderr is not None
        return self.run.stderr.readline().decode().rstrip("\n")

    def code(self, number: int | str) -> None:
        """The code of the tool."""
        (self.kernel.home / "tools/words/words.py").write_text(WORDS.replace("NUMBER", str(number)))

    def pids(self) -> dict[tuple[str, str], int]:
        """Every process that lives and stays, by role and name."""
        return {
            (row["role"], row["name"]): row["pid"]
            for row in self.kernel.ps()
            if row["pid"] is not None and row["status"] != "stopping"
        }


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with sandbox(BUNDLE) as kernel:
        (kernel.home / "tools/words").mkdir(parents=True)
        (kernel.home / "prompt.md").write_text("one")
        made = Watched(kernel, kernel.popen("run", "--watch", stdin=subprocess.PIPE))
        made.code(1)
        made.say("/words__say {}")
        assert made.hear() == "1", kernel.log("supervisor")
        assert kernel.gdn("send", "other", "/bash__exec command='echo there'").out == "there\n"
        yield made
        assert made.run.stdin is not None
        made.run.stdin.close()
        assert made.run.wait(30) == 0, kernel.log("supervisor")


@pytest.mark.feature("restart")
def test_new_code_of_a_tool_takes_its_jails_and_no_other_process(watched: Watched) -> None:
    before = watched.pids()
    watched.code(2)
    assert "Tool/words" in watched.news()
    watched.say("/words__say {}")
    assert watched.hear() == "2"
    after = watched.pids()
    assert {key for key in before if after.get(key) != before[key]} == {("worker", "words")}


@pytest.mark.feature("restart")
def test_a_new_prompt_and_another_tool_take_no_process_and_a_new_model_its_agents(watched: Watched) -> None:
    before = watched.pids()
    (watched.kernel.home / "prompt.md").write_text("two")
    assert watched.news().startswith("gdn: the bundle has changed: Agent/main;")
    watched.kernel.bundle.write_text(BUNDLE.replace("[Tool/bash, Tool/words]", "[Tool/words, Tool/wait]"))
    assert watched.news().startswith("gdn: the bundle has changed: Agent/main;")
    watched.say("/words__say {}")
    assert watched.hear() == "2"
    assert "not available" in watched.kernel.gdn("send", "/bash__exec command='echo x'").out
    assert "not available" not in watched.kernel.gdn("send", '/wait__seconds {"seconds": 0}').out
    after = watched.pids()
    assert {key: after.get(key) for key in before} == before
    watched.kernel.bundle.write_text(BUNDLE.replace("{provider: embedded}", "{provider: embedded, params: {a: 1}}"))
    assert watched.news().startswith("gdn: the bundle has changed: Agent/main, Agent/other;")
    wait_until(lambda: not {("agent", "main"), ("agent", "other")} & watched.pids().keys())
    watched.say("/words__say {}")
    assert watched.hear() == "2"
    [state] = watched.kernel.state_dirs
    with closing(sqlite3.connect(state / "instances/main/default/conversation.db")) as db:
        assert db.execute("SELECT count(*) FROM turns WHERE status = 'completed'").fetchone()[0] >= 2


def test_junk_and_what_is_put_back_restarts_nothing(watched: Watched) -> None:
    before, log = watched.pids(), watched.kernel.log("supervisor")
    folder = watched.kernel.home / "tools/words"
    (folder / ".words.py.swp").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/words.pyc").write_text("x")
    (watched.kernel.home / "prompt.md").write_text("other")
    (watched.kernel.home / "prompt.md").write_text("two")
    watched.code(3)  # what comes next shows that the watch goes on, and was not held up
    assert "Tool/words" in watched.news()
    said = watched.kernel.log("supervisor").removeprefix(log)
    assert said.count("the bundle has changed") == 1
    assert "Agent/" not in said
    after = watched.pids()
    assert {key for key in before if after.get(key) != before[key]} <= {("worker", "words")}


@pytest.mark.feature("restart")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("name: swarm}\nspec: {", "name: swarm}\nspec: {unknown: 1, "), "unknown"),
        (
            ("{provider: embedded}", "{provider: openai, model: m, endpoint: 'http://127.0.0.1:9/v1'}"),
            "the revision that runs stays",
        ),
    ],
    ids=["invalid", "more powers"],
)
def test_a_bundle_that_may_not_run_changes_nothing_and_says_so(
    watched: Watched, change: tuple[str, str], says: str
) -> None:
    kernel, before = watched.kernel, watched.pids()
    kernel.bundle.write_text(BUNDLE.replace(*change))
    told = watched.news()
    assert "does not run" in told
    assert says in told
    if "powers" in says or "stays" in says:
        assert f"gdn trust {kernel.bundle}" in told
    assert {key: pid for key, pid in watched.pids().items() if key[0] != "worker"} == {
        key: pid for key, pid in before.items() if key[0] != "worker"
    }
    kernel.bundle.write_text(BUNDLE)
    watched.say("/words__say {}")
    assert watched.hear() == "3"


@pytest.mark.feature("restart")
def test_a_turn_that_runs_comes_to_its_step_boundary_and_goes_on_with_what_is_new(watched: Watched) -> None:
    watched.say("/bash__exec command='echo x >> runs; sleep 2; wc -l < runs'")
    wait_until(lambda: ("worker", "bash") in watched.pids() and ("agent", "main") in watched.pids())
    before = watched.pids()
    watched.kernel.bundle.write_text(BUNDLE.replace("{provider: embedded}", "{provider: embedded, params: {a: 2}}"))
    assert "Agent/main" in watched.news()
    assert watched.hear() == "1"
    after = watched.pids()
    assert after["agent", "main"] != before["agent", "main"]
    assert after["toolhost", "toolhost"] == before["toolhost", "toolhost"]


@pytest.mark.feature("restart")
def test_one_agent_restarts_and_its_conversation_begins_anew_when_that_is_wished(watched: Watched) -> None:
    kernel, before = watched.kernel, watched.pids()
    [state] = kernel.state_dirs
    folder = state / "instances/main/default"
    done = kernel.gdn("restart", "--agent", "main", "--fresh", "--json", timeout=40)
    assert done.json == {"restarted": "agent", "agent": "main", "processes": 1, "fresh": True}
    watched.say("/words__say {}")
    assert watched.hear() == "3"
    after = watched.pids()
    assert {key for key in before if key[0] != "worker" and after.get(key) != before[key]} == {("agent", "main")}
    with closing(sqlite3.connect(folder / "earlier.db")) as db:
        kept = db.execute("SELECT count(*) FROM messages").fetchone()[0]
    with closing(sqlite3.connect(folder / "conversation.db")) as db:
        said = db.execute("SELECT count(*) FROM base").fetchone()[0]
    assert kept > 4
    assert said == 4  # of the one turn since: a question, a call, its result, an answer
    assert not (state / "instances/other/default/earlier.db").exists()
    unknown = kernel.gdn("restart", "--agent", "nobody", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_AGENT_NOT_FOUND")
    assert "main, other" in unknown.json["error"]["message"]


@pytest.mark.feature("restart")
def test_a_limit_of_the_swarm_restarts_the_kernel_in_place_and_the_watch_goes_on(watched: Watched) -> None:
    kernel, before = watched.kernel, watched.pids()
    ready = kernel.times_ready("broker")
    changed = BUNDLE.replace("entryAgent: Agent/main,", "entryAgent: Agent/main, policy: {maxLiveAgents: 9},")
    kernel.bundle.write_text(changed)
    assert "max_live_agents" in watched.news()
    wait_until(lambda: kernel.times_ready("broker") > ready)  # until then the kernel before it answers
    watched.say("/words__say {}")
    assert watched.hear() == "3"
    after = watched.pids()
    assert after["supervisor", "supervisor"] == before["supervisor", "supervisor"]
    assert after["broker", "broker"] != before["broker", "broker"]
    watched.code(4)
    assert "Tool/words" in watched.news()
    watched.say("/words__say {}")
    assert watched.hear() == "4"


@pytest.mark.parametrize("role", ["toolhost", "agent", "broker"])
def test_a_change_is_taken_over_though_one_is_killed_that_moment(watched: Watched, role: str) -> None:
    kernel = watched.kernel
    ready = kernel.times_ready(role)
    watched.code(f"after the {role}")
    pid = watched.pids()[role, "main" if role == "agent" else role]
    os.kill(pid, signal.SIGKILL)
    while "Tool/words" not in watched.news():
        pass
    watched.say("/words__say {}")
    assert watched.hear() == f"after the {role}"
    if role != "agent":
        wait_until(lambda: kernel.times_ready(role) > ready)
