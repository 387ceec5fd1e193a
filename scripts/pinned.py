"""constraints.txt as data: every package that `make setup` installs, its version, and the hashes of its wheels.

Pure: text in, text out. make_venv.py reads the file with nothing but the standard library; pin.py writes and checks it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

#: What can be asked for, and the heading of its part of the file. Each kind installs those before it as well.
KINDS = {"run": "run time", "dev": "development", "bench": "benchmarks", "mutants": "mutation testing"}
#: The machines that there are hashes for: versions of Python, processors, C libraries.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
LIBRARIES = ("manylinux", "musllinux")

HEAD = """\
# Every package that `make setup` installs: its version, and the hashes of its wheels. pyproject.toml says what the code
# needs. To change a version, edit its line and run `make pins`, which finds the hashes anew; a package that is needed
# in addition gets a line `NAME==VERSION` first. Nothing else is written here by hand.
"""
SEAL = "# sealed: "
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)( \\)?")
_HASH = re.compile(r"    --hash=sha256:([0-9a-f]{64})( \\)?")
_GAP = re.compile(r"# ([A-Za-z0-9._-]+) has no wheel for: ([a-z0-9_., ]+)")


class Malformed(Exception):
    """A line that constraints.txt cannot have; the message names it."""


@dataclass
class Pin:
    """One package."""

    #: The name of the package.
    name: str
    #: The pinned version.
    version: str
    #: The kind that installs it (a key of KINDS).
    kind: str
    #: The hashes of its wheels.
    hashes: list[str] = field(default_factory=list)
    #: The machines ("3.14 aarch64 musllinux") that it has no wheel for.
    lacking: list[str] = field(default_factory=list)


def machines() -> list[str]:
    """Every machine that there are hashes for: "3.11 x86_64 manylinux", …"""
    return [f"{python} {machine} {library}" for library in LIBRARIES for machine in MACHINES for python in PYTHONS]


def normal(name: str) -> str:
    """The name by which a package is compared: as the packaging standards have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> list[Pin]:
    """The packages of the file, in its order. Raises Malformed."""
    pins: list[Pin] = []
    kind = ""
    gaps: dict[str, list[str]] = {}
    more = False  # the line before ends with a backslash
    headings = {f"# {title}": name for name, title in KINDS.items()}
    for number, line in enumerate(text.splitlines(), 1):
        if found := _HASH.fullmatch(line):
            if not more:
                raise Malformed(f"line {number}: a hash that belongs to no package")
            pins[-1].hashes.append(found[1])
            more = found[2] is not None
        elif more:
            raise Malformed(f"line {number}: a hash is expected, after the backslash")
        elif line in headings:
            kind = headings[line]
        elif gap := _GAP.fullmatch(line):
            gaps[gap[1]] = gap[2].split(", ")
        elif pin := _PIN.fullmatch(line):
            if not kind:
                raise Malformed(f"line {number}: {pin[1]} stands before the first heading")
            if any(normal(other.name) == normal(pin[1]) for other in pins):
                raise Malformed(f"line {number}: {pin[1]} a second time")
            pins.append(Pin(pin[1], pin[2], kind))
            more = pin[3] is not None
        elif line and not line.startswith("#"):
            raise Malformed(f"line {number}: {line!r} is no NAME==VERSION")
    if more:
        raise Malformed("the file ends after a backslash")
    for read in pins:
        read.lacking = gaps.get(read.name, [])
    return pins


def render(pins: list[Pin]) -> str:
    """The whole file, sealed."""
    lines = [HEAD]
    for kind, title in KINDS.items():
        lines.append(f"\n# {title}\n")
        for pin in sorted((pin for pin in pins if pin.kind == kind), key=lambda pin: normal(pin.name)):
            if pin.lacking:
                lines.append(f"# {pin.name} has no wheel for: {', '.join(pin.lacking)}\n")
            lines.append(requirement(pin))
    body = "".join(lines)
    return f"{body}\n{SEAL}{seal(body)}\n"


def requirement(pin: Pin) -> str:
    """The lines with which pip installs a package, and no other bytes than these."""
    return " \\\n".join([f"{pin.name}=={pin.version}", *(f"    --hash=sha256:{value}" for value in pin.hashes)]) + "\n"


def seal(body: str) -> str:
    """A digest of the text above the seal. It does not match after a version was changed by hand."""
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def wanted(pins: list[Pin], kind: str) -> list[Pin]:
    """The packages that `kind` installs, with those of the kinds before it."""
    order = list(KINDS)
    return [pin for pin in pins if order.index(pin.kind) <= order.index(kind)]
