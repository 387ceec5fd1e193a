"""Tools whose entries are programs, in real jails: whatever a program does, its call has one structured result."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ToolSpec
from goondan.schemas.wire.errors import HELP_BASE
from goondan.toolhost.policy.plan import walls_full
from tests.toolhost_fixture import Bench, bench, error_of, make_tool, small_outputs

#: One program with an export for each thing that programs do. The request is on one line, and begins with the export.
PROGRAM = r"""#!/bin/sh
read -r request
export=${request#'{"export":"'}
export=${export%%'"'*}
case $export in
  echo) printf '{"output":%s}' "$request" ;;
  pretty) printf '\n{\n  "output": [1,\n 2.5, "\\ud55c"]\n}\n\n' ;;
  null) echo '{"output":null}' ;;
  fails) echo '{"error":{"message":"out of stock","code":"E_SHOP","suggestion":"Wait.","helpUrl":"https://shop.test/"}}'
         exit 3 ;;
  quietly) echo '{"error":{"message":"no good"}}' ;;
  kernel) echo '{"error":{"message":"m","code":"E_FORBIDDEN"}}' ;;
  status) echo "cannot go on" >&2; echo '{"output":1}'; exit 7 ;;
  dies) kill -SEGV $$ ;;
  nothing) ;;
  text) printf 'Traceback: oh\nmore\n' ;;
  bare) echo '{"words":3}' ;;
  array) echo '[1]' ;;
  both) echo '{"output":1,"error":{"message":"m"}}' ;;
  no-message) echo '{"error":"m"}' ;;
  behind) echo '{"output":1} {"output":2}' ;;
  nan) echo '{"output":[NaN]}' ;;
  infinite) echo '{"output":1e999}' ;;
  huge-number) printf '{"output":'; head -c 5000 /dev/zero | tr '\0' 9; echo '}' ;;
  twice) echo '{"output":{"a":1,"a":2}}' ;;
  latin) printf '{"output":"\351"}' ;;
  deep) head -c 100000 /dev/zero | tr '\0' '[' ;;
  levels) printf '{"output":'; head -c 80 /dev/zero | tr '\0' '['; head -c 80 /dev/zero | tr '\0' ']'; echo '}' ;;
  big) printf '{"output":"'; head -c 5242880 /dev/zero | tr '\0' x; echo '"}' ;;
  endless) cat /dev/zero ;;
  closes) exec <&-; echo '{"output":"closed"}' ;;
  logs) echo looking up >&2; printf 'no end of line' >&2; echo '{"output":1}' ;;
  chatty) head -c 20000000 /dev/zero | tr '\0' 'x' | fold -w 100 >&2; echo '{"output":1}' ;;
  slow) sleep 0.5; echo '{"output":"slept"}' ;;
  forever) sleep 60 & echo $! > left; echo ready > ready; sleep 60 ;;
  waits) while [ ! -e go ]; do sleep 0.05; done; echo '{"output":"went"}' ;;
  leaves) sleep 60 & echo $! > left; echo '{"output":1}' ;;
  keeps) sleep 60 >/dev/null & echo $! > left; printf 'half a line' >&2; echo '{"output":1}' ;;
  alive) kill -0 "$(cat left)" 2>/dev/null && echo '{"output":true}' || echo '{"output":false}' ;;
  environment) printf '{"output":["%s","%s","%s","%s"]}' "$PWD" "$HOME" "$LANG" "${SECRET-}" ;;
