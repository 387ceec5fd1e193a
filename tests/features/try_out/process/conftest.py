"""The fixtures of tests that start programs."""

from tests.process.conftest import kernel
from tests.process.test_cli_tool import home

__all__ = ["home", "kernel"]
