"""What tests see of a machine that somebody lives on: nothing but what they set themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THEIRS = {
    "LC_ALL": "tr_TR.UTF-8",
    "LANG": "tr_TR.UTF-8",
    "LANGUAGE": "tr",
    "LC_TIME": "de_DE",
    "TZ": "Asia/Kathmandu",
    **{f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "HTTPS", "all")},
    "HTTP_PROXY": "http://127.0.0.1:9",
    "no_proxy": "example.org",
}
SEEN = """
import json, os, resource, time
import tests.conftest
from tests.machine import FOUND
names = [name for name in os.environ if "proxy" in name.lower() or name.startswith("LC_")]
print(json.dumps([
    sorted(names), os.environ["LANG"], os.environ.get("LANGUAGE"), time.tzname[0], os.umask(0), os.getgroups(),
    resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_NPROC), FOUND["http_proxy"],
]))
"""


def test_tests_set_what_they_see_of_the_machine() -> None:
    limits = "umask 077; ulimit -S -n 256; ulimit -S -u 4000;"
    done = subprocess.run(
        ["/bin/bash", "-c", f'{limits} exec "$0" -c "$1"', sys.executable, SEEN],
        cwd=ROOT, env={"PATH": os.environ["PATH"], **THEIRS}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names, lang, language, zone, umask, groups, files, processes, proxy = json.loads(done.stdout)
    assert (names, lang, language, zone, umask, files) == ([], "C.UTF-8", None, "UTC", 0o022, 1024)
    assert groups == ([] if os.geteuid() == 0 else os.getgroups())
    assert processes[0] == processes[1]
    assert proxy == "http://127.0.0.1:9", "what installs packages asks for it"
