"""A jail has nothing of the kernel but toolhost/inside: what takes secrets out of texts stands there once more."""

from __future__ import annotations

import schemas.redaction
import toolhost.inside.redaction
from tests.kernel_fixture import ROOT


def test_both_are_the_same_file() -> None:
    ours, in_jails = (ROOT / name / "redaction.py" for name in ("schemas", "toolhost/inside"))
    assert ours.read_bytes() == in_jails.read_bytes(), "copy schemas/redaction.py to toolhost/inside/redaction.py"
    assert schemas.redaction.__doc__ == toolhost.inside.redaction.__doc__
