"""Both certificates, each by one call.

Source: docs/certify.md.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kernel.certify.playing import PATIENCE_S, Player, play_all, probe
from kernel.certify.report import Report, report
from kernel.certify.scenarios import chosen
from kernel.certify.trace import Scenario


def certify_client(
    argv: Sequence[str], env: Mapping[str, str], words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """Play the scenarios that have one of `words` (without: all). After `patience` seconds a wait is in vain.

    Raises GoondanError E_CERTIFY when the program cannot be started, does not connect, or does not end; E_USAGE when no
    scenario has the words.
    """
    from kernel.certify.client.playing import Stage
    from kernel.certify.client.scenarios import scenarios

    def player(scenario: Scenario, stopping: threading.Event) -> Player:
        return Stage(argv, env, scenario, stopping, patience)

    (first, *rest), rules = scenarios()
    picked = chosen(rest, words)
    probe(argv, lambda stopping: player(first, stopping))
    return report("client", argv, play_all(picked, player), rules)
