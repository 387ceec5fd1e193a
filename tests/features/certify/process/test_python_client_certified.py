"""The client for Python keeps every rule that `gdn certify client` knows."""

from __future__ import annotations

from pathlib import Path

import goondan_client.certified
from tests.features.certify.process.certificates import certify
from tests.forked_programs import forked


def test_the_python_client_is_certified() -> None:
    with forked(Path(goondan_client.certified.__file__)) as program:
        certify(program)
