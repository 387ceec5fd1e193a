"""Our programs take their packages from where they are installed, and no module that somebody else put anywhere."""

from __future__ import annotations

import json
import os
import re
import site
import socket
import subprocess
import sys
import tempfile
import tomllib
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.import_path import NEEDED, folders
from goondan.kernel.spawn import START, command
from goondan.toolhost.lookup.this_host import machine
from goondan.toolhost.policy.seccomp import own_program
from tests.kernel_fixture import Sandbox
from tests.process.installed import BASE, VERSION, site_packages

ROOT = Path(__file__).parents[2]
#: `copy` and `pickle` try for `org`; the others are of the standard library, and imported by every program here.
PLANTED = ("org", "json", "signal", "array", "asyncio", "msgspec", "argparse", "fcntl")
#: Every program that the kernel starts.
PROGRAMS = (
    "goondan.kernel.supervisor",
    "goondan.kernel.broker",
    "goondan.agentproc.start.forkserver",
    "goondan.toolhost",
    "goondan.kernel.cli.__main__",
)
#: The interpreter itself imports these, unless it is isolated.
BY_ITSELF = ("sitecustomize", "usercustomize", "encodings")


def plant(place: Path, ran: Path, *names: str) -> None:
    """Modules that say that they were imported, and by which program."""
    place.mkdir(parents=True, exist_ok=True)
    for name in names:
        (place / f"{name}.py").write_text(
            f"import sys\nopen({str(ran)!r}, 'a').write({name + ' in '!r} + ' '.join(sys.orig_argv[:4]) + chr(10))\n"
            "raise ImportError\n"
        )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree that a tool has written to."""
    (tmp_path / "goondan").symlink_to(ROOT / "goondan")
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError\n"
        )
    return tmp_path


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_of_the_kernel(tree: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-I", tree / "goondan" / "kernel" / "start.py", module, "--help"],
        capture_output=True, text=True, cwd="/", check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tree / "ran").exists()


@pytest.mark.parametrize("program", ["launcher/__main__.py", "egress/start.py"])
def test_a_program_of_the_tool_host(tree: Path, program: str) -> None:
    """Both serve a socket until it is closed, the proxy under a filter of system calls."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, tempfile.TemporaryFile(buffering=0) as filter_file:
        ours.close()
        filter_file.write(own_program("relay", machine()))
        filter_file.seek(0)
        fds = [theirs.fileno()] + ([filter_file.fileno()] if program == "egress/start.py" else [])
        argv = [sys.executable, "-I", "-S", str(tree / "goondan" / "toolhost" / program), *map(str, fds)]
        argv += ["-"] if program == "launcher/__main__.py" else []  # the umask of jails: its own
        done = subprocess.run(argv, capture_output=True, text=True, pass_fds=fds, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tree / "ran").exists()


