"""A page of the documentation as somebody follows it: its files written, its commands run, one after the other.

What is in a fenced block decides what it is:
- `console` with lines that begin with `$ `: commands, each with the output shown under it. A `#` behind two blanks
  begins a remark. Lines that begin with `> ` are typed into the command. `cd`, `export` and `unset` hold for what
  follows.
- `console` without such lines: what is typed into the command before it, which then is run with it.
- `sh`: only shown, for commands that need what not everybody has.
- any other block right behind a line that ends with "`PATH`:": a file with that content.
Everything else is only shown. In shown output `…` stands for anything.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: How long one command may take (seconds): the first one downloads and installs.
PATIENCE_S = 600.0
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([^`\s]+)`:\s*\Z")


@dataclass
class File:
    """Write `text` to `path`, relative to where the page is followed."""

    path: str
    text: str


@dataclass
class Command:
    """Run a line in a shell."""

    #: The line.
    line: str
    #: The text for its stdin.
    typed: str = ""
    #: The output that the page shows; "" for none.
    shown: str = ""


@dataclass
class Outcome:
    """How a command ended."""

    #: The command.
    command: Command
    #: Its exit status.
    status: int
    #: Its stdout.
    out: str
    #: Its stderr.
    err: str

    @property
    def fits(self) -> bool:
        """Whether it succeeded and printed what the page shows."""
        return self.status == 0 and fits(self.command.shown, self.out)

    def __str__(self) -> str:
        shown = f"\n--- the page shows\n{self.command.shown}" if self.command.shown else ""
        return f"$ {self.command.line}\n{self.out}{self.err}(status {self.status}){shown}"


@dataclass
class Walker:
    """Follows pages in `folder`. `environment` is all that the commands have; `user` and `group` are ids to run as."""

    folder: Path
    environment: Mapping[str, str]
    user: int | None = None
    group: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    _before: list[str] = field(default_factory=list)

    def follow(self, steps: list[File | Command]) -> list[Outcome]:
        """Take every step. Returns how the commands ended. A command that fails does not stop the others."""
        before = len(self.outcomes)
        for step in steps:
            if isinstance(step, File):
                self.write(step)
                continue
            self.outcomes.append(self.run(step))
            if re.match(r"(cd|export|unset) ", step.line) and self.outcomes[-1].status == 0:
                self._before.append(step.line)
        return self.outcomes[before:]

    def write(self, file: File) -> None:
        """Write a file, in a folder that is made if need be."""
        path = shlex.quote(file.path)
        done = self.run(Command(f'mkdir -p "$(dirname {path})" && cat > {path}', typed=file.text))
        if done.status != 0:
            raise OSError(f"{file.path} cannot be written: {done.err}")

    def run(self, command: Command) -> Outcome:
        """Run a command in a shell of its own. Processes that it leaves in the background keep no pipe of ours."""
        line = " && ".join([f"cd {shlex.quote(str(self.folder))}", *self._before, command.line])
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", line],
                input=command.typed,
                capture_output=True,
                text=True,
                env=dict(self.environment),
                user=self.user,
                group=self.group,
                extra_groups=None if self.user is None else [],
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(command, -1, "", f"not done within {PATIENCE_S:g} s\n")
        return Outcome(command, done.returncode, done.stdout, done.stderr)


def steps(page: str) -> list[File | Command]:
    """What a page asks for, in its order."""
    found: list[File | Command] = []
    end = 0
    for match in _FENCE.finditer(page):
        language, block = match.groups()
        before = page[end : match.start()]
        end = match.end()
        named = _FILE.search(before)
        if language == "console":
            commands = list(_commands(block))
            last = found[-1] if found else None
            if commands:
                found += commands
            elif isinstance(last, Command):
                last.typed += block
        elif named is not None and language != "sh":
            found.append(File(named.group(1), block))
    return found


def _commands(block: str) -> Iterator[Command]:
    current: Command | None = None
    for line in block.splitlines():
        if line.startswith("$ "):
            if current is not None:
                yield current
            current = Command(re.sub(r"\s{2,}#.*$", "", line[2:]).rstrip())
        elif current is not None and line.startswith("> "):
            current.typed += line[2:] + "\n"
        elif current is not None:
            current.shown += line + "\n"
    if current is not None:
        yield current


def fits(shown: str, printed: str) -> bool:
    """Whether `printed` holds the lines of `shown`, one behind the other; `…` is anything within a line, a line that
    is only `…` any lines.
    """
    pattern = r"\n"
    for line in shown.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(re.escape(part) for part in line.rstrip().split("…")) + r"[ \t]*\n"
    return not shown.strip() or re.search(pattern, "\n" + printed.rstrip("\n") + "\n") is not None
