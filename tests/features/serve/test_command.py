"""`gdn serve` before it serves: what is said without its packages, and who imports those of all doors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_fixture import BUNDLE, environment

#: What doors, the exporter and `gdn acp` speak with.
PACKAGES = ("starlette", "uvicorn", "prometheus_client", "opentelemetry", "requests", "acp", "pydantic")
#: The programs of a kernel, and the command line.
PROGRAMS = (
    "goondan.kernel.supervisor.__main__",
    "goondan.kernel.supervisor.life",
    "goondan.kernel.broker.__main__",
    "goondan.kernel.broker.loop",
    "goondan.agentproc.start.warmup",
    "goondan.toolhost.app",
    "goondan.kernel.cli",
    "goondan.features.serve.command",
)
#: What those import of features: all but doors, and programs and commands of their own.
PARTS = ("agent", "broker", "bundle", "console", "host", "process", "status", "wire")


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_it_is_one_error_that_says_what_to_install(missing: str, tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    program = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[:] = ['gdn', 'serve', '--trust', '--port', '0']\n"
        "from goondan.kernel.cli import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        text=True,
        env=environment(tmp_path / "state"),
        cwd=tmp_path,
        timeout=30,
        check=False,
    )
    assert run.returncode == 2, run
    assert f"the package {missing}" in run.stderr and "goondan-kernel[serve]" in run.stderr
    assert "Traceback" not in run.stderr and not list(tmp_path.glob("state/workspaces/*/logs/*")), "nothing was started"


def test_what_serves_is_imported_where_it_serves_alone() -> None:
    program = (
        f"import sys, {', '.join(PROGRAMS)}\nfrom goondan.features import parts\n"
        f"for part in {PARTS}:\n    parts(part)\nprint(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    imported = set(run.stdout.split())
    assert "goondan.features.telemetry.broker" in imported
    assert not imported & {*PACKAGES}
