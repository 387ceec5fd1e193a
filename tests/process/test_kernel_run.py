"""`gdn run` and `gdn call` with a kernel of their own: it starts with them, and nothing of it outlives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from goondan.kernel.cli.console.lines import MAX_LINE_BYTES
from goondan.schemas.transport import SOCKETS
from tests.kernel_fixture import BUNDLE, Sandbox, wait_until


def exec_line(command: str) -> str:
    return f"/bash__exec {json.dumps({'command': command})}\n"


# --- call


def test_calls_that_start_at_once_share_a_kernel_or_wait_for_it(kernel: Sandbox) -> None:
    calls = [
        kernel.popen("call", "bash__exec", json.dumps({"command": f"echo {n}"}), "--instance", f"i{n}")
        for n in range(4)
    ]
    outputs = [json.loads(process.communicate(timeout=30)[0])["output"]["stdout"] for process in calls]
    assert outputs == [f"{n}\n" for n in range(4)]
    assert [process.returncode for process in calls] == [0, 0, 0, 0]
    kernel.wait_for_nothing()


def test_a_batch_over_several_instances_answers_every_line(kernel: Sandbox) -> None:
    count = 40
    good = [
        {"id": n, "tool": "bash__exec", "args": {"command": f"echo {n}"}, "instance": f"i{n % 5}"} for n in range(count)
    ]
    lines = [json.dumps(line) for line in good]
    lines[7:7] = ["", "nonsense", '{"id":"no-tool"}', '{"id":"bad-dir","tool":"bash__exec","workdir":"/nonexistent"}']
    result = kernel.gdn("call", "--batch", "-", input="\n".join(lines), timeout=55)
    assert (result.status, result.err) == (0, "")
    found = {str(line["id"]): line for line in result.lines}
    assert len(result.lines) == count + 3
    for n in range(count):
        assert found[str(n)]["result"]["output"]["stdout"] == f"{n}\n"
    assert found["None"]["line"] == 9
    for key in ("None", "no-tool", "bad-dir"):
        assert found[key]["result"]["status"] == "error"
        assert found[key]["result"]["error"]["code"] == "E_USAGE"
    kernel.assert_clean()


# --- run


def test_run_as_json_is_one_document(kernel: Sandbox) -> None:
    result = kernel.gdn("run", "--json", input="hello\n")
    assert (result.status, result.err) == (0, "")
    (answer,) = result.json["answers"]
    assert answer["status"] == "completed"
    assert answer["response"]
    assert answer["eventId"]
    assert answer["turnId"]


def test_lines_are_answered_in_their_order_and_a_failed_turn_is_status_1(kernel: Sandbox) -> None:
    too_long = "x" * MAX_LINE_BYTES + "x\n"
    result = kernel.gdn("run", input=exec_line("sleep 0.2; echo one") + "\n" + too_long + exec_line("echo two"))
    assert (result.status, result.out) == (1, "one\ntwo\n")
    assert "[E_FRAME_TOO_LARGE]" in result.err
    kernel.assert_clean()


def test_an_input_that_cannot_be_read_is_one_error(kernel: Sandbox) -> None:
    unreadable = os.open(os.devnull, os.O_WRONLY)
    process = kernel.popen("run", "--json", stdin=unreadable)
    os.close(unreadable)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, b"")
    assert json.loads(out)["error"]["code"] == "E_STATE"
    kernel.assert_clean()


def test_an_invalid_bundle_is_reported_whole_and_starts_nothing(kernel: Sandbox) -> None:
    kernel.bundle.write_text(BUNDLE.replace("Tool/bash", "Tool/nothing").replace("Model/console", "Model/none"))
    for command in (["run"], ["run", "--detach"], ["call", "bash__exec", "{}"]):
        result = kernel.gdn(*command)
        assert result.status == 2
        assert result.out == ""
        assert result.err.count(": E_CONFIG_MISSING_REF ") == 2
        assert "goondan.yaml:10" in result.err
    as_json = kernel.gdn("run", "--json")
    assert as_json.status == 2
    assert len(as_json.json["errors"]) == 2
    assert as_json.json["error"]["code"] == "E_CONFIG_MISSING_REF"
    kernel.assert_clean()


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [(("run",), signal.SIGTERM, 143), (("call", "bash__exec", '{"command":"sleep 60"}'), signal.SIGINT, 130)],
)
def test_a_signal_ends_the_command_and_its_kernel(
    kernel: Sandbox, command: tuple[str, ...], number: signal.Signals, status: int
) -> None:
    process = kernel.popen(*command, stdin=subprocess.PIPE)
    roles = {"supervisor"} if command[0] == "run" else {"worker"}
    wait_until(lambda: roles <= {row["role"] for row in kernel.ps()})
    process.send_signal(number)
    assert process.wait(timeout=30) == status
    assert process.stderr is not None
    assert process.stderr.read().strip() == (b"" if command[0] == "run" else b"cancelled")
    kernel.assert_clean()


def test_the_kernel_of_run_dies_with_it(kernel: Sandbox) -> None:
    process = kernel.popen("run", stdin=subprocess.PIPE)
    wait_until(lambda: len(kernel.ps()) >= 4)
    process.kill()
    process.wait()
    kernel.wait_for_nothing()
    wait_until(lambda: not kernel.run_dirs)


def test_a_lost_kernel_is_one_structured_error(kernel: Sandbox) -> None:
    process = kernel.popen("run", "--json", stdin=subprocess.PIPE)
    wait_until(lambda: len(kernel.ps()) >= 4)
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert json.loads(out)["error"]["code"] == "E_KERNEL_LOST"
    assert err == b""
    kernel.assert_clean()


def test_a_kernel_that_is_lost_before_its_first_word_is_the_same_error(kernel: Sandbox) -> None:
    kernel.detach()
    os.kill(kernel.pid("broker"), signal.SIGSTOP)
    process = kernel.popen("call", "bash__exec", "{}", "--json")
    wait_until(lambda: not_accepted(kernel), what="a link that waits for the welcome")
    os.kill(kernel.pid("supervisor"), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (1, b"")
    assert json.loads(out)["error"]["code"] == "E_KERNEL_LOST"


def not_accepted(kernel: Sandbox) -> bool:
    """Whether a client has connected to the broker, which does not answer. Others connect as well: an agent that waits,
    and whoever asks the supervisor.
    """
    connecting = "02"  # the state of the server's end as long as nobody has accepted it
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    sockets = [f"{folder}/{SOCKETS['client']}" for folder in kernel.run_dirs]
    return any(row[5] == connecting and row[-1] in sockets for row in rows)


def test_nobody_reads_the_answers(kernel: Sandbox) -> None:
    read, write = os.pipe()
    process = kernel.popen("run", stdin=subprocess.PIPE, stdout=write)
    os.close(write)
    os.close(read)
    _, err = process.communicate(b"hello\nhello\n", timeout=30)
    assert (process.returncode, err) == (141, b"")
    kernel.assert_clean()


def test_closed_standard_streams_do_no_harm(kernel: Sandbox) -> None:
    process = kernel.popen("run", preexec_fn=lambda: os.closerange(0, 3))
    assert process.wait(timeout=30) == 0
    kernel.assert_clean()
