"""What the README shows is what happens."""

from __future__ import annotations

import json
import re

from tests.kernel_fixture import ROOT, sandbox

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The one code block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_tool_in_one_file_works_as_shown() -> None:
    (arguments,) = re.findall(r"^\$ gdn call words__count '(.*)'$", README, flags=re.MULTILINE)
    with sandbox(block("yaml")) as made:
        (made.home / "tools").mkdir()
        (made.home / "tools/words.py").write_text(block("python"))
        assert made.gdn("validate").status == 0
        result = made.gdn("call", "words__count", arguments)
        assert (result.status, result.err) == (0, "")
        assert json.loads(result.out)["output"] == {"words": 3}
