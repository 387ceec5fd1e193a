"""What a command brings along when a bundle is judged.

A module of its own: a supervisor reads it before it starts the inspection of the bundle's tools, beside which all else
is imported (kernel/bundle/loader.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.grants.powers import Power


class Asking(Struct, frozen=True, kw_only=True):
    """What a command knows about the user's agreement."""

    #: The command was given --trust.
    everything: bool = False
    #: Powers that a person has just agreed to on its screen.
    agreed: Sequence[Power] = ()
    #: See goondan.kernel.grants.powers.Consent.
    running: Sequence[Power] | None = None


def read_agreed(fd: int) -> list[Power]:
    """The powers that a command passes on a descriptor, which is closed. Raises GoondanError E_USAGE."""
    from goondan.kernel.grants.powers import Power

    try:
        with open(fd, "rb") as source:
            return msgspec.json.decode(source.read(), type=list[Power])
    except (OSError, msgspec.DecodeError) as error:
        raise fail("E_USAGE", f"the powers that were agreed to cannot be read: {error}") from None
