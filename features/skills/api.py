"""Skills: folders with a SKILL.md, in the public format. What its text says, and how much of it counts. Pure.

A SKILL.md may begin with front matter: YAML between two lines `---`. It was written by somebody who is not trusted, and
perhaps by a tool. So no alias is followed, and what is deep, long or anything but text is refused.

Source: docs/design/tools.md section 14; requirements SKILL-04, SKILL-05; the public format (agentskills.io).
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.text.visible import visible_line

#: The file that makes a folder a skill.
SKILL_FILE: Final = "SKILL.md"
#: The longest name of a skill, and the longest description (characters), as the public format has them.
MAX_NAME: Final = 64
MAX_DESCRIPTION: Final = 1024
#: The longest front matter (characters). Descriptions have 1,024, and metadata some lines.
MAX_FRONT_MATTER: Final = 16_384
#: Front matter has so many values at most, and so many levels. The public format needs two levels.
_MAX_VALUES: Final = 256
_MAX_DEPTH: Final = 4
_BEGIN: Final = re.compile(r"---[ \t]*\n")
_END: Final = re.compile(r"^(?:---|\.\.\.)[ \t]*$", re.MULTILINE)


class BadFrontMatter(ValueError):
    """The front matter cannot be used; the message says why."""


class SkillText(Struct, frozen=True, kw_only=True):
    """What a SKILL.md says about its skill."""

    #: What it is for, one line of at most MAX_DESCRIPTION characters.
    description: str
    #: The name that it gives itself; None: none.
    name: str | None = None
    #: The tools that it asks for, as they are written. Nothing is granted because of them.
    allowed_tools: list[str] = []
    #: Its licence, as it is written.
    license: str | None = None
    #: What is wrong with it, a sentence each. It can be used nevertheless.
    problems: list[str] = []


def is_skill_name(name: str) -> bool:
    """Whether a folder of this name can be a skill: 1 to 64 characters that can be printed, no blanks around them."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and name.strip() == name and _is_utf8(name)


def read_skill_text(text: str, folder: str) -> SkillText:
    """What a SKILL.md says that lies in a folder of this name. `text` may end after MAX_FRONT_MATTER characters."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    problems: list[str] = []
    fields: dict[str, Any] = {}
    body = text
    begin = _BEGIN.match(text)
    end = _END.search(text, begin.end()) if begin is not None else None
    if begin is not None:
        try:
            if end is None or end.start() > MAX_FRONT_MATTER:
                raise BadFrontMatter(f"it has no end within {MAX_FRONT_MATTER} characters")
            body = text[end.end() :].lstrip("\n")
            fields = read_front_matter(text[begin.end() : end.start()])
        except BadFrontMatter as error:
            problems.append(f"the front matter cannot be used: {error}")
    name, given = _text(fields.get("name")), _text(fields.get("description"))
    if name is not None and name != folder:
        problems.append(
            f"it calls itself {visible_line(name[:MAX_NAME])!r}, and its folder is {visible_line(folder)!r}"
        )
    description = _line(given) if given else ""
    if not description:
        first = (
            body.split("\n", 1)[0] if body is text else next((line for line in body.split("\n") if line.strip()), "")
        )
        description = _line(first.strip().lstrip("#")) if first.strip() != "---" else ""
    if len(description) > MAX_DESCRIPTION:
        problems.append(f"its description has more than {MAX_DESCRIPTION} characters")
        description = description[: MAX_DESCRIPTION - 1] + "…"
    return SkillText(
        description=description or f"Skill: {folder}",
        name=name,
        allowed_tools=_words(fields.get("allowed-tools")),
        license=_text(fields.get("license")),
        problems=problems,
    )


def read_front_matter(text: str) -> dict[str, Any]:
    """The values of a front matter: texts, and lists and mappings of such. A scalar is the text that stands there.

    Raises BadFrontMatter.
    """
    import yaml  # what has no front matter does without

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise BadFrontMatter(f"{getattr(error, 'problem', None) or 'it is no YAML'}{where}") from None
    except (RecursionError, ValueError, OverflowError) as error:
        if isinstance(error, BadFrontMatter):
            raise
        raise BadFrontMatter("it is no YAML") from None
    if builder.made is None:
        return {}
    if not isinstance(builder.made, dict):
        raise BadFrontMatter("it is no mapping")
    return builder.made


class _Builder:
    """Makes values from the parser's events, without recursion, and stops at what is too much."""

    def __init__(self) -> None:
        self.made: Any = None
        self._open: list[tuple[Any, list[str]]] = []  # a list or mapping, and the key that waits for its value
        self._values = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        """The next event. Raises BadFrontMatter."""
        match type(event).__name__:
            case "AliasEvent":
                raise BadFrontMatter("it has an alias (*), which is not followed")
            case "DocumentStartEvent":
                self._documents += 1
                if self._documents > 1:
                    raise BadFrontMatter("it is more than one document")
            case "ScalarEvent":
                self._add(event.value)
            case "SequenceStartEvent" | "MappingStartEvent":
                made: Any = [] if type(event).__name__ == "SequenceStartEvent" else {}
                self._add(made)
                self._open.append((made, []))
                if len(self._open) > _MAX_DEPTH:
                    raise BadFrontMatter(f"it is deeper than {_MAX_DEPTH} levels")
            case "SequenceEndEvent" | "MappingEndEvent":
                self._open.pop()

    def _add(self, value: Any) -> None:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise BadFrontMatter(f"it has more than {_MAX_VALUES} values")
        if not self._open:
            self.made = value
            return
        holder, key = self._open[-1]
        if isinstance(holder, list):
            holder.append(value)
        elif not key:
            if not isinstance(value, str):
                raise BadFrontMatter("a key is no text")
            key.append(value)
        else:
            holder[key.pop()] = value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _line(text: str) -> str:
    """The text in one line, with nothing that a terminal obeys."""
    return visible_line(" ".join(text.split()))


def _words(value: Any) -> list[str]:
    """The tools of `allowed-tools`: a list, or names with commas or blanks between them (`Bash(git:*), Read`)."""
    if isinstance(value, list):
        return [_line(item) for item in value if isinstance(item, str)]
    return re.findall(r"[^\s,(]+(?:\([^)]*\))?", _line(value)) if isinstance(value, str) else []


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
