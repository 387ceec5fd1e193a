"""The clients as programs, for tests that drive each of them. One that this machine cannot run is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kernel_fixture import ROOT
from tests.node_fixture import node_client

CLIENTS: Final = ("python", "node", "rust")
PYTHON: Final = ROOT / "clients" / "python"
RUST: Final = ROOT / "examples" / "polyglot" / "rust"
#: Debian's own cargo, which builds from the sources of Debian's packages.
CARGO: Final = "/usr/bin/cargo"
#: What has to lie in Debian's folder of sources.
CRATES: Final = ("zmq", "rmp", "serde_json", "sha2")
BUILD_S: Final = 240
#: Where it is built for tests: `make clean` removes it.
BUILT: Final = ROOT / ".cache" / "rust-client"


def command_of(client: str) -> tuple[list[str], dict[str, str]]:
    """The command that speaks the certificate's line protocol, and what it needs in its environment."""
    if client == "python":
        return [sys.executable, "-m", "goondan_client.certified"], {"PYTHONPATH": str(PYTHON)}
    if client == "node":
        return ["node", str(node_client() / "certified.mjs")], {}
    return [str(rust()), "certified"], {}


def rust() -> Path:
    """The Rust client, built. Skips without Debian's cargo and the packages that it needs."""
    sources = Path("/usr/share/cargo/registry")
    missing = [name for name in CRATES if not list(sources.glob(f"{name}-[0-9]*"))]
    if not Path(CARGO).exists() or missing:
        pytest.skip(f"Rust is not there: {CARGO} and librust-*-dev of {', '.join(CRATES)}")
    done = cargo("build")
    assert done.returncode == 0, done.stderr
    return BUILT / "debug" / "ask"


def cargo(command: str) -> subprocess.CompletedProcess[str]:
    """Run one of cargo's commands on the Rust client."""
    arguments = [CARGO, command, "--offline", "--quiet"]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(BUILT)}
    return subprocess.run(
        arguments, cwd=RUST, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
