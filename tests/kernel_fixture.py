"""Kernels for tests: each with a state root and a runtime directory of its own, and nothing of it left afterwards.

A process belongs to a test if its environment, its command line or its mounts (a jailed worker has nothing else) name
the test's state root, or if it descends from one that does.
"""

from __future__ import annotations

import fcntl
import json
import marshal
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from goondan.features import FEATURES
from goondan.kernel import lock
from goondan.kernel.supervisor_client import SupervisorClient, end_of
from goondan.schemas.wire.errors import GoondanError
from tests.program_forks import MAX_REQUEST
from tests.ready_gdn import ForkedGdn, ReadyGdn

#: What `Sandbox.gdn` forks from.
READY: Final = ReadyGdn()

ROOT = Path(__file__).resolve().parent.parent
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
#: How long anything may take that takes well under a second on an idle machine (seconds).
PATIENCE_S = 40.0
#: How long all of a kernel may take to go whose end is said to be there (seconds).
GONE_S: Final = 10.0

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""


def has_feature(name: str) -> bool:
    """Whether this tree has a feature: a bundle for several tests can leave out what one of them needs it for."""
    return any(feature.name == name for feature in FEATURES)


@dataclass
class Result:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """One JSON document a line."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Sandbox:
    """A bundle, and the commands on it."""

    home: Path
    env: dict[str, str]
    bundle: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    #: Where commands are run; None: in `home`.
    here: Path | None = None
    #: When it was made, as the system counts the starts of processes: older ones are not of this test.
    since: int = field(default_factory=lambda: int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S) - 1)

    # --- commands

    def popen(
        self, *arguments: str, forked: bool = True, terminal: bool = False, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start `gdn`; killed at the end of the test if it still runs. `terminal`: stderr is its controlling terminal.

        `forked`: from a process that has imported it, unless an option (as of subprocess.Popen) is one of a start.
        """
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        of_a_start = options.keys() - streams
        streams |= options
        folder = self.here or self.home
        process: subprocess.Popen[bytes]
        if forked and not of_a_start and READY.fits(self.env):
            process = ForkedGdn(READY, arguments, self.env, folder, terminal=terminal, **streams)
        else:
            if terminal:
                streams |= {"start_new_session": True, "preexec_fn": lambda: fcntl.ioctl(2, termios.TIOCSCTTY, 0)}
            command = [sys.executable, "-I", "-m", "goondan.kernel.cli", *arguments]
            process = subprocess.Popen(command, env=self.env, cwd=folder, **streams)
        self.running.append(process)
        return process

    def gdn(self, *arguments: str, input: str | bytes | None = None, timeout: float = PATIENCE_S) -> Result:
        """Run `gdn` to its end."""
        data = input.encode() if isinstance(input, str) else input
        process = self.popen(*arguments, stdin=subprocess.DEVNULL if data is None else subprocess.PIPE)
        out, err = process.communicate(data, timeout=timeout)
        self.running.remove(process)
        return Result(process.returncode, out.decode(), err.decode())

    def detach(self) -> None:
        """Start the swarm; it runs until `stop`, or the end of the test."""
        result = self.gdn("run", "--detach")
        assert result.status == 0, result.err

    @contextmanager
    def on_path(self) -> Iterator[str]:
        """A PATH on which a shell finds a `gdn` that is forked (program_forks.py: how it hands its streams over)."""
        folder = self.home / "bin"
        folder.mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(folder / "s"))
            listening.listen()
            command = [sys.executable, "-I", "-S", str(ROOT / "tests" / "program_forks.py"), str(folder / "s")]
            (folder / "gdn").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$PWD" "$@"\n')
            (folder / "gdn").chmod(0o755)
            threading.Thread(target=self._run_asked, args=(listening,), daemon=True).start()
            yield f"{folder}:{self.env['PATH']}"
            listening.shutdown(socket.SHUT_RDWR)

    def _run_asked(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it is over
            while True:
                threading.Thread(target=self._run_one, args=(listening.accept()[0],), daemon=True).start()

    def _run_one(self, asked: socket.socket) -> None:
        request, (stdin, stdout, stderr), _, _ = socket.recv_fds(asked, MAX_REQUEST, 3)
        (folder, *arguments), env = marshal.loads(request)
        process = ForkedGdn(READY, arguments, env, Path(folder), stdin=stdin, stdout=stdout, stderr=stderr)
        for stream in (stdin, stdout, stderr):
            os.close(stream)
        with asked:
            asked.send(str(process.wait()).encode())

    def call(self, command: str, *options: str) -> Any:
        """`bash__exec` by `gdn call`; the tool result."""
        return self.gdn("call", "bash__exec", json.dumps({"command": command}), "--json", *options).json

    # --- looking

    def ps(self) -> list[dict[str, Any]]:
        """What `gdn ps --json` prints, asked for without starting a command."""
        for state_dir in self.state_dirs:
            client = SupervisorClient.connect(str(state_dir))
            if client is not None:
                try:
                    return [msgspec.to_builtins(row) for row in client.ask("ps").processes or []]
                except GoondanError:
                    return []  # it is at its end
                finally:
                    client.close()
        return []

    def pid(self, role: str) -> int:
        """The process of a role."""
        return int(next(row["pid"] for row in self.ps() if row["role"] == role and row["pid"] is not None))

    @property
    def state_dirs(self) -> list[Path]:
        """Where kernels of this test keep their state."""
        return sorted(Path(self.env["GOONDAN_STATE_ROOT"]).glob("workspaces/*"))

    @property
    def run_dirs(self) -> list[Path]:
        """Runtime directories that exist."""
        parent = Path(self.env["XDG_RUNTIME_DIR"]) / "goondan"
        return list(parent.iterdir()) if parent.exists() else []

    def log(self, name: str) -> str:
        """Everything in the logs of a role, for the message of a failed assertion."""
        logs = sorted(self.home.glob(f"state/workspaces/*/logs/{name}*.log"))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def times_ready(self, role: str) -> int:
        """How often this service was ready. `ps` calls one that died often a crash loop, for ten seconds more."""
        return self.log("supervisor").count(f" {role} is ready")

    def processes(self) -> dict[int, str]:
        """Living processes of this test: pid and command line."""
        parents = _parents(self.since)
        found = {pid for pid in parents if self._is_ours(pid)}
        for pid in parents:
            at: int | None = pid
            while at is not None and at not in found:
                at = parents.get(at)
            if at is not None and pid not in found:
                found.add(pid)
        mine = {process.pid for process in self.running if process.poll() is None}
        return {pid: _command(pid) for pid in sorted(found - mine - {os.getpid()}) if _is_alive(pid)}

    def _is_ours(self, pid: int) -> bool:
        # In the command lines of those whose environment only root can read, too.
        marker = str(self.home).encode()
        own = False
        with suppress(OSError):  # gone, or closed to us
            # Most processes of a machine have its mounts, and reading those takes long.
            own = os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        for name in ("environ", "cmdline", "mountinfo") if own else ("environ", "cmdline"):
            if marker in _read(f"/proc/{pid}/{name}"):
                return True
        return False

    def mounts(self) -> list[str]:
        """Mounts below the test's directory."""
        return [line for line in Path("/proc/mounts").read_text().splitlines() if f" {self.home.parent}/" in line]

    def wait_for_nothing(self) -> None:
        """See that every process goes by itself."""
        until, pauses = time.monotonic() + GONE_S, _pauses()
        while left := self.processes():
            assert time.monotonic() < until, f"still alive after {GONE_S} s: {left}"
            time.sleep(next(pauses))

    def assert_clean(self) -> None:
        """No process, no runtime directory, no mount."""
        self.wait_for_nothing()
        assert self.run_dirs == []
        assert self.mounts() == []


def shown(pid: int) -> bytes:
    """What a process shows to us of what it was started with: its command line, and its environment unless that is
    closed to all but root.
    """
    told = Path(f"/proc/{pid}/cmdline").read_bytes()
    closed = () if os.geteuid() == 0 else (PermissionError,)
    with suppress(*closed):
        told += Path(f"/proc/{pid}/environ").read_bytes()
    return told


def _read(path: str) -> bytes:
    """What the file says, or nothing when it cannot be read: processes end at any time."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def _parents(since: int) -> dict[int, int]:
    """Every process that has started since then (ticks since the machine has), with its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (state := _read(f"/proc/{name}/stat")):
            fields = state.rpartition(b")")[2].split()
            if int(fields[19]) >= since:
                found[int(name)] = int(fields[1])
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def wait_until(condition: Any, seconds: float = PATIENCE_S, what: str = "") -> Any:
    """The first true value of `condition()`."""
    until, pauses = time.monotonic() + seconds, _pauses()
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds} s: {what or condition}"
        time.sleep(next(pauses))
    return value


