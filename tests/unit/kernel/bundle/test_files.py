"""What belongs to a bundle, what a document may point at, and what a digest covers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle import files as files_module
from goondan.kernel.bundle.files import BundleFiles, list_documents, read_file, tree_digest
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.rules.lookup import MAX_PROMPT_BYTES, Unreadable
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- paths in documents ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("VALIDATE-01", "SCHEMA-02", "EXT-02")
def test_a_file_of_the_bundle(tmp_path: Path) -> None:
    target = write(tmp_path / "tools" / "a.py")
    for spelling in ("tools/a.py", "./tools/a.py", "tools/../tools/a.py", "tools//a.py"):
        found = BundleFiles(str(tmp_path)).find(spelling)
        assert (found.path, found.fault) == (str(target), None), spelling


def test_links_may_not_leave_the_bundle(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "secret.py")
    root = tmp_path / "bundle"
    write(root / "real.py")
    (root / "link.py").symlink_to(root / "real.py")
    (root / "escape.py").symlink_to(outside)
    (root / "folder").symlink_to(outside.parent)
    (root / "loop.py").symlink_to(root / "loop.py")
    files = BundleFiles(str(root))
    assert files.find("link.py").path == str(root / "real.py")
    for name in ("escape.py", "folder/secret.py"):
        assert "leads out of the bundle" in str(files.find(name).fault), name
    assert files.find("loop.py").fault is not None


def test_a_neighbour_whose_name_begins_like_the_root(tmp_path: Path) -> None:
    write(tmp_path / "bundle-two" / "a.py")
    root = tmp_path / "bundle"
    root.mkdir()
    assert "leads out" in str(BundleFiles(str(root)).find("../bundle-two/a.py").fault)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    files = BundleFiles(str(tmp_path))
    assert "regular" in str(files.find("folder").fault)
    assert "regular" in str(files.find("pipe").fault)
    with pytest.raises(Unreadable, match="regular"):
        read_file(str(tmp_path / "pipe"), 10)


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "a", "", "~", "\0", "é"]), max_size=6).map("/".join))
def test_no_path_leads_out(tmp_path_factory: pytest.TempPathFactory, named: str) -> None:
    root = str(tmp_path_factory.getbasetemp())
    found = BundleFiles(root).find(named)
    assert found.fault is not None or found.path.startswith(root)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a", "12345"))
    assert read_file(path, 5) == b"12345"
    with pytest.raises(Unreadable, match="larger"):
        read_file(path, 4)
    with pytest.raises(Unreadable):
        read_file("/dev/zero", 4)


def test_paths_of_a_sandbox(tmp_path: Path) -> None:
    files = BundleFiles(str(tmp_path))
    assert files.resolve("data") == f"{tmp_path}/data"
    assert files.resolve("../data") == str(tmp_path.parent / "data")
    assert files.resolve("/data/") == "/data"
    assert files.resolve("~/x") == os.path.expanduser("~/x")
    write(tmp_path / "env" / "pyvenv.cfg")
    assert files.is_environment(str(tmp_path / "env"))
    assert not files.is_environment(str(tmp_path))


# --- a directory ----------------------------------------------------------------------------------------------------


def test_a_directory_is_its_yaml_files(tmp_path: Path) -> None:
    for name in ("b.yaml", "goondan.yaml", "a.yml", "sub/deep/c.yaml", "readme.md", ".hidden.yaml", ".git/x.yaml"):
        write(tmp_path / name)
    for name in ("node_modules/p/x.yaml", "env/pyvenv.cfg", "env/x.yaml", "other/goondan.yaml", "other/sub/x.yaml"):
        write(tmp_path / name)
    write(tmp_path / "real" / "d.yaml")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    names = [os.path.relpath(path, tmp_path) for path in list_documents(str(tmp_path))]
    assert names == ["goondan.yaml", "a.yml", "b.yaml", "real/d.yaml", "sub/deep/c.yaml"]


def test_a_directory_named_by_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_ENTRIES", 3)
    for index in range(4):
        write(tmp_path / f"{index}.txt")
    with pytest.raises(Unreadable, match=r"goondan\.yaml"):
        list_documents(str(tmp_path))
    monkeypatch.setattr(files_module, "MAX_ENTRIES", 100)
    monkeypatch.setattr(files_module, "MAX_FILES", 2)
    for index in range(3):
        write(tmp_path / f"{index}.yaml")
    with pytest.raises(Unreadable, match="YAML files"):
        list_documents(str(tmp_path))


def test_documents_in_several_files(look: Look) -> None:
    model, agent, tool, swarm = GOOD.split("---\n")
    files = {"agents.yaml": agent, "tools/words.yaml": tool, "swarm.yml": swarm, "ci/compose.yaml": "services: {}\n"}
    files |= {"values.yaml": "a: {{ .Values }}\n", "k8s.yaml": "apiVersion: v1\nkind: Service\n"}
    inspected = sound(look(model, files=files, directory=True))
    assert sorted(w.file.rpartition("/")[2] for w in inspected.warnings) == ["compose.yaml", "k8s.yaml", "values.yaml"]
    assert {w.code for w in inspected.warnings} == {"W_CONFIG_SKIPPED"}
    broken = look(model, files={**files, "agents.yaml": agent.replace("Tool/words", "Tool/x")}, directory=True)
    assert [(p.file.rpartition("/")[2], p.line) for p in broken.errors] == [("agents.yaml", 11)]


def test_a_broken_file_of_ours_in_a_directory_is_an_error(look: Look) -> None:
    inspected = look(GOOD, files={"more.yaml": "apiVersion: goondan.ai/v1\nkind: [\n"}, directory=True)
    assert [(p.code, p.file.rpartition("/")[2]) for p in inspected.errors] == [("E_CONFIG_SYNTAX", "more.yaml")]


def test_a_file_is_that_file_alone(look: Look) -> None:
    sound(look(GOOD, files={"more.yaml": "kind: Nonsense\n"}, name="mine.yaml"))


def test_documents_that_are_no_mapping(look: Look) -> None:
    inspected = look("- a\n---\ntext\n---\n" + GOOD)
    assert [(p.code, p.line) for p in inspected.errors] == [
        ("E_CONFIG_INVALID_VALUE", 1),
        ("E_CONFIG_INVALID_VALUE", 3),
    ]


@pytest.mark.parametrize("text", ["", "---\n---\n", "# only a comment\n"])
def test_a_file_without_documents(look: Look, text: str) -> None:
    assert [p.code for p in look(text).errors] == ["E_CONFIG_NOT_FOUND"]


def test_files_that_cannot_be_read(tmp_path: Path, bundled: object) -> None:
    os.mkfifo(tmp_path / "goondan.yaml")
    inspected = inspect_bundle(str(tmp_path / "goondan.yaml"), state_dir=None, env={}, handlers=False)
    assert [p.code for p in inspected.errors] == ["E_CONFIG_NOT_FOUND"]
    in_folder = inspect_bundle(str(tmp_path), state_dir=None, env={}, handlers=False)
    assert [p.code for p in in_folder.errors] == ["E_CONFIG_NOT_FOUND"]


def test_a_prompt_in_a_file(look: Look) -> None:
    text = GOOD.replace("system: You help.", "systemRef: prompts/a.md")
    inspected = sound(look(text, files={"prompts/a.md": "You are ${X}.\n"}))
    assert inspected.checked.agents["helper"].system == "You are ${X}.\n"
    for content in (b"\xff", b"x" * (MAX_PROMPT_BYTES + 1)):
        broken = look(text, files={"prompts/a.md": content})
        assert [(p.code, p.path) for p in broken.errors] == [("E_CONFIG_INVALID_VALUE", "spec.prompt.systemRef")]


# --- where a tool's folder ends -------------------------------------------------------------------------------------


def test_a_tool_sees_its_own_folder_and_never_the_bundles_root(look: Look, tmp_path: Path) -> None:
    own = look(GOOD).checked.tools["words"]
    assert (own.entry, own.root) == (str(tmp_path / "tools/words.py"), str(tmp_path / "tools"))
    at_root = look(GOOD.replace("tools/words.py", "words.py"), files={"words.py": "x"}).checked.tools["words"]
    assert (at_root.entry, at_root.root) == (str(tmp_path / "words.py"), str(tmp_path / "words.py"))


# --- digests --------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_folder_follows_its_content(tmp_path: Path) -> None:
    write(tmp_path / "t" / "a.py", "1")
    write(tmp_path / "t" / "sub" / "b.py", "2")
    root = str(tmp_path / "t")
    digest, whole = tree_digest(root)
    assert whole
    write(tmp_path / "t" / ".hidden", "x")
    write(tmp_path / "t" / "__pycache__" / "a.pyc", "x")
    assert tree_digest(root) == (digest, True)
    seen = {digest}
    for change in (
        lambda: write(tmp_path / "t" / "a.py", "3"),
        lambda: write(tmp_path / "t" / "sub" / "c.py", ""),
        lambda: (tmp_path / "t" / "sub" / "c.py").rename(tmp_path / "t" / "sub" / "d.py"),
        lambda: (tmp_path / "t" / "link").symlink_to("a.py"),
        lambda: (tmp_path / "t" / "sub" / "b.py").chmod(0o755),
        (tmp_path / "t" / "a.py").unlink,
    ):
        change()
        seen.add(tree_digest(root)[0])
    assert len(seen) == 7


def test_the_digest_of_one_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.py", "1")
    first = tree_digest(str(path))
    write(tmp_path / "b.py", "1")
    assert tree_digest(str(path)) == first
    path.write_text("2")
    assert tree_digest(str(path)) != first


def test_a_huge_folder_is_not_digested_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MAX_TREE_FILES", 3)
    for index in range(4):
        write(tmp_path / "t" / str(index))
    assert tree_digest(str(tmp_path / "t"))[1] is False


def test_names_that_are_no_text(look: Look, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.yaml")).write_text("kind: Tool\n")
    write(tmp_path / os.fsdecode(b"\xff") / "a.yaml")
    write(tmp_path / "real" / os.fsdecode(b"\xff.py"))
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / os.fsdecode(b"\xff.py"))
    assert look(GOOD, directory=True).errors == []
    assert BundleFiles(str(tmp_path)).find("link.py").fault == "the path is not UTF-8"
