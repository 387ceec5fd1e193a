"""Build or refresh .venv: the slow half of scripts/setup, run by the interpreter that the environment is made of.

`make_venv.py run|dev|bench` installs the dependencies that pyproject.toml names, in the versions of constraints.txt and
what pinned.txt has by hash, and makes the four packages importable and `gdn` callable. An environment that was made for
another interpreter, machine or place, or whose making was interrupted, is thrown away and built anew. Standard library
only; nothing outside the repository is changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: What the environment was built for; compared as a whole.
MADE_FOR = VENV / ".made-for"
#: Present while pip works: what it leaves when it is killed cannot be told from a finished installation.
INSTALLING = VENV / ".installing"
#: `pip --python` exists from here on; an older pip is not asked.
MIN_PIP = (22, 3)

GDN = """\
#!/bin/sh
'''exec' {python} -P "$0" "$@"
' '''
import sys

from kernel.cli import main

sys.exit(main())
"""

#: Found by the environment's interpreter: what runs, and what `make` uses.
FOUND = ("schemas", "kernel", "agentproc", "toolhost", "scripts", "tests", "bench")

FINDER = """\
import sys
from importlib.machinery import PathFinder


class Source:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in {found!r}:
            return PathFinder.find_spec(name, [{root!r}], target)


sys.meta_path.append(Source)
"""


def main(kind: str) -> None:
    """Make .venv ready for `kind` ("run", "dev" or "bench"). Exits with a message when that is not possible."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = list(project["dependencies"])
    if kind != "run":
        packages += project["optional-dependencies"][kind]
    made_for = f"{sysconfig.get_config_var('SOABI')} {sys.base_prefix} {VENV}"
    if not usable(made_for):
        say(f"making .venv with {sys.executable} (Python {sys.version.split()[0]})")
        build(made_for)
    INSTALLING.touch()
    if packages:
        say(f"installing {len(packages)} packages and what they need into .venv (once; the next start skips this)")
        install(["--no-deps", "--require-hashes", "--requirement", str(ROOT / "pinned.txt")])
        install(["--constraint", str(ROOT / "constraints.txt"), *packages])
    expose(project["name"], project["version"])
    INSTALLING.unlink()


def say(message: str) -> None:
    """One line for the person who waits."""
    print(f"setup: {message}", file=sys.stderr, flush=True)


def usable(made_for: str) -> bool:
    """Whether the present environment runs, was made for this interpreter and place, and is not half-installed."""
    if INSTALLING.exists() or not MADE_FOR.is_file() or MADE_FOR.read_text() != made_for:
        return False
    try:
        return subprocess.run([PYTHON, "-I", "-S", "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def build(made_for: str) -> None:
    """A new, empty environment, without pip: the one of the base interpreter installs into it."""
    if VENV.is_symlink() or VENV.is_file():
        VENV.unlink()
    elif VENV.exists():
        shutil.rmtree(VENV)
    venv.create(VENV, symlinks=True, with_pip=False)
    MADE_FOR.write_text(made_for)


def install(arguments: list[str]) -> None:
    """One call of `pip install`. Settings of the user that would send packages elsewhere are left out."""
    elsewhere = (
        "PIP_USER",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_REQUIRE_VIRTUALENV",
        "PYTHONPATH",
        "PYTHONHOME",
    )
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    environment |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [*pip(environment), "install", "-qq", *arguments]
    if subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode != 0:
        sys.exit("setup: pip could not install the packages; its message is above")


def pip(environment: dict[str, str]) -> list[str]:
    """The command that installs into .venv: the base interpreter's pip, or one put into .venv if there is none."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= MIN_PIP:
        return [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    result = subprocess.run(
        [PYTHON, "-m", "ensurepip", "--default-pip"], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(
            f"setup: {sys.executable} has neither pip nor ensurepip\n"
            "setup: install them (Debian, Ubuntu: apt install python3-venv) or name another Python: make run PYTHON=…"
        )
    return [str(PYTHON), "-m", "pip"]


def expose(name: str, version: str) -> None:
    """Let the environment find the packages of the repository, put its name and version into the list of what is
    installed, and `gdn` into bin: what an editable install does, without a build and its download.

    The repository itself is not on the import path: it may be a workdir of tools, and whatever they put there under the
    name of a module that somebody only tries for would be imported.
    """
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(VENV), "platbase": str(VENV)}))
    module = f"_{name.replace('-', '_')}_source"
    (site / f"{module}.py").write_text(FINDER.format(root=str(ROOT), found=FOUND))
    (site / f"{name}.pth").write_text(f"import {module}\n")
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("make\n")
    quoted = "'" + str(PYTHON).replace("'", "'\"'\"'") + "'"
    gdn = VENV / "bin" / "gdn"
    gdn.write_text(GDN.format(python=quoted))
    gdn.chmod(0o755)


def leave_environment() -> None:
    """Started from inside a virtual environment, perhaps this very one, activated: go on as what it was made of."""
    base = getattr(sys, "_base_executable", sys.executable)
    if sys.prefix != sys.base_prefix and base != sys.executable:
        os.execv(base, [base, "-I", *sys.argv])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("run", "dev", "bench"):
        sys.exit("usage: make_venv.py run|dev|bench")
    leave_environment()
    main(sys.argv[1])
