"""What models have used: sums that only grow, whatever becomes of instances."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import TurnUsage
from goondan.kernel.traces import used
from goondan.kernel.traces.used import UsedSoFar
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.traces.turn_notes import ModelDetail

AT = "2026-11-23T09:00:00.000Z"


def turn(folder: Path, key: str, tokens: int, calls: int = 1) -> None:
    """A turn of an instance."""
    store, spent = ConversationStore(instance_dir(str(folder), "main", key)), TurnUsage()
    for _ in range(calls):
        spent.count(ModelDetail(step=1, model="p/m", input_tokens=tokens), AT)
    store.adopt(1)
    with store.write(final=True):
        store.begin_turn("e", "t", 1, AT)
        store.finish_turn("e", "t", "completed", AT, steps=1, answer=None, used=spent.parts)
    store.close()


def tokens(seen: UsedSoFar) -> int:
    return sum(amount.input_tokens for _, _, amount in seen.look())


def test_another_instance_in_the_place_of_a_deleted_one_is_counted_beside_it(tmp_path: Path) -> None:
    seen = UsedSoFar(str(tmp_path))
    turn(tmp_path, "a", 100, calls=2)
    turn(tmp_path, "b", 1000)
    assert tokens(seen) == 1200
    shutil.rmtree(instance_dir(str(tmp_path), "main", "a"))
    turn(tmp_path, "a", 7)
    assert tokens(seen) == tokens(seen) == 1207


def test_deleted_instances_take_no_room_from_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used, "MAX_FILES", 2)
    monkeypatch.setattr(used, "MAX_SUMS", 0)
    seen = UsedSoFar(str(tmp_path))
    for number in range(5):
        turn(tmp_path, f"i{number}", 10)
        assert tokens(seen) == 10 * (number + 1)
        shutil.rmtree(instance_dir(str(tmp_path), "main", f"i{number}"))
    assert tokens(seen) == 50
    assert len(seen.look()) == 1
