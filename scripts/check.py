"""All checks of CI besides the tests: style, types, architecture, schema drift, layout, requirements.

Runs every check, two at a time, prints one line each and the output of those that failed, and exits 1 if one did.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.typescript_types import GENERATED

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("schemas", "kernel", "agentproc", "toolhost", "features")
#: The longest module that can still be reviewed at one sitting.
MAX_MODULE_LINES = 700
#: Modules of Python, JavaScript and TypeScript.
MODULES = {".py", ".js", ".mjs", ".ts", ".mts"}
#: Names without a meaning. Such code belongs beside its caller, or in a module that is named after its task.
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}
# In brackets, so that this file names none itself.
REGISTRY = re.compile(
    r"py[p]i\.(?:org|python)|python[h]osted\.org|npm[j]s\.(?:org|com)|deb\.de[b]ian\.org|cra[t]es\.io|ghcr\.i[o]"
)
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E)\b")
#: Texts that are kept as they were written.
AS_WRITTEN = {"LICENSE", "tests/requirements.yaml"}


def tool(*command: str) -> Callable[[], str]:
    """A check by another program. Its result is the program's output when it fails, otherwise ""."""

    def run() -> str:
        result = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return "" if result.returncode == 0 else result.stdout or f"exit status {result.returncode}"

    return run


def files() -> Iterator[Path]:
    """The files of the repository, also those that are not in git yet, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = [Path(name) for name in listing.stdout.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [
            name for name in names if not any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        ]
    return (name for name in sorted(set(names)) if (ROOT / name).is_file() and not (ROOT / name).is_symlink())


def layout() -> str:
    """Module sizes and names, unfinished work, registry hosts."""
    problems = []
    for name in files():
        if str(name) in AS_WRITTEN:
            continue
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a recorded frame or another binary file
        if name.suffix in MODULES and str(name) not in GENERATED:
            if len(lines) > MAX_MODULE_LINES:
                problems.append(f"{name}: {len(lines)} lines, limit {MAX_MODULE_LINES}")
            if EMPTY_NAMES & {name.name.partition(".")[0], *name.parts[:-1]}:
                problems.append(f"{name}: a module named after what it does, please")
        for number, line in enumerate(lines, 1):
            if REGISTRY.search(line):
                problems.append(f"{name}:{number}: names a package registry's host")
            if UNFINISHED.search(line):
                problems.append(f"{name}:{number}: unfinished work; finish it, or write an issue")
    return "\n".join(problems)


def python(*arguments: str) -> Callable[[], str]:
    """A check by a module or script of ours."""
    return tool(sys.executable, "-I", *arguments)


# The slowest check comes first, because it decides how long all of them take.
CHECKS: dict[str, Callable[[], str]] = {
    "types": tool(
        str(BIN / "mypy"),
        *(part for package in ("goondan", "tests", "scripts", "bench", "goondan_client") for part in ("-p", package)),
    ),
    "architecture": tool(str(BIN / "lint-imports"), "--no-logo", "--cache-dir", ".cache/import-linter"),
    "schemas": python("-m", "scripts.export_schemas", "--check"),
    "documents": python("-m", "scripts.bundle_docs", "--check"),
    "tool pages": python("-m", "scripts.tool_docs", "--check"),
    "error pages": python("-m", "scripts.error_docs", "--check"),
    "declarations": python("-m", "scripts.typescript_types", "--check"),
    "manifests": python("-m", "scripts.prepare_manifests", "--check"),
    "requirements": python("-m", "scripts.requirements", "--quiet"),
    "mutations": python("-m", "scripts.mutations", "--check"),
    "citations": python("-m", "scripts.citations"),
    "features": python("-m", "scripts.feature_walls"),
    "circles": python("-m", "scripts.import_circles"),
    "imports": python("-m", "scripts.every_import"),
    "fields": python("-m", "scripts.documented_fields"),
    "pins": python("-m", "scripts.pin", "--check"),
    "figures": python("-m", "bench.page", "--check"),
    "lint": tool(str(BIN / "ruff"), "check", "--quiet", "."),
    "format": tool(str(BIN / "ruff"), "format", "--check", "--quiet", "."),
    "layout": layout,
}


def main() -> int:
    """Run all checks; 0 when every one is clean."""
    failed = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {name: pool.submit(timed, check) for name, check in CHECKS.items()}
        for name, future in started.items():
            seconds, output = future.result()
            print(f"{name:<13} {'FAILED' if output else 'ok':<6} {seconds:5.1f} s", flush=True)
            if output:
                failed.append(name)
                print("    " + output.strip().replace("\n", "\n    "), flush=True)
    print("check: " + (f"failed: {', '.join(failed)}" if failed else "all clean"))
    return 1 if failed else 0


def timed(check: Callable[[], str]) -> tuple[float, str]:
    """Seconds taken, and the check's output."""
    start = time.monotonic()
    output = check()
    return time.monotonic() - start, output


if __name__ == "__main__":
    sys.exit(main())
