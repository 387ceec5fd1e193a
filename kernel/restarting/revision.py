"""A bundle that was read again beside a kernel that runs: what may take the place of its revision, or why not."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from goondan.kernel.trust.powers import Power
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload


class Revision(Struct, frozen=True, tag="revision", kw_only=True):
    """A bundle that may run."""

    #: Names its content.
    revision: str
    #: msgpack of its KernelPlan.
    plan: bytes
    #: What it asks for beyond its jails.
    powers: list[Power]
    #: See goondan.kernel.bundle.loader.OpenedBundle.
    files: list[str] = []
    #: See goondan.kernel.bundle.loader.OpenedBundle.
    trees: list[str] = []


class RevisionRefused(Struct, frozen=True, tag="refused", kw_only=True):
    """A bundle that may not run."""

    #: Why it may not run.
    error: ErrorPayload
    #: Every problem, as `gdn validate --json` has it.
    problems: list[Any] = []
    #: How many problems more there are.
    dropped: int = 0

    def exception(self) -> GoondanError:
        """As a program raises it."""
        return GoondanError(self.error)


Found = Revision | RevisionRefused

_decoder: msgspec.msgpack.Decoder[Found] = msgspec.msgpack.Decoder(Found)


def encode(found: Found) -> bytes:
    """For the program that asked."""
    return msgspec.msgpack.encode(found)


def decode(data: bytes) -> Found:
    """Raises msgspec.DecodeError and its kin."""
    return _decoder.decode(data)
