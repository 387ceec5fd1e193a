"""Both certificates, each by one call.

Source: docs/certify.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Final

from goondan.kernel.certify.playing import PATIENCE_S, Player, play_all, probe
from goondan.kernel.certify.report import Report, report
from goondan.kernel.certify.scenarios import chosen, read
from goondan.kernel.certify.trace import Rule, Scenario

#: The tools that workers are certified with, by their language.
SAMPLES: Final = {"python": "tool.py", "javascript": "tool.mjs"}


def certify_client(
    argv: Sequence[str], env: Mapping[str, str], words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """Play the scenarios that have one of `words` (without: all). After `patience` seconds a wait is in vain.

    Raises GoondanError E_CERTIFY when the program cannot be started, does not connect, or does not end; E_USAGE when no
    scenario has the words.
    """
    from goondan.kernel.certify.client.playing import Stage
    from goondan.kernel.certify.client.scenarios import scenarios

    def player(scenario: Scenario, stopping: threading.Event) -> Player:
        return Stage(argv, env, scenario, stopping, patience)

    return _certified("client", argv, words, scenarios(), player)


def certify_worker(
    argv: Sequence[str], env: Mapping[str, str], entry: str, words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """The same for a worker. `entry`: a language of SAMPLES, or the path of a tool with the same exports."""
    import yaml

    from goondan.kernel.certify.worker.playing import Host
    from goondan.kernel.certify.worker.rules import JUDGES

    folder = files("goondan.kernel.certify.worker")
    path = str(folder.joinpath("samples", SAMPLES[entry])) if entry in SAMPLES else os.path.abspath(entry)

    def player(scenario: Scenario, stopping: threading.Event) -> Player:
        return Host(argv, env, path, scenario, stopping, patience)

    written = read(yaml.safe_load(folder.joinpath("scenarios.yaml").read_bytes()), JUDGES)
    return _certified("worker", argv, words, written, player)


def _certified(
    kind: str,
    argv: Sequence[str],
    words: Sequence[str],
    written: tuple[list[Scenario], list[Rule]],
    player: Callable[[Scenario, threading.Event], Player],
) -> Report:
    (first, *rest), rules = written
    picked = chosen(rest, words)
    probe(argv, lambda stopping: player(first, stopping))
    return report(kind, argv, play_all(picked, player), rules)
