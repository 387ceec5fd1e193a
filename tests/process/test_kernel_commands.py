"""The commands on a running kernel: real broker, agents, tool host and jails."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel import paths
from tests.kernel_fixture import ROOT, Sandbox, sandbox, wait_until


def exec_line(command: str) -> str:
    return f"/bash__exec {json.dumps({'command': command})}\n"


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel that the tests of this module share: none of them ends it. Each uses instances of its own."""
    with sandbox() as made:
        made.detach()
        yield made


# --- call


def test_call_uses_the_kernel_that_runs(running: Sandbox) -> None:
    supervisor = running.pid("supervisor")
    assert running.call("echo hi")["output"]["stdout"] == "hi\n"
    assert running.pid("supervisor") == supervisor
    refused = running.gdn("call", "bash__exec", "{}", "--allow-net", "localhost:80", "--json")
    assert (refused.status, refused.json["error"]["code"]) == (2, "E_USAGE")


@pytest.mark.parametrize(("tool", "code"), [("no__such", "E_TOOL_NOT_IN_CATALOG"), ("bash__exec", "E_TOOL")])
def test_a_failed_call_is_a_tool_result_with_status_1(running: Sandbox, tool: str, code: str) -> None:
    result = running.gdn("call", tool, "{}", "--json")
    assert result.status == 1
    assert result.json["status"] == "error"
    assert result.json["error"]["code"].startswith(code)
    assert result.json["error"]["suggestion"]
    assert result.json["error"]["helpUrl"]


@pytest.mark.parametrize("line", [("call", "\udcff__x", "{}"), ("restart", "--agent", "\udcff")])
def test_an_argument_that_is_no_utf_8_is_bad_usage(running: Sandbox, line: tuple[str, ...]) -> None:
    result = running.gdn(*line)
    assert (result.status, "E_USAGE" in result.err, "not UTF-8" in result.err) == (2, True, True)


def test_an_output_that_cannot_be_written_is_one_error(running: Sandbox) -> None:
    with open("/dev/full", "wb") as full:
        process = running.popen("explain", "E_USAGE", stdout=full)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, b"E_STATE" in err, b"Traceback" in err) == (1, True, False)


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [(("ps",), 1, b"E_STATE"), (("call", "bash__exec", "{"), 2, b"E_USAGE"), (("nonsense",), 1, b"E_STATE")],
)
def test_a_document_that_cannot_be_written_is_one_error(
    running: Sandbox, line: tuple[str, ...], status: int, code: bytes
) -> None:
    with open("/dev/full", "wb") as full:
        process = running.popen(*line, "--json", stdout=full, forked=False)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count(b"error: "), code in err, b"Traceback" in err) == (status, 1, True, False)


#: `gdn`, which gets a signal when the first extension module is looked for. Prints the exit status, and whether the
#: signal was held back.
INTERRUPTED = """\
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "msgspec._core":
            held.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            signal.raise_signal(signal.SIGINT)
held = []
sys.meta_path.insert(0, Finder())
from goondan.kernel import cli
print(cli.execute(sys.argv[1:]), held)
"""


@pytest.mark.parametrize("line", [("call", "bash__exec", "{"), ("nonsense",)], ids=["read directly", "read by click"])
def test_an_interrupt_comes_when_a_command_is_imported(line: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, "-I", "-c", INTERRUPTED, *line], capture_output=True, timeout=30)
    assert (ended.stdout, ended.stderr) == (b"130 [True]\n", b"\n")


def test_an_error_that_cannot_be_written_has_its_status(running: Sandbox) -> None:
    with open("/dev/full", "wb") as full:
        process = running.popen("call", "bash__exec", "{", stderr=full, forked=False)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (2, b"")


def test_workdir_and_instance(running: Sandbox) -> None:
    work = running.home / "my work"
    work.mkdir()
    assert running.call("pwd; echo x > made", "--workdir", "my work")["output"]["stdout"] == f"{work}\n"
    assert (work / "made").read_text() == "x\n"
    running.call("echo a > mark", "--instance", "a")
    assert running.call("cat mark", "--instance", "a")["output"]["stdout"] == "a\n"
    assert running.call("cat mark", "--instance", "b")["output"]["exitCode"] != 0


