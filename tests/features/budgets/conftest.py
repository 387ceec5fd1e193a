"""The fixtures of tests about bundles, turns and twists."""

from tests.contract.twists.conftest import stage
from tests.unit.agentproc.conftest import make
from tests.unit.kernel.bundle.conftest import bundled, look, package

__all__ = ["bundled", "look", "make", "package", "stage"]
