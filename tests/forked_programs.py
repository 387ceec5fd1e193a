"""Programs that tests start many times: program_forks.py has how."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = Path(__file__).with_name("program_forks.py")


@contextmanager
def forked(path: Path) -> Iterator[list[str]]:
    """The command that runs the program in Python at `path`, with the arguments that are put behind it."""
    with tempfile.TemporaryDirectory(prefix="gf", dir="/tmp") as folder:
        place = f"{folder}/s"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(place)
            listening.listen(128)
            serving = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM), str(listening.fileno()), str(path)],
                pass_fds=[listening.fileno()],
                stdin=subprocess.PIPE,
            )
        with serving:  # which closes its stdin, and waits for its end
            yield [sys.executable, "-I", "-S", str(_PROGRAM), place]
