"""Puts together a new plan that comes to a running broker in pieces: it can be larger than a frame. Pure."""

from __future__ import annotations

import msgspec

from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.control import Revise


class Pieces:
    """The pieces of one plan. A first piece begins a new plan."""

    def __init__(self) -> None:
        self._have: list[bytes] = []

    def take(self, message: Revise) -> KernelPlan | None:
        """The plan when its last piece is here, else None. Raises msgspec.DecodeError and its kin for a bad plan."""
        if message.piece == 0:
            self._have = []
        if message.piece != len(self._have):
            return None  # of a plan whose beginning another broker got: the supervisor asks again
        self._have.append(message.data)
        if len(self._have) < message.pieces:
            return None
        data, self._have = b"".join(self._have), []
        return msgspec.msgpack.decode(data, type=KernelPlan)
