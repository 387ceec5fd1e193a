"""What features bring to bundles: kinds of documents, providers of models, model servers, what they do with files.

What such documents become is a part of the plan, under the feature's name. The core passes it on unopened.

A provider of a feature answers without a server, from a file that a Model names.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from goondan.features import parts
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Report
from goondan.kernel.bundle.rules.shape import Document
from goondan.kernel.grants.powers import Power
from goondan.schemas.bundle.extensions import API_MEMBERS
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import DOCUMENTS, ModelBody, Strict


class Kind(Protocol):
    """One kind of document."""

    @property
    def name(self) -> str:
        """What documents have as their `kind`."""

    @property
    def part(self) -> str:
        """The name of the feature, and of the part of the plan."""

    @property
    def documents(self) -> Mapping[str, type[Strict]]:
        """The struct of its documents for each apiVersion."""

    @property
    def secrets(self) -> Mapping[tuple[str, str], str]:
        """The paths of fields with secrets, each with the use of a variable whose value goes there, as a person reads
        it who is asked for trust.
        """

    def check(self, document: Document, body: Any, report: Report, *, whole: bool) -> None:
        """Report what is wrong with a document. `whole`: it fits its form, so that no value was replaced."""

    def resolve(self, name: str, body: Any, env: Mapping[str, str]) -> Any:
        """What the plan has of a document."""

    def powers(self, document: Document, body: Any) -> Iterable[Power]:
        """What a bundle can do by a document, for the person who is asked for trust."""


class Instead(Protocol):
    """What answers every agent in place of its Model, because whoever starts the kernel wants it."""

    @property
    def model_ref(self) -> str:
        """The Model that all agents have, as a reference; "": each has its own."""

    def model(self, body: ModelBody, params: Mapping[str, Any]) -> ModelSpec | None:
        """What answers in place of a Model; None: the Model does. `params` are the agent's own."""


class OwnProvider(Protocol):
    """A provider of models that needs no server."""

    @property
    def name(self) -> str:
        """What Models have as their `provider`."""

    @property
    def text(self) -> str:
        """What answers, in a few words for a person."""

    def find_file(self, document: Document, body: ModelBody, files: Files, report: Report) -> str | None:
        """The file that a Model names: an absolute path. None after an error."""

    def instead(self, env: Mapping[str, str]) -> Instead | None:
        """What the environment of the kernel puts in place of all Models; None: nothing."""


class LocalModels:
    """What a feature knows of the model servers of this machine. This class knows of none: it is used when no feature
    does.
    """

    def chosen(self, state_root: str, bundle: str) -> str | None:
        """The endpoint that agents use whose bundle leaves the model to the environment. None: a person chose none."""
        return None

    def offer(self, state_root: str, bundle: str) -> None:
        """Offer one to the person at the terminal, if there is one. Raises GoondanError E_STATE."""

    def before_start(self, bundle: str, state_dir: str, policy: str | None) -> Callable[[str | None], str | None]:
        """A person starts a swarm at a terminal. Returns what tells a line about the server of the model that the
        kernel names, or None.
        """
        return lambda model: None


def brought(name: str) -> list[Any]:
    """What features have by this name in their `bundle.py`, in the order of the table. Raises ImportError."""
    return [getattr(module, name) for module in parts("bundle") if hasattr(module, name)]


def local_models() -> LocalModels:
    """`LOCAL_MODELS` of the one feature that has it. Two would choose two servers."""
    found: list[LocalModels] = brought("LOCAL_MODELS")
    return found[0] if found else LocalModels()


@cache
def kinds() -> Mapping[str, Kind]:
    """All such kinds by their names: `KIND` of each feature's `bundle.py` that has one."""
    found: list[Kind] = brought("KIND")
    return {kind.name: kind for kind in found}


@cache
def documents() -> Mapping[tuple[str, str], type[Strict]]:
    """(apiVersion, kind) -> the struct of the document: those of the core, then those of features."""
    own = {(version, kind.name): form for kind in kinds().values() for version, form in kind.documents.items()}
    return {**DOCUMENTS, **own}


@cache
def kind_names() -> tuple[str, ...]:
    """Every kind that a document may have, in whatever version."""
    return tuple(dict.fromkeys(kind for _, kind in documents()))


def secret_use(kind: str, path: tuple[str, ...]) -> str | None:
    """The use of a variable whose value goes into a secret field of a feature's kind; None for any other place."""
    known = kinds().get(kind)
    return None if known is None else next((use for at, use in known.secrets.items() if path[:2] == at), None)


@cache
def providers() -> Mapping[str, OwnProvider]:
    """All such providers by their names: `PROVIDER` of each feature's `bundle.py` that has one."""
    found: list[OwnProvider] = brought("PROVIDER")
    return {provider.name: provider for provider in found}


def before_reading(state_dir: str) -> None:
    """The files of a bundle are about to be read: `before_reading` of each feature's `bundle.py` that has one completes
    or undoes what it had begun with them. `state_dir` is the state of the workspace. Raises GoondanError.
    """
    for completes in brought("before_reading"):
        completes(state_dir)


class Begun(NamedTuple):
    """What a feature has done for a new bundle."""

    #: What it has begun, as `gdn init --json` has it.
    name: str
    #: What became of it, likewise.
    outcome: str
    #: The same as a line for a person.
    line: str


def begin(folder: str, names: Sequence[str]) -> Iterator[Begun]:
    """A new bundle was written to `folder` (absolute), these files: `begin` of each feature's `bundle.py` that has one
    does the rest.
    """
    for begins in brought("begin"):
        yield begins(folder, names)


@cache
def api_members() -> Mapping[str, frozenset[str] | None]:
    """Members of the `api` of extensions: those of the core, and `API` of each feature's `bundle.py` that has it."""
    return {**API_MEMBERS, **{name: members for own in brought("API") for name, members in own.items()}}
