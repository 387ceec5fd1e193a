"""The handlers by themselves, without a jail: `python3 -m unittest discover -s tests` (pytest finds them as well)."""

import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from TOOL_MODULE import handlers  # found through the line above


class ToolTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.ctx = SimpleNamespace(workdir=folder.name)

    def test_words_are_counted(self):
        self.assertEqual(handlers["run"](self.ctx, {"text": "three short words"}), {"words": 3})
        self.assertEqual(handlers["run"](self.ctx, {"text": ""}), {"words": 0})


if __name__ == "__main__":
    unittest.main()
