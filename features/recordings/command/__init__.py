"""The commands of recordings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from goondan.features.recordings.command.record import record
from goondan.features.recordings.command.replay import replay

COMMANDS: Final[Mapping[str, click.Command]] = {"record": record, "replay": replay}
