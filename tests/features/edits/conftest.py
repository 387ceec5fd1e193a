"""The fixtures of tests of turns."""

from tests.unit.agentproc.conftest import _own_state_root, make

__all__ = ["_own_state_root", "make"]
