"""A jail does not show `schemas`: what takes secrets out of texts stands in toolhost/base/goondan_base as a link."""

from __future__ import annotations

from goondan.toolhost.lookup.jail_request import _REDACTION
from tests.kernel_fixture import ROOT


def test_both_are_the_same_file() -> None:
    link = ROOT / "toolhost/base/goondan_base/redaction.py"
    assert link.is_symlink()
    assert str(link.resolve()) == _REDACTION  # which bundled tools see
    assert not link.readlink().is_absolute()
