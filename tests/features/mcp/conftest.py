"""The fixtures of tests about bundles and agents."""

from tests.unit.agentproc.conftest import _own_state_root, make
from tests.unit.kernel.bundle.conftest import bundled, look, package

__all__ = ["_own_state_root", "bundled", "look", "make", "package"]
