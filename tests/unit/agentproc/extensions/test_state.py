"""`api.state`: stored whole, durable, bounded, and one change at a time among many processes."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.extensions import state as state_module
from goondan.agentproc.extensions.state import MAX_BYTES, ExtState, StoredState
from goondan.schemas.wire.errors import GoondanError


def state_of(place: Path, name: str = "guard", instance: str = "i1") -> StoredState:
    return StoredState(name, str(place / instance), str(place / "state"))


def code(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(GoondanError) as caught:
        call(*args, **options)
    return caught.value.info.code


def test_an_object_is_there_again_for_the_same_extension_and_instance_only(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    assert state.get() == {}
    assert state.set({"count": 1, "name": "가"}) == 1
    assert state.set({"count": 2}) == 2
    assert state_of(tmp_path).get() == {"count": 2}
    assert state_of(tmp_path, "other").get() == {}
    assert state_of(tmp_path, instance="i2").get() == {}
    assert state.get(scope="workspace") == {}
    file = tmp_path / "i1" / "extensions" / "guard.json"
    assert json.loads(file.read_text())["value"] == {"count": 2}
    assert file.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in file.parent.iterdir()) == ["guard.json", "guard.json.lock"]


def test_what_is_given_back_is_a_copy(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    state.set({"list": [1]})
    state.get()["list"].append(2)
    assert state.get() == {"list": [1]}


def test_a_workspaces_object_is_shared_and_changed_from_what_was_read(tmp_path: Path) -> None:
    one, two = state_of(tmp_path), state_of(tmp_path, instance="i2")
    assert code(one.set, {"a": 1}, scope="workspace") == "E_USAGE"
    assert one.set({"a": 1}, scope="workspace", revision=0) == 1
    value, revision = two.read()
    assert (value, revision) == ({"a": 1}, 1)
    two.set({"a": 2}, scope="workspace", revision=revision)
    assert code(one.set, {"a": 3}, scope="workspace", revision=1) == "E_STATE_CONFLICT"
    assert one.get(scope="workspace") == {"a": 2}


def _count(place: Path, times: int) -> None:
    state = state_of(place)
    for _ in range(times):
        state.update(lambda value: {"count": value.get("count", 0) + 1})


def test_no_change_of_many_processes_is_lost(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_count, args=(tmp_path, 20)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert state_of(tmp_path).get(scope="workspace") == {"count": 80}


@pytest.mark.parametrize(
    "value", [None, [], "text", {"a": object()}, {"a": float("inf")}, {"a": "\ud800"}, {"a": 2**70}, {"a": {1, 2}}]
)
def test_what_is_no_json_object_is_refused_and_changes_nothing(tmp_path: Path, value: Any) -> None:
    state = state_of(tmp_path)
    state.set({"old": 1})
    assert code(state.set, value) == "E_USAGE"
    assert state.get() == {"old": 1}


def test_an_object_that_contains_itself_or_is_too_deep_is_refused(tmp_path: Path) -> None:
    state, deep = state_of(tmp_path), dict[str, Any]()
    deep["self"] = deep
    assert code(state.set, deep) == "E_USAGE"
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {"a": nested}
    assert code(state.set, nested) == "E_USAGE"


def test_too_much_is_refused(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    state.set({"old": 1})
    assert code(state.set, {"a": "x" * MAX_BYTES}) == "E_TOOL_LIMIT"
    assert state.get() == {"old": 1}


@pytest.mark.parametrize("scope", ["swarm", "", None, 5, []])
def test_an_unknown_scope_is_refused(tmp_path: Path, scope: Any) -> None:
    assert code(state_of(tmp_path).get, scope=scope) == "E_USAGE"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"value": 5, "revision": 1}', b'{"value": {}}', b"\xff" * 10])
def test_a_file_that_cannot_be_read_is_named_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    state = state_of(tmp_path)
    state.set({"old": 1})
    file = tmp_path / "i1" / "extensions" / "guard.json"
    file.write_bytes(content)
    for call in (state.get, lambda: state.set({"new": 1})):
        with pytest.raises(GoondanError) as caught:
            call()
        assert caught.value.info.code == "E_STATE"
        assert str(file) in caught.value.info.message
    assert file.read_bytes() == content


def test_links_are_not_followed(tmp_path: Path) -> None:
    state, other = state_of(tmp_path), tmp_path / "other"
    other.write_text('{"revision": 1, "value": {"stolen": 1}}')
    state.set({})
    file = tmp_path / "i1" / "extensions" / "guard.json"
    file.unlink()
    file.symlink_to(other)
    assert code(state.get) == "E_STATE"
    file.unlink()
    file.with_suffix(".json.new").symlink_to(other)
    assert code(state.set, {"new": 1}) == "E_STATE"
    assert "stolen" in other.read_text()


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "i1").write_text("no folder")
    with pytest.raises(GoondanError, match=r"guard\.json cannot be written"):
        state_of(tmp_path).set({})


def test_a_lock_that_another_process_keeps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "LOCK_S", 0.02)
    state = state_of(tmp_path)
    state.set({"old": 1})
    with open(tmp_path / "i1" / "extensions" / "guard.json.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(GoondanError, match="locked by another process"):
            state.set({"new": 1})
    assert state.set({"new": 1}) == 2


def test_a_file_is_synced_before_it_takes_the_others_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        seen.append("fsync")
        fsync(descriptor)

    def replaced(old: str, new: str) -> None:
        seen.append("replace")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    state_of(tmp_path).set({"a": 1})
    assert seen == ["fsync", "replace", "fsync"]


def test_the_state_in_memory_reads_by_key_and_by_attribute() -> None:
    state = ExtState()
    assert state.count is None
    state.count = 1
    state["count"] += 1
    assert (state.count, state) == (2, {"count": 2})
    del state.count
    assert "count" not in state
