"""The extension's functions by themselves: `python3 -m unittest discover -s tests` (pytest finds them as well)."""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "extensions"))

from EXTENSION_MODULE import forbidden  # found through the line above


class ExtensionTest(unittest.TestCase):
    def test_a_forbidden_word_is_found_wherever_it_stands(self):
        self.assertEqual(forbidden({"command": "sudo reboot now"}, ["rm", "reboot"]), "reboot")
        self.assertIsNone(forbidden({"command": "warm", "times": 3}, ["rm"]))


if __name__ == "__main__":
    unittest.main()
