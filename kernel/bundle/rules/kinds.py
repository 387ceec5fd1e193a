"""What features bring to bundles: kinds of documents, providers of models, model servers, what they do with files, and
what they know of the configs of bundled extensions.

What such documents become is a part of the plan, under the feature's name. The core passes it on unopened.

A provider of a feature answers without a server, from a file that a Model names.

An extension is code of an agent, so what bounds an agent cannot be left to it. A feature reads the config of such an
extension, and the kernel keeps to it. The extension lies in the feature's folder, so there is none without the feature.
What the config becomes is a part of the agent's specification, under the feature's name.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from goondan.features import parts
from goondan.kernel.bundle.rules import lookup, shape
from goondan.kernel.bundle.rules.checked import CheckedAgent, CheckedServer, CheckedTool, ServerUse
from goondan.kernel.bundle.rules.problems import Path, Report
from goondan.kernel.grants.powers import Power
from goondan.schemas.bundle.extensions import API_MEMBERS
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec, ToolSpec, is_bundled
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

    def check(self, document: shape.Document, body: Any, report: Report, *, whole: bool) -> None:
        """Report what is wrong with a document. `whole`: it fits its form, so that no value was replaced."""

    def resolve(self, name: str, body: Any, env: Mapping[str, str]) -> Any:
        """What the plan has of a document."""

    def powers(self, document: shape.Document, body: Any) -> Iterable[Power]:
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

    def find_file(self, document: shape.Document, body: ModelBody, files: lookup.Files, report: Report) -> str | None:
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


class ServerRules(Protocol):
    """What a feature knows of the servers that a bundled extension names in its config."""

    #: The command that shows how they are: `gdn …`.
    shown_by: str

    #: The name of the extension: `NAME` of `@goondan/base/NAME`.
    extension: str

    def prefix(self, extension: str, config: Mapping[str, Any]) -> str:
        """The prefix of the names of a server's tools."""

    def faults(self, extension: str, config: Mapping[str, Any]) -> list[str]:
        """The faults of a config that fits the schema of the extension, worded as the schema's issues are."""

    def check(
        self,
        uses: Iterable[tuple[str, ServerUse]],
        taken: Mapping[str, CheckedTool],
        reserved: frozenset[str],
        files: lookup.Files,
        report: Report,
    ) -> dict[str, CheckedServer]:
        """The servers of a bundle by their prefixes. `uses` are agents with the configs that they use. `reserved` are
        names of bundled Tools that a bundle has only with their extensions.
        """

    def powers(self, server: CheckedServer) -> Iterable[Power]:
        """What a bundle can do by a server, for the person who is asked for trust."""

    def without_values(self, holder: dict[str, Any]) -> dict[str, Any]:
        """A copy of an object with a `config`, without the values of variables and headers."""

    def trial(self, server: ToolSpec, agent: str) -> dict[str, Any]:
        """The result of `gdn extension test` for a server, as this agent has it."""


@cache
def server_rules() -> ServerRules | None:
    """`SERVERS` of the feature whose `bundle.py` has them; at most one has. None: there is no such feature."""
    return next(iter(brought("SERVERS")), None)


def server_rules_of(entry: str, bundled: bool) -> ServerRules | None:
    """What is known of the servers that an extension with this entry names; None: it names none."""
    known = server_rules()
    return known if known is not None and is_bundled(known.extension, entry, bundled) else None


class FeatureExtension(Protocol):
    """A bundled extension whose config is for a feature."""

    @property
    def feature(self) -> str:
        """The name of the feature, and of the part of an agent's specification."""

    @property
    def extension(self) -> str:
        """The name of the extension: `NAME` of `@goondan/base/NAME`."""

    def faults(self, config: Mapping[str, Any]) -> list[str]:
        """What is wrong with a config that fits its schema, worded as issues of the schema are."""

    def check(self, agents: Sequence[CheckedAgent], report: Report) -> None:
        """Report what is wrong between the agents of the swarm. What is wrong with one config is reported already."""

    def part(self, extensions: Sequence[ExtensionSpec]) -> Any | None:
        """The part of the specification of an agent that has these extensions. None: it has no such extension."""


class NamedFolders(Struct, frozen=True):
    """What becomes of an agent's use of an extension whose config names folders."""

    #: The specification of the extension, with absolute paths in its config.
    spec: ExtensionSpec
    #: The existing folders outside of workdirs, as absolute paths. The Tool that the extension brings may read them.
    granted: list[str]
    #: What is odd about the config, as a code, a sentence, and what to do about it; None: nothing.
    warning: tuple[str, str, str] | None = None


class FolderRules(Protocol):
    """A bundled extension whose config names folders that its Tool works in."""

    @property
    def extension(self) -> str:
        """The name of the extension: `NAME` of `@goondan/base/NAME`."""

    def check(self, config: Mapping[str, Any], document: shape.Document, at: Path, report: Report) -> None:
        """Report what is wrong with the folders that a config names. `at` is its place in the document."""

    def resolve(self, spec: ExtensionSpec, files: lookup.Files) -> NamedFolders:
        """What becomes of a config that fits the extension's schema."""


def folder_rules_of(entry: str, bundled: bool) -> FolderRules | None:
    """The rules for the folders of an extension with this entry: `FOLDERS` of a feature's `bundle.py`. None: its config
    names none.
    """
    found: list[FolderRules] = brought("FOLDERS")
    return next((rules for rules in found if is_bundled(rules.extension, entry, bundled)), None)


@cache
def feature_extensions() -> tuple[FeatureExtension, ...]:
    """`EXTENSION` of each feature's `bundle.py` that has one. Raises ImportError when a file is missing."""
    return tuple(brought("EXTENSION"))