def test_batch_answers_before_the_end_of_input(running: Sandbox) -> None:
    process = running.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(3):
        process.stdin.write(json.dumps({"id": n, "tool": "bash__exec", "args": {"command": "true"}}).encode() + b"\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 20)[0]
        assert json.loads(process.stdout.readline())["id"] == n
    process.stdin.close()
    assert process.wait(timeout=30) == 0


def test_batch_survives_a_restart_of_the_broker(running: Sandbox) -> None:
    process = running.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(6):
        line = {"id": n, "tool": "bash__exec", "args": {"command": "sleep 0.3; echo done"}, "instance": f"s{n % 2}"}
        process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    os.kill(running.pid("broker"), signal.SIGKILL)
    process.stdin.close()
    rest = process.stdout.read().splitlines()
    assert process.wait(timeout=30) == 0
    assert len(rest) == 5
    for answer in rest:
        assert json.loads(answer)["result"]["output"]["stdout"] == "done\n"


def test_a_batch_whose_reader_leaves_ends_though_its_input_does_not(running: Sandbox) -> None:
    process = running.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    line = json.dumps({"id": 1, "tool": "bash__exec", "args": {"command": "sleep 0.2"}}).encode() + b"\n"
    process.stdin.write(line)
    process.stdin.flush()
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


# --- send


def test_send_prints_only_the_answer(running: Sandbox) -> None:
    plain = running.gdn("send", "main", "/bash__exec command='echo $((6*7))'")
    assert (plain.status, plain.out, plain.err) == (0, "42\n", "")
    document = running.gdn("send", "hello", "--json").json
    assert document.keys() == {"eventId", "traceId", "turnId", "status", "response", "finishReason", "model"}
    unknown = running.gdn("send", "nobody", "hello", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_AGENT_NOT_FOUND")


def test_an_event_id_is_answered_once(running: Sandbox) -> None:
    line = exec_line("echo x >> count; cat count")
    first, again = (running.gdn("send", line, "--event-id", "e1", "--json").json for _ in range(2))
    assert first == again
    assert first["eventId"] == "e1"
    other = running.gdn("send", exec_line("true"), "--event-id", "e1", "--json")
    assert (other.status, other.json["error"]["code"]) == (1, "E_FRAME_INVALID")


def test_send_without_waiting(running: Sandbox) -> None:
    result = running.gdn("send", exec_line("sleep 1"), "--no-wait", "--event-id", "slow", "--instance", "n", "--json")
    told = {"eventId": "slow", "status": "accepted", "traceId": result.json["traceId"]}
    assert (result.status, result.json) == (0, told)
    assert running.gdn("send", exec_line("sleep 1"), "--event-id", "slow", "--instance", "n").status == 0


def test_the_time_of_send_is_the_time_of_its_tools(running: Sandbox) -> None:
    running.gdn("send", "hello", "--instance", "t")  # the time is for the call, not for the start of an agent
    begun = time.monotonic()
    result = running.gdn("send", exec_line("sleep 30"), "--timeout", "2", "--instance", "t", "--json")
    assert time.monotonic() - begun < 15.0
    # A call gets less time than its turn, so the turn can still tell what became of it.
    assert (result.json["status"], "E_TOOL_TIMEOUT" in result.json["response"]) == ("completed", True)


def test_send_gives_up_by_itself(running: Sandbox) -> None:
    running.gdn("send", "hello", "--instance", "stopped")
    agent = next(int(row["pid"]) for row in running.ps() if row["instanceKey"] == "stopped")
    os.kill(agent, signal.SIGSTOP)
    result = running.gdn("send", "hello", "--timeout", "0.5", "--instance", "stopped", "--json")
    os.kill(agent, signal.SIGKILL)
    assert (result.status, result.json["error"]["code"]) == (1, "E_AGENT_TIMEOUT")


def test_send_survives_a_restart_of_the_broker(running: Sandbox) -> None:
    process = running.popen("send", exec_line("touch begun; sleep 1; echo late"), "--instance", "r")
    wait_until(lambda: list(running.home.glob("state/workspaces/*/instances/main/r/workspace/begun")))
    os.kill(running.pid("broker"), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, b"late\n", b"")


# --- ps, and what else looks at it


def test_ps_shows_every_process_also_while_the_broker_is_down(running: Sandbox) -> None:
    running.call("true")
    rows = {row["role"]: row for row in running.gdn("ps", "--json").json}
    assert rows.keys() == {"supervisor", "broker", "forkserver", "toolhost", "agent", "worker"}
    for row in running.ps():
        assert row.keys() - {"runDir"} == {
            "role", "name", "instanceKey", "pid", "status", "since", "restarts", "lastExit"
        }  # fmt: skip
        assert ("runDir" in row) is (row["role"] == "broker")
        os.kill(row["pid"], 0)
    assert ("_operator", "default") in {(row["name"], row["instanceKey"]) for row in running.ps()}
    before, ready = rows["broker"], running.times_ready("broker")
    assert {"clients.sock", "client.token"} <= set(os.listdir(before["runDir"]))
    os.kill(before["pid"], signal.SIGSTOP)
    assert len(running.gdn("ps", "--json").json) >= 6
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: running.times_ready("broker") > ready)
    after = next(row for row in running.ps() if row["role"] == "broker")
    assert (after["restarts"], after["lastExit"]) == (before["restarts"] + 1, "signal SIGKILL")
    assert after["pid"] not in (before["pid"], None)
    assert "SIGKILL" in running.gdn("ps").out


def test_run_starts_no_second_kernel(running: Sandbox) -> None:
    result = running.gdn("run", "--json", "--detach", input="")
    assert (result.status, result.json["error"]["code"]) == (1, "E_KERNEL_RUNNING")
    (sockets,) = [row["runDir"] for row in running.ps() if row["role"] == "broker"]
    assert f"its sockets are in {sockets}" in result.json["error"]["message"]
    joined = running.gdn("run", "--json", input="")
    assert (joined.status, joined.json) == (0, {"answers": []})
    assert running.call("echo still here")["output"]["stdout"] == "still here\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="their files in /proc are closed to all but root")
def test_trusted_processes_hold_the_lock_and_nothing_else_of_each_other(running: Sandbox) -> None:
    running.call("true")
    (folder,) = (running.home / "state").resolve().glob("workspaces/*/kernel")
    for row in running.ps():
        held = set()
        for fd in Path(f"/proc/{row['pid']}/fd").iterdir():
            try:
                held.add(os.readlink(fd))
            except FileNotFoundError:
                continue
        if row["role"] == "worker":
            assert f"{folder}/alive" not in held
        else:
            assert f"{folder}/alive" in held, row
        assert (f"{folder}/lock" in held) == (row["role"] == "supervisor")


@pytest.mark.skipif(os.geteuid() != 0, reason="their files in /proc are closed to all but root")
def test_no_secret_is_in_an_argument_or_an_environment(running: Sandbox) -> None:
    running.call("true")
    (run_dir,) = running.run_dirs
    token = (run_dir / "client.token").read_bytes()
    assert (run_dir / "client.token").stat().st_mode & 0o777 == 0o600
    for row in running.ps():
        for name in ("cmdline", "environ"):
            data = Path(f"/proc/{row['pid']}/{name}").read_bytes()
            assert token not in data
            assert b"PYTHONPATH" not in data or row["role"] == "supervisor"


# --- kernels of their own


def test_stop_returns_when_everything_is_gone_also_during_a_long_call(kernel: Sandbox) -> None:
    kernel.detach()
    process = kernel.popen("call", "bash__exec", '{"command":"sleep 60"}', "--json")
    wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
    begun = time.monotonic()
    result = kernel.gdn("stop", "--json")
    assert (result.status, result.json) == (0, {"stopped": True, "killed": False})
    assert time.monotonic() - begun < 10.0
    assert kernel.processes() == {}
    kernel.assert_clean()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert json.loads(out)["error"]["code"].startswith("E_")


def test_stop_ends_a_supervisor_that_hangs(kernel: Sandbox) -> None:
    kernel.detach()
    os.kill(kernel.pid("supervisor"), signal.SIGSTOP)
    begun = time.monotonic()
    result = kernel.gdn("stop", "--json")
    assert (result.status, result.json) == (0, {"stopped": True, "killed": True})
    assert time.monotonic() - begun < 10.0
    kernel.assert_clean()


def test_detach_holds_no_stream_of_ours(kernel: Sandbox, running: Sandbox) -> None:
    # Read to the end: a daemon that kept the pipe would make this hang.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "goondan.kernel.cli", "run", "--detach", "--json"],
        env={**kernel.env, "PYTHONPATH": str(ROOT)},
        cwd=kernel.home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert Path(document["runDir"]).is_dir()
    assert document["pid"] == kernel.pid("supervisor")
    assert running.pid("supervisor") != document["pid"], "another bundle runs beside it"


def test_a_runtime_directory_that_others_can_open_is_not_used(kernel: Sandbox) -> None:
    (usual,) = {Path(path) for path in paths.run_dirs(str(kernel.bundle), kernel.env)[:1]}
    usual.mkdir(parents=True)
    usual.chmod(0o755)
    assert kernel.call("echo fine")["output"]["stdout"] == "fine\n"
    assert f"{usual} is open to others" in kernel.log("supervisor")
    assert os.listdir(usual) == []
    usual.rmdir()
