"""The client for Node.js keeps every rule that `gdn certify client` knows."""

from __future__ import annotations

from tests.features.certify.process.certificates import certify
from tests.polyglot_clients import command_of


def test_the_node_client_is_certified() -> None:
    certify(command_of("node")[0])
