"""Standard input and output as a protocol's streams: what a client can do to them."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """\
import asyncio
from goondan.kernel.cli.console import streams

async def main() -> None:
    lines = streams.LineStreams(1 << 20)
    {0}

asyncio.run(main())
"""


def _started(work: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-c", PROGRAM.format(work.replace("\n", "\n    "))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout)


def test_no_line_is_read_while_many_are_worked_on() -> None:
    work = """\
begun, ending = 0, asyncio.Event()
@lines.working
async def handle():
    global begun
    begun += 1
    await ending.wait()
async def read():
    while await lines.read() is not None:
        asyncio.ensure_future(handle())
reading = asyncio.ensure_future(read())
while begun < streams.MAX_AT_WORK:
    await asyncio.sleep(0.01)
await asyncio.sleep(0.2)
await lines.write(b"%d" % begun)
ending.set()
await reading
await lines.write(b"%d" % begun)""".replace("global", "nonlocal")
    said, _ = _started(work).communicate(b"x\n" * 5_000)
    first, last = map(int, said.split())
    assert first < 600
    assert last == 5_000


def test_an_output_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = _started('await lines.write(b"x" * (1 << 20))\nassert not lines.broken.done()', write)
    os.close(write)
    with open(read, "rb") as stream:
        assert len(stream.read()) == (1 << 20) + 1
    process.communicate()
    assert process.returncode == 0
