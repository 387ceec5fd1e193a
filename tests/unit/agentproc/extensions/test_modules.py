"""What an extension may import from its folder, which tools may be able to write to."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest

from goondan.agentproc.extensions import loaded
from goondan.schemas.bundle.launch import ExtensionSpec

NUMBERS = count()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before, path = set(sys.modules), list(sys.meta_path)
    yield
    loaded._folders.clear()
    sys.meta_path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def entry(folder: Path, code: str, recorded: list[str] | None = None) -> ModuleType:
    """Import an entry of that code; `recorded` are the other modules that the kernel knows, None: it recorded none."""
    path = folder / "main.py"
    if not path.exists():
        path.write_text(code)
    known = None
    if recorded is not None:
        known = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("main.py", *recorded)
            if (folder / name).exists()
        }
    spec = ExtensionSpec(name="x", entry=str(folder / "main.py"), resource={}, modules=known)
    return loaded.import_entry(spec, f"goondan_test_extension_{next(NUMBERS)}")


def plant_compiled(source: Path, code: str) -> None:
    """A compiled form that the import system would take for the source's: same time, same size."""
    was, stat = source.read_text(), source.stat()
    source.write_text(code.ljust(len(was)))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    py_compile.compile(str(source), doraise=True)
    source.write_text(was)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("recorded", [None, ["gdn_beside.py"]])
def test_a_compiled_form_is_never_taken(tmp_path: Path, recorded: list[str] | None) -> None:
    beside = tmp_path / "gdn_beside.py"
    beside.write_text("WHAT = 'the source' # long enough")
    plant_compiled(beside, "WHAT = 'planted'")
    code = "import gdn_beside\nWHAT = gdn_beside.WHAT"
    (tmp_path / "main.py").write_text(code)
    plant_compiled(tmp_path / "main.py", "WHAT = 'planted'")
    assert entry(tmp_path, code, recorded).WHAT == "the source"
    usual = [
        subprocess.run([sys.executable, "-c", f"import {name} as m; print(m.WHAT)"], capture_output=True, cwd=tmp_path)
        for name in ("gdn_beside", "main")
    ]  # what the import system itself would do
    assert [done.stdout for done in usual] == [b"planted\n"] * 2


def test_what_came_later_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "gdn_pkg" / "inner").mkdir(parents=True)
    (tmp_path / "gdn_pkg" / "__init__.py").write_text("")
    (tmp_path / "gdn_pkg" / "inner" / "known.py").write_text("X = 1")
    code = "import gdn_pkg.inner.known\ndef later(name): __import__(name)"
    made = entry(tmp_path, code, ["gdn_pkg/__init__.py", "gdn_pkg/inner/known.py"])
    (tmp_path / "gdn_late.py").write_text("raise SystemError")
    (tmp_path / "gdn_pkg" / "late.py").write_text("raise SystemError")
    (tmp_path / "gdn_pkg" / "inner" / "late.py").write_text("raise SystemError")
    (tmp_path / "gdn_pkg" / "__init__.cpython-311-x86_64-linux-gnu.so").write_text("")
    for name in ("gdn_late", "gdn_pkg.late", "gdn_pkg.inner.late"):
        with pytest.raises(ModuleNotFoundError, match=name):
            made.later(name)


def test_what_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gdn_later.py").write_text("X = 1")
    made = entry(tmp_path, "def later(): import gdn_later", ["gdn_later.py"])
    (tmp_path / "gdn_later.py").write_text("raise SystemError")
    with pytest.raises(ImportError, match=r"gdn_later\.py has changed since the kernel was started"):
        made.later()


def test_a_library_is_compared_too(tmp_path: Path) -> None:
    (tmp_path / "gdn_native.so").write_text("one")
    made = entry(tmp_path, "def later(): import gdn_native", ["gdn_native.so"])
    (tmp_path / "gdn_native.so").write_text("two")
    with pytest.raises(ImportError, match="has changed"):
        made.later()


def test_what_is_installed_goes_first(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemError")
    assert entry(tmp_path, "import json", ["json.py"]).json.dumps(1) == "1"
    spec = importlib.util.find_spec("colorsys")
    assert spec is not None and not str(spec.origin).startswith(str(tmp_path))


def test_folders_in_each_other_do_not_hide_each_other(tmp_path: Path) -> None:
    inner = tmp_path / "ext"
    (inner / "gdn_both").mkdir(parents=True)
    (inner / "gdn_both" / "part.py").write_text("X = 2")
    entry(tmp_path, "", [])
    assert entry(inner, "import gdn_both.part as part", ["gdn_both/part.py"]).part.X == 2
