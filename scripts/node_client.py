"""`python -m scripts.node_client [--types]`: what clients/node needs, installed beside it, so that it runs there.

`--types` makes its declarations for TypeScript anew: the compiler takes them from what its modules say.

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
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "clients" / "node"
#: The declarations that the compiler makes, relative to the root of the repository; a program needs no others.
DECLARATIONS: Final = ("clients/node/errors.d.mts", "clients/node/index.d.mts")
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


def declarations(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the files of DECLARATIONS have to hold. Raises Unavailable, CalledProcessError for wrong types."""
    compiler = install(environment) / "node_modules" / "typescript" / "bin" / "tsc"
    with tempfile.TemporaryDirectory() as made:
        options = ["--noEmit", "false", "--declaration", "--emitDeclarationOnly", "--outDir", made]
        subprocess.run(
            ["node", compiler, "--project", FOLDER, "--rootDir", FOLDER, *options], env=dict(environment), check=True
        )
        head = "// Made by `python -m scripts.node_client --types` from {}. Do not edit.\n\n"
        return {
            path: head.format(path.replace(".d.mts", ".mjs"))
            + (Path(made) / Path(path).name).read_text(encoding="utf-8")
            for path in DECLARATIONS
        }


def main(arguments: list[str]) -> int:
    """Install, and say where."""
    try:
        print(install())
        if "--types" in arguments:
            for path, content in declarations().items():
                (ROOT / path).write_text(content, encoding="utf-8")
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
