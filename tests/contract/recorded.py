"""The recorded parity cases: setting one up, and comparing what came with what was recorded.

Compared are status, code, message, output and files; an error's name and suggestion are ours.
`cases.jsonl` is the recording, `edge_cases.jsonl` are more of the kind, mostly edges, answered by the same reference;
`parity_deviations.yaml` says which cases we knowingly answer differently, and why.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CASES = HERE / "parity" / "cases.jsonl"
EDGE_CASES = HERE / "parity" / "edge_cases.jsonl"
#: Case id -> why we answer differently.
DEVIATIONS: dict[str, str] = yaml.safe_load((HERE / "parity_deviations.yaml").read_text(encoding="utf-8"))
#: Of the cases that no tag makes a candidate, at most this share may deviate (docs/design/tools.md section 9).
MAX_DEVIATIONS = 0.05
_CANDIDATES = {"quirk", "doc-deviation", "security"}
#: A handler's error without a code of its own gets this one (ERROR-02); the recording has none then.
DEFAULT_CODE = "E_TOOL"
#: Longer strings are recorded as their length (UTF-16 units) and digest.
LONG = 3000


def cases(*tools: str) -> list[dict[str, Any]]:
    """The cases whose tool is an export of one of these resources; all cases without any."""
    lines = [line for file in (CASES, EDGE_CASES) for line in file.read_text(encoding="utf-8").strip("\n").split("\n")]
    return [case for case in map(json.loads, lines) if not tools or case["tool"].partition("__")[0] in tools]


def fill(value: Any, places: dict[str, str]) -> Any:
    """Put real values for placeholders such as {{WORKDIR}}."""
    if isinstance(value, str):
        for name, real in places.items():
            value = value.replace("{{" + name + "}}", real)
        return value
    if isinstance(value, list):
        return [fill(item, places) for item in value]
    if isinstance(value, dict):
        return {fill(key, places): fill(item, places) for key, item in value.items()}
    return value


def set_up(setup: dict[str, Any], workdir: Path) -> None:
    """Make the files that a case wants."""
    for name in setup.get("dirs", []):
        (workdir / name).mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {name: text.encode() for name, text in setup.get("files", {}).items()}
    contents |= {name: base64.b64decode(data) for name, data in setup.get("filesBase64", {}).items()}
    contents |= {name: (text * times).encode() for name, (text, times) in setup.get("filesRepeat", {}).items()}
    for name, data in contents.items():
        path = workdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name, target in setup.get("symlinks", {}).items():
        (workdir / name).symlink_to(target)


def differences(case: dict[str, Any], result: dict[str, Any], workdir: Path, elapsed_ms: float) -> list[str]:
    """What differs from the recording; empty when nothing does. `case` has its placeholders filled."""
    expect = case["expect"]
    ignored = set(case.get("volatile", []))
    found: list[str] = []
    if result["status"] != expect["status"]:
        return [
            f"status {result['status']} instead of {expect['status']}: {result.get('error') or result.get('output')}"
        ]
    if expect["status"] == "error":
        found += _compare_error(case, result["error"], ignored)
    else:
        found += _compare(expect.get("output"), result.get("output"), "output", ignored, case.get("match", {}))
    low, high = case.get("elapsedMs", [0, float("inf")])
    if not low <= elapsed_ms <= high:
        found.append(f"took {elapsed_ms:.0f} ms instead of {low} to {high}")
    for name, content in expect.get("files", {}).items():
        found += _compare_file(workdir / name, content)
    return found


def check(case: dict[str, Any], found: list[str]) -> None:
    """Fail for a difference that nobody wrote down, and for one that was written down and is none."""
    if case["id"] in DEVIATIONS:
        assert found, f"{case['id']} passes now: take it out of parity_deviations.yaml"
    else:
        assert not found, "\n".join(found)


def check_deviations(tool: str) -> None:
    """Fail when too many cases of a resource deviate, for no reason given, or when a deviation is of no case."""
    of_tool = cases(tool)
    deviating = [c["id"] for c in of_tool if c["id"] in DEVIATIONS and not _CANDIDATES & set(c.get("tags", []))]
    assert len(deviating) <= MAX_DEVIATIONS * len(of_tool)
    ours = {name: reason for name, reason in DEVIATIONS.items() if name.startswith(f"{tool}__")}
    assert not ours.keys() - {case["id"] for case in of_tool}
    assert all(len(reason) > 20 for reason in ours.values())


def _compare_error(case: dict[str, Any], error: dict[str, Any], ignored: set[str]) -> list[str]:
    expected = case["expect"]["error"]
    found: list[str] = []
    if "error.code" not in ignored and error.get("code") != expected.get("code", DEFAULT_CODE):
        found.append(f"code {error.get('code')} instead of {expected.get('code', DEFAULT_CODE)}: {error['message']}")
    pattern = case.get("messageMatch")
    if pattern is None and error["message"] != expected["message"]:
        found.append(f"message {error['message']!r} instead of {expected['message']!r}")
    elif pattern is not None and re.search(pattern, error["message"]) is None:
        found.append(f"message {error['message']!r} does not match {pattern}")
    return found


def _compare(expected: Any, got: Any, path: str, ignored: set[str], patterns: dict[str, str]) -> list[str]:
    if path in ignored:
        return []
    if path in patterns:
        return [] if re.search(patterns[path], str(got)) else [f"{path}: {got!r} does not match {patterns[path]}"]
    if isinstance(expected, dict) and "$long" in expected:
        return _compare_long(expected["$long"], got, path)
    if isinstance(expected, dict) and isinstance(got, dict):
        found = [f"{path}.{key} is missing" for key in expected.keys() - got.keys() if f"{path}.{key}" not in ignored]
        found += [f"{path}.{key} is not expected" for key in got.keys() - expected.keys()]
        for key in expected.keys() & got.keys():
            found += _compare(expected[key], got[key], f"{path}.{key}", ignored, patterns)
        return found
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return [f"{path} has {len(got)} items instead of {len(expected)}"]
        return [
            line
            for index, pair in enumerate(zip(expected, got, strict=True))
            for line in _compare(*pair, f"{path}.{index}", ignored, patterns)
        ]
    same = expected == got and isinstance(expected, bool) == isinstance(got, bool)
    return [] if same else [f"{path}: {got!r} instead of {expected!r}"]


def _compare_long(expected: dict[str, Any], got: Any, path: str) -> list[str]:
    text = str(got)
    units = len(text.encode("utf-16-le", "surrogatepass")) // 2
    digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    if (units, digest) == (expected["length"], expected["sha256"]):
        return []
    return [f"{path}: another text of {units} characters, recorded are {expected['length']}"]


def _compare_file(path: Path, content: Any) -> list[str]:
    if content is None:
        return [f"{path} exists"] if path.exists() else []
    if isinstance(content, dict) and content.get("dir"):
        return [] if path.is_dir() else [f"{path} is no folder"]
    wanted = base64.b64decode(content["base64"]) if isinstance(content, dict) else str(content).encode()
    if not path.is_file():
        return [f"{path} is missing"]
    return [] if path.read_bytes() == wanted else [f"{path} has another content"]