esac
"""
EXPORTS: list[str | ExportSpec] = [
    *(name for name in re.findall(r"^  ([a-z-]+)\)", PROGRAM, flags=re.MULTILINE) if name != "keeps"),
    ExportSpec(name="keeps", background=True),
]


def program(
    folder: Path,
    source: str | bytes = PROGRAM,
    exports: list[Any] = EXPORTS,
    *,
    mode: int = 0o755,
    sandbox: SandboxSpec | None = None,
) -> ToolSpec:
    """A tool that is a program."""
    return make_tool(folder, source, *exports, file="t.sh", mode=mode, sandbox=sandbox)


async def output(made: Bench, export: str, workdir: Path, args: Any = None) -> Any:
    result = await made.call(f"t__{export}", args, workdir=workdir)
    assert result["status"] == "ok", result
    return result["output"]


async def test_a_program_is_told_its_call_and_tells_its_output(short_tmp: Path, workdir: Path) -> None:
    async with bench(program(short_tmp)) as made:
        args = {"text": "한 \n \u2028 \"'$(x)", "n": [2**63, -(2**63), 1.5, None, True]}
        told = await output(made, "echo", workdir, args)
        remaining = told["ctx"].pop("remainingMs")
        assert 0 < remaining <= 20_000
        assert told == {
            "export": "echo",
            "input": args,
            "ctx": {
                "agentName": "coder",
                "instanceKey": "k1",
                "turnId": "turn-1",
                "toolCallId": "call-1",
                "workdir": str(workdir),
                "message": None,
                "outputLimit": 4 << 20,
            },
        }
        receipt = made.receipts["turn-1/call-1"]
        assert receipt["jail"]["walls"] == list(walls_full(made.facts))
        assert set(receipt["jail"]["limits"]) >= {"memoryMb", "processes", "wallSeconds", "outputMb"}
        message = {"id": "m1", "data": {"role": "assistant"}, "metadata": {}, "createdAt": "t", "source": {}}
        said = await made.call("t__echo", workdir=workdir, message_id="m1", message=message)
        assert said["output"]["ctx"]["message"] == message
        assert await output(made, "pretty", workdir) == [1, 2.5, "한"]
        assert await output(made, "null", workdir) is None
        assert await output(made, "environment", workdir) == [str(workdir), "/run/goondan/home", "C.UTF-8", ""]
        assert made.host.sessions.jail_count == 1


BAD = [
    ("fails", "E_SHOP", "out of stock"),
    ("quietly", "E_TOOL", "no good"),
    ("kernel", "tool:E_FORBIDDEN", "m"),
    ("status", "E_TOOL", "t.sh ended with status 7: cannot go on"),
    ("dies", "E_TOOL", "t.sh was ended by SIGSEGV"),
    ("nothing", "E_TOOL_BAD_OUTPUT", "t.sh wrote no result to standard output: there is nothing"),
    ("text", "E_TOOL_BAD_OUTPUT", "Expecting value: line 1 column 1 (char 0). It begins: Traceback: oh"),
    ("bare", "E_TOOL_BAD_OUTPUT", 'it is neither {"output": …} nor {"error": {"message": …}}. It begins: {"words":3}'),
    ("array", "E_TOOL_BAD_OUTPUT", "it is no object. It begins: [1]"),
    ("both", "E_TOOL_BAD_OUTPUT", "it is neither"),
    ("no-message", "E_TOOL_BAD_OUTPUT", "it is neither"),
    ("behind", "E_TOOL_BAD_OUTPUT", "Extra data: line 1 column 14 (char 13)"),
    ("nan", "E_TOOL_BAD_OUTPUT", "JSON has no NaN"),
    ("infinite", "E_TOOL_BAD_OUTPUT", "inf is no JSON number"),
    ("huge-number", "E_TOOL_BAD_OUTPUT", "integer"),
    ("twice", "E_TOOL_BAD_OUTPUT", "the key 'a' stands twice"),
    ("latin", "E_TOOL_BAD_OUTPUT", 'byte 11 is no UTF-8. It begins: {"output":"\ufffd"}'),
    ("deep", "E_TOOL_BAD_OUTPUT", "it is nested too deeply. It begins: [[[["),
    ("levels", "E_TOOL_BAD_OUTPUT", "output[0][0][0]"),
    ("big", "E_TOOL_LIMIT", "more than 4194304 bytes to standard output (outputMb)"),
    ("endless", "E_TOOL_LIMIT", "outputMb"),
]


async def test_bad_output_of_each_kind_is_one_error_and_the_next_call_works(short_tmp: Path, workdir: Path) -> None:
    async with bench(program(short_tmp)) as made:
        for export, code, words in BAD:
            error = error_of(await made.call(f"t__{export}", workdir=workdir))
            assert (error["code"], words in error["message"]) == (code, True), (export, error)
            if export == "fails":
                assert (error["suggestion"], error["helpUrl"]) == ("Wait.", "https://shop.test/")
            else:
                assert error["helpUrl"].startswith(HELP_BASE)
        assert await output(made, "null", workdir) is None
        assert len([news for news in made.workers if news.op == "start"]) == 1


async def test_a_program_need_not_read_what_it_is_given(short_tmp: Path, workdir: Path) -> None:
    source = "#!/bin/sh\n{} echo '{{\"output\":1}}'\n"
    args = {"text": "x" * 1_000_000}
    for first in ("", "exec <&-;", "sleep 0.2; head -c 10 >/dev/null;"):
        async with bench(program(short_tmp, source.format(first), ["run"])) as made:
            assert await output(made, "run", workdir, args) == 1
    async with bench(program(short_tmp, "#!/bin/sh\nprintf '{\"output\":%d}' $(wc -c)\n", ["run"])) as made:
        assert await output(made, "run", workdir, args) > 1_000_000


async def test_standard_error_is_the_log(short_tmp: Path, workdir: Path) -> None:
    async with bench(program(short_tmp)) as made:
        await output(made, "logs", workdir)
        lines = [(line.level, line.message, line.call_id) for line in made.logs if line.level == "warn"]
        assert lines == [
            ("warn", "looking up", "turn-1/call-1"),
            ("warn", "no end of line", "turn-1/call-1"),
        ]
        assert await output(made, "chatty", workdir) == 1
        assert len(made.logs) < 3000
        assert await output(made, "null", workdir) is None


async def test_calls_run_beside_each_other_and_one_that_is_cancelled_is_killed(short_tmp: Path, workdir: Path) -> None:
    async with bench(program(short_tmp)) as made:
        loop = asyncio.get_running_loop()
        await output(made, "null", workdir)
        began = loop.time()
        assert await asyncio.gather(*(output(made, "slow", workdir) for _ in range(8))) == ["slept"] * 8
        assert loop.time() - began < 8 * 0.5
        _, waiting = made.start("t__waits", workdir=workdir)
        call_id, cancelled = made.start("t__forever", workdir=workdir)
        while not (workdir / "ready").exists():
            await asyncio.sleep(0.02)
        assert await output(made, "alive", workdir) is True
        made.cancel(call_id)
        assert error_of(await cancelled)["code"] == "E_CANCELLED"
        while await output(made, "alive", workdir):
            await asyncio.sleep(0.02)
        (workdir / "go").touch()
        assert (await waiting)["output"] == "went"
        assert len([news for news in made.workers if news.op == "start"]) == 1, "the jail lives on"


async def test_a_deadline_is_an_error(short_tmp: Path, workdir: Path) -> None:
    async with bench(program(short_tmp)) as made:
        error = error_of(await made.call("t__forever", workdir=workdir, deadline_ms=700))
        assert error["code"] == "E_TOOL_TIMEOUT"
        assert await output(made, "null", workdir) is None


async def test_what_a_program_leaves_behind_is_killed_but_of_a_background_export(
    short_tmp: Path, workdir: Path
) -> None:
    async with bench(program(short_tmp)) as made:
        await output(made, "leaves", workdir)
        while await output(made, "alive", workdir):  # whoever is killed has a number until init has noticed
            await asyncio.sleep(0.02)
        await output(made, "keeps", workdir)
        assert [line.message for line in made.logs if line.level == "warn"] == ["half a line"]
        assert await output(made, "alive", workdir) is True


async def test_each_call_of_its_own_has_fresh_private_files(short_tmp: Path, workdir: Path) -> None:
    source = """#!/bin/sh
