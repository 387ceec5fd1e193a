"""The plan of the quicker boot stage, and which jails have it; the stage itself is tried in jails."""

from __future__ import annotations

from msgspec.structs import replace

from goondan.schemas.bundle.launch import JavaScriptRuntime, SandboxSpec, ServerSpec, ToolSpec
from goondan.toolhost.policy.launch_plan import quick_boot_plan
from goondan.toolhost.policy.plan import plan
from goondan.toolhost.policy.subject import HostFacts, Request
from tests.checks import there

HOST = HostFacts(bwrap="/b", python="/usr/bin/python3", inside="/i", machine="x86_64", perl="/usr/bin/perl", landlock=6)
TOOL = ToolSpec(
    name="t",
    entry="/x/t.ts",
    root="/x",
    exports=[],
    javascript=JavaScriptRuntime(name="node", program="/n/node", version="22.20.0"),
)


def test_a_jail_that_becomes_a_runtime_boots_quickly_where_there_is_a_perl_and_no_root_to_drop() -> None:
    made = plan(Request(tool=TOOL), HOST)
    assert (made.quick, made.command) == (True, ["/usr/bin/perl", "/run/goondan/goondan_tool/boot.pl"])
    assert not plan(Request(tool=TOOL), replace(HOST, perl="")).quick
    assert not plan(Request(tool=TOOL), replace(HOST, user_namespaces=False)).quick
    assert not plan(Request(tool=replace(TOOL, entry="/x/t.py", javascript=None)), HOST).quick
    server = ServerSpec(extension="e", transport="stdio", command=["x"])
    assert not plan(Request(tool=replace(TOOL, root="", entry="", javascript=None, server=server)), HOST).quick


def test_every_wall_of_the_plan_is_in_its_words() -> None:
    made = plan(Request(tool=replace(TOOL, sandbox=SandboxSpec())), HOST)
    words = quick_boot_plan(made, {"/a b": (7, 9)}, "x86_64").decode().split("\0")
    assert words[:5] == ["302", "seen", "/a b", "7", "9"]
    assert words[-1] == ""
    assert words[words.index("exec") + 1 : -1] == there(made.program).argv
    limits = [i for i, word in enumerate(words) if word == "limit"]
    assert [(int(words[i + 1]), int(words[i + 2])) for i in limits] == made.limits
    assert words.count("rule") == len(there(made.landlock).rules)
    assert words.index("ruleset") < words.index("rule") < words.index("restrict") < words.index("exec")
