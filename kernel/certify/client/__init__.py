"""The certificate of a client: it is started beside a kernel that is played here.

Source: schemas/PROTOCOL.md; docs/certify.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernel.certify.client.playing import PATIENCE_S, Stage
from kernel.certify.client.rules import RULES
from kernel.certify.client.scenarios import PROBE, scenarios
from kernel.certify.playing import chosen, play_all, probe
from kernel.certify.report import Report, report


def certify(
    argv: Sequence[str], env: Mapping[str, str], words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """Play the scenarios that have one of `words` (without: all). After `patience` seconds a wait is in vain.

    Raises GoondanError E_CERTIFY when the program cannot be started, does not connect, or does not end; E_USAGE when no
    scenario has the words.
    """
    picked = chosen(scenarios(), words)
    probe(argv, lambda stopping: Stage(argv, env, PROBE, stopping, patience))
    played = play_all(picked, lambda scenario, stopping: Stage(argv, env, scenario, stopping, patience))
    return report("client", argv, played, RULES)
