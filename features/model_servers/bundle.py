"""Model servers of this machine, for what reads a bundle and for `gdn`: the hooks of kernel/bundle/rules/kinds.py.

Source: docs/design/commands.md section 10.
"""

from __future__ import annotations

from collections.abc import Callable

from goondan.features.model_servers import api
from goondan.kernel.bundle.rules.kinds import LocalModels


class Found(LocalModels):
    """See kernel/bundle/rules/kinds.py. What talks to a person is imported when somebody is there."""

    def chosen(self, state_root: str, bundle: str) -> str | None:
        """The server that a person has chosen."""
        return api.endpoint(state_root, bundle)

    def offer(self, state_root: str, bundle: str) -> None:
        """Offer one that runs here."""
        from goondan.features.model_servers.api.offering import offer

        offer(state_root, bundle)

    def before_start(self, bundle: str, state_dir: str, policy: str | None) -> Callable[[str | None], str | None]:
        """Offer one if the swarm would have no model, and ask its model's server meanwhile."""
        from goondan.features.model_servers.api.offering import ModelLook, offer_before_start

        offer_before_start(bundle, state_dir, policy)
        return ModelLook(bundle, state_dir, policy).line


LOCAL_MODELS = Found()
