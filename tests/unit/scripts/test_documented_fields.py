"""The check that fields of structs are documented finds each that is not, and believes each way to do it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.documented_fields import problems


def found(root: Path, source: str, other: str = "") -> list[str]:
    for package in ("schemas", "kernel", "agentproc", "toolhost", "features"):
        (root / package).mkdir()
    (root / "kernel" / "base.py").write_text(other)
    (root / "schemas" / "x.py").write_text(source)
    return [line.partition(": ")[2] for line in problems(root)]


@pytest.mark.parametrize(
    "field",
    [
        "#: What it is.\n    a: int",
        "#: What it is,\n    #: in two lines.\n    a: int = 0",
        "#: What it is.\n    # A remark for the next engineer.\n    a: int",
        'a: Annotated[int, Meta(description="What it is.")]',
        'a: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="What it is.")] = None',
        'a: Literal["this"]',
        "a: ClassVar[int] = 0",
        "a: _Described",
        "a: Other",
        "b = 0",
    ],
)
def test_a_field_that_is_documented(tmp_path: Path, field: str) -> None:
    head = '_Described = Annotated[int, Meta(description="x")]\nclass Other(Struct):\n    """It says it."""\n'
    assert found(tmp_path, f"{head}class S(Struct):\n    {field}\n") == []


@pytest.mark.parametrize(
    "field",
    [
        "a: int",
        "# What it is.\n    a: int",
        "#: Of another.\n    b = 0\n    a: int",
        'a: Literal["x", "y"]',
        "a: _Bare",
    ],
)
def test_a_field_that_is_not(tmp_path: Path, field: str) -> None:
    head = "_Bare = Annotated[int, Meta(ge=0)]\n"
    assert found(tmp_path, f"{head}class S(msgspec.Struct, frozen=True):\n    {field}\n") == ["S.a has no comment `#:`"]


def test_a_struct_is_known_by_its_bases_in_other_modules(tmp_path: Path) -> None:
    source = "class S(Middle):\n    a: int\nclass T(Plain):\n    a: int\n"
    other = "class _Strict(Struct):\n    pass\nclass Middle(_Strict, tag=True):\n    pass\nclass Plain:\n    a: int\n"
    assert found(tmp_path, source, other) == ["S.a has no comment `#:`"]
