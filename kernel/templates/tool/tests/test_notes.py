"""The handlers by themselves, without a jail: `python3 -m unittest discover -s tests` (pytest finds them as well)."""

import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from notes import handlers  # found through the line above


class NotesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.ctx = SimpleNamespace(workdir=folder.name)

    def call(self, export, **arguments):
        return handlers[export](self.ctx, arguments)

    def test_notes_are_kept_in_their_order(self):
        self.assertEqual(self.call("list"), {"notes": []})
        self.assertEqual(self.call("add", text="water the plants"), {"count": 1})
        self.assertEqual(self.call("add", text="call\nhome"), {"count": 2})
        self.assertEqual(self.call("list"), {"notes": ["water the plants", "call home"]})

    def test_a_note_of_nothing_is_refused(self):
        with self.assertRaises(ValueError):
            self.call("add", text="  ")


if __name__ == "__main__":
    unittest.main()
