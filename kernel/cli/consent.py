"""The question that `gdn` asks before a bundle runs that asks for more than the user has agreed to.

The kernel decides: it refuses to start with E_BUNDLE_UNTRUSTED. Then this module reads the bundle and shows what it
asks for. The user agrees to what was shown. The kernel compares this with what it reads itself. So a change of the
files in between does no harm: the kernel refuses the changed bundle again, and the user is asked again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from goondan.kernel.cli.output import columns_of, is_terminal, write
from goondan.kernel.cli.state import Place
from goondan.schemas.wire.errors import GoondanError

if TYPE_CHECKING:
    from goondan.kernel.bundle.loader import Inspected
    from goondan.kernel.trust.powers import Power

#: How often the user is asked about one start. Otherwise a bundle that changes after each answer would be asked about
#: without end.
MAX_QUESTIONS: Final = 3
#: The longest answer (bytes).
MAX_ANSWER: Final = 100

Answer = Literal["always", "once", "no"]
T = TypeVar("T")


class Where(Place, Protocol):
    """A bundle that is started: see goondan.kernel.cli.attach.BundleTarget."""

    @property
    def policy(self) -> str | None:
        """The file of --policy."""


def started_when_trusted(place: Where, begin: Callable[[Sequence[Power]], T]) -> T:
    """Call `begin`, and return what it has started. Its argument are the powers that the user has just agreed to: at
    first none.

    When it raises E_BUNDLE_UNTRUSTED and a person is at the terminal, the person is asked. Raises what `begin` raises.
    """
    agreed: Sequence[Power] = ()
    for left in reversed(range(MAX_QUESTIONS + 1)):
        try:
            return begin(agreed)
        except GoondanError as error:
            if error.info.code != "E_BUNDLE_UNTRUSTED" or not left or not can_ask():
                raise
            inspected = look_again(place)
            if not inspected.judgement.trusted:  # otherwise the user has agreed in another terminal
                answer = ask(inspected)
                if answer == "no":
                    raise
                if answer == "always":
                    remember(inspected, place.state_dir, how="question")
            agreed = inspected.judgement.powers
    raise AssertionError("the last start returns or raises")


def look_again(place: Where) -> Inspected:
    """Read the bundle again, without its modules. Raises BundleError when it has errors now."""
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.bundle.problems import BundleError

    inspected = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    # A variable that is not set keeps the bundle from running, but it can still be read.
    broken = [problem for problem in inspected.errors if problem.code != "E_CONFIG_MISSING_ENV"]
    if broken:
        raise BundleError(broken, inspected.dropped)
    return inspected


def can_ask() -> bool:
    """Whether a person is at the terminal, and did not ask for JSON."""
    return is_terminal(sys.stdin) and is_terminal(sys.stderr) and "--json" not in sys.argv


def ask(inspected: Inspected) -> Answer:
    """Show what the bundle asks for, and ask the person. Anything but a clear yes is a no."""
    from goondan.kernel.cli.console.trust_screen import question, screen
    from goondan.kernel.cli.terminal import style_of

    judgement = inspected.judgement
    _drop_typed_ahead()
    lines = screen(judgement, inspected.path, style_of(sys.stderr), columns_of(sys.stderr, 80))
    write(*lines, question(judgement), stream=sys.stderr)
    # Read from the descriptor: later text is for the conversation, and must not stay in a buffer here.
    said = os.read(sys.stdin.fileno(), MAX_ANSWER).decode("utf-8", "replace").strip().lower()
    if said in ("y", "yes"):
        return "always" if judgement.unbelieved is None else "once"
    return "once" if said in ("o", "once") else "no"


def confirmed(question: str) -> bool:
    """Whether the person at the terminal says yes. Anything but a clear yes is a no."""
    _drop_typed_ahead()
    write(question, stream=sys.stderr)
    return os.read(sys.stdin.fileno(), MAX_ANSWER).decode("utf-8", "replace").strip().lower() in ("y", "yes")


def remember(inspected: Inspected, state_dir: str, *, how: str, own: bool | None = None) -> None:
    """Record that the user has agreed to everything that the bundle asks for. Raises GoondanError E_STATE."""
    from goondan.kernel.paths import root_of
    from goondan.kernel.trust import records

    root = root_of(state_dir)
    known = records.read(root, inspected.path)
    is_own = known is not None and known.own if own is None else own
    records.write(root, inspected.path, inspected.judgement.powers, own=is_own, how=how)


def _drop_typed_ahead() -> None:
    """Throw away text that was typed or pasted before the question appeared: it is no answer."""
    import termios

    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
