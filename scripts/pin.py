"""`make pins` writes the hashes of constraints.txt anew; `--check` says, without a network, whether the file is whole.

The versions are a person's choice and stay as they are. For each machine that there are hashes for (pinned.py) pip is
asked which wheel it would install, and for that wheel's hash. Among several wheels for one machine the one for the
oldest systems is taken, so that one hash serves them all. pip's own configuration says where packages come from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement

from scripts.pinned import KINDS, MACHINES, PYTHONS, SEAL, Malformed, Pin, machines, normal, parse, render
from scripts.pinned import seal as seal_of

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
#: Tags of wheels, the oldest systems first: glibc from 2.5 on, musl.
OLDEST_FIRST = {
    "manylinux": ["manylinux1", "manylinux2010", "manylinux2014"]
    + [f"manylinux_2_{minor}" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)],
    "musllinux": ["musllinux_1_1", "musllinux_1_2"],
}

#: Requirements without use, by the package that asks. Only the command of libcst reads YAML; mutmut uses its parser.
NOT_NEEDED = {("libcst", "pyyaml-ft")}


def project() -> dict[str, list[Requirement]]:
    """The requirements of pyproject.toml, by kind."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = told["optional-dependencies"]
    return {
        kind: [Requirement(line) for line in (told["dependencies"] if kind == "run" else optional.get(kind, []))]
        for kind in KINDS
    }


# --- without a network ----------------------------------------------------------------------------------------------


def problems(text: str, asked: dict[str, list[Requirement]]) -> list[str]:
    """Why the file cannot be installed from, or was not written by `make pins`; an empty list when it is right."""
    try:
        pins = parse(text)
    except Malformed as error:
        return [str(error)]
    found = [f"{pin.name}: no hash" for pin in pins if not pin.hashes]
    found += [
        f"{pin.name}: its hashes are not sorted, or one stands twice"
        for pin in pins
        if sorted(set(pin.hashes)) != pin.hashes
    ]
    found += [
        f"{pin.name}: no machine is called {name!r}" for pin in pins for name in pin.lacking if name not in machines()
    ]
    by_name = {normal(pin.name): pin for pin in pins}
    order = list(KINDS)
    for kind, requirements in asked.items():
        for needed in requirements:
            pin = by_name.get(normal(needed.name))
            if pin is None:
                found.append(f"{needed.name}: pyproject.toml needs it for {KINDS[kind]}, and no version is pinned")
            elif not needed.specifier.contains(pin.version, prereleases=True):
                found.append(f"{pin.name}: {pin.version} is not {needed.specifier}, as pyproject.toml asks")
            elif order.index(pin.kind) > order.index(kind):
                found.append(f"{pin.name}: needed for {KINDS[kind]}, and stands under {KINDS[pin.kind]}")
    if not found and text != render(pins):
        body, _, seal = text.rpartition(f"\n{SEAL}")
        changed = seal.strip() != seal_of(body)
        found.append("it was changed since `make pins` wrote it" if changed else "it is not as `make pins` writes it")
    return found


# --- with one -------------------------------------------------------------------------------------------------------


