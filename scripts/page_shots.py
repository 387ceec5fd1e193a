"""`python -m scripts.page_shots`: pictures of the page for the documents, from the recorded example.

The swarm of examples/recorded answers its recorded messages from its recording, and a headless Chromium looks at it.
Names, texts and spans are the same each time; times are those of this run.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Final

from tests.features.page.browser import PHONE, Chromium, Site, door
from tests.kernel_fixture import sandbox

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLE, INTO = ROOT / "examples" / "recorded", ROOT / "docs" / "page"
#: All pictures together have no more (bytes).
MOST: Final = 400_000
WIDE: Final = (1120, 560)
#: The pictures: what each shows, how wide, and whether it is dark. RUN is the first run.
SHOTS: Final = {
    "run-light": ("#/run/RUN", WIDE, False),
    "now-light": ("#/now", WIDE, False),
    "talk-dark": ("#/talk/desk/default", WIDE, True),
    "runs-phone-light": ("#/runs", PHONE, False),
    "run-phone-dark": ("#/run/RUN", PHONE, True),
}
STEPS: Final = """
await page.evaluate((route) => { location.hash = route; }, it.args.to);
await page.waitForSelector(`.view-${it.args.view}`);
await page.waitForNetworkIdle({ idleTime: 400, concurrency: 1 });
await it.settled(page);
await page.mouse.move(0, Number(it.args.height) - 1);
return (await page.screenshot({ encoding: "base64" }));
"""


def asked(page: Site) -> str:
    """Have the recorded messages answered. Returns the run of the first one."""
    recorded = [json.loads(line) for line in (EXAMPLE / "refund.jsonl").read_text(encoding="utf-8").splitlines()]
    outside = [turn for turn in recorded if turn["kind"] == "turn" and turn.get("outside")]
    first = ""
    for turn in sorted(outside, key=lambda turn: turn["outside"]):
        said = {"text": turn["input"], "agent": turn["agent"], "instance": turn["instance"]}
        answer = page.ask("/api/v1/messages", said)
        if answer.get("response") != turn["response"]:
            raise SystemExit(f"this is not the recorded answer: {answer}")
        first = first or answer["traceId"]
    return first


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length


def _lines(data: bytes, width: int, height: int, depth: int) -> Iterator[bytes]:
    """The pixels of each line: what filters have put into them is taken out."""
    size, before = width * depth, bytearray(width * depth)
    for number in range(height):
        place = number * (size + 1)
        kind, line = data[place], bytearray(data[place + 1 : place + 1 + size])
        for at in range(size):
            left, up = line[at - depth] if at >= depth else 0, before[at]
            corner = before[at - depth] if at >= depth else 0
            if kind == 4:
                near = left + up - corner
                by_left, by_up, by_corner = abs(near - left), abs(near - up), abs(near - corner)
                guess = left if by_left <= by_up and by_left <= by_corner else up if by_up <= by_corner else corner
            else:
                guess = (0, left, up, (left + up) // 2)[kind]
            line[at] = (line[at] + guess) & 255
        yield bytes(line)
        before = line


def smaller(png: bytes) -> bytes:
    """The same picture with 256 colours: a page has few, and the edges of its letters need no more."""
    chunks = list(_chunks(png))
    width, height, bits, kind = struct.unpack(">IIBB", chunks[0][1][:10])
    depth = {2: 3, 6: 4}[kind]
    assert bits == 8
    packed = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))
    pixels = [line[at : at + 3] for line in _lines(packed, width, height, depth) for at in range(0, len(line), depth)]
    counts: dict[bytes, int] = {}
    for pixel in pixels:
        counts[pixel] = counts.get(pixel, 0) + 1
    colours = sorted(counts, key=lambda pixel: -counts[pixel])
    palette = colours[:256]
    places = {colour: place for place, colour in enumerate(palette)}
    for colour in colours[256:]:
        places[colour] = min(
            range(256), key=lambda place: sum((a - b) ** 2 for a, b in zip(colour, palette[place], strict=True))
        )
    rows = b"".join(
        b"\0" + bytes(places[pixel] for pixel in pixels[row * width : (row + 1) * width]) for row in range(height)
    )
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(palette)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    )
    told = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return png[:8] + b"".join(told)


def main() -> int:
    """Write the pictures. Returns 1 when they are too large."""
    os.environ["GOONDAN_TRUST"] = "1"
    chromium = Chromium()
    INTO.mkdir(exist_ok=True)
    total = 0
    with sandbox((EXAMPLE / "goondan.yaml").read_text(), {"GOONDAN_REPLAY": str(EXAMPLE / "refund.jsonl")}) as kernel:
        kernel.here = copytree(EXAMPLE, kernel.home / EXAMPLE.name)  # the head names the folder
        with door(kernel, chromium) as page:
            run = asked(page)
            for name, (route, size, dark) in SHOTS.items():
                to = {"to": route.replace("RUN", run), "view": route.split("/")[1], "height": str(size[1])}
                shot = smaller(base64.b64decode(page.see(STEPS, None, size=size, dark=dark, anyway=False, **to)))
                (INTO / f"{name}.png").write_bytes(shot)
                total += len(shot)
                print(f"{name}: {len(shot):,} bytes")
    chromium.close()
    print(f"{total:,} bytes of {MOST:,}")
    return int(total > MOST)


if __name__ == "__main__":
    sys.exit(main())