test -e /tmp/seen && seen=true || seen=false
touch /tmp/seen
echo '{"output":'$seen'}'
"""
    async with bench(program(short_tmp, source, ["run"])) as made:
        assert [await output(made, "run", workdir) for _ in range(2)] == [False, True]
    async with bench(program(short_tmp, source, ["run"], sandbox=SandboxSpec(isolation="call"))) as made:
        assert [await output(made, "run", workdir) for _ in range(2)] == [False, False]


FOREIGN = bytes.fromhex("7f454c4602010100") + bytes(8) + bytes.fromhex("0200f300") + bytes(44)
UNSTARTABLE = [
    (PROGRAM, 0o644, "t.sh is not executable: chmod +x t.sh"),
    ("#!/usr/bin/no-such-thing\n", 0o755, "the first line of t.sh names /usr/bin/no-such-thing, and its jail has"),
    ("#!/bin/sh\r\necho\r\n", 0o755, "the first line of t.sh names /bin/sh\\r"),
    ("#!\n", 0o755, "t.sh is no program: it has neither #!"),
    ("echo hello\n", 0o755, "t.sh is no program: it has neither #!"),
    ("", 0o755, "t.sh is no program"),
    (FOREIGN, 0o755, "t.sh is a program for another kind of machine, and this one is"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "mode", "words"), UNSTARTABLE)
async def test_a_file_that_cannot_be_run_says_why(
    short_tmp: Path, workdir: Path, source: str | bytes, mode: int, words: str
) -> None:
    async with bench(program(short_tmp, source, ["run"], mode=mode)) as made:
        error = error_of(await made.call("t__run", workdir=workdir))
        assert error["code"] == "E_CONFIG_ENTRY"
        assert words in error["message"]
        assert "/run/goondan" not in error["message"], "no line of ours"
        assert "bench" not in error["message"]


GCC = shutil.which("gcc")


@pytest.mark.skipif(GCC is None, reason="there is no gcc")
async def test_a_program_of_machine_code(short_tmp: Path, workdir: Path) -> None:
    assert GCC is not None
    (short_tmp / "t.c").write_text('#include <stdio.h>\nint main(void) { puts("{\\"output\\":\\"C\\"}"); return 0; }\n')
    subprocess.run([GCC, "-o", short_tmp / "dynamic", short_tmp / "t.c"], check=True)
    subprocess.run(
        [GCC, "-Wl,--dynamic-linker=/nonexistent/ld.so", "-o", short_tmp / "strange", short_tmp / "t.c"], check=True
    )
    async with bench(program(short_tmp, (short_tmp / "dynamic").read_bytes(), ["run"])) as made:
        assert await output(made, "run", workdir) == "C"
    async with bench(program(short_tmp, (short_tmp / "strange").read_bytes(), ["run"])) as made:
        error = error_of(await made.call("t__run", workdir=workdir))
        assert "t.sh cannot be started" in error["message"]
        assert "loader is not in its jail" in error["suggestion"]


async def test_an_output_over_the_tools_own_limit(short_tmp: Path, workdir: Path) -> None:
    source = '#!/bin/sh\nprintf \'{"output":"\'; head -c 1048570 /dev/zero | tr "\\0" x; echo \'"}\'\n'
    async with bench(small_outputs(program(short_tmp, source, ["run"]))) as made:
        error = error_of(await made.call("t__run", workdir=workdir))
        assert (error["code"], "1048576" in error["message"]) == ("E_TOOL_LIMIT", True), json.dumps(error)
