"""`python -m scripts.node_client`: what clients/node needs, installed beside it, so that it runs where it lies.

npm installs what package-lock.json says into .cache, once for each content of the lock, and `clients/node/node_modules`
leads there. No script of a package runs: zeromq brings its binaries along.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "clients" / "node"
#: How long npm may take (seconds); it takes three with an empty cache.
INSTALL_S: Final = 50.0
#: After a failure the next one does not try again for so long (seconds).
AGAIN_S: Final = 600.0
#: The oldest Node.js that the client runs on.
OLDEST: Final = 20


class Unavailable(Exception):
    """There is no Node.js, no npm, or npm could not install the packages. The text says which."""


def install(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the client, ready to run. Raises Unavailable."""
    node, npm = (shutil.which(name, path=environment.get("PATH")) for name in ("node", "npm"))
    if node is None or npm is None:
        raise Unavailable("node and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0] or 0) < OLDEST:
        raise Unavailable(f"Node.js {version} is older than {OLDEST}")
    lock = (FOLDER / "package-lock.json").read_bytes()
    cache = ROOT / ".cache" / "node-client" / hashlib.sha256(lock).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (cache / "done").exists():
            _install(cache, npm, environment)
        link = FOLDER / "node_modules"
        if not link.is_symlink() or link.readlink() != cache / "node_modules":
            fresh = FOLDER / ".cache-link"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(cache / "node_modules")
            fresh.rename(link)
    return FOLDER


def _install(cache: Path, npm: str, environment: Mapping[str, str]) -> None:
    failed = cache / "failed"
    if failed.exists() and time.time() - failed.stat().st_mtime < AGAIN_S:
        raise Unavailable(f"npm could not install the packages a moment ago: {failed.read_text(encoding='utf-8')}")
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(FOLDER / name, cache / name)
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
    try:
        done = subprocess.run(
            [npm, "ci", *options],
            cwd=cache,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
        why = done.stderr[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = "it took too long"
    if why:
        failed.write_text(why, encoding="utf-8")
        raise Unavailable(f"npm could not install the packages: {why}")
    (cache / "done").touch()


def main() -> int:
    """Install, and say where."""
    try:
        print(install())
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
