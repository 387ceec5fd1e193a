"""Programs that run from a source tree take their own packages from it, and no module that somebody else put there."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from toolhost.policy.facts import machine
from toolhost.seccomp.program import relay_program

ROOT = Path(__file__).parents[2]
#: `copy` and `pickle` try for `org`; the others are of the standard library, and imported by every program here.
PLANTED = ("org", "json", "signal", "array", "asyncio", "msgspec", "argparse", "fcntl")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree that a tool has written to."""
    for name in ("schemas", "kernel", "agentproc", "toolhost"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    "module", ["kernel.supervisor", "kernel.broker", "agentproc.forkserver", "toolhost", "kernel.cli.__main__"]
)
def test_a_program_of_the_kernel(tree: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", tree / "kernel" / "start.py", module, "--help"],
        capture_output=True, text=True, cwd="/", check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tree / "ran").exists()


@pytest.mark.parametrize("program", ["launcher/__main__.py", "egress/start.py"])
def test_a_program_of_the_tool_host(tree: Path, program: str) -> None:
    """Both serve a socket until it is closed, the proxy under a filter of system calls."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile(buffering=0) as filter_file:
        ours.close()
        filter_file.write(relay_program(machine()))
        filter_file.seek(0)
        fds = [theirs.fileno()] + ([filter_file.fileno()] if program == "egress/start.py" else [])
        argv = [sys.executable, "-I", "-S", str(tree / "toolhost" / program), *map(str, fds)]
        done = subprocess.run(argv, capture_output=True, text=True, pass_fds=fds, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tree / "ran").exists()
