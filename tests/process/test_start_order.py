"""What a start does before the one thing that everything waits for: it is no slower than it must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: t}
spec: {entry: ./t.py, exports: [{name: a, description: a, parameters: {type: object}}]}
"""
#: Prints what a supervisor has imported when it starts the program that looks into the modules of tools.
LOOK = """\
import sys
from kernel.bundle.inspector import Inspector
from kernel import supervisor
from kernel.supervisor_options import load_plan, parse
Inspector.start_early = lambda self: (print(*sys.modules), sys.exit(0))
load_plan(parse(["--bundle", sys.argv[1]]))
"""


def test_the_modules_of_tools_are_looked_into_while_the_checks_of_a_bundle_are_imported(tmp_path: Path) -> None:
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    program = [sys.executable, "-I", "-c", LOOK, str(tmp_path / "goondan.yaml")]
    environment = {"HOME": str(tmp_path), "GOONDAN_STATE_ROOT": str(tmp_path / "state")}
    run = subprocess.run(program, capture_output=True, text=True, check=True, env=environment, timeout=30)
    imported = set(run.stdout.split())
    assert "kernel.bundle.opening" in imported
    assert not imported & {"yaml", "schemas.resources", "kernel.bundle.check", "kernel.trust.look", "jsonschema_rs"}
