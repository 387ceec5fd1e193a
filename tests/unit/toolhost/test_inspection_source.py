"""What the syntax tree of a module says about its handlers. Modules in jails are tested in tests/process."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.schemas.bundle.launch import ExportSpec, ToolSpec
from goondan.schemas.worker.inspection import ModuleReport
from goondan.toolhost.inspection import MAX_SOURCE_BYTES, read_source

FOUND = {
    "a literal": ("handlers = {'a': f, 'b': g}", ["a", "b"]),
    "annotated": ("handlers: dict[str, object] = {'a': f}", ["a"]),
    "by keyword": ("handlers = dict(a=f)", ["a"]),
    "added to": ("handlers = {}\nhandlers['a'] = f\n", ["a"]),
    "the last one counts": ("handlers = {'a': f}\nhandlers = {'b': f}", ["b"]),
    "two targets": ("x = handlers = {'a': f}", ["a"]),
    "empty": ("handlers = {}", []),
    "lambda": ("handlers = {'a': lambda ctx, input: 1}", ["a"]),
    "a call": ("handlers = build()", None),
    "imported": ("from .other import handlers", None),
    "star": ("from .other import *", None),
    "renamed": ("from .other import x as handlers", None),
    "computed keys": ("handlers = {name: f}", None),
    "unpacked": ("handlers = {**more}", None),
    "unpacked by keyword": ("handlers = dict(**more)", None),
    "in a condition": ("if x:\n    handlers = {'a': f}\n", None),
    "in a loop": ("handlers = {}\nfor n in names:\n    handlers[n] = f\n", None),
    "by a decorator": ("handlers = {}\ndef tool(f):\n    handlers[f.__name__] = f\n    return f\n", None),
    "updated": ("handlers = {}\nhandlers.update(x)\n", None),
}


def finding(tmp_path: Path, source: str | bytes) -> ModuleReport:
    path = tmp_path / "tool.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return read_source(ToolSpec(name="t", entry=str(path), root=str(tmp_path), exports=[ExportSpec(name="a")]))


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_exports_as_far_as_the_source_tells(tmp_path: Path, case: tuple[str, list[str] | None]) -> None:
    source, exports = case
    assert finding(tmp_path, source) == ModuleReport(name="t", method="source", exports=exports)


REFUSED = {
    "no handlers": ("x = 1", "handlers"),
    "only read in a function": ("def f():\n    return 1\n", "handlers"),
    "a list": ("handlers = [f]", "handlers"),
    "a text": ("handlers = 'a'", "handlers"),
    "a function": ("def handlers(): pass", "handlers"),
    "a class": ("class handlers: pass", "handlers"),
    "a value that cannot be called": ("handlers = {'a': 1}", "handlers"),
    "a key that is no text": ("handlers = {1: f}", "handlers"),
    "bad syntax": ("def f(:", "import"),
    "a zero byte": ("x = 1\0", "import"),
    "bad encoding": (b"# coding: utf-8\nx = '\xff'\n", "import"),
    "too deep": ("(" * 5000 + ")" * 5000, "import"),
    "too large": ("#" * (MAX_SOURCE_BYTES + 1), "import"),
}


@pytest.mark.requirement("HANDLER-03")
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_modules_that_cannot_serve(tmp_path: Path, case: tuple[str | bytes, str]) -> None:
    source, reason = case
    found = finding(tmp_path, source)
    assert found.exports is None
    assert found.error is not None
    assert found.error.reason == reason
    assert found.error.message


def test_nothing_of_a_module_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    assert finding(tmp_path, f"open({str(mark)!r}, 'w')\nhandlers = {{'a': len}}\n").exports == ["a"]
    assert not mark.exists()


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    gone = ToolSpec(name="t", entry=str(tmp_path / "no.py"), root=str(tmp_path), exports=[])
    found = read_source(gone)
    assert found.error is not None
    assert found.error.reason == "import"
