"""Attempts by access control lists: they name users whom no mode shows, and what is made in a folder inherits its own.

Real lists on a real file system. Whether somebody gets in is tried by a second user, where root runs the tests; what is
said of a list is looked at in any case.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from goondan.kernel.broker.journal.committer import open_store
from goondan.kernel.broker.state.records import Put
from goondan.kernel.grants.powers import Writers
from goondan.kernel.rundir import take, write_private
from goondan.kernel.state_root import open_state_root
from goondan.kernel.trust.judgement import others_who_can_write
from goondan.schemas.system.directories import DirectoryRefused, open_directory

OTHER = 40_001
_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
#: linux/posix_acl.h
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def give(path: Path, rights: int, *, mask: int = 7, default: bool = False) -> None:
    """What `setfacl -m u:OTHER:rights,m::mask` does, with `-d` if `default`."""
    entries = [(_USER_OBJ, 7, _NOBODY), (_USER, rights, OTHER), (_GROUP_OBJ, 0, _NOBODY)]
    entries += [(_MASK, mask, _NOBODY), (_OTHER, 0, _NOBODY)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, _DEFAULT if default else _ACCESS, value)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            pytest.skip("this file system has no access control lists")
        raise


def seen_by_the_other(top: Path) -> list[str]:
    """What the second user can read or write of all that is below `top`; [] for an ordinary user's tests."""
    if os.geteuid() != 0:
        return []
    look = """
import os, sys
user = int(sys.argv[1])
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
found = []
for path in sys.stdin.read().splitlines():
    for how in (os.O_RDONLY, os.O_RDWR):
        try:
            os.close(os.open(path, how | os.O_NONBLOCK))
            found.append(path)
        except OSError:
            pass
    if os.access(path, os.W_OK):
        found.append(path)
print("\\n".join(sorted(set(found))))
"""
    places = [
        str(top),
        *(os.path.join(folder, name) for folder, *names in os.walk(top) for kind in names for name in kind),
    ]
    command = [sys.executable, "-I", "-c", look, str(OTHER)]
    done = subprocess.run(command, input="\n".join(places), capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.fixture
def top(short_tmp: Path) -> Path:
    """A folder that everybody reaches, as a home directory may be."""
    short_tmp.chmod(0o755)
    return short_tmp


def used(root: Path) -> Path:
    """A state that has everything a kernel makes in it."""
    workspace = root / "workspaces" / "0123456789abcdef"
    open_state_root(str(root), workspace=str(workspace), make=True)
    store = open_store(str(workspace), "process")
    store.commit([Put("event:1", b"secret")], 0)
    store.checkpoint()
    store.close()
    directory, _ = take([str(root / "run" / "goondan" / "d")], name="d", state_dir=str(workspace), base=str(root))
    with directory:
        write_private(directory.fd, "client.token", b"secret")
    return workspace


def test_what_is_made_below_a_list_that_is_inherited_is_closed(top: Path) -> None:
    give(top, 7, default=True)
    give(top, 5, mask=5)
    workspace = used(top / "state")
    assert (workspace / "kernel.db").exists()
    assert [path for path in seen_by_the_other(top) if path != str(top)] == []


def test_a_state_with_a_list_is_closed_and_nothing_in_it_is_believed(top: Path) -> None:
    root = top / "state"
    root.mkdir(mode=0o700)
    give(root, 7)
    give(root, 7, default=True)
    (root / "trust").mkdir()
    give(root / "trust", 7)
    (root / "policy.yaml").write_text("{}")
    give(root / "policy.yaml", 6, mask=6)
    assert seen_by_the_other(root) or os.geteuid() != 0, "the attempt itself works"
    opened = open_state_root(str(root))
    assert not opened.believable, "who could write may have written"
    assert opened.mended
    used(root)
    assert seen_by_the_other(top / "state") == []


@pytest.mark.parametrize("rights", [7, 5])
def test_a_folder_on_the_way_that_a_list_opens_is_refused(top: Path, rights: int) -> None:
    above = top / "above"
    above.mkdir(mode=0o700)
    give(above, rights, mask=rights)
    (above / "run").mkdir(mode=0o700)
    if rights == 7:
        with pytest.raises(DirectoryRefused, match="access control list"):
            open_directory(str(above / "run"))
    else:  # it may be looked into, and changes nothing
        open_directory(str(above / "run")).close()
    with pytest.raises(DirectoryRefused):
        open_directory(str(above), private_from=str(above))


@pytest.mark.parametrize("where", ["the module", "its folder", "the bundle's folder", "the bundle"])
def test_whoever_a_list_lets_write_to_a_bundle_is_named(top: Path, where: str) -> None:
    bundle = top / "bundle"
    (bundle / "extensions").mkdir(parents=True)
    module, document = bundle / "extensions" / "memory.py", bundle / "goondan.yaml"
    for file in (module, document):
        file.write_text("")
        file.chmod(0o600)
    paths = [str(document), str(module)]
    before = others_who_can_write(paths)
    target = {"the module": module, "its folder": module.parent, "the bundle's folder": bundle, "the bundle": document}
    give(target[where], 6 if "folder" not in where else 7)
    assert set(others_who_can_write(paths)) - set(before) == {Writers(target[where].stat().st_gid)}
    give(target[where], 7, mask=5)
    assert others_who_can_write(paths) == before, "a mask without writing takes it away"
