"""Write the pages about every kind and field of a bundle, from the structs themselves.

`python scripts/bundle_docs.py` writes docs/bundle.md, docs/bundle.ko.md and docs/old-spellings.md; `--check` says what
is out of date and exits 1. Words come from the structs (docstrings and field descriptions), examples from
scripts/bundle_text/; the first paragraphs stand in the pages. The Korean page says the same through
bundle_text/ko.yaml and NAME.ko.yaml of a feature with a kind; an English text without its Korean one, or a Korean one
that nothing needs, is an error.
docs/old-spellings.md has the documents of version 0.9 and the kinds that nothing runs. Parts that the structs have and
validation still refuses are found by running the validation.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from goondan.features import FEATURES
from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.rules.kinds import documents
from goondan.schemas.bundle.resources import API_V1
from scripts.export_schemas import export
from scripts.pages import hand_written, write_or_check

ROOT: Final = Path(__file__).resolve().parent.parent
SCRIPT: Final = "scripts/bundle_docs.py"
TEXT: Final = ROOT / "scripts" / "bundle_text"
DEFINITIONS: Final[dict[str, Any]] = json.loads(export()["bundle.schema.json"])["$defs"]
#: Structs that several kinds use. They are described once, behind the kinds.
SHARED: Final = ("Metadata", "ObjectRef", "ValueSource", "Sandbox", "SandboxPart")
#: Kinds that nothing runs: docs/old-spellings.md has them.
ABSENT: Final = ("Connector", "Connection")
#: Kinds that have no other form than that of version 0.9.
ONE_FORM: Final = ("OAuthApp",)
#: The text about parts that validation still refuses.
FIELD_REFUSED: Final = "Not there yet: it is refused."
KIND_REFUSED: Final = "Not there yet: it is checked, and then refused as `E_CONFIG_UNSUPPORTED`."
#: The text in place of the table of a struct that has the fields of another one, each of which may be left out.
SAME_FIELDS: Final = "Its fields are those of {}."
#: Parts that the structs have and that may still be refused: (struct, field) -> documents that use them.
PROBES: Final = {
    ("AgentBody", "extensions"): "{agent, spec: {modelConfig: {modelRef: Model/local}, extensions: [Extension/notes]}}",
}
#: Remarks in docstrings for readers of the code: requirement ids, sections.
_REMARK: Final = re.compile(r" \((?:[A-Z]+-\d\d|sandbox\.md [^)]*)\)")


def examples() -> dict[tuple[str, str], str]:
    """(apiVersion, kind) -> the text of its example."""
    texts = (TEXT / "examples.yaml").read_text(encoding="utf-8").split("---\n")
    return {(document["apiVersion"], document["kind"]): text for text in texts for document in [yaml.safe_load(text)]}


def korean_texts() -> dict[str, str]:
    """English text -> the Korean one: of the core, and of each feature that is there and has a file."""
    names = ("ko.yaml", *(f"{feature.name}.ko.yaml" for feature in FEATURES))
    found: dict[str, str] = {}
    for path in (TEXT / name for name in names):
        found |= yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def refused(documents: list[str]) -> bool:
    """Whether validation knows these documents and still refuses them. Any other error is our mistake: ValueError."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("tools/words.py", "extensions/notes.py", "connectors/mail.py", "prompts/assistant.md"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text("def register(api): ...")
        bundle = root / "goondan.yaml"
        bundle.write_text("---\n".join(documents), encoding="utf-8")
        env = {"MAIL_PASSWORD": "x", "CALENDAR_SECRET": "x"}
        errors = inspect_bundle(str(bundle), state_dir=None, env=env, handlers=False).errors
    wrong = [error.message for error in errors if error.code != "E_CONFIG_UNSUPPORTED"]
    if wrong:
        raise ValueError(f"an example is wrong: {wrong}")
    return bool(errors)


