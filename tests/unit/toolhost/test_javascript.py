"""What is decided about tools in JavaScript: their runtime, its command and limits, and what its last words say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from goondan.schemas.bundle.launch import JavaScriptRuntime, Limits, ToolSpec
from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.jails.worker import last_line
from goondan.toolhost.policy.launch_plan import command, limits_data, runtime_of
from goondan.toolhost.policy.limits import Tree, lacks_memory, resource_limits

NODE = JavaScriptRuntime(name="node", program="/n/node", version="22.20.0")
BUN = JavaScriptRuntime(name="bun", program="/b/bun", version="1.4.5")
TOOL = ToolSpec(name="t", entry="/x/t.ts", root="/x", exports=[], javascript=NODE)
PYTHON = replace(TOOL, entry="/x/t.py", javascript=None)
GROUPS = Tree(version=2, memory="/g")
_RLIMIT_DATA = 2


def test_a_tool_gets_its_runtime_and_without_one_an_error_with_what_helps() -> None:
    assert runtime_of(TOOL) is NODE
    assert runtime_of(PYTHON) is None
    with pytest.raises(GoondanError) as raised:
        runtime_of(replace(TOOL, javascript=None, lack="there is no Node", lack_fix="Install it."))
    info = raised.value.info
    assert (info.code, info.suggestion) == ("E_SANDBOX_UNAVAILABLE", "Install it.")
    assert info.message.endswith("there is no Node")


def test_the_command_of_each_runtime() -> None:
    node, bun = command(NODE, "/code", None), command(BUN, "/code", None)
    assert (node[0], node[-1]) == ("/n/node", "/code/javascript/worker.mjs")
    assert not [flag for flag in node if "space" in flag]  # files say it: an option makes each start slower
    assert "--max-old-space-size=200" in command(NODE, "/code", 400)
    assert (bun[0], bun[-1]) == ("/b/bun", "/code/javascript/worker.mjs")
    assert {"--no-install", "--config=/dev/null", "--env-file=/dev/null"} <= set(bun)


@pytest.mark.parametrize(
    ("tool", "groups", "limited"),
    [(TOOL, GROUPS, False), (TOOL, None, True), (TOOL, Tree(version=1, cpu="/c"), True), (PYTHON, GROUPS, True)],
)
def test_data_is_limited_by_itself_where_no_control_group_keeps_memory(
    tool: ToolSpec, groups: Tree | None, limited: bool
) -> None:
    assert limits_data(tool, groups) is limited
    found = dict(resource_limits(Limits(memory_mb=64), groups, data=limits_data(tool, groups)))
    assert found.get(_RLIMIT_DATA) == (64 << 20 if limited else None)


@pytest.mark.parametrize(
    ("printed", "began", "counted", "lacks"),
    [
        (
            "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory\n---\n1: 0x1",
            True,
            True,
            True,
        ),
        (
            "#\n# Fatal process out of memory: Failed to reserve virtual memory for CodeRange\n#\n 1: 0x",
            False,
            False,
            True,
        ),
        ("panic(main thread): abort() called\noh no\nhttps://bun.report/1", False, False, True),
        ("panic(main thread): abort() called\noh no\nhttps://bun.report/1", True, False, False),
        ("panic(main thread): abort() called\noh no\nhttps://bun.report/1", False, True, False),
        ("Segmentation fault", True, True, False),
    ],
)
def test_what_a_runtimes_last_words_say_of_memory(printed: str, began: bool, counted: bool, lacks: bool) -> None:
    words = last_line(printed.split("\n"), javascript=True)
    assert lacks_memory(words, began=began, counted=counted) is lacks
