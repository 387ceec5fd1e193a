"""The pure parts of the tool for skills, and what it says when no command could be started."""

from __future__ import annotations

import posix
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.skills.jail.skills import skills


@pytest.mark.requirement("SKILL-13")
def test_the_parameters_and_their_defaults() -> None:
    manifest = yaml.safe_load((Path(skills.__file__).parent / "brought.yaml").read_text())
    parameters = manifest["spec"]["exports"][0]["parameters"]
    assert parameters["required"] == ["name", "command"]
    assert {name: about["type"] for name, about in parameters["properties"].items()} == {
        "name": "string", "command": "string", "args": "array", "timeout": "number",
    }  # fmt: skip
    assert parameters["properties"]["args"]["default"] == []
    assert parameters["properties"]["timeout"]["default"] == 60_000
    assert [skills.timeout(given) for given in ({}, {"timeout": 0}, {"timeout": -1}, {"timeout": 5.5})] == [
        60_000, 60_000, 60_000, 5.5,
    ]  # fmt: skip


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"))))
def test_each_argument_is_one_word(words: list[str]) -> None:
    assert shlex.split(" ".join(map(skills.quoted, words))) == words


@pytest.mark.requirement("SKILL-15")
@pytest.mark.parametrize(("place", "code"), [("nothing", "ENOENT"), ("file", "ENOTDIR")])
def test_a_command_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(posix.environ, b"CALL_FOLDER", str(tmp_path / place).encode())
    ctx: Any = SimpleNamespace(workdir=str(tmp_path), output_limit=1 << 20)
    with pytest.raises(skills.NotStarted, match=f"^Failed to run command: {code}: ") as caught:
        skills.run(ctx, {"name": "deploy", "command": "true"})
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("input", "message"),
    [
        ({"name": "", "command": "x"}, "'name' must be a non-empty string"),
        ({"name": "a", "command": "a\0b"}, "'command' must not contain null bytes"),
        ({"name": "a", "command": "x", "args": ["\0"]}, "'args' must not contain null bytes"),
        ({"name": "a", "command": "x", "timeout": "1"}, "'timeout' must be a valid number"),
    ],
)
def test_bad_arguments(input: dict[str, Any], message: str) -> None:
    ctx: Any = SimpleNamespace(workdir="/", output_limit=1 << 20)
    with pytest.raises(ValueError, match=message):
        skills.run(ctx, input)
