"""The fixtures of the twists and of turns."""

from tests.contract.twists.conftest import stage
from tests.unit.agentproc.conftest import _own_state_root, make

__all__ = ["_own_state_root", "make", "stage"]
