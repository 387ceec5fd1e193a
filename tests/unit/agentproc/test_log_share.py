"""An instance of an agent that logs without end leaves room for the others of that agent."""

import io
import logging

from goondan.agentproc.start.log import Share
from goondan.schemas.traces.log_admission import SOURCE_BURST, SOURCE_RATE


def test_an_instance_has_its_share_of_the_log_and_the_log_says_what_is_missing() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s main/a %(message)s"))
    share = Share(handler)
    handler.addFilter(share)
    logger = logging.getLogger("tests.log_share")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    for number in range(5_000):
        logger.info("%d %s", number, "x" * 1000)
    logger.removeHandler(handler)
    text = out.getvalue()
    assert SOURCE_BURST * 0.8 < len(text) < SOURCE_BURST + 20 * SOURCE_RATE
    share._admission._sources[""].level = share._admission._groups[""].level = SOURCE_BURST  # as after half a minute
    logger.addHandler(handler)
    logger.info("after")
    logger.removeHandler(handler)
    lines = out.getvalue().splitlines()
    assert lines[-1].endswith("INFO main/a after")
    notes = [line for line in lines if "suppressed: too many at once" in line]
    assert lines[-2] == notes[-1]
    assert " WARNING main/a " in notes[-1]
    assert sum(int(note.split()[4]) for note in notes) + len(lines) - len(notes) - 1 == 5_000
