"""`python -m scripts.freeze_client NAME`: keep the client for Python, and what the protocol has, as they are now.

It writes `tests/frozen/NAME`: the package, the sequences of a client, and the names of all types and fields. From then
on tests/process/test_minor_versions.py tries the kept client with the kernel as it becomes, and the client as it
becomes with a kernel that knows no more than the kept names. Run it when a minor of the protocol is released.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from scripts.export_schemas import frame_types

ROOT: Final = Path(__file__).resolve().parent.parent
FROZEN: Final = ROOT / "tests" / "frozen"
#: What a client sends and is sent.
STRUCTS: Final = ("AgentEvent", "Answer", "Credit", "ErrorPayload", "Hello", "RuntimeEvent", "Usage", "Wait", "Welcome")


def freeze(place: Path) -> None:
    """Write everything into the folder `place`, in the stead of what is there."""
    shutil.rmtree(place, ignore_errors=True)
    source = ROOT / "clients" / "python" / "goondan_client"
    shutil.copytree(source, place / "goondan_client", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "schemas" / "vectors" / "sequences.json", place / "sequences.json")
    (place / "names.json").write_text(json.dumps(names(), indent=1) + "\n", encoding="utf-8")


def names() -> dict[str, Any]:
    """The types of frames, and the fields of headers and payloads."""
    fields = {}
    for name, file in (("Frame", "frame"), *((name, "payloads") for name in STRUCTS)):
        schema = json.loads((ROOT / "schemas" / "json" / f"{file}.schema.json").read_text(encoding="utf-8"))
        fields[name] = sorted(schema["$defs"][name]["properties"])
    return {"types": sorted(frame_types()), "fields": fields}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].replace(".", "").isdecimal():
        sys.exit("usage: freeze_client.py MINOR, for example 1.0")
    freeze(FROZEN / sys.argv[1])
