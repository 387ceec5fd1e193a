"""Changesets in the supervisor: its client of the conductor, and the worker that does the git work.

Source: docs/decisions/067.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goondan.features.changesets.wire import FEATURE

if TYPE_CHECKING:
    from goondan.kernel.supervisor.conductor import Client, Conductor

__all__ = ["FEATURE", "make_client"]


def make_client(conductor: Conductor) -> Client:
    """See conductor.clients."""
    from goondan.features.changesets.process.supervised import Changesets

    return Changesets(conductor)
