"""Which files of a conversation a request to a model has, and which are lines of words there.

Rules.
- What a model sees is what its Model says (`sees`). Where it says nothing, files are sent, and a refusal teaches it.
- The files of the turn's own user message have to be seen, otherwise the turn fails with E_MODEL_CANNOT_SEE: a person
  asks about them. All others (of earlier turns, of results) become words, so no conversation gets stuck by a file.
- A request has MAX_SHOWN files and MAX_SHOWN_BYTES at most: the newest ones. The older ones become words in groups, so
  that the beginning of the requests stays the same for as long as possible.

Source: docs/design/files.md section 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from goondan.agentproc.conversation import UserData, files_of
from goondan.agentproc.providers.base import ModelRequest
from goondan.agentproc.providers.vendor import Fault
from goondan.schemas.wire.blobs import MAX_SHOWN, MAX_SHOWN_BYTES, PDF, kind_of, size_of_files
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import FilePart

#: So many files become words at a time.
GROUP: Final = 8
#: The statuses of a server that does not take a request.
_REFUSALS: Final = frozenset((400, 404, 413, 415, 422, 500, 501))
_WHAT: Final = r"(?:image|vision|picture|multi-?modal|pdf|document|file)"
#: A server says that its model sees nothing of the kind. The words of the usual servers, in lower case.
_CANNOT: Final = re.compile(
    rf"not support[^.]{{0,60}}{_WHAT}|{_WHAT}[^.]{{0,60}}(?:not support|not enabled|only supported by)"
    rf"|not a multi-?modal|at most 0 {_WHAT}|mmproj|unknown variant `(?:image_url|file|image|document)`"
    rf"|content must be a string|no endpoints found that support|missing data required for {_WHAT}"
)
#: A server does not take this very file.
_BAD: Final = re.compile(
    r"format|media.?type|mime|too large|too big|exceed|dimension|could not process|decode|base64|corrupt"
)
_ABOUT: Final = re.compile(_WHAT)
_ABOUT_PDF: Final = re.compile(r"pdf|document|`file`|file (?:input|content)")
_ABOUT_IMAGE: Final = re.compile(r"image|vision|picture|modal|mmproj")


class Seeing:
    """What the models of one agent see. `is_there` tells whether the file at a path has this size (bytes)."""

    def __init__(self, is_there: Callable[[str, int], bool]) -> None:
        self._is_there = is_there
        #: (endpoint, model) -> the kinds that its server has refused.
        self._unseen: dict[tuple[str | None, str], set[str]] = {}
        #: Files that a server did not take, by `blob.file`.
        self._refused: set[str] = set()

    def ready(self, request: ModelRequest) -> ModelRequest:
        """The request with the files that are to be words. Raises GoondanError E_MODEL_CANNOT_SEE."""
        if request.files is None:
            return request
        files, asked = _files(request)
        if not files:
            return request
        if request.files_as_words:
            return replace(request, hidden_files=frozenset(file.blob.file for file in files))
        unseen = self._kinds_unseen(request)
        blind = next((file for file in asked if kind_of(file.media_type) in unseen), None)
        if blind is not None:
            raise cannot_see(request, blind)
        hidden = {file.blob.file for file in files if self._is_hidden(file, unseen, request.files.folder)}
        shown = [file for file in files if file.blob.file not in hidden]
        hidden.update(file.blob.file for file in _too_many(shown))
        return replace(request, hidden_files=frozenset(hidden))

    def learn(self, request: ModelRequest, fault: Fault) -> ModelRequest | None:
        """What a refusal says about the files of a request that `ready` returned: the request to send in its place,
        None when the refusal is about something else. Raises GoondanError E_MODEL_CANNOT_SEE.

        Each time, at least one file more becomes words. So a request is sent again at most once for each kind of file,
        and once for files that the server does not take.
        """
        if request.files is None or fault.status not in _REFUSALS:
            return None
        files, asked = _files(request)
        shown = [file for file in files if file.blob.file not in request.hidden_files]
        words = fault.message.lower()
        cannot = _CANNOT.search(words) is not None and _BAD.search(words) is None
        if not shown or not (cannot or fault.status == 413 or _ABOUT.search(words)):
            return None
        if cannot:
            kinds = {kind for file in shown if (kind := kind_of(file.media_type)) is not None}
            named = {kind for kind, about in (("pdf", _ABOUT_PDF), ("image", _ABOUT_IMAGE)) if about.search(words)}
            self._unseen.setdefault(_model(request), set()).update(kinds & named or kinds)
        elif any(file in shown for file in asked):
            return None  # the server's words are the error of the turn
        else:
            self._refused.update(file.blob.file for file in shown)
        return self.ready(request)

    # --- inside

    def _kinds_unseen(self, request: ModelRequest) -> set[str]:
        sees = request.model.sees
        unseen = set() if sees is None else {"image", "pdf"} - set(sees)
        return unseen | self._unseen.get(_model(request), set())

    def _is_hidden(self, file: FilePart, unseen: set[str], folder: str) -> bool:
        if kind_of(file.media_type) in unseen or file.blob.file in self._refused:
            return True
        return not self._is_there(f"{folder}/{file.blob.file}", file.blob.size)


def cannot_see(request: ModelRequest, file: FilePart) -> GoondanError:
    """The error of a turn whose message has a file that the model cannot see."""
    what = "PDFs" if file.media_type == PDF else "pictures"
    model = f"{request.model.provider}/{request.model.model}".rstrip("/")
    return fail("E_MODEL_CANNOT_SEE", f"the model {model} cannot see {what}; the message has {file.name or 'one'}")


def _model(request: ModelRequest) -> tuple[str | None, str]:
    return request.model.endpoint, request.model.model


def _files(request: ModelRequest) -> tuple[list[FilePart], list[FilePart]]:
    """All files of the conversation, in order; and those of the turn's own user messages."""
    files: list[FilePart] = []
    asked: list[FilePart] = []
    own = f"{request.turn_id}."
    for message in request.messages:
        found = files_of(message)
        files += found
        if found and isinstance(message.data, UserData) and message.id.startswith(own):
            asked += found
    return files, asked


def _too_many(files: Sequence[FilePart]) -> Sequence[FilePart]:
    """The oldest files, without which the rest is within the limits of a request."""
    cut = 0
    while len(files) - cut > MAX_SHOWN or size_of_files(files[cut:]) > MAX_SHOWN_BYTES:
        cut += GROUP if len(files) - cut > 2 * GROUP else 1  # one message's own files always fit
    return files[:cut]
