"""The bundled tool `self-restart`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from goondan.agentproc.calls.swarm import Handler
from goondan.features.restart.base.self_restart import self_restart

#: The handlers of the tools by the tools' names, each by its export.
HANDLERS: Final[Mapping[str, Mapping[str, Handler]]] = {"self-restart": self_restart.handlers}
