"""The copy that runs where others can write: whole, exact, and made without following a link."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from goondan.kernel.trust import private_copy
from goondan.kernel.trust.private_copy import sweep, with_private_copy
from goondan.schemas.bundle.launch import (
    AgentSpec,
    ExtensionSpec,
    Filesystem,
    JavaScriptRuntime,
    KernelPlan,
    ModelSpec,
    SandboxSpec,
    ServerSpec,
    ToolHostSpec,
    ToolSpec,
)
from goondan.schemas.wire.errors import GoondanError
from tests.checks import refuses, there

SOURCE = b"def register(api): pass\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "bundle"
    for name in ("ext/inner", "tools/data", ".git"):
        (made / name).mkdir(parents=True)
    (made / "ext" / "e.py").write_bytes(SOURCE)
    (made / "ext" / "inner" / "data.json").write_text("{}")
    (made / "tools" / "t.py").write_text("handlers = {}\n")
    (made / "tools" / "run.sh").write_text("true\n")
    (made / "tools" / "run.sh").chmod(0o777)
    return made


def plan(root: Path, digest: str = hashlib.sha256(SOURCE).hexdigest(), entry: str = "ext/e.py") -> KernelPlan:
    state = str(root.parent / "state")
    modules = {os.path.basename(entry): digest}
    extension = ExtensionSpec(name="e", entry=str(root / entry), resource={}, modules=modules)
    agent = AgentSpec(
        name="a",
        model=ModelSpec(provider="embedded"),
        registry=[],
        catalog=[],
        state_dir=state,
        revision="r",
        extensions=[extension],
    )
    tools = [
        ToolSpec(name="t", entry=str(root / "tools/t.py"), root=str(root / "tools"), exports=[]),
        ToolSpec(name="bash", entry="/base/bash.py", root="/base", exports=[], bundled=True),
        ToolSpec(name="p", entry="/packages/p.py", root="/packages", exports=[]),
    ]
    host = ToolHostSpec(tools=tools, state_dir=state, revision="r")
    return KernelPlan(
        revision="r", bundle=str(root), state_dir=state, entry_agent="a", agents={"a": agent}, toolhost=host
    )


def test_what_runs_is_the_copy_and_the_rest_stays(root: Path) -> None:
    made = with_private_copy(plan(root), str(root))
    place = Path(made.private_copy)
    assert place.parent == root.parent / "state" / "private"
    (extension,) = made.agents["a"].extensions
    assert (extension.entry, Path(extension.entry).read_bytes()) == (str(place / "ext/e.py"), SOURCE)
    own, base, package = made.toolhost.tools
    assert (own.entry, own.root) == (str(place / "tools/t.py"), str(place / "tools"))
    assert [tool.root for tool in (base, package)] == ["/base", "/packages"]
    assert (place / "ext/inner/data.json").read_text() == "{}"
    modes = {str(path.relative_to(place)): path.stat().st_mode & 0o777 for path in place.rglob("*")}
    assert modes["tools/run.sh"] == 0o755
    assert set(modes.values()) == {0o755, 0o644}
    assert not (place / ".git").exists()
    (root / "ext" / "e.py").write_text("changed")
    assert Path(extension.entry).read_bytes() == SOURCE


@pytest.mark.parametrize(
    ("program", "library", "runs"),
    [("/usr/bin/node", "/opt/lib", True), ("{}/bin/node", "/opt/lib", False), ("/opt/node", "{}/lib", False)],
)
@pytest.mark.parametrize("tool", ["t", "p"])
def test_no_runtime_that_others_can_write_loads_a_tool(
    root: Path, tool: str, program: str, library: str, runs: bool
) -> None:
    """Neither one of the bundle nor one of a package."""
    runtime = JavaScriptRuntime(
        name="node", program=program.format(root), version="22.19.0", libraries=[library.format(root)]
    )
    given = plan(root)
    tools = [replace(one, javascript=runtime) if one.name == tool else one for one in given.toolhost.tools]
    made = with_private_copy(replace(given, toolhost=replace(given.toolhost, tools=tools)), str(root))
    (found,) = [one for one in made.toolhost.tools if one.name == tool]
    assert found.javascript == (runtime if runs else None)
    assert ("others can write" in found.lack) is not runs
    assert found.root.startswith(made.private_copy) is (tool == "t")


def test_a_module_of_other_bytes_than_those_that_were_judged_stops_the_start(root: Path) -> None:
    with refuses("E_BUNDLE_UNTRUSTED"):
        with_private_copy(plan(root, digest="0" * 64), str(root))
    assert list((root.parent / "state" / "private").iterdir()) == []


def test_an_entry_in_the_bundles_own_folder_takes_its_modules_alone(root: Path) -> None:
    (root / "e.py").write_bytes(SOURCE)
    made = with_private_copy(plan(root, entry="e.py"), str(root))
    assert sorted(os.listdir(made.private_copy)) == ["e.py", "tools"]


def test_links_are_not_followed(root: Path) -> None:
    secret = root.parent / "secret"
    secret.mkdir()
    (secret / "key").write_text("s3cret")
    (root / "tools" / "link").symlink_to(secret)
    (root / "ext" / "key").symlink_to(secret / "key")
    place = Path(with_private_copy(plan(root), str(root)).private_copy)
    assert (place / "tools" / "link").is_symlink()
    assert (place / "ext" / "key").is_symlink()
    # A folder that became a link after the bundle was read.
    os.rename(root / "tools", root / "before")
    (root / "tools").symlink_to(secret)
    with refuses("E_STATE"):
        with_private_copy(plan(root), str(root))
    os.rename(root, root.parent / "moved")
    root.symlink_to(secret)
    with pytest.raises(GoondanError):
        with_private_copy(plan(root), str(root))
    kept = root.parent / "state" / "private"
    assert [path for path in kept.rglob("*") if path.is_file() and not path.is_symlink() and path.name == "key"] == []


def test_pipes_and_sockets_are_left_out(root: Path) -> None:
    os.mkfifo(root / "tools" / "pipe")
    place = Path(with_private_copy(plan(root), str(root)).private_copy)
    assert not (place / "tools" / "pipe").exists()


@pytest.mark.parametrize(("name", "value"), [("MAX_FILES", 3), ("MAX_BYTES", 20), ("MAX_DEPTH", 0)])
def test_a_copy_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    monkeypatch.setattr(private_copy, name, value)
    with refuses("E_STATE"):
        with_private_copy(plan(root), str(root))
    assert list((root.parent / "state" / "private").iterdir()) == []


def test_copies_of_earlier_kernels_go(root: Path) -> None:
    one, other = (with_private_copy(plan(root), str(root)) for _ in range(2))
    sweep(one.state_dir, keep=other.private_copy)
    assert os.listdir(f"{one.state_dir}/private") == [os.path.basename(other.private_copy)]
    sweep(one.state_dir)
    assert os.listdir(f"{one.state_dir}/private") == []
    sweep("/nonexistent")


def test_a_servers_command_moves_with_its_folder_and_not_with_one_whose_name_is_longer(root: Path) -> None:
    here = str(root / "tools")
    command = ["python3", f"{here}/t.py", f"--data={here}", f"{here}-more/t.py"]
    server = ServerSpec(extension="s", transport="stdio", command=command)
    spec = ToolSpec(name="s", entry=f"{here}/t.py", root=here, exports=[], server=server)
    given = plan(root)
    made = with_private_copy(replace(given, toolhost=replace(given.toolhost, tools=[spec])), str(root))
    (moved,) = made.toolhost.tools
    copied = f"{made.private_copy}/tools"
    assert there(moved.server).command == ["python3", f"{copied}/t.py", f"--data={copied}", f"{here}-more/t.py"]


def test_an_installed_server_takes_the_packages_that_it_may_read_along(root: Path) -> None:
    whole = root / "mcp" / "files"
    for part in ("node_modules/server/dist/index.js", "node_modules/dependency/index.js"):
        (whole / part).parent.mkdir(parents=True)
        (whole / part).write_text("")
    program = f"{whole}/node_modules/server/dist/index.js"
    server = ServerSpec(extension="s", transport="stdio", command=["node", program])
    sandbox = SandboxSpec(filesystem=Filesystem(read=[str(whole), "/opt/node"]))
    home = os.path.dirname(program)
    spec = ToolSpec(
        name="s", entry=program, root=home, exports=[], server=server, sandbox=sandbox, narrowed={"a": sandbox}
    )
    given = plan(root)
    made = with_private_copy(replace(given, toolhost=replace(given.toolhost, tools=[spec])), str(root))
    (moved,) = made.toolhost.tools
    copied = f"{made.private_copy}/mcp/files"
    assert there(moved.server).command == ["node", f"{copied}/node_modules/server/dist/index.js"]
    assert os.path.isfile(f"{copied}/node_modules/dependency/index.js")
    assert moved.root == copied, "it is shown as the server's own folder; no grant may lead into the state"
    for granted in (moved.sandbox, moved.narrowed["a"]):
        assert granted.filesystem.read == ["/opt/node"]