class Page:
    """One language's page. `say` turns an English text into this language."""

    def __init__(self, korean: bool) -> None:
        self.korean = korean
        self._table: dict[str, str] = korean_texts() if korean else {}
        self._missing: dict[str, None] = {}
        # Their time may be over, or come again.
        self._used = {FIELD_REFUSED, KIND_REFUSED}
        self._examples = examples()

    @property
    def path(self) -> Path:
        """The path of the page."""
        return ROOT / "docs" / ("bundle.ko.md" if self.korean else "bundle.md")

    def problems(self) -> list[str]:
        """Missing and unused entries in the table of translations. To be called after `text`."""
        unused = sorted(set(self._table) - self._used)
        return [f"no Korean for: {text}" for text in self._missing] + [
            f"nothing says any more: {text}" for text in unused
        ]

    def say(self, text: str) -> str:
        """`text` in the page's language."""
        if not self.korean:
            return text
        self._used.add(text)
        if text not in self._table:
            self._missing[text] = None
        return self._table.get(text, text)

    def text(self) -> str:
        """The whole page."""
        parts = [hand_written(self.path, SCRIPT)]
        known = set(SHARED)
        for (version, kind), struct in documents().items():
            if (version == API_V1 and kind not in ABSENT) or kind in ONE_FORM:
                parts.append(self.kind(version, kind, struct.__name__, known))
        parts.append(f"## {self.say('What several kinds share')}\n")
        for name in SHARED:
            parts += self.structs(name, known)
        return "\n".join(parts)

    def kind(self, version: str, kind: str, struct: str, known: set[str], mark: str = "##") -> str:
        """The section of one kind: its description, an example, its fields, and the structs that only it uses."""
        body = DEFINITIONS[struct]["properties"]["spec"]["$ref"].rpartition("/")[2]
        example = self._examples[version, kind]
        context = [text for key, text in self._examples.items() if key[0] == API_V1 and key != (version, kind)]
        if kind == "Connector":
            context = [text for text in context if "kind: Connection" not in text]
        elif kind != "Connection":
            context = [text for text in context if "kind: Connect" not in text]
        title = kind if version == API_V1 or kind in ONE_FORM else f"{kind} (v0.9)"
        lines = [f"{mark} {title}", "", self.described(body), "", f"```yaml\n{example}```", ""]
        if refused([*context, example]):  # a table of what nobody can use is in the way
            return "\n".join([*lines[:4], self.say(KIND_REFUSED), ""])
        lines += [self.table(body), ""]
        known.add(body)
        for name in references(body):
            if name not in known:
                lines += self.structs(name, known)
        return "\n".join(lines)

    def structs(self, name: str, known: set[str]) -> Iterator[str]:
        """The section of a struct, and of those in it that are not on the page yet."""
        known.add(name)
        whole = name.removesuffix("Part")
        if whole != name and fields_of(whole) == fields_of(name):
            same = self.say(SAME_FIELDS).replace("{}", f"[{whole}](#{whole.lower()})")
            yield f"### {name}\n\n{self.described(name)} {same}\n"
            return
        yield f"### {name}\n\n{self.described(name)}\n\n{self.table(name)}\n"
        for inner in references(name):
            if inner not in known:
                yield from self.structs(inner, known)

    def described(self, struct: str) -> str:
        """The description of a struct."""
        return self.say(_REMARK.sub("", DEFINITIONS[struct]["description"]))

    def table(self, struct: str) -> str:
        """The fields of a struct."""
        definition = DEFINITIONS[struct]
        required = definition.get("required", [])
        heads = [self.say(word) for word in ("Field", "Type", "Default", "What it is")]
        rows = [f"| {' | '.join(heads)} |", "|---|---|---|---|"]
        for name, schema in definition["properties"].items():
            default = f"**{self.say('required')}**" if name in required else shown_default(schema)
            rows.append(f"| `{name}` | {self.type(schema)} | {default} | {self.words(struct, name, schema)} |")
        return "\n".join(rows)

    def words(self, struct: str, name: str, schema: dict[str, Any]) -> str:
        """The description of a field: its own, otherwise that of the struct in it."""
        text = schema.get("description")
        if text is None and "$ref" in schema:
            return self.described(schema["$ref"].rpartition("/")[2])
        if text is None:
            raise ValueError(f"{struct}.{name} has no description")
        said = self.say(text)
        probe = PROBES.get((struct, name))
        if probe is not None and refused(self._probe(probe)):
            said += f" *{self.say(FIELD_REFUSED)}*"
        return said.replace("|", "\\|")

    def _probe(self, text: str) -> list[str]:
        agent = "apiVersion: goondan.ai/v1, kind: Agent, metadata: {name: probe}"
        kept = [self._examples[API_V1, kind] for kind in ("Model", "Tool", "Agent", "Swarm", "Extension")]
        return [*kept, text.replace("agent", agent, 1) + "\n"]

    def type(self, schema: dict[str, Any]) -> str:
        """A type in words."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return f"[{name}]({self.page_of(name)}#{name.lower()})"
        if "enum" in schema:
            return ", ".join(f"`{value}`" for value in schema["enum"])
        if "anyOf" in schema:
            kinds = [self.type(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
            return f" {self.say('or')} ".join(dict.fromkeys(kinds))
        kind = schema.get("type")
        if kind == "array":
            return self.say("list: {}").replace("{}", self.type(schema["items"]))
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            return self.say("map to: {}").replace("{}", self.type(schema["additionalProperties"]))
        names = {"string": "text", "integer": "whole number", "boolean": "true or false", "object": "map"}
        return self.say("anything" if kind is None else names.get(kind, kind)) + self.bounds(schema)

    def page_of(self, struct: str) -> str:
        """The page that a link to a struct names; "" for this one."""
        return ""

    def bounds(self, schema: dict[str, Any]) -> str:
        """Bounds of a number."""
        least, most = schema.get("minimum"), schema.get("maximum")
        above = schema.get("exclusiveMinimum")
        if least is not None and most is not None:
            return f", {least}–{most}"
        if least is not None:
            return f", ≥ {least}"
        return f", > {above}, ≤ {most}" if above is not None else ""


class OldSpellings(Page):
    """docs/old-spellings.md: its first sections, documents of version 0.9, and the kinds that nothing runs."""

    def __init__(self) -> None:
        super().__init__(korean=False)
        self._own: set[str] = set()

    @property
    def path(self) -> Path:
        """The path of the page."""
        return ROOT / "docs" / "old-spellings.md"

    def text(self) -> str:
        """The whole page."""
        known = {struct for struct in DEFINITIONS if struct not in ("ConnectorBody", "ConnectorEvent")}
        self._own = DEFINITIONS.keys() - known
        parts = [hand_written(self.path, SCRIPT)]
        parts.append("## Documents of version 0.9\n")
        for (version, kind), struct in documents().items():
            if version != API_V1 and kind not in ONE_FORM:
                parts.append(self.kind(version, kind, struct.__name__, known, "###"))
        parts.append("## Kinds that nothing runs\n")
        parts.append("`gdn validate` checks them.\n")
        absent = [self.kind(API_V1, kind, documents()[API_V1, kind].__name__, known, "###") for kind in ABSENT]
        return "\n".join([*parts, *absent])

    def page_of(self, struct: str) -> str:
        """The page that a link to a struct names; "" for this one."""
        return "" if struct in self._own else "bundle.md"


def fields_of(struct: str) -> dict[str, str]:
    """The fields of a struct with their descriptions; {} for none that there is."""
    properties = DEFINITIONS.get(struct, {}).get("properties", {})
    return {name: schema.get("description", "") for name, schema in properties.items()}


def references(struct: str) -> list[str]:
    """The structs in a struct's fields, in order."""
    found = re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(DEFINITIONS[struct]["properties"]))
    return list(dict.fromkeys(found))


def shown_default(schema: dict[str, Any]) -> str:
    """The default as text; "" when it is empty, or the struct's own."""
    default = schema.get("default")
    if default in (None, "", [], {}):
        return ""
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    PAGES = (Page(korean=False), Page(korean=True), OldSpellings())
    sys.exit(write_or_check(PAGES, SCRIPT, sys.argv[1:]))
