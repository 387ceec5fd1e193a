"""A jail whose making was cut off is ended by the next tool host; one that is being made is left alone."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from goondan.toolhost.policy.subject import JAIL_CODE
from goondan.toolhost.watch.procfs import end_stranded, stranded

pytestmark = pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")


@contextmanager
def second_process(folder: Path, parent: str) -> Iterator[int]:
    """A process named `bwrap` that is the first of a pid namespace, below one of the name `parent`."""
    shell = shutil.which("bash")
    assert shell is not None
    for name in {"bwrap", parent}:
        if not (folder / name).exists():
            shutil.copy(shell, folder / name)
    # The pid namespace is for children, so the shell that asks for it is the parent of the first process in it.
    script = f"{folder}/bwrap -c 'echo; sleep 60; :' {JAIL_CODE}/boot.py & wait"
    command = ["unshare", "--user", "--map-root-user", "--pid", f"{folder}/{parent}", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], 20)[0] or process.stdout.read(1) != b"\n":
            pytest.skip("no user namespaces here")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        yield int(children[0])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_only_a_jail_without_its_first_process_is_stranded(tmp_path: Path) -> None:
    with ExitStack() as stack:
        left = stack.enter_context(second_process(tmp_path, "other"))
        made = stack.enter_context(second_process(tmp_path, "bwrap"))
        found = stranded()
        assert left in found
        assert made not in found
        assert os.getpid() not in found
        pidfd = os.pidfd_open(left)
        stack.callback(os.close, pidfd)
        assert end_stranded() >= 1
        assert select.select([pidfd], [], [], 20)[0], "it lives on"
        assert left not in stranded()
