"""The key and the files: who can read them, and what becomes of those that nobody can."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from goondan.features.oauth.process.rules import Grant
from goondan.features.oauth.process.vault import Vault, read_or_make
from goondan.kernel.paths import is_shared, key_file
from goondan.schemas.wire.errors import GoondanError


def grant(subject: str = "ann", token: str = "at") -> Grant:
    return Grant(app="cal", subject=subject, server="s", client_id="c", access_token=token, refresh_token="rt")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "keys").mkdir(mode=0o700)
    return tmp_path


def vault(root: Path, key: bytes = b"k" * 32) -> Vault:
    return Vault(f"{root}/state/oauth", f"{root}/state", key)


def key(root: Path) -> bytes:
    return read_or_make(f"{root}/keys/oauth.key", f"{root}/state")


def test_where_the_key_is() -> None:
    assert key_file({}, "/home/ann", "oauth.key") == "/home/ann/.config/goondan/keys/oauth.key"
    assert key_file({"XDG_CONFIG_HOME": "/c"}, "/home/ann", "oauth.key") == "/c/goondan/keys/oauth.key"
    assert key_file({"XDG_CONFIG_HOME": "c"}, "/home/ann", "oauth.key") == "/home/ann/.config/goondan/keys/oauth.key"
    assert key_file({"GOONDAN_KEY_FILE": "/k/./x", "XDG_CONFIG_HOME": "/c"}, "/home/ann", "oauth.key") == "/k/x"
    for folder in ("/home/ann", "/home", "/", "/tmp", "/etc"):
        assert is_shared(folder, "/home/ann")
    assert not is_shared("/home/ann/.config/goondan/keys", "/home/ann")


def test_the_key_is_made_once_and_closed(root: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(key(root))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert [path.name for path in (root / "keys").iterdir()] == ["oauth.key"]
    assert (root / "keys" / "oauth.key").stat().st_mode & 0o777 == 0o600
    assert key(root) == found[0]


@pytest.mark.parametrize("fault", ["open", "short", "link", "folder", "fifo", "open folder"])
def test_a_key_that_others_may_know_is_not_used(root: Path, fault: str) -> None:
    path = root / "keys" / "oauth.key"
    if fault == "link":
        (root / "other").write_bytes(b"k" * 32)
        path.symlink_to(root / "other")
    elif fault == "folder":
        path.mkdir()
    elif fault == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(b"k" * (31 if fault == "short" else 32))
        path.chmod(0o644 if fault == "open" else 0o600)
    if fault == "open folder":
        (root / "keys").chmod(0o755)
    with pytest.raises(GoondanError) as refused:
        key(root)
    assert refused.value.code == "E_OAUTH_KEY"
    assert str(root / "keys") in refused.value.info.message


def test_no_key_lies_in_the_state(root: Path) -> None:
    with pytest.raises(GoondanError, match="in the state root"):
        read_or_make(f"{root}/state/keys/oauth.key", f"{root}/state")
    (root / "door").symlink_to(root / "state")
    with pytest.raises(GoondanError, match="in the state root"):
        read_or_make(f"{root}/door/keys/oauth.key", f"{root}/state")


def test_what_is_held(root: Path) -> None:
    held = vault(root)
    assert held.load("cal", "ann") is None
    held.save(grant())
    held.save(grant("bob"))
    held.save(grant(token="at2"))
    assert vault(root).load("cal", "ann") == grant(token="at2")
    assert [one.subject for one in held.all()] == ["ann", "bob"]
    held.drop("cal", "ann")
    held.drop("cal", "ann")
    assert held.load("cal", "ann") is None


def test_a_file_counts_for_nobody_else_and_no_bit_of_it_can_change(root: Path) -> None:
    held = vault(root)
    held.save(grant())
    (ann,) = (root / "state" / "oauth").iterdir()
    data = ann.read_bytes()
    held.save(grant("bob"))
    (bob,) = set((root / "state" / "oauth").iterdir()) - {ann}
    bob.write_bytes(data)
    assert held.load("cal", "bob") is None
    assert not bob.exists()
    assert bob.with_name(bob.name + ".unreadable").read_bytes() == data  # put aside, not thrown away
    for at in (0, 20, len(data) // 2, len(data) - 1):
        ann.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert held.load("cal", "ann") is None
    ann.write_bytes(data)
    assert held.load("cal", "ann") == grant()


def test_another_key_reads_nothing(root: Path) -> None:
    vault(root).save(grant())
    assert vault(root, b"x" * 32).load("cal", "ann") is None
    assert vault(root).all() == []


def test_a_link_in_the_place_of_a_file_is_not_followed(root: Path) -> None:
    held = vault(root)
    held.save(grant())
    (file,) = (root / "state" / "oauth").iterdir()
    file.rename(root / "elsewhere")
    file.symlink_to(root / "elsewhere")
    with pytest.raises(GoondanError) as refused:
        held.load("cal", "ann")
    assert refused.value.code == "E_STATE"


def test_subjects_that_somebody_makes_up_do_not_fill_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.features.oauth.process.vault.MAX_GRANTS", 2)
    held = vault(root)
    held.save(grant("a"))
    held.save(grant("b"))
    held.save(grant("a", "at2"))
    with pytest.raises(GoondanError) as refused:
        held.save(grant("c"))
    assert refused.value.code == "E_OVERLOADED"
