"""The fixture of the twists."""

from tests.contract.twists.conftest import stage

__all__ = ["stage"]
