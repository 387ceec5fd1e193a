"""What commands say of model servers: one line about the server of a swarm that starts, and the question whether a
server of this machine is to be used.

Servers of this machine are looked for only where a person is at the terminal, and used only after a yes.

Source: docs/design/commands.md section 10.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Final

from goondan.features.model_servers import api
from goondan.features.model_servers.api import Asking, FoundServer, find
from goondan.features.model_servers.api.listing import line_of
from goondan.kernel import lock, paths
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.rules.models import model_text, names_a_model
from goondan.kernel.cli.output import can_ask, confirmed, printable, write
from goondan.schemas.wire.errors import GoondanError

#: How long the server may take for its answer (seconds); it has the time in which the swarm starts.
ASK_S: Final = 2.0
#: How long the first prompt waits for what was learned (seconds).
WAIT_S: Final = 0.3


class ModelLook:
    """Asks the entry agent's model server while the swarm starts. It fails at nothing: without an answer there is no
    line. A bundle to which nobody has agreed yet is not looked at further.
    """

    def __init__(self, bundle: str, state_dir: str, policy: str | None) -> None:
        self._place = bundle, state_dir, policy
        self._line: str | None = None
        self._text: str | None = None
        self._thread = threading.Thread(target=self._run, name="model look", daemon=True)
        self._thread.start()

    def line(self, model: str | None) -> str | None:
        """What was learned of this model, as the kernel names it; None when nothing was."""
        self._thread.join(WAIT_S)
        return self._line if model is not None and self._text == model else None

    def _run(self) -> None:
        with suppress(Exception):  # the start says what is wrong; a thread's exception would be shown with a traceback
            self._look()

    def _look(self) -> None:
        inspected = _inspect(*self._place)
        entry = inspected.checked.agents.get(inspected.checked.entry_agent or "")
        model = entry.model if entry is not None and inspected.judgement.trusted else None
        learned = None if model is None else Asking(model, ASK_S).wait(ASK_S)
        if model is not None and learned is not None:
            self._text = model_text(model)
            self._line = f"its server: {line_of(learned, model.api_key is not None)}"


def offer_before_start(bundle: str, state_dir: str, policy: str | None) -> None:
    """Before a swarm starts: offer a server of this machine, if agents would get the console for want of a model, and
    the person has not declined it before.
    """
    if not can_ask():
        return
    root = paths.root_of(state_dir)
    try:
        if lock.is_held(state_dir):
            return
        found = _offered(root, bundle, set(api.read(root, bundle).declined))
        if found and any(
            agent.model is not None and agent.model.chosen_by == ""
            for agent in _inspect(bundle, state_dir, policy).checked.agents.values()
        ):
            _ask(root, bundle, found[0])
    except GoondanError:
        return  # the start says it


def offer(root: str, bundle: str) -> None:
    """Offer a server of this machine, also one that was declined before. Raises GoondanError E_STATE."""
    if can_ask() and (found := _offered(root, bundle, set())):
        _ask(root, bundle, found[0])


def _offered(root: str, bundle: str, declined: set[str]) -> list[FoundServer]:
    """The servers that can be offered; none where a model is named or chosen already."""
    if names_a_model(os.environ) or api.read(root, bundle).endpoint is not None:
        return []
    return [server for server in find() if server.endpoint not in declined]


def _ask(root: str, bundle: str, server: FoundServer) -> None:
    others = f" and {server.models - 1} more" if server.models > 1 else ""
    asked = (
        f"A model server answers on this machine: {server.endpoint} (the usual port of {server.usual}), with "
        f"{printable(server.model)}{others}."
    )
    write(asked, stream=sys.stderr)
    if confirmed("Shall agents whose bundle leaves the model to the environment use it? [y/N]"):
        api.choose(root, bundle, server.endpoint)
        write("It is used when a swarm starts; gdn doctor --forget-server takes that back.", stream=sys.stderr)
    else:
        api.decline(root, bundle, server.endpoint)


def _inspect(bundle: str, state_dir: str, policy: str | None) -> Inspected:
    return inspect_bundle(bundle, state_dir=state_dir, handlers=False, policy=policy)
