"""Compiled forms are written where they are missing or old, and nowhere else."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

from goondan.toolhost.lookup.this_host import compile_sources, is_current

TAG = sys.implementation.cache_tag


def test_missing_and_outdated_forms_are_written(tmp_path: Path) -> None:
    source = tmp_path / "sub" / "m.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    compiled = source.parent / "__pycache__" / f"m.{TAG}.pyc"
    compile_sources([str(tmp_path)])
    assert is_current(str(compiled), str(source))
    first = compiled.stat().st_mtime_ns
    compile_sources([str(tmp_path)])
    assert compiled.stat().st_mtime_ns == first
    source.write_text("x = 12\n")
    assert not is_current(str(compiled), str(source))
    compile_sources([str(tmp_path)])
    assert is_current(str(compiled), str(source))
    compiled.write_bytes(b"\0" * 16)
    assert not is_current(str(compiled), str(source))


def test_what_cannot_be_compiled_or_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "notes.txt").write_text("def (:\n")
    compile_sources([str(tmp_path), "/nonexistent"])
    assert list(tmp_path.rglob("*.pyc")) == []


def test_forms_bound_by_hash_are_trusted(tmp_path: Path) -> None:
    source = tmp_path / "m.py"
    source.write_text("x = 1\n")
    compiled = str(tmp_path / "m.pyc")
    py_compile.compile(str(source), cfile=compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text("x = 12345\n")
    assert is_current(compiled, str(source))