def ask(pins: list[Pin], machine: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What pip would install of `pins` on a machine: name -> its entry in pip's report. Fills `lacking`."""
    python, processor, library = machine.split()
    asked, report = folder / "asked.txt", folder / "report.json"
    platforms = [word for tag in OLDEST_FIRST[library] for word in ("--platform", f"{tag}_{processor}")]
    while True:
        present = [pin for pin in pins if machine not in pin.lacking]
        asked.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in present))
        command = [
            sys.executable, "-I", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
            "--disable-pip-version-check", "--target", str(folder / "none"), "--only-binary", ":all:",
            "--implementation", "cp", "--python-version", python, *platforms, "--report", str(report), "-r", str(asked),
        ]  # fmt: skip
        done = subprocess.run(with_pip(command), stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            told = json.loads(report.read_text())["install"]
            return {normal(entry["metadata"]["name"]): entry for entry in told}
        missing = [pin for pin in present if f"No matching distribution found for {pin.name}==" in done.stderr]
        if not missing:
            sys.exit(f"pin: pip says, for {machine}:\n{done.stderr.strip()}")
        for pin in missing:
            pin.lacking.append(machine)


def with_pip(command: list[str]) -> list[str]:
    """The command with an interpreter that has a pip: .venv has none, the one that it was made of does."""
    base = getattr(sys, "_base_executable", sys.executable)
    return [base, *command[1:]]


def unmet(pins: list[Pin], needs: dict[str, list[Requirement]], asked: dict[str, list[Requirement]]) -> list[str]:
    """Packages that some machine needs and that are not pinned, and pinned ones that no machine needs. Sets each pin's
    kind.

    `needs`: the requirements of each package, by its normal name.
    """
    by_name = {normal(pin.name): pin for pin in pins}
    seen: dict[str, str] = {}
    found: list[str] = []
    for kind, requirements in asked.items():
        for python in PYTHONS:
            for processor in MACHINES:
                machine = {
                    "python_version": python,
                    "python_full_version": f"{python}.0",
                    "platform_machine": processor,
                }
                reached: set[tuple[str, str]] = set()
                ahead: list[tuple[str, Iterable[Requirement], frozenset[str]]] = [
                    ("pyproject.toml", requirements, frozenset())
                ]
                while ahead:
                    by, wanted, extras = ahead.pop()
                    for needed in wanted:
                        if not applies(needed, machine, extras):
                            continue
                        name = normal(needed.name)
                        pin = by_name.get(name)
                        if (normal(by), name) in NOT_NEEDED:
                            continue
                        if pin is None:
                            found.append(f"{by} needs {needed}: add a line {needed.name}==VERSION")
                            continue
                        if not needed.specifier.contains(pin.version, prereleases=True):
                            found.append(f"{by} needs {needed}, and {pin.version} is pinned")
                        seen.setdefault(name, kind)
                        for extra in (*needed.extras, ""):
                            if (name, extra) not in reached:
                                reached.add((name, extra))
                                ahead.append((pin.name, needs.get(name, []), frozenset({extra} - {""})))
    for pin in pins:
        name = normal(pin.name)
        if name in seen:
            pin.kind = seen[name]
        else:
            found.append(f"nothing needs {pin.name}: remove its line")
    return list(dict.fromkeys(found))


def applies(needed: Requirement, machine: dict[str, str], extras: Iterable[str]) -> bool:
    """Whether a requirement counts on a machine, with any of the extras that were asked for."""
    if needed.marker is None:
        return True
    # Linux and CPython are what the interpreter that runs this says of itself.
    here: dict[str, Any] = {**default_environment(), **machine}
    return any(needed.marker.evaluate({**here, "extra": extra}) for extra in (*extras, ""))


def write() -> int:
    """Find every hash and write the file. 1 when versions are missing or left over."""
    try:
        pins = parse(FILE.read_text(encoding="utf-8"))
    except Malformed as error:
        sys.exit(f"pin: constraints.txt, {error}")
    needs: dict[str, list[Requirement]] = {}
    hashes: dict[str, set[str]] = {normal(pin.name): set() for pin in pins}
    for pin in pins:
        pin.lacking = []
    with tempfile.TemporaryDirectory() as folder:
        for machine in machines():
            print(f"pin: {machine}", file=sys.stderr, flush=True)
            for name, entry in ask(pins, machine, Path(folder)).items():
                hashes[name].add(entry["download_info"]["archive_info"]["hashes"]["sha256"])
                needs.setdefault(name, [Requirement(line) for line in entry["metadata"].get("requires_dist", [])])
    for pin in pins:
        pin.hashes = sorted(hashes[normal(pin.name)])
    if wrong := unmet(pins, needs, project()):
        print(*(f"pin: {line}" for line in wrong), sep="\n", file=sys.stderr)
        return 1
    FILE.write_text(render(pins), encoding="utf-8")
    return 0


def main(arguments: list[str]) -> int:
    """`--check`, or write; the exit status."""
    if arguments not in ([], ["--check"]):
        sys.exit("usage: pin.py [--check]")
    if not arguments:
        return write()
    found = problems(FILE.read_text(encoding="utf-8"), project())
    print(*(f"constraints.txt: {line} (then run `make pins`)" for line in found), sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
