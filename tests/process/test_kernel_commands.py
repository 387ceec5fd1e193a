"""The commands of design section 11 against a real kernel: real broker, agents, tool host and jails."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until


def exec_line(command: str) -> str:
    return f"/bash__exec {json.dumps({'command': command})}\n"


# --- call


def test_call_without_a_kernel_starts_one_and_leaves_nothing_behind(kernel: Sandbox) -> None:
    result = kernel.gdn("call", "bash__exec", '{"command":"echo $((6*7))"}')
    assert (result.status, result.err) == (0, "")
    assert result.json["status"] == "ok"
    assert result.json["output"]["stdout"] == "42\n"
    assert kernel.processes() == {}
    kernel.assert_clean()


def test_call_uses_the_kernel_that_runs(kernel: Sandbox) -> None:
    kernel.detach()
    supervisor = kernel.pid("supervisor")
    assert kernel.call("echo hi")["output"]["stdout"] == "hi\n"
    assert kernel.pid("supervisor") == supervisor
    refused = kernel.gdn("call", "bash__exec", "{}", "--allow-net", "localhost:80", "--json")
    assert refused.status == 2
    assert refused.json["error"]["code"] == "E_USAGE"


def test_calls_that_start_at_once_share_a_kernel_or_wait_for_it(kernel: Sandbox) -> None:
    calls = [
        kernel.popen("call", "bash__exec", json.dumps({"command": f"echo {n}"}), "--instance", f"i{n}")
        for n in range(4)
    ]
    outputs = [json.loads(process.communicate(timeout=30)[0])["output"]["stdout"] for process in calls]
    assert outputs == [f"{n}\n" for n in range(4)]
    assert [process.returncode for process in calls] == [0, 0, 0, 0]
    kernel.wait_for_nothing(2.0)


def test_a_failed_call_is_a_tool_result_with_status_1(kernel: Sandbox) -> None:
    kernel.detach()
    for tool, args, code in (("no__such", "{}", "E_TOOL"), ("bash__exec", "{}", "E_TOOL")):
        result = kernel.gdn("call", tool, args, "--json")
        assert result.status == 1, result
        assert result.json["status"] == "error"
        assert result.json["error"]["code"].startswith(code)
        assert result.json["error"]["helpUrl"]


def test_workdir_and_instance(kernel: Sandbox) -> None:
    kernel.detach()
    work = kernel.home / "my work"
    work.mkdir()
    assert kernel.call("pwd; echo x > made", "--workdir", "my work")["output"]["stdout"] == f"{work}\n"
    assert (work / "made").read_text() == "x\n"
    kernel.call("echo a > mark", "--instance", "a")
    assert kernel.call("cat mark", "--instance", "a")["output"]["stdout"] == "a\n"
    assert kernel.call("cat mark", "--instance", "b")["output"]["exitCode"] != 0


def test_batch_answers_every_line_and_leaves_nothing_behind(kernel: Sandbox) -> None:
    good = [
        {"id": n, "tool": "bash__exec", "args": {"command": f"echo {n}"}, "instance": f"i{n % 5}"} for n in range(40)
    ]
    lines = [json.dumps(line) for line in good]
    lines[7:7] = ["", "nonsense", '{"id":"no-tool"}', '{"id":"bad-dir","tool":"bash__exec","workdir":"/nonexistent"}']
    result = kernel.gdn("call", "--batch", "-", input="\n".join(lines), timeout=40)
    assert (result.status, result.err) == (0, "")
    found = {str(line["id"]): line for line in result.lines}
    assert len(result.lines) == 43
    for n in range(40):
        assert found[str(n)]["result"]["output"]["stdout"] == f"{n}\n"
    assert found["None"]["line"] == 9
    for key in ("None", "no-tool", "bad-dir"):
        assert found[key]["result"]["status"] == "error"
        assert found[key]["result"]["error"]["code"] == "E_USAGE"
    kernel.assert_clean()


def test_batch_answers_before_the_end_of_input(kernel: Sandbox) -> None:
    process = kernel.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(3):
        process.stdin.write(json.dumps({"id": n, "tool": "bash__exec", "args": {"command": "true"}}).encode() + b"\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], 20)[0]
        assert json.loads(process.stdout.readline())["id"] == n
    process.stdin.close()
    assert process.wait(timeout=10) == 0


def test_batch_survives_a_restart_of_the_broker(kernel: Sandbox) -> None:
    kernel.detach()
    process = kernel.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for n in range(6):
        line = {"id": n, "tool": "bash__exec", "args": {"command": "sleep 0.3; echo done"}, "instance": f"i{n % 2}"}
        process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    os.kill(kernel.pid("broker"), signal.SIGKILL)
    process.stdin.close()
    rest = process.stdout.read().splitlines()
    assert process.wait(timeout=20) == 0
    assert len(rest) == 5
    for answer in rest:
        assert json.loads(answer)["result"]["status"] in ("ok", "error")


# --- run


def test_run_answers_its_lines_in_order_then_stops(kernel: Sandbox) -> None:
    lines = exec_line("sleep 0.2; echo one") + "\n" + exec_line("echo two")
    result = kernel.gdn("run", input=lines)
    assert (result.status, result.err) == (0, "")
    assert result.out.index("one") < result.out.index("two")
    kernel.assert_clean()


def test_run_as_json_is_one_document(kernel: Sandbox) -> None:
    result = kernel.gdn("run", "--json", input="hello\n")
    assert result.status == 0
    (answer,) = result.json["answers"]
    assert answer["status"] == "completed"
    assert answer["response"]
    assert answer["eventId"]
    assert answer["turnId"]


def test_run_refuses_a_second_kernel(kernel: Sandbox) -> None:
    kernel.detach()
    for options in ([], ["--detach"]):
        result = kernel.gdn("run", "--json", *options, input="")
        assert result.status == 1
        assert result.json["error"]["code"] == "E_KERNEL_RUNNING"
    assert kernel.call("echo still here")["output"]["stdout"] == "still here\n"


def test_an_invalid_bundle_is_reported_whole_and_starts_nothing(kernel: Sandbox) -> None:
    kernel.bundle.write_text(BUNDLE.replace("Tool/bash", "Tool/nothing").replace("Model/console", "Model/none"))
    for command in (["run"], ["run", "--detach"], ["call", "bash__exec", "{}"]):
        result = kernel.gdn(*command)
        assert result.status == 2
        assert result.out == ""
        assert result.err.count("E_CONFIG_MISSING_REF") == 2
        assert "goondan.yaml:10" in result.err
        as_json = kernel.gdn(*command, "--json")
        assert as_json.status == 2
        assert len(as_json.json["errors"]) == 2
        assert as_json.json["error"]["code"] == "E_CONFIG_MISSING_REF"
    kernel.assert_clean()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_run_and_its_kernel(kernel: Sandbox, number: signal.Signals, status: int) -> None:
    process = kernel.popen("run", stdin=subprocess.PIPE)
    wait_until(kernel.ps)
    process.send_signal(number)
    assert process.wait(timeout=10) == status
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    kernel.assert_clean()


def test_the_kernel_of_run_dies_with_it(kernel: Sandbox) -> None:
    process = kernel.popen("run", stdin=subprocess.PIPE)
    wait_until(lambda: len(kernel.ps()) >= 4)
    process.kill()
    process.wait()
    kernel.wait_for_nothing(5.0)
    wait_until(lambda: not kernel.run_dirs)


def test_a_lost_kernel_is_one_structured_error(kernel: Sandbox) -> None:
    process = kernel.popen("run", "--json", stdin=subprocess.PIPE)
    wait_until(lambda: len(kernel.ps()) >= 4)
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert json.loads(out)["error"]["code"] == "E_KERNEL_LOST"
    assert err == b""
    kernel.assert_clean()


def test_nobody_reads_the_answers(kernel: Sandbox) -> None:
    read, write = os.pipe()
    process = kernel.popen("run", stdin=subprocess.PIPE, stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(b"hello\nhello\n", timeout=20)
    assert (process.returncode, err) == (141, b"")
    kernel.assert_clean()


def test_a_person_gets_a_prompt_and_the_answer(kernel: Sandbox) -> None:
    leader, terminal = pty.openpty()
    process = kernel.popen("run", stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    shown = b""

    def read_until(text: bytes) -> None:
        nonlocal shown
        until = time.monotonic() + 20
        while text not in shown:
            assert time.monotonic() < until, shown
            if select.select([leader], [], [], 0.1)[0]:
                shown += os.read(leader, 4096)

    read_until(b"> ")
    shown = b""
    os.write(leader, exec_line("sleep 0.8; echo $((6*7))").encode())
    read_until(b"working")
    read_until(b"42")
    read_until(b"> ")
    os.write(leader, b"\x04")
    assert process.wait(timeout=10) == 0
    os.close(leader)
    kernel.assert_clean()


# --- send


def test_send_needs_a_kernel_and_prints_only_the_answer(kernel: Sandbox) -> None:
    refused = kernel.gdn("send", "hello", "--json")
    assert (refused.status, refused.json["error"]["code"]) == (1, "E_KERNEL_NOT_RUNNING")
    kernel.detach()
    plain = kernel.gdn("send", "main", "/bash__exec command='echo $((6*7))'")
    assert plain.status == 0, plain
    assert "42" in plain.out
    assert plain.err == ""
    document = kernel.gdn("send", "hello", "--json").json
    assert document.keys() == {"eventId", "turnId", "status", "response", "finishReason"}
    unknown = kernel.gdn("send", "nobody", "hello", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_AGENT_NOT_FOUND")


def test_an_event_id_is_answered_once(kernel: Sandbox) -> None:
    kernel.detach()
    first, again = (
        kernel.gdn("send", exec_line("echo x >> count; cat count"), "--event-id", "e1", "--json").json for _ in range(2)
    )
    assert first == again
    assert first["eventId"] == "e1"


def test_send_without_waiting(kernel: Sandbox) -> None:
    kernel.detach()
    result = kernel.gdn("send", exec_line("sleep 30"), "--no-wait", "--event-id", "slow", "--json")
    assert (result.status, result.json) == (0, {"eventId": "slow", "status": "accepted"})


def test_the_time_of_send_is_the_time_of_its_tools(kernel: Sandbox) -> None:
    kernel.detach()
    begun = time.monotonic()
    result = kernel.gdn("send", exec_line("sleep 30"), "--timeout", "1", "--json")
    assert time.monotonic() - begun < 4.0
    assert "E_AGENT_TIMEOUT" in result.out or "E_TOOL_TIMEOUT" in result.out


def test_send_gives_up_by_itself(kernel: Sandbox) -> None:
    kernel.detach()
    kernel.gdn("send", "hello")
    agent = kernel.pid("agent")
    os.kill(agent, signal.SIGSTOP)
    result = kernel.gdn("send", "hello", "--timeout", "0.5", "--json")
    os.kill(agent, signal.SIGKILL)
    assert (result.status, result.json["error"]["code"]) == (1, "E_AGENT_TIMEOUT")


def test_send_survives_a_restart_of_the_broker(kernel: Sandbox) -> None:
    kernel.detach()
    process = kernel.popen("send", exec_line("sleep 1; echo late"))
    wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
    os.kill(kernel.pid("broker"), signal.SIGKILL)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, b"")
    assert b"late" in out


# --- ps and stop


def test_ps_shows_every_process_also_while_the_broker_is_down(kernel: Sandbox) -> None:
    kernel.detach()
    kernel.call("true")
    rows = {row["role"]: row for row in kernel.ps()}
    assert rows.keys() == {"supervisor", "broker", "forkserver", "toolhost", "agent", "worker"}
    for row in rows.values():
        assert row.keys() == {"role", "name", "instanceKey", "pid", "status", "since", "restarts", "lastExit"}
        os.kill(row["pid"], 0)
    assert rows["agent"]["instanceKey"] == "default"
    os.kill(rows["broker"]["pid"], signal.SIGSTOP)
    assert len(kernel.ps()) == 6
    os.kill(rows["broker"]["pid"], signal.SIGKILL)
    after = wait_until(lambda: [r for r in kernel.ps() if r["role"] == "broker" and r["status"] == "running"])[0]
    assert (after["restarts"], after["lastExit"]) == (1, "signal SIGKILL")
    assert "SIGKILL" in kernel.gdn("ps").out


def test_stop_returns_when_everything_is_gone(kernel: Sandbox) -> None:
    kernel.detach()
    kernel.call("true")
    begun = time.monotonic()
    result = kernel.gdn("stop", "--json")
    assert (result.status, result.json) == (0, {"stopped": True, "killed": False})
    assert time.monotonic() - begun < 3.0
    assert kernel.processes() == {}
    kernel.assert_clean()


def test_stop_during_a_long_call_is_bounded(kernel: Sandbox) -> None:
    kernel.detach()
    process = kernel.popen("call", "bash__exec", '{"command":"sleep 60"}', "--json")
    wait_until(lambda: any(row["role"] == "worker" for row in kernel.ps()))
    begun = time.monotonic()
    assert kernel.gdn("stop").status == 0
    assert time.monotonic() - begun < 10.0
    assert kernel.processes() == {}
    out, _ = process.communicate(timeout=5)
    assert process.returncode == 1
    assert json.loads(out)["error"]["code"].startswith("E_")


def test_stop_ends_a_supervisor_that_hangs(kernel: Sandbox) -> None:
    kernel.detach()
    os.kill(kernel.pid("supervisor"), signal.SIGSTOP)
    begun = time.monotonic()
    result = kernel.gdn("stop", "--json")
    assert (result.status, result.json) == (0, {"stopped": True, "killed": True})
    assert time.monotonic() - begun < 11.0
    kernel.assert_clean()


def test_detach_holds_no_stream_of_ours(kernel: Sandbox) -> None:
    # Read to the end: a daemon that kept the pipe would make this hang.
    done = subprocess.run(
        [sys.executable, "-m", "kernel.cli", "run", "--detach", "--json"],
        env={**kernel.env, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=kernel.home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0
    os.kill(document["pid"], 0)
    assert Path(document["runDir"]).is_dir()
    assert document["pid"] == kernel.pid("supervisor")


# --- what could go wrong around it


def test_two_bundles_run_side_by_side(kernel: Sandbox) -> None:
    kernel.detach()
    with sandbox() as other:
        other.detach()
        assert other.pid("supervisor") != kernel.pid("supervisor")
        assert other.call("echo two")["output"]["stdout"] == "two\n"


def test_modules_in_the_current_directory_are_not_imported(kernel: Sandbox) -> None:
    for name in ("json", "asyncio", "schemas", "kernel", "zmq"):
        (kernel.home / f"{name}.py").write_text("raise SystemExit('imported from the current directory')\n")
    kernel.detach()
    assert kernel.call("echo fine")["output"]["stdout"] == "fine\n"


def test_a_runtime_directory_that_others_can_open_is_refused(kernel: Sandbox) -> None:
    kernel.detach()
    (run_dir,) = kernel.run_dirs
    kernel.gdn("stop")
    run_dir.mkdir(parents=True)
    run_dir.chmod(0o755)
    result: Any = kernel.gdn("call", "bash__exec", "{}", "--json")
    assert (result.status, result.json["error"]["code"]) == (1, "E_RUN_DIR")
    run_dir.rmdir()
