"""A workdir that is the bundle's own repository: what a tool writes there does not run outside of jails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.containment.bundle_workdir import PLANTED, scene
from tests.containment.ordinary_user import told_as_user


def check(found: dict[str, Any]) -> None:
    assert {name: how for name, how in found["refused"].items() if how == "done"} == {}
    assert found["kept"] == ["refused", "refused"]  # the second in a new jail: the first one's guard was gone
    # The last one is the document that an editor replaced while tools were there.
    written = sorted([*PLANTED, "a/bots/linked.yaml", "a/bots/goondan.yaml"])
    assert (found["during"], found["after"]) == (written, written)
    assert not {".git", ".venv", ".goondan"} & set(found["left"])


async def test_nothing_gets_out_of_it(short_tmp: Path) -> None:
    check(await scene(short_tmp))


@pytest.mark.skipif(os.geteuid() != 0, reason="the test above was it")
def test_nothing_gets_out_of_it_as_an_ordinary_user(short_tmp: Path) -> None:
    program = "import runpy; runpy.run_module('tests.containment.bundle_workdir', run_name='__main__')"
    check(told_as_user(program, short_tmp))
