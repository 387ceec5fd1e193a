"""The folder of one tool host: who has it, and who takes over what one that is gone has left."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.app import StateFolder
from tests.toolhost_fixture import POWERS


async def test_a_name_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first = await StateFolder.claim(str(tmp_path), "toolhost/1", POWERS)
    assert first.file("x") == str(tmp_path / "toolhosts" / "1" / "x")
    with pytest.raises(GoondanError, match="another process is toolhost/1") as refused:
        await StateFolder.claim(str(tmp_path), "toolhost/1", POWERS, patience_s=0)
    assert refused.value.info.code == "E_PRINCIPAL_BUSY"
    other = await StateFolder.claim(str(tmp_path), "toolhost/../2", POWERS, patience_s=0)
    assert other.path == str(tmp_path / "toolhosts" / "%2E%2E%2F2")
    asyncio.get_running_loop().call_later(0.01, first.release)
    assert (await StateFolder.claim(str(tmp_path), "toolhost/1", POWERS)).path == first.path


async def test_only_what_is_left_by_the_dead_is_taken(tmp_path: Path) -> None:
    living, dead, ours = [
        await StateFolder.claim(str(tmp_path), f"toolhost/{name}", POWERS) for name in ("a", "b", "c")
    ]
    assert ours.orphans() == []
    dead.release()
    (orphan,) = ours.orphans()
    assert orphan.path == dead.path
    assert ours.orphans() == []  # it is ours to look through
    orphan.release()
    assert living.path is not None


async def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = await StateFolder.claim(str(tmp_path / "file"), "toolhost/1", POWERS)
    assert (nowhere.path, nowhere.file("x"), nowhere.orphans()) == (None, None, [])
    nowhere.release()
    assert os.listdir(tmp_path) == ["file"]
