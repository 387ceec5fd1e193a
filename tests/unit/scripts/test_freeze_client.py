"""What is kept of a minor of the protocol: the sequences, every name, and at its release the client."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.export_schemas import frame_types
from scripts.freeze_client import STRUCTS, freeze


def test_all_of_it_is_kept_and_nothing_of_before(tmp_path: Path) -> None:
    place = tmp_path / "9.9"
    (place / "goondan_client").mkdir(parents=True)
    (place / "goondan_client" / "old.py").touch()
    freeze(place, client=False)
    assert {path.name for path in place.iterdir()} == {"names.json", "sequences.json"}
    (place / "old.json").touch()
    freeze(place, client=True)
    assert {path.name for path in place.iterdir()} == {"goondan_client", "names.json", "sequences.json"}
    modules = {path.name for path in (place / "goondan_client").iterdir()}
    assert "machine.py" in modules and not modules & {"old.py", "__pycache__"}
    names = json.loads((place / "names.json").read_text())
    assert set(names["types"]) == set(frame_types())
    assert set(names["fields"]) == {"Frame", *STRUCTS}
    assert {"token", "versions", "awaiting"} <= set(names["fields"]["Hello"])
