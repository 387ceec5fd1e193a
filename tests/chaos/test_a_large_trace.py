"""A trace of 50,000 spans on its way to a collector; a sample of them in `make test`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.features.telemetry.test_exporter import Rig, send_large_trace

pytestmark = pytest.mark.feature("telemetry")


def test_a_large_trace_is_sent_in_bounded_batches_with_flat_memory(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    send_large_trace(rig, 50_000 if "GOONDAN_CHAOS_KILLS" in os.environ else 8_000)
    rig.turns.close()