def _pauses() -> Iterator[float]:
    """Between looks at something (seconds), longer and longer: a look at all processes takes several milliseconds."""
    pause = 0.01
    while True:
        yield pause
        pause = min(1.2 * pause, 0.05)


def environment(state: Path, **more: str) -> dict[str, str]:
    """Of a command line whose state root is `state`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "GOONDAN_TRUST") if name in os.environ}
    return kept | {"GOONDAN_STATE_ROOT": str(state), **more}


@contextmanager
def sandbox(bundle: str = BUNDLE, extra_env: Mapping[str, str] | None = None) -> Iterator[Sandbox]:
    """A fresh directory with a bundle; at the end everything is stopped, and must be gone."""
    top = Path(tempfile.mkdtemp(prefix="gk", dir="/tmp"))
    # What a kernel is to believe from its state must not lie in a bundle's folder; `home/state` leads there.
    home, state = top / "h", top / "state"
    home.mkdir()
    state.mkdir(mode=0o700)
    (home / "state").symlink_to(state)
    runtime = home / "r"
    runtime.mkdir(mode=0o700)
    (home / "goondan.yaml").write_text(bundle)
    made = Sandbox(home, environment(state, XDG_RUNTIME_DIR=str(runtime), **(extra_env or {})), home / "goondan.yaml")
    passed = False
    try:
        yield made
        passed = True
    finally:
        try:
            for state_dir in made.state_dirs:
                _stop(str(state_dir))
            _end(made)
            if passed:
                made.assert_clean()
        finally:
            for pid in made.processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(top, ignore_errors=True)


def _stop(state_dir: str) -> None:
    """What `gdn stop` does, without the start of a command."""
    client = SupervisorClient.connect(state_dir)
    if client is None:
        # One that is just dying has closed its socket and may hold its lock for a moment more.
        until, pauses = time.monotonic() + 2.0, _pauses()
        lock.clear_after_death(state_dir)
        while lock.read_record(state_dir) is not None and time.monotonic() < until:
            time.sleep(next(pauses))
            lock.clear_after_death(state_dir)
        return
    with suppress(GoondanError):  # it hangs, and is killed
        client.ask("stop")
    end_of(client.pidfd, state_dir)
    client.close()


def _end(made: Sandbox) -> None:
    for process in made.running:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
