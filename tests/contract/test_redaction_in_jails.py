"""A jail does not show `schemas`: what takes secrets out of texts stands in toolhost/base/goondan_base once more."""

from __future__ import annotations

import schemas.redaction
import toolhost.base.goondan_base.redaction
from tests.kernel_fixture import ROOT


def test_both_are_the_same_file() -> None:
    ours, in_jails = (ROOT / name / "redaction.py" for name in ("schemas", "toolhost/base/goondan_base"))
    assert ours.read_bytes() == in_jails.read_bytes(), f"copy {ours} to {in_jails}"
    assert schemas.redaction.__doc__ == toolhost.base.goondan_base.redaction.__doc__
