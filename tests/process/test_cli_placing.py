"""What commands write for a person lands beneath the folder that was named, or nowhere: no link leads out of it."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from goondan.kernel.cli import execute
from goondan.kernel.cli.commands.bundles import template_files
from goondan.kernel.cli.placing import Placing
from goondan.schemas.wire.errors import GoondanError
from tests.kernel_fixture import BUNDLE


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `gdn init` trusts here is kept here, and not in the state of whoever runs the tests."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path_factory.mktemp("state")))


def everything(folder: Path) -> dict[str, str]:
    """All below a folder: path -> content, target of a link, or "/" for a directory."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else "/"
        if path.is_dir()
        else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder as a clone can be: `tools` and `tests` lead to a folder of the person's."""
    (tmp_path / "home").mkdir()
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("tools", "tests"):
        (folder / name).symlink_to(tmp_path / "home")
    return folder


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("linked", ["tools", "tests"])
def test_init_writes_through_no_linked_subfolder(
    trap: Path, linked: str, force: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (trap / ("tests" if linked == "tools" else "tools")).unlink()
    before = everything(trap.parent)
    assert execute(["init", str(trap), "--template", "tool", "--json", *(["--force"] if force else [])]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], f"{trap}/{linked} is a link" in error["message"]) == ("E_INIT", True)
    assert everything(trap.parent) == before


@pytest.mark.feature("try_out")
@pytest.mark.parametrize("bundle", [None, BUNDLE])
def test_tool_new_writes_through_no_linked_subfolder(
    trap: Path, bundle: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if bundle is not None:
        (trap / "goondan.yaml").write_text(bundle)
    before = everything(trap.parent)
    assert execute(["tool", "new", "fine", "--dir", str(trap), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_INIT"
    assert everything(trap.parent) == before


def test_schema_export_replaces_links_and_follows_none(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "frame.schema.json").symlink_to(theirs)
    (folder / "bundle.schema.json").write_text("old")
    assert execute(["schema", "export", str(folder)]) == 0
    assert theirs.read_text() == "mine"
    assert not (folder / "frame.schema.json").is_symlink()
    assert json.loads((folder / "bundle.schema.json").read_text())
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to("real")
    assert execute(["init", str(tmp_path / "named")]) == 0
    assert (tmp_path / "real" / "goondan.yaml").read_bytes() == template_files("agent")["goondan.yaml"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of somebody else")
@pytest.mark.parametrize("named", ["link", "link/new", "link/inner/.."])
def test_a_link_that_somebody_else_has_put_into_a_shared_folder_is_not_followed(tmp_path: Path, named: str) -> None:
    """As in /tmp, where the system does not see to it itself (fs.protected_symlinks)."""
    (tmp_path / "home" / "inner").mkdir(parents=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(tmp_path / "home")
    os.lchown(shared / "link", 4242, 4242)
    before = everything(tmp_path)
    assert execute(["init", f"{shared}/{named}"]) != 0
    assert everything(tmp_path) == before


def test_what_fails_late_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(GoondanError, match="too long"), Placing(str(folder)) as placing:
        placing.write({"goondan.yaml": b"x", "tools/one.py": b"y", "n" * 300: b"z"}, replace=False)
    assert everything(tmp_path) == {}
    with pytest.raises(GoondanError, match="changed"), Placing(str(folder)) as placing:
        placing.append(placing.write({"tools/one.py": b"y", "two.py": b"y"}, replace=True)[1], b"x", b"z")
    assert everything(tmp_path) == {}


def test_a_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "one.py").mkdir()
    with pytest.raises(GoondanError, match="is a directory"), Placing(str(tmp_path)) as placing:
        placing.write({"two.py": b"", "one.py": b""}, replace=True)
    assert everything(tmp_path) == {"one.py": "/"}


def test_what_was_changed_meanwhile_is_not_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "goondan.yaml"
    file.write_text("one\n")
    with pytest.raises(GoondanError, match="changed"), Placing(str(tmp_path)) as placing:
        placing.append("goondan.yaml", b"other\n", b"two\n")
    with Placing(str(tmp_path)) as placing:
        placing.append("goondan.yaml", b"one\n", b"two\n")
    assert file.read_text() == "one\ntwo\n"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to("elsewhere")
    with pytest.raises(GoondanError), Placing(str(tmp_path)) as placing:
        placing.append("goondan.yaml", b"one\ntwo\n", b"three\n")
    assert (tmp_path / "elsewhere").read_text() == "one\ntwo\n"


def test_a_folder_that_is_exchanged_while_files_are_written_leads_nowhere(tmp_path: Path) -> None:
    """Another process swaps `tools` for a link and back, all the time."""
    home = tmp_path / "home"
    home.mkdir()
    folder = tmp_path / "clone"
    (folder / "tools").mkdir(parents=True)
    over = threading.Event()

    def swap() -> None:
        for number in count():
            if over.is_set():
                return
            with suppress(OSError):  # the files' writer makes the folder anew in between
                os.rename(folder / "tools", folder / f"away{number}")
                os.symlink(home, folder / "tools")
                os.unlink(folder / "tools")
                os.rename(folder / f"away{number}", folder / "tools")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for number in range(300):
            with suppress(GoondanError), Placing(str(folder)) as placing:
                placing.write({f"tools/f{number}": b"x", "goondan.yaml": b"y"}, replace=True)
    finally:
        over.set()
        swapping.join()
    assert everything(home) == {}
