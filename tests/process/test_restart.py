"""A kernel that restarts in place: `gdn restart` beside a `gdn run` that talks on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.supervisor_client import SupervisorClient
from tests.kernel_fixture import BUNDLE, ROOT, Sandbox, has_feature, sandbox, wait_until

pytestmark = pytest.mark.xdist_group("restart")
#: Whether each kind of restart is killed at both moments (`make chaos`), or at one of its own.
CHAOS = "GOONDAN_CHAOS_KILLS" in os.environ
WISHES = (
    BUNDLE.replace("tools: [Tool/bash]", "tools: [Tool/bash, Tool/self-restart]") if has_feature("restart") else BUNDLE
)


@dataclass
class Talk:
    """A kernel, and the `gdn run` that started it, whose lines are typed here."""

    kernel: Sandbox
    run: subprocess.Popen[bytes]
    asked: int = 0

    def say(self, line: str) -> None:
        """Type a line; its answer is one line."""
        assert self.run.stdin is not None
        self.run.stdin.write(line.encode() + b"\n")
        self.run.stdin.flush()
        self.asked += 1

    def hear(self) -> str:
        """The next line of an answer."""
        assert self.run.stdout is not None
        return self.run.stdout.readline().decode().rstrip("\n")

    def hear_json(self) -> Any:
        """The next answer, which is a JSON document on several lines."""
        lines = [self.hear()]
        while lines[-1] != "}":
            lines.append(self.hear())
        return json.loads("\n".join(lines))

    def pids(self) -> dict[str, int]:
        """The processes that are always there, by role."""
        return {row["role"]: row["pid"] for row in self.kernel.ps() if row["role"] not in ("agent", "worker")}

    def restart(self, *options: str) -> Any:
        """`gdn restart --json`."""
        done = self.kernel.gdn("restart", "--json", *options, timeout=60)
        assert done.status == 0, done.err + done.out + self.kernel.log("supervisor")
        return done.json


@pytest.fixture(scope="module")
def talk() -> Iterator[Talk]:
    """Ends as a person ends it: with the end of input, and exit status 0."""
    with sandbox(WISHES) as kernel:
        run = kernel.popen("run", stdin=subprocess.PIPE)
        talk = Talk(kernel, run)
        talk.say("/bash__exec command='echo begun'")
        assert talk.hear() == "begun"
        yield talk
        assert run.stdin is not None
        run.stdin.close()
        assert run.wait(30) == 0, kernel.log("supervisor")
        assert run.stderr is not None
        assert run.stderr.read() == b""


def test_a_restart_keeps_the_pid_the_conversation_and_everyone_who_waits(talk: Talk) -> None:
    kernel, before = talk.kernel, talk.pids()
    talk.say("/bash__exec command='sleep 1.5; echo $((40+2))'")
    waiting = kernel.popen("send", "/bash__exec command='sleep 1.5; echo waited'", "--instance", "other")
    wait_until(lambda: sum(row["role"] == "worker" for row in kernel.ps()) == 2)
    done = talk.restart()
    after = talk.pids()
    assert done == {"restarted": "kernel", "pid": before["supervisor"], "fresh": False}
    assert after["supervisor"] == before["supervisor"]
    assert not {after[role] for role in ("broker", "toolhost", "forkserver")} & set(before.values())
    assert talk.hear() == "42"
    out, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, out.decode()) == (0, "waited\n")
    # On a busy machine the start takes longer than two seconds, and then it says what it waits for.
    assert all(line.startswith("gdn: main/other waits for ") for line in err.decode().splitlines()), err
    # The conversation is the same one: the trace has the turn of before.
    talk.say("/bash__exec command='echo again'")
    assert talk.hear() == "again"
    listed = kernel.gdn("instance", "list", "--json").json
    assert sorted(row["instanceKey"] for row in listed if row["agent"] == "main") == ["default", "other"]
    [supervisor] = [row for row in kernel.ps() if row["role"] == "supervisor"]
    assert (supervisor["status"], supervisor["restarts"]) == ("running", 1)


def test_calls_that_reach_a_step_boundary_run_once(talk: Talk) -> None:
    kernel = talk.kernel
    talk.say("/bash__exec command='echo x >> runs; sleep 1; wc -l < runs'")
    wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
    talk.restart()
    assert talk.hear() == "1"
    assert "did not leave in time" not in kernel.log("supervisor")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ("spec: {provider: embedded, unknown: 1}", "E_CONFIG_UNKNOWN_FIELD", "unknown"),
        (
            "spec: {provider: openai, model: m, endpoint: 'http://127.0.0.1:9/v1'}",
            "E_BUNDLE_UNTRUSTED",
            "the revision that runs stays",
        ),
    ],
    ids=["invalid", "more powers"],
)
def test_a_bundle_that_may_not_run_stops_nothing(talk: Talk, change: str, code: str, says: str) -> None:
    kernel, before = talk.kernel, talk.pids()
    kernel.bundle.write_text(WISHES.replace("spec: {provider: embedded}", change))
    try:
        refused = kernel.gdn("restart", "--json", timeout=60)
    finally:
        kernel.bundle.write_text(WISHES)
    error = refused.json["error"]
    assert refused.status != 0
    assert error["code"] == code, error
    assert says in error["message"]
    if code == "E_BUNDLE_UNTRUSTED":  # GOONDAN_TRUST=1 of the kernel's start trusts nothing that came later
        assert f"gdn trust {kernel.bundle}" in error["suggestion"]
        assert "--trust" not in error["suggestion"]
    assert talk.pids() == before
    talk.say("/bash__exec command='echo serves'")
    assert talk.hear() == "serves"


@pytest.mark.feature("restart")
def test_the_bundle_is_read_anew(talk: Talk) -> None:
    kernel = talk.kernel
    [state] = kernel.state_dirs
    record = state / "kernel" / "kernel.json"
    before = json.loads(record.read_text())
    kernel.bundle.write_text(WISHES.replace("Tool/self-restart]", "Tool/self-restart, Tool/json-query]"))
    talk.restart("--fresh")  # and conversations begin anew
    after = json.loads(record.read_text())
    assert after["revision"] != before["revision"]
    assert (after["pid"], after["startedAt"]) == (before["pid"], before["startedAt"])
    talk.say("""/json-query__pick {"data": "{\\"a\\": 7}", "keys": ["a"]}""")
    assert "7" in str(talk.hear_json())
    with closing(sqlite3.connect(state / "instances/main/default/conversation.db")) as db:
        assert db.execute("SELECT count(*) FROM base").fetchone() == (4,)  # of this one turn
    with closing(sqlite3.connect(state / "instances/main/default/earlier.db")) as db:
        assert db.execute("SELECT count(*) FROM messages").fetchone()[0] > 4


@pytest.mark.feature("restart")
@pytest.mark.requirement("RESTART-01", "RESTART-02", "RESTART-03", "RESTART-04")
def test_an_agent_restarts_the_kernel_and_its_turn_goes_on(talk: Talk) -> None:
    kernel, before = talk.kernel, talk.pids()
    kernel.bundle.write_text(WISHES.replace("Tool/self-restart]", "Tool/self-restart, Tool/text-transform]"))
    talk.say("/self-restart__request {}")
    assert talk.hear_json() == {"ok": True, "restartRequested": True, "restartReason": "tool:self-restart"}
    after = talk.pids()
    assert after["supervisor"] == before["supervisor"]
    assert not {after[role] for role in ("broker", "toolhost", "forkserver")} & set(before.values())
    # The call was in one process of the agent, and the step behind it in another: the turn was not run again.
    turn = kernel.gdn("trace", "--json").json
    assert (turn["status"], turn["attempt"], len(turn["resumedAt"])) == ("completed", 1, 1), turn
    assert [[tool["status"] for tool in step.get("tools", [])] for step in turn["steps"]] == [["ok"], []], turn
    assert kernel.log("supervisor").count("restarting: an agent wishes it: tool:self-restart") == 1
    talk.say("""/text-transform__case {"text": "changed", "to": "upper"}""")
    assert talk.hear_json()["result"] == "CHANGED"


@pytest.mark.feature("restart")
@pytest.mark.requirement("RESTART-02")
def test_a_wish_for_a_bundle_that_may_not_run_is_an_error_result(talk: Talk) -> None:
    kernel, before = talk.kernel, talk.pids()
    kernel.bundle.write_text(WISHES.replace("spec: {provider: embedded}", "spec: {provider: embedded, unknown: 1}"))
    try:
        talk.say("/self-restart__request {}")
        told = "".join(talk.hear() for _ in range(3))  # the message, what to do, and a page
    finally:
        kernel.bundle.write_text(WISHES)
    assert "unknown" in told
    assert talk.pids() == before


def test_a_second_restart_and_a_hold_wait_or_are_refused(talk: Talk) -> None:
    """Whoever comes while a kernel restarts is told, or served by the one that comes after."""
    kernel = talk.kernel
    talk.say("/bash__exec command='sleep 1; echo held'")
    wait_until(lambda: any(row["role"] == "worker" and row["status"] == "running" for row in kernel.ps()))
    [state] = kernel.state_dirs
    first, second, third = (SupervisorClient.connect(str(state)) for _ in range(3))
    assert first and second and third
    first._connection.sendall(b'{"op":"restart"}\n')
    wait_until(lambda: next(row["status"] for row in kernel.ps() if row["role"] == "supervisor") == "restarting")
    second._connection.sendall(b'{"op":"restart"}\n')
    refused = json.loads(second._input.readline())
    assert refused["error"]["code"] == "E_RESTART_REFUSED"
    assert "under way" in refused["error"]["message"]
    held = third.ask("hold", 30)
    assert (held.ok, held.entry_agent) == (True, "main")
    assert json.loads(first._input.readline())["ok"] is True
    for client in (first, second, third):
        client.close()
    assert talk.hear() == "held"


@pytest.mark.feature("restart")
@pytest.mark.timeout(60)
@pytest.mark.requirement("RESTART-03")
def test_a_kernel_that_is_killed_while_it_restarts_has_lost_nothing_and_repeats_nothing() -> None:
    with sandbox(WISHES) as kernel:
        kernel.detach()
        for moment, others in (("before-the-exec", 1), ("after-the-exec", 0))[: 1 + CHAOS]:
            pid, wish = kernel.pid("supervisor"), f"wish {moment[:3]}"
            if others:  # the processes of the kernel cannot be gone before this command is
                kernel.popen("send", "/bash__exec command='sleep 5; echo slow'", "--instance", "slow", "--no-wait")
                wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
            kernel.popen("send", f"/self-restart__request reason={wish!r}", "--event-id", moment, "--no-wait")
            if others:
                wait_until(lambda pid=pid: kernel.ps()[0]["status"] == "restarting")
            else:
                wait_until(lambda pid=pid: b"--resume-fd" in Path(f"/proc/{pid}/cmdline").read_bytes())
            # `ps` may tell a moment before the log does.
            wait_until(lambda wish=wish: f"an agent wishes it: {wish}" in kernel.log("supervisor"))
            os.kill(pid, signal.SIGKILL)
            kernel.wait_for_nothing()
            kernel.detach()
            asked = ("send", f"/self-restart__request reason={wish!r}", "--event-id", moment, "--json")
            answer = kernel.gdn(*asked, timeout=30).json
            assert (answer["status"], wish in answer["response"]) == ("completed", True), answer
            # Its start was the restart: there is no other one.
            assert kernel.log("supervisor").count(f"an agent wishes it: {wish}") == 1
            assert kernel.ps()[0]["restarts"] == 0
        check_killed_when_fresh(kernel)


def check_killed_when_fresh(kernel: Sandbox) -> None:
    """Killed while it begins conversations anew: what was said is there or put aside, and is put aside once."""
    [state] = kernel.state_dirs
    folder = state / "instances/main/default"
    before = messages(folder / "conversation.db", "base")
    assert before
    for moment in ("--resume-fd", "restarting")[: 1 + CHAOS]:
        pid = kernel.pid("supervisor")
        kernel.popen("restart", "--fresh")
        if moment == "restarting":
            wait_until(lambda: any(row["status"] == "restarting" for row in kernel.ps()[:1]))
        else:
            wait_until(lambda pid=pid: b"--resume-fd" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(pid, signal.SIGKILL)
        kernel.wait_for_nothing()
        kernel.detach()
        assert kernel.gdn("send", f"/bash__exec command='echo {moment}'").out == f"{moment}\n"
        kept = messages(folder / "conversation.db", "base") + messages(folder / "earlier.db", "messages")
        assert set(kept) >= set(before), "what was said before is gone"
        assert len(kept) == len(set(kept)), "it is there twice"
        before = kept
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    kernel.wait_for_nothing()
    kernel.detach()
    assert kernel.gdn("send", "/bash__exec command='echo later'").out == "later\n"
    assert set(messages(folder / "conversation.db", "base")) > set(before) - set(
        messages(folder / "earlier.db", "messages")
    ), "a later start has put it aside once more"


def messages(path: Path, table: str) -> list[str]:
    """The ids of the messages in a file of an instance."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as db:
        return [row[0] for row in db.execute(f"SELECT id FROM {table}")]


