"""Numbers of jails that somebody has: a tool host of root passes them over, and is not somebody itself.

In a mount namespace of its own each time, with an /etc of its own: whoever this machine has is nobody there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.system.users import DEFAULT, read_user_numbers
from tests.containment.ordinary_user import ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's jails have that user's number")

_NEWNS, _BIND, _PRIVATE, _REC = 0x20000, 0x1000, 0x40000, 0x4000
RUN = """
import json, os, sys
from goondan.schemas.system.users import NUMBERS
from goondan.toolhost.drop_privileges import drop_privileges
from goondan.toolhost.privileges.powers import Uids
before = Uids(os.getpid(), NUMBERS).bounds
try:
    powers, _ = drop_privileges()
except OSError as error:
    print(json.dumps({"refused": error.strerror}))
else:
    print(json.dumps({"user": os.geteuid(), "before": before, "bounds": powers.uids.bounds,
        "first": powers.uids.take()}))
"""


def run(folder: Path, accounts: str, setting: str | None = None, ranges: str = "") -> dict[str, Any]:
    """What a tool host becomes where these accounts are all besides root, with these ranges for their containers."""
    files = {
        "passwd": f"root:x:0:0::/root:/bin/sh\n{accounts}",
        "group": "root:x:0:\n",
        "nsswitch.conf": "passwd: files\n",
    }
    files |= dict.fromkeys(("subuid", "subgid"), ranges)
    etc = folder / "etc"
    etc.mkdir(exist_ok=True)
    for name, text in files.items():
        (etc / name).write_text(text)
    env = {name: value for name, value in os.environ.items() if name != "GOONDAN_JAIL_UIDS"}
    if setting is not None:
        env["GOONDAN_JAIL_UIDS"] = setting

    def show() -> None:
        libc = ctypes.CDLL(None)
        for failed in (
            libc.unshare(_NEWNS),
            libc.mount(None, b"/", None, _PRIVATE | _REC, None),
            libc.mount(os.fsencode(etc), b"/etc", None, _BIND, None),
        ):
            if failed:
                os._exit(99)

    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        env=env,
        preexec_fn=show,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def every_block_from(first: int, last: int) -> str:
    return "".join(f"u{number}:x:{number}:1::/:/bin/sh\n" for number in range(first + 7, last + 1, 4096))


def test_a_tool_host_and_its_jails_have_numbers_that_nobody_has(short_tmp: Path) -> None:
    found = run(short_tmp, "")
    assert found["user"] == DEFAULT.toolhost
    assert found["bounds"] == found["before"] and found["first"] == found["before"][0]


def test_numbers_that_somebody_has_are_passed_over(short_tmp: Path) -> None:
    """Somebody has one of every block but one; which block comes first depends on the process's number."""
    numbers = read_user_numbers("100000-165535")  # eight blocks
    blocks = range(numbers.jails[0], numbers.jails[1] + 1, 4096)
    accounts = "".join(f"u{first}:x:{first + 9}:1::/:/bin/sh\n" for first in blocks if first != blocks[3])
    found = run(short_tmp, accounts, "100000-165535")
    assert found["first"] == found["bounds"][0] == blocks[3]
    assert found["user"] == numbers.toolhost


def test_ranges_of_somebodys_containers_are_passed_over(short_tmp: Path) -> None:
    """useradd gives each account 65,536 numbers, from 100000 on."""
    ranges = "alice:100000:65536\nbob:165536:65536\n"
    numbers = read_user_numbers("210000-275535")  # the first blocks are bob's
    found = run(short_tmp, "alice:x:1000:1000::/:/bin/sh\nbob:x:1001:1001::/:/bin/sh\n", "210000-275535", ranges)
    assert (
        found["first"] == found["bounds"][0] and found["first"] > 165536 + 65536 and found["user"] == numbers.toolhost
    )
    assert "GOONDAN_JAIL_UIDS" in run(short_tmp, "", "100000-165535", ranges)["refused"]


def test_a_range_that_is_all_somebodys_is_refused(short_tmp: Path) -> None:
    numbers = read_user_numbers("100000-165535")
    found = run(short_tmp, every_block_from(*numbers.jails), "100000-165535")
    assert "GOONDAN_JAIL_UIDS=FIRST-LAST" in found["refused"]


def test_a_tool_host_is_nobody_that_a_service_knows(short_tmp: Path) -> None:
    found = run(short_tmp, f"alice:x:{DEFAULT.toolhost}:1::/:/bin/sh\n")
    assert "is alice: set GOONDAN_JAIL_UIDS=FIRST-LAST" in found["refused"]
    assert run(short_tmp, f"goondan-tools:x:{DEFAULT.toolhost}:1::/:/bin/sh\n")["user"] == DEFAULT.toolhost
    moved = run(short_tmp, f"alice:x:{DEFAULT.toolhost}:1::/:/bin/sh\n", "3000000000-3000100000")
    assert moved["user"] == read_user_numbers("3000000000-3000100000").toolhost


def test_a_setting_that_is_none_starts_nothing(short_tmp: Path) -> None:
    assert "needs at least 16384 numbers" in run(short_tmp, "", "5000-6000")["refused"]
