"""The quicker boot stage by itself: what it refuses, and that it refuses before the program is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from goondan.toolhost.inside.confine import FAILED, NUMBERS, REPLACED
from goondan.toolhost.lookup.this_host import PERL

BOOT = Path(__file__).parents[2] / "toolhost" / "inside" / "boot.pl"

pytestmark = pytest.mark.skipif(not os.path.exists(PERL), reason="there is no Perl")


def boot(*words: object) -> tuple[int, str]:
    plan = b"".join(os.fsencode(str(word)) + b"\0" for word in (NUMBERS["prlimit64"], *words))
    with NamedTemporaryFile() as file:
        file.write(plan)
        file.flush()
        command = f"exec {PERL} {BOOT} 8<{file.name}"
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout + done.stderr


def test_it_puts_up_limits_and_becomes_the_program(tmp_path: Path) -> None:
    found = tmp_path.lstat()
    status, said = boot(
        "seen", tmp_path, found.st_dev, found.st_ino, "limit", 7, 33, "exec", "/bin/sh", "-c", "ulimit -n"
    )
    assert (status, said) == (0, "33\n")


def test_a_place_that_was_replaced(tmp_path: Path) -> None:
    found = tmp_path.lstat()
    for device, inode in ((found.st_dev, found.st_ino + 1), (found.st_dev + 1, found.st_ino)):
        status, said = boot("seen", tmp_path, device, inode, "exec", "/bin/echo", "through")
        assert (status, said) == (REPLACED, f"boot: {tmp_path} was replaced while the jail was being made\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("seen", "/nonexistent/place", 1, 1, "exec", "/bin/echo"), "/nonexistent/place: No such file"),
        (("limit", 999, 1, "exec", "/bin/echo"), "prlimit64: Invalid argument"),
        (("ruleset", 1 << 60, 0, 0, "restrict", "exec", "/bin/echo"), "landlock_create_ruleset: Invalid argument"),
        (
            ("ruleset", 1, 0, 0, "rule", "/tmp", 1 << 60, "exec", "/bin/echo"),
            "landlock_add_rule: /tmp: Invalid argument",
        ),
        (("wall", "exec", "/bin/echo"), "the plan says wall"),
        (("exec", "/nonexistent/program"), "/nonexistent/program: No such file"),
        ((), "the plan ends without a program"),
    ],
)
def test_whatever_fails_ends_it(words: tuple[object, ...], why: str) -> None:
    status, said = boot(*words)
    assert (status, why in said) == (FAILED, True), said