@pytest.mark.parametrize(("module", "path"), [*zip(PROGRAMS, cycle([":/nonexistent", ".", "{place}"]), strict=False)])
def test_a_program_that_is_started_in_a_strangers_folder(tmp_path: Path, module: str, path: str) -> None:
    """The supervisor gets the whole environment of whoever starts it."""
    place, ran = tmp_path / "clone", tmp_path / "ran"
    plant(place, ran, *PLANTED, *BY_ITSELF)
    plant(place / "goondan", ran, "__init__")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "PYTHONPATH": path.format(place=place),
        "PYTHONHOME": str(place),
    }
    done = subprocess.run(command(module, ["--help"]), cwd=place, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not ran.exists(), ran.read_text()


@pytest.mark.feature("doctor")
def test_a_whole_kernel_that_is_started_in_a_strangers_clone(kernel: Sandbox, tmp_path: Path) -> None:
    place, ran = tmp_path / "clone", tmp_path / "ran"
    plant(place, ran, *PLANTED, *BY_ITSELF, "click", "yaml")
    plant(place / "goondan", ran, "__init__", "kernel", "schemas")
    gdn = Path(sys.executable).with_name("gdn")
    if not gdn.exists():
        pytest.skip("this environment was not made by `make setup`")
    bundle = ["--bundle", str(kernel.bundle)]
    env = {**kernel.env, "PYTHONPATH": f":{place}:.", "PYTHONSTARTUP": str(place / "json.py"), "HOME": str(place)}
    how: dict[str, Any] = {"cwd": place, "env": env, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    answer = subprocess.run([gdn, "call", *bundle, "bash__exec", '{"command": "echo here"}', "--json"], **how)
    assert json.loads(answer.stdout)["output"]["stdout"] == "here\n", answer
    for arguments in (["validate", str(kernel.bundle)], ["doctor", *bundle]):
        assert '"error"' not in subprocess.run([gdn, *arguments, "--json"], **how).stdout[:10]
    assert not ran.exists(), ran.read_text()


# --- where other packages are found ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "how"),
    [*zip([*PROGRAMS[:4], "goondan.toolhost.survey"], cycle(["for one user", "into a folder"]), strict=False)],
)
def test_packages_elsewhere_are_found_and_nothing_beside_them_runs(tmp_path: Path, module: str, how: str) -> None:
    """`pip install --user` and `pip install --target`: children get the folder, and not what runs by itself there."""
    ran = tmp_path / "ran"
    home = tmp_path / "home"
    if how == "for one user":
        place = site_packages(home / ".local" / "lib" / VERSION / "site-packages")
        env = {"HOME": str(home)}
        (place / "planted.pth").write_text(
            f"import sys; open({str(ran)!r}, 'a').write(' '.join(sys.orig_argv) + chr(10))\n"
        )
    else:
        place = site_packages(tmp_path / "target")
        env = {"HOME": str(home), "PYTHONPATH": str(place)}
    plant(place, ran, "usercustomize", "sitecustomize", "json")
    for name in ("json", *(["sitecustomize"] if how == "for one user" else [])):
        (place / f"{name}.py").rename(place / f"{name}.later")  # these would end the parent, which is not isolated
    code = (
        "import os, subprocess, sys\n"
        "from goondan.kernel.spawn import command\n"
        f"for name in os.listdir({str(place)!r}):\n"
        "    if name.endswith('.later'):\n"
        f"        os.rename({str(place)!r} + '/' + name, {str(place)!r} + '/' + name[:-6] + '.py')\n"
        f"open({str(ran)!r}, 'w').close()\n"
        f"argv = command({module!r}, ['--help'])\n"
        "print(argv.count('--packages'))\n"
        "sys.stdout.flush()\n"
        "sys.exit(subprocess.run(argv, stdout=subprocess.DEVNULL).returncode)\n"
    )
    start = [BASE, "-P", "-c", code]
    done = subprocess.run(start, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert ran.read_text() == ""


def test_no_folder_is_passed_on_where_everything_is_installed_in_one_place() -> None:
    if not any(Path(place, "msgspec").exists() for place in site.getsitepackages()):
        pytest.skip("packages of this environment lie elsewhere")
    assert folders() == ()
    assert command("x.y", ["z"]) == [sys.executable, "-I", START, "x.y", "z"]


def test_what_is_looked_for_is_what_the_project_needs() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    modules = {"pyzmq": "zmq", "pyyaml": "yaml"}
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0].lower().replace("-", "_") for line in asked]
    assert {modules.get(name, name) for name in names} == set(NEEDED)


@pytest.mark.parametrize("path", [":/nonexistent", "/nonexistent:", ".", "below/..", ""])
def test_an_installed_gdn_leaves_the_current_folder_before_it_imports_more(tmp_path: Path, path: str) -> None:
    """The script that pip writes is not isolated, and its folder holds no module of ours."""
    place = site_packages(tmp_path / "site")
    ran = tmp_path / "ran"
    plant(tmp_path / "clone", ran, *PLANTED[:3], "click", "yaml")
    script = (
        "import sys\n"
        f"sys.path.append({str(place)!r})\n"
        "from goondan.kernel.import_path import main\n"
        "sys.argv = ['gdn', '--help']\n"
        "sys.exit(main())\n"
    )
    (tmp_path / "gdn").write_text(script)
    done = subprocess.run(
        [BASE, tmp_path / "gdn"], cwd=tmp_path / "clone", env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gdn" in done.stdout
    assert not ran.exists(), ran.read_text()


def test_an_absolute_entry_of_pythonpath_is_somebodys_choice(tmp_path: Path) -> None:
    code = "import sys; from goondan.kernel.import_path import leave_current_folder as leave; leave(); print(sys.path)"
    env = {"PYTHONPATH": f"{tmp_path}/mine:{ROOT}:"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    path = done.stdout
    assert f"'{tmp_path}/mine'" in path
    assert f"'{ROOT}'" in path
    assert f"'{tmp_path}'" not in path
