"""Records of trust: private, whole, and believed only where nobody else could have written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.kernel.grants.powers import Reach
from goondan.kernel.trust import records
from goondan.schemas.wire.errors import GoondanError

NET = [Reach("t", "public")]


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "goondan.yaml").write_text("")
    return str(tmp_path / "work" / "goondan.yaml")


def test_a_record_is_written_read_listed_and_forgotten(tmp_path: Path, bundle: str) -> None:
    root = str(tmp_path / "state")
    assert records.read(root, bundle) is None
    written = records.write(root, bundle, NET, how="command")
    assert records.read(root, bundle) == written
    assert records.read(root, os.path.dirname(bundle)) == written  # one place, however it is spelt
    assert records.every(root) == [written]
    assert (written.bundle, written.powers, written.how) == (os.path.dirname(bundle), NET, "command")
    (file,) = (tmp_path / "state" / "trust").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert records.forget(root, bundle)
    assert not records.forget(root, bundle)
    assert records.read(root, bundle) is None


def test_the_umask_makes_nothing_open(tmp_path: Path, bundle: str) -> None:
    before = os.umask(0)
    try:
        records.write(str(tmp_path / "state"), bundle, NET, how="question")
    finally:
        os.umask(before)
    for path in (tmp_path / "state", *(tmp_path / "state").rglob("*")):
        assert not path.stat().st_mode & 0o077, path


@pytest.mark.parametrize("part", ["state", "state/trust", "state/trust/FILE"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_what_others_could_have_written_is_not_believed(tmp_path: Path, bundle: str, part: str, mode: int) -> None:
    root = str(tmp_path / "state")
    records.write(root, bundle, NET, how="command")
    (file,) = (tmp_path / "state" / "trust").iterdir()
    path = tmp_path / part.replace("FILE", file.name)
    path.chmod(mode)
    if os.geteuid() == 0 and part == "state":
        os.chown(path, 0, 40_002)  # root's own group holds nobody else
    elif part == "state" and mode == 0o770:
        pytest.skip("whether a user's own group holds somebody else is this machine's affair")
    assert records.read(root, bundle) is None
    assert records.every(root) == []


def test_a_state_root_that_comes_with_the_bundle_is_not_believed(tmp_path: Path, bundle: str) -> None:
    inside = f"{os.path.dirname(bundle)}/.goondan"
    with pytest.raises(GoondanError) as caught:
        records.write(inside, bundle, NET, how="command")
    assert caught.value.info.code == "E_STATE"
    assert "inside the bundle" in caught.value.info.message
    clone = tmp_path / "clone"
    (clone / ".git").mkdir(parents=True)
    assert "a bundle or a checkout" in (records.why_not_believed(str(clone / "x" / "state"), bundle) or "")
    # One that was planted is not read either.
    other = tmp_path / "state"
    records.write(str(other), bundle, NET, how="command")
    os.rename(other, inside)
    assert records.read(inside, bundle) is None


def test_a_link_in_place_of_the_folder_or_of_a_file_is_not_followed(tmp_path: Path, bundle: str) -> None:
    root, other = tmp_path / "state", tmp_path / "other"
    records.write(str(other), bundle, NET, how="command")
    root.mkdir(mode=0o700)
    (root / "trust").symlink_to(other / "trust")
    assert records.read(str(root), bundle) is None
    (root / "trust").unlink()
    (root / "trust").mkdir(mode=0o700)
    (file,) = (other / "trust").iterdir()
    (root / "trust" / file.name).symlink_to(file)
    assert records.read(str(root), bundle) is None
