"""The client in Rust: what it does with the recorded frames and sequences. Without Debian's cargo it is skipped."""

from __future__ import annotations

import subprocess

from tests.polyglot_clients import BUILD_S, CARGO, RUST, rust


def test_the_recorded_frames_and_sequences_are_replayed() -> None:
    rust()
    tests = [CARGO, "test", "--offline", "--quiet"]
    done = subprocess.run(tests, cwd=RUST, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
