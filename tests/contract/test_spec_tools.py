"""The two tool modules that the specification prints run as they are printed, in real jails, under Node and under Bun.

Their files are compared by digest. The recorded cases are those of the reference's own tools, which take more arguments
and answer with more; a case applies when the printed tool knows its arguments, and its fields are compared.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.codec import replace_surrogates
from tests.contract.recorded import cases, differences, fill, set_up
from tests.javascript_runtimes import RUNTIMES, runtime
from tests.toolhost_fixture import Bench, bench

HERE: Final = Path(__file__).parent
#: SHA-256 of what is printed: the module, and its manifest without our line above it.
PRINTED: Final = {
    "bash": (
        "0f5d1d956eb254b2750c462bfd94d8b7f5d716e1ed73a127c539837d9a12fa03",
        "6257a11cfeff0dc271a874bb58bc10439218fef473ee54431181dd94f6816b5a",
    ),
    "file-system": (
        "6a43db2660f2bf5964b90f8d357cbb690102cf58b2d4298a797dd9abb2ea3164",
        "3194586215cc72c65a4174cb7b78e7a8933a905ed551c4d9f72f1f6119489fb3",
    ),
}
#: What the printed exports take, and what they answer with.
EXPORTS: Final = {
    "bash__exec": ({"command"}, {"stdout", "exitCode"}),
    "bash__script": ({"path"}, {"stdout", "exitCode"}),
    "file-system__read": ({"path", "maxBytes"}, {"path", "size", "truncated", "content"}),
    "file-system__write": ({"path", "content"}, {"path", "size", "written"}),
}
#: Recorded cases whose arguments the printed tools know, and that these answer otherwise, by the reason. They differ
#: under both runtimes, but for those of NODE.
OTHERWISE: Final = {
    "the recorded tool checks its arguments, the printed one does not": {
        *(f"file-system__{case}" for case in ("read/empty-path", "write/empty-path", "write/empty-content")),
        *(f"file-system__read/{case}" for case in ("max-bytes-zero", "edge-02")),
        *(f"bash__{case}" for case in ("exec/empty-command", "exec/edge-10", "script/empty-path", "script/edge-07")),
    },
    "the printed tool has words of its own for whatever is no file, and no code": {
        *(f"file-system__read/{case}" for case in ("missing", "directory", "edge-05", "edge-06", "edge-07", "edge-08")),
    },
    "a path outside of the jail's mounts is not there": {"file-system__read/absolute-outside"},
    "the printed tool counts maxBytes in UTF-16 units": {"file-system__read/truncate-in-astral"},
    "Bun.file(path).text() leaves out a byte order mark": {"file-system__read/bom-kept"},
    "Response.text() decodes a stream as a whole": {"bash__exec/split-multibyte-chunks"},
    "the printed tool has no exit code of a program that a signal ended; the recorded one says -1": {
        "bash__exec/self-kill",
        "bash__exec/self-term",
    },
    "the printed tool runs scripts with sh, the recorded one with bash": {"bash__script/bash-by-default"},
    "the printed tool lets sh say that there is no script": {"bash__script/missing-script", "bash__script/edge-06"},
}
DIFFERENT: Final = frozenset[str]().union(*OTHERWISE.values())
#: Bun has an error of its own for a null byte in a path, which is as recorded. Under Node there is no such file.
NODE: Final = {"file-system__read/edge-null-byte"}


def printed(name: str) -> tuple[str, str]:
    """The module and the manifest of a tool."""
    module = (HERE / "spec_tools" / f"{name}.ts").read_text(encoding="utf-8")
    document = (HERE / "spec_documents" / f"tool_{name.replace('-', '_')}.yaml").read_text(encoding="utf-8")
    return module, document.partition("\n")[2]


def applying() -> list[dict[str, Any]]:
    """The recorded cases that are about what the printed tools do."""
    known = [case for case in cases(*PRINTED) if case["tool"] in EXPORTS]
    usual = [case for case in known if not case.keys() & {"catalog", "registry", "allowRegistryBypass"}]
    return [case for case in usual if case["args"].keys() <= EXPORTS[case["tool"]][0]]


CASES: Final = applying()


@pytest.mark.parametrize("name", PRINTED)
def test_they_are_as_printed(name: str) -> None:
    assert tuple(hashlib.sha256(text.encode()).hexdigest() for text in printed(name)) == PRINTED[name]


def bundle(folder: Path, runtime_name: str) -> list[ToolSpec]:
    """A bundle of the two tools, as the kernel reads it where only that runtime is to be had."""
    program = runtime(runtime_name)
    for name in PRINTED:
        module, _ = printed(name)
        (folder / "tools" / name).mkdir(parents=True)
        (folder / "tools" / name / "index.ts").write_bytes(module.encode())
    (folder / "goondan.yaml").write_text("---\n".join(printed(name)[1] for name in PRINTED), encoding="utf-8")
    none = str(folder / "none")
    env = {"PATH": none, "GOONDAN_NODE": none, "GOONDAN_BUN": none, f"GOONDAN_{runtime_name.upper()}": program}
    inspected = inspect_bundle(str(folder / "goondan.yaml"), state_dir=None, env=env, handlers=False)
    assert inspected.errors == []
    tools = [tool_spec(inspected.checked.tools[name]) for name in PRINTED]
    assert {tool.javascript and tool.javascript.name for tool in tools} == {runtime_name}
    return tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[str], Awaitable[Bench]]]:
    """One host for each runtime, whose jails stay warm."""
    made: dict[str, Bench] = {}
    async with AsyncExitStack() as stack:

        async def get(name: str) -> Bench:
            if name not in made:
                tools = bundle(tmp_path_factory.mktemp(name), name)
                made[name] = await stack.enter_async_context(bench(*tools))
            return made[name]

        yield get


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_recorded(
    case: dict[str, Any], name: str, benches: Callable[[str], Awaitable[Bench]], place: Path
) -> None:
    case = fill(case, {"WORKDIR": str(place), "PARENT": str(place.parent)})
    set_up(case.get("setup", {}), place)
    made = await benches(name)
    began = time.monotonic()
    result = await made.call(case["tool"], replace_surrogates(case["args"]), workdir=place)
    _, fields = EXPORTS[case["tool"]]
    if "output" in case["expect"]:
        case["expect"]["output"] = {key: value for key, value in case["expect"]["output"].items() if key in fields}
    found = differences(case, result, place, (time.monotonic() - began) * 1000)
    if case["id"] in (DIFFERENT | NODE if name == "node" else DIFFERENT):
        assert found, f"{case['id']} passes now: take it out"
    else:
        assert not found, "\n".join(found)


def test_most_cases_apply() -> None:
    assert not (DIFFERENT | NODE) - {case["id"] for case in CASES}
    assert len(CASES) - len(DIFFERENT) > 50


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", RUNTIMES)
async def test_what_they_answer(name: str, benches: Callable[[str], Awaitable[Bench]], place: Path) -> None:
    """All of it, and the exit code of the program, which the printed code reads before the program is awaited."""
    made = await benches(name)

    async def output(tool: str, **args: Any) -> Any:
        result = await made.call(tool, args, workdir=place)
        assert result["status"] == "ok", result
        return result["output"]

    for _ in range(5):
        assert await output("bash__exec", command="echo hi; exit 3") == {"stdout": "hi\n", "exitCode": 3}
    (place / "s.sh").write_text("echo $0; pwd")
    assert await output("bash__script", path="s.sh") == {"stdout": f"s.sh\n{place}\n", "exitCode": 0}
    assert await output("bash__exec", command="kill -9 $$") == {"stdout": "", "exitCode": None}
    written = {"path": f"{place}/a/b.txt", "size": 6, "written": True}
    assert await output("file-system__write", path="a/b.txt", content="한글") == written
    read = {"path": f"{place}/a/b.txt", "size": 6, "truncated": False, "content": "한글"}
    assert await output("file-system__read", path="a/b.txt") == read
    missing = await made.call("file-system__read", {"path": "none.txt"}, workdir=place)
    assert missing["error"]["message"] == f"파일이 존재하지 않습니다: {place}/none.txt"
    shutil.rmtree(place / "a")
