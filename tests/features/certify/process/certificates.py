"""Whether a client's program keeps the rules of the certificate."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence

from goondan.features.certify.command import certify_client
from goondan.features.certify.command.client import scenarios
from tests.kernel_fixture import ROOT


def certify(program: Sequence[str], without: Collection[str] = ()) -> None:
    """The program keeps every rule that `gdn certify client` knows, and offers all but some of the sections `without`.

    Each client's own tests replay the recorded sequences, frame by frame. So the real socket sees those in `make chaos`
    alone, and the scenarios that are not recorded in each run.
    """
    recorded = json.loads((ROOT / "schemas" / "vectors" / "sequences.json").read_text())["sequences"]
    known = set() if "GOONDAN_CHAOS_KILLS" in os.environ else {one["name"] for one in recorded}
    report = certify_client(program, os.environ, [one.name for one in scenarios()[0] if one.name not in known])
    broken = [(row.rule, row.seen) for row in report.rules if row.outcome == "broken"]
    assert not broken, broken
    assert {row.section for row in report.rules if row.outcome == "not offered"} <= {*without}
    assert report.certified
    assert len(report.rules) > 60
