"""The example of agents that ask each other, run without a key: the lines that it says to try, in order."""

from __future__ import annotations

import re

from tests.kernel_fixture import ROOT, sandbox

NEWSROOM = ROOT / "examples" / "newsroom"
#: The lines that the file says to try.
TRIED = re.findall(
    r"^#   ([@/].*?)(?: {3,}\S.*)?$", (NEWSROOM / "goondan.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE
)


def test_every_line_that_the_newsroom_says_to_try_does_what_it_says() -> None:
    assert len(TRIED) == 7
    told = "\n".join([*TRIED, "/agents__list", "@archivist goodbye"])
    with sandbox(extra_env={"GOONDAN_TRUST": ""}) as kernel:
        result = kernel.gdn("run", "--bundle", str(NEWSROOM), "--json", input=told + "\n")
    assert (result.status, result.err) == (0, "")
    asked, chain, later, handed, spawned, catalog, circle, listed, last = [
        answer["response"] for answer in result.json["answers"][:9]
    ]
    assert "embedded console" in asked, "the researcher's own answer"
    assert "/instances/archivist/default/workspace" in chain, "three agents in a row"
    assert '"async": true' in later
    assert "handoff:" in handed
    assert '"spawned": true' in spawned
    assert '"callableCount": 3' in catalog
    assert "E_AGENT_CYCLE" in circle
    assert '"instanceKey": "sports"' in listed
    assert "embedded console" in last