def test_without_a_kernel_there_is_nothing_to_restart() -> None:
    with sandbox() as kernel:
        refused = kernel.gdn("restart", "--json")
        assert (refused.status, refused.json["error"]["code"]) == (1, "E_KERNEL_NOT_RUNNING")


#: A supervisor that the system will not replace, once: real programs cannot be had to fail there, and nowhere else.
REFUSES = """
import sys
from goondan.kernel.supervisor import __main__ as supervisor
from goondan.kernel.supervisor import handover
execute, times = handover.execute, []

def refuse(*arguments):
    times.append(1)
    return OSError(12, "Cannot allocate memory") if len(times) == 1 else execute(*arguments)

handover.execute = refuse
sys.exit(supervisor.main(sys.argv[1:]))
"""


@pytest.mark.timeout(60)
def test_a_kernel_that_cannot_be_replaced_goes_on_and_can_be_stopped_while_it_restarts() -> None:
    with sandbox() as kernel:
        run = subprocess.Popen(
            [sys.executable, "-c", REFUSES, "--bundle", str(kernel.bundle)],
            env=kernel.env | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        kernel.running.append(run)
        wait_until(lambda: any(row["role"] == "supervisor" and row["status"] == "running" for row in kernel.ps()))
        waiting = kernel.popen("send", "/bash__exec command='sleep 1; echo stays'")
        wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
        failed = kernel.gdn("restart", "--json", timeout=60)
        assert failed.json["error"]["code"] == "E_RESTART_FAILED"
        assert "Cannot allocate memory" in failed.json["error"]["message"]
        assert waiting.communicate(timeout=30)[0] == b"stays\n"
        assert kernel.pid("supervisor") == run.pid
        # The next one works, unless somebody stops the kernel meanwhile.
        busy = kernel.popen("send", "/bash__exec command='sleep 30'")
        wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
        restarting = kernel.popen("restart", "--json")
        wait_until(lambda: kernel.ps()[0]["status"] == "restarting")
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(7) == 0  # sooner than turns get before a restart
        told = json.loads(restarting.communicate(timeout=30)[0])
        assert told["error"]["code"] == "E_KERNEL_NOT_RUNNING"
        busy.wait(30)


def test_an_agent_that_is_only_starting_is_not_waited_for() -> None:
    with sandbox() as kernel:
        kernel.detach()
        forks = kernel.pid("forkserver")
        os.kill(forks, signal.SIGSTOP)
        try:
            kernel.gdn("send", "hello", "--instance", "late", "--no-wait")
            wait_until(lambda: any(row["role"] == "agent" and row["status"] == "starting" for row in kernel.ps()))
            assert kernel.gdn("restart", "--agent", "main", "--json", timeout=10).json["processes"] == 0
        finally:
            os.kill(forks, signal.SIGCONT)
