"""The rules between documents: kinds, names, references, agents, the swarm. The result is the validated bundle.

Everything is checked, also after errors. A reference is not reported as missing when its target may be in a part that
could not be read: one mistake gets one error.

Source: docs/design/bundle.md section 3; requirements NAME-04, NAME-09, BASE-03, COMPAT-01, COMPAT-02, SCHEMA-06.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from goondan.kernel.bundle.rules import checked, lookup, models, positions, references, variables
from goondan.kernel.bundle.rules import extensions as extension_rules
from goondan.kernel.bundle.rules.kinds import (
    documents,
    feature_extensions,
    folder_rules_of,
    kind_names,
    kinds,
    providers,
    server_rules,
    server_rules_of,
)
from goondan.kernel.bundle.rules.positions import Mapping as MappingNode
from goondan.kernel.bundle.rules.problems import Path, Position, Report, did_you_mean, shown
from goondan.kernel.bundle.rules.shape import Builder, Document, Environment
from goondan.kernel.bundle.rules.tools import check_output, check_tool
from goondan.kernel.grants.granting import join_paths
from goondan.schemas.bundle import launch, resources
from goondan.schemas.bundle.address import SEPARATOR, is_resource_name, is_shown_name, parse_tool_name, shown_tool_name
from goondan.schemas.bundle.resources import API_V1, API_V1ALPHA1, BASE_PACKAGE, SwarmPolicy
from goondan.schemas.wire.frames import ORCHESTRATOR


class Checker:
    """Checks the documents of one bundle."""

    def __init__(
        self,
        documents: Iterable[Document],
        base: Mapping[str, checked.CheckedTool],
        files: lookup.Files,
        env: Mapping[str, str],
        report: Report,
        *,
        packages: checked.Packages,
        base_extensions: checked.Bundled,
        complete: bool = True,
        chosen_server: str | None = None,
    ) -> None:
        self._chosen_server = chosen_server
        self._packages = packages
        self._base_extensions = base_extensions
        self._packaged: dict[str, checked.CheckedTool] = {}
        self._brought: dict[str, checked.CheckedTool] = {}
        self._documents = list(documents)
        self._base = base
        self._files = files
        self._env = env
        self._environment = Environment(env)
        self._report = report
        self._found: dict[tuple[str, str], tuple[Document, Any]] = {}
        # The names of resources that exist but could not be read. None: any resource may exist.
        self._uncertain: set[str] | None = set() if complete else None
        # Documents that do not fit their structs. Their replaced values must not be checked.
        self._broken: set[str] = set()
        self._package = ""
        self._pointed_at: list[str] = []
        #: The files that Models of features' providers name, by the names of their documents.
        self._model_files: dict[str, str] = {}
        self._instead = next((found for own in providers().values() if (found := own.instead(env)) is not None), None)

    def check(self) -> checked.Checked:
        """Check all documents."""
        for document in self._documents:
            before = len(self._report.errors) + self._report.dropped
            built = self._read(document)
            if built is not None:
                self._enter(document, built)
            if len(self._report.errors) + self._report.dropped > before:
                self._broken.add(document.resource)
        tools = self._tools()
        extensions = self._extensions()
        self._models()
        self._connectors()
        self._own_package()
        self._connections()
        declared = self._declared()
        agents = self._agents(tools, extensions)
        entry, policy, members = self._swarm(agents)
        used = {**self._base, **tools, **self._packaged, **self._brought}
        uses = [(agent.name, use) for agent in agents.values() if agent.name in members for use in agent.servers]
        reserved = self._base_extensions.tool_names()
        known = server_rules()
        found = {} if known is None else known.check(uses, used, reserved, self._files, self._report)
        for rules in feature_extensions():
            rules.check([agent for agent in agents.values() if agent.name in members], self._report)
        runnable = {name: tool for name, tool in tools.items() if tool.entry}
        return checked.Checked(
            agents={name: agent for name, agent in agents.items() if name in members},
            tools={
                **runnable,
                **self._packaged,
                **self._brought,
                **{name: tool for name, tool in self._base.items() if name not in runnable},
            },
            policy=policy,
            entry_agent=entry,
            files=self._pointed_at,
            extension_roots=sorted(
                {path for found in extensions.values() for path in (found.root, *found.beside) if path}
            ),
            swarm=next((name for _, name, _ in self._of("Swarm")), ""),
            extensions=extensions,
            servers=found,
            swarm_resource=next((msgspec.to_builtins(built) for _, _, built in self._of("Swarm")), {}),
            declared=declared,
            parts={
                kind.part: {one.name: kind.resolve(one.name, one.body, self._env) for one in declared[name]}
                for name, kind in kinds().items()
                if declared[name]
            },
        )

    # --- one document

    def _read(self, document: Document) -> Any:
        """The struct of a document. None when its kind is unknown."""
        report, node = self._report, document.node
        kind_node, name = node.get("kind"), _name_text(node)
        known_kinds = "Write one of: " + ", ".join(kind_names()) + "."
        if kind_node is None:
            report.error("E_CONFIG_MISSING_FIELD", "the field 'kind' is missing", document.place("kind"), known_kinds)
        elif not isinstance(kind_node, positions.Scalar) or not isinstance(kind_node.value, str):
            report.error("E_CONFIG_INVALID_VALUE", "the kind is no text", document.place("kind"), known_kinds)
        elif kind_node.text not in kind_names():
            hint = did_you_mean(kind_node.text, kind_names()) or known_kinds
            report.error("E_CONFIG_UNKNOWN_KIND", f"unknown kind {shown(kind_node.text)}", document.place("kind"), hint)
        else:
            kind = kind_node.text
            document.resource = f"{kind}/{name}" if name else kind
            version = node.get("apiVersion")
            wanted = version.text if isinstance(version, positions.Scalar) else API_V1
            # An unknown version is reported by the check of the struct, which names the right one.
            forms = documents()
            known = forms.get((wanted, kind)) or forms.get((API_V1, kind)) or forms[API_V1ALPHA1, kind]
            return Builder(document, self._environment, report).build(known)
        if self._uncertain is not None and name:
            self._uncertain.add(name)
        return None

    def _enter(self, document: Document, built: Any) -> None:
        kind, name = _kind_of(document), built.metadata.name
        if not name:
            self._uncertain = None
            return
        self._check_name(document, kind, name)
        earlier = self._found.get((kind, name))
        if earlier is not None:
            place = earlier[0].place("metadata", "name")
            message = f"{document.resource} stands twice, first in {place.file}:{place.line}"
            self._report.error("E_CONFIG_DUPLICATE", message, document.place("metadata", "name"))
            return
        self._found[kind, name] = (document, built)
        is_old = isinstance(built.spec, resources.ToolV09Body | resources.ExtensionV09Body)
        for field in ("runtime", "auth") if is_old else ():
            if getattr(built.spec, field, None) is not None:
                message = f"spec.{field} of v0.9 is ignored"
                self._report.warn("W_CONFIG_IGNORED", message, document.key("spec", field))

    def _check_name(self, document: Document, kind: str, name: str) -> None:
        place, text = document.place("metadata", "name"), document.text("metadata", "name")
        plain = name
        if kind == "Package":
            scope, slash, rest = name.partition("/")
            plain = rest if slash and scope.startswith("@") and is_resource_name(scope[1:]) else name
        if not is_resource_name(plain):
            what = "contains __, which separates tool and export" if SEPARATOR in name else "is no resource name"
            self._report.error("E_CONFIG_INVALID_NAME", f"{text} {what}", place, _NAME_HINT)
        elif kind == "Agent" and name == ORCHESTRATOR:
            hint = "Choose another name."
            self._report.error("E_CONFIG_INVALID_NAME", f"{text} is the kernel's own address", place, hint)

    def _of(self, kind: str) -> list[tuple[Document, str, Any]]:
        return [(document, name, built) for (k, name), (document, built) in self._found.items() if k == kind]

    # --- one kind after the other

    def _tools(self) -> dict[str, checked.CheckedTool]:
        tools: dict[str, checked.CheckedTool] = {}
        for document, name, built in self._of("Tool"):
            tool = checked.CheckedTool(document, name, built.spec)
            check_tool(tool, self._files, self._report)
            tools[name] = tool
            if name in self._base:
                message = f"{document.resource} replaces the bundled tool of that name"
                self._report.warn("W_CONFIG_SHADOWED", message, document.place("metadata", "name"))
        return tools

    def _extensions(self) -> dict[str, checked.CheckedExtension]:
        extensions: dict[str, checked.CheckedExtension] = {}
        for document, name, built in self._of("Extension"):
            extension = extensions[name] = checked.CheckedExtension(document, name, built)
            extension_rules.check_extension(extension, self._files, self._report, self._base_extensions)
            extension_rules.check_given(extension, self._report)
            folders = folder_rules_of(extension.entry, extension.bundled)
            if folders is not None:
                folders.check(extension.resource.spec.config or {}, document, ("spec", "config"), self._report)
            if self._base_extensions.find(name) is not None and not extension.bundled:
                message = f"{document.resource} replaces the bundled extension of that name"
                self._report.warn("W_CONFIG_SHADOWED", message, document.place("metadata", "name"))
        for extension in extensions.values():
            for index, value in enumerate(extension.resource.spec.depends_on):
                at: Path = ("spec", "dependsOn", index)
                wanted = self._refer(extension.document, references.read_ref(value, "Extension"), at)
                if wanted is not None:
                    extension.depends_on.append(wanted)
        self._circles(extensions)
        return extensions

    def _circles(self, extensions: Mapping[str, checked.CheckedExtension]) -> None:
        for circle in extension_rules.circles({name: extension.depends_on for name, extension in extensions.items()}):
            shown_circle = " -> ".join(f"Extension/{name}" for name in (*circle, circle[0]))
            message = f"the extensions depend on each other in a circle: {shown_circle}; they are loaded as listed"
            place = extensions[circle[0]].document.place("spec", "dependsOn")
            self._report.warn("W_CONFIG_DEPENDENCY", message, place)

    def _models(self) -> None:
        for document, _, built in self._of("Model"):
            body: resources.ModelBody = built.spec
            models.check_model(document, body, self._report)
            own = providers().get(body.provider)
            path = None if own is None else own.find_file(document, body, self._files, self._report)
            if path is not None:
                self._model_files[document.resource] = path
                self._pointed_at.append(path)

    def _connectors(self) -> None:
        for document, _, built in self._of("Connector"):
            path = references.check_connector(document, built.spec, self._files, self._report)
            if path is not None:
                self._pointed_at.append(path)

    def _connections(self) -> None:
        for document, _, built in self._of("Connection"):
            body: resources.ConnectionBody = built.spec
            references.check_connection(document, body, self._report)
            self._refer(document, references.read_ref(body.connector_ref, "Connector", ("connectorRef",)), ("spec",))
            if body.swarm_ref is not None:
                self._refer(document, references.read_ref(body.swarm_ref, "Swarm", ("swarmRef",)), ("spec",))
            for index, rule in enumerate(body.ingress.rules):
                if rule.route.agent_ref is not None:
                    at: Path = ("spec", "ingress", "rules", index, "route")
                    self._refer(document, references.read_ref(rule.route.agent_ref, "Agent", ("agentRef",)), at)

    def _declared(self) -> dict[str, list[checked.Declared]]:
        """The documents of the kinds that features bring."""
        found = {}
        for name, kind in kinds().items():
            found[name] = [checked.Declared(document, called, built.spec) for document, called, built in self._of(name)]
            for one in found[name]:
                whole = one.document.resource not in self._broken
                kind.check(one.document, one.body, self._report, whole=whole)
        return found

    def _own_package(self) -> None:
        """The package that the bundle itself is. There is at most one."""
        packages = self._of("Package")
        if packages:
            self._package = packages[0][1]
        for document, _, _ in packages[1:]:
            message = "a bundle has at most one Package document"
            self._report.error("E_CONFIG_DUPLICATE", message, document.place("kind"), "Remove one of the two.")

    # --- references

    def _refer(self, document: Document, ref: references.Ref | references.BadRef, at: Path) -> str | None:
        """The name of the resource that `ref` means. When there is none, that is reported, and None is returned."""
        place = document.place(*at, *ref.at)
        text = document.text(*at, *ref.at)
        if isinstance(ref, references.BadRef):
            if ref.message:
                self._report.error("E_CONFIG_INVALID_VALUE", ref.message.format(text), place, ref.suggestion)
            return None
        own = (ref.kind, ref.name) in self._found
        bundled = self._is_bundled(ref)
        if ref.package is None or (self._package and ref.package == self._package):
            if own or (bundled and ref.package is None):
                return ref.name
        elif ref.package == BASE_PACKAGE:
            if bundled and own:
                message = f"the bundled {ref.kind} {text} is hidden by the bundle's own of that name"
                self._report.error("E_CONFIG_DUPLICATE", message, place, "Give the bundle's own another name.")
                return None
            if bundled:
                return ref.name
        else:
            return self._refer_package(document, ref, (*at, *ref.at[:-1]), place)
        if self._uncertain is None or ref.name in self._uncertain:
            return None
        names = {name for kind, name in self._found if kind == ref.kind and self._is_written(kind, name)}
        names |= set(self._base) if ref.kind == "Tool" else set()
        names |= set(self._base_extensions.names()) if ref.kind == "Extension" else set()
        hint = did_you_mean(ref.name, names)
        if hint is None and SEPARATOR in ref.name and ref.name.partition(SEPARATOR)[0] in names:
            hint = f"A reference names the whole Tool: {ref.kind}/{ref.name.partition(SEPARATOR)[0]}."
        if hint is None:
            known = ", ".join(sorted(names)[:_LISTED]) or "none"
            hint = f"Declare the {ref.kind}, or correct the reference. Known: {known}."
        missing = text if "/" in text else f"'{ref.kind}/{text[1:]}"
        self._report.error("E_CONFIG_MISSING_REF", f"there is no {missing}", place, hint)
        return None

    def _is_bundled(self, ref: references.Ref) -> bool:
        if ref.kind == "Extension":
            return self._base_extensions.find(ref.name) is not None
        return ref.kind == "Tool" and ref.name in self._base

    def _refer_package(self, document: Document, ref: references.Ref, at: Path, place: Position) -> str | None:
        """The name of a tool of an installed package. When there is none, that is reported, and None is returned."""
        package = self._packages.find(ref.package or "")
        if isinstance(package, str):
            message = f"the package {document.text(*at, 'package')} cannot be used: {package}"
            self._report.error("E_CONFIG_MISSING_REF", message, document.place(*at, "package"), _PACKAGE_HINT)
            return None
        tool = package.tools.get(ref.name) if ref.kind == "Tool" else None
        if tool is None:
            hint = did_you_mean(ref.name, package.tools)
            message = f"the package {package.name} has no {ref.kind} {shown(ref.name)}"
            self._report.error("E_CONFIG_MISSING_REF", message, place, hint)
            return None
        own = ("Tool", ref.name) in self._found
        taken = own or ref.name in self._base
        if taken or self._packaged.setdefault(ref.name, tool) is not tool:
            message = f"there is another Tool {shown(ref.name)}: the tools of a kernel need different names"
            self._report.error("E_CONFIG_DUPLICATE", message, place, "Give the bundle's own another name.")
            return None
        return ref.name

    def _is_written(self, kind: str, name: str) -> bool:
        """Whether the file contains the resource's name literally. A name from the environment is not shown."""
        return self._found[kind, name][0].resource == f"{kind}/{name}"

    # --- agents and the swarm

    def _agents(
        self, tools: Mapping[str, checked.CheckedTool], extensions: Mapping[str, checked.CheckedExtension]
    ) -> dict[str, checked.CheckedAgent]:
        agents: dict[str, checked.CheckedAgent] = {}
        for document, name, built in self._of("Agent"):
            agent = checked.CheckedAgent(document, name, built.spec, resource=msgspec.to_builtins(built))
            agents[name] = agent
            self._agent_model(agent)
            self._agent_prompt(agent)
            check_output(document, agent.body.output, self._report)
            self._agent_tools(agent, tools)
            self._agent_extensions(agent, extensions)
            policy = agent.body.policy.tool_calls
            if policy.extensions_may_add is not None and all(extension.bundled for extension in agent.extensions):
                message = "the agent has no extension of the bundle's own: nothing adds a tool"
                place = document.key("spec", "policy", "toolCalls", "extensionsMayAdd")
                self._report.warn("W_CONFIG_IGNORED", message, place)
        return agents

    def _agent_model(self, agent: checked.CheckedAgent) -> None:
        at: Path = ("spec", "modelConfig")
        named = agent.body.model_config.model_ref if self._instead is None else self._instead.model_ref
        ref = references.read_ref(named or agent.body.model_config.model_ref, "Model", ("modelRef",))
        name = self._refer(agent.document, ref, at)
        found = self._found.get(("Model", name)) if name is not None else None
        if found is None or found[0].resource in self._broken:
            return
        document, built = found
        if self._instead is not None:
            agent.model = self._instead.model(built.spec, agent.body.model_config.params)
            if agent.model is not None:
                return
        agent.model_document, agent.model_body = document, built.spec
        agent.model = self._model(document, built.spec, agent, agent.body.model_config.params)
        agent.fallback = list(self._fallback(document, built.spec, agent))

    def _fallback(
        self, document: Document, body: resources.ModelBody, agent: checked.CheckedAgent
    ) -> Iterable[checked.CheckedFallback]:
        """The models that are asked when the agent's own gives no answer. What they name in their turn does not count,
        so no circle can be written but the shortest.
        """
        for index, written in enumerate(body.fallback):
            at: Path = ("spec", "fallback", index)
            name = self._refer(document, references.read_ref(written, "Model"), at)
            found = self._found.get(("Model", name)) if name is not None else None
            if found is None or found[0].resource in self._broken:
                continue
            other, built = found
            if other is document:
                message = "a model is asked in place of itself"
                hint = "Name another Model; `retry` says how long this one is asked again."
                self._report.error("E_CONFIG_INVALID_VALUE", message, document.place(*at), hint)
            elif built.spec.provider in ("embedded", "auto", *providers()):
                message = f"{other.resource} names no model that could be asked in place of another"
                hint = "Name a Model whose provider is a server's."
                self._report.error("E_CONFIG_INVALID_VALUE", message, document.place(*at), hint)
            elif (model := self._model(other, built.spec, agent, {})) is not None:
                yield checked.CheckedFallback(other, built.spec, model)

    def _model(
        self, document: Document, body: resources.ModelBody, agent: checked.CheckedAgent, params: Mapping[str, Any]
    ) -> launch.ModelSpec | None:
        """A Model with everything that a request needs. When that is not there, it is reported, and None returned."""
        try:
            model = models.resolve_model(
                body, params, self._env, document.resource.partition("/")[2], self._chosen_server
            )
        except models.ModelFault as fault:
            message = fault.message.format(document.text(*fault.path)) if "{}" in fault.message else fault.message
            message += f" ({agent.document.resource} uses it)"
            self._report.error(fault.code, message, document.place(*fault.path), fault.suggestion)
            return None
        if models.sends_open_key(model):
            what = "the key is" if model.api_key is not None else "the headers of the Model are"
            message = f"{what} sent to {model.key_origin} over plain http: everybody on the way can read it"
            self._report.warn("W_CONFIG_OPEN_KEY", message, document.place("spec", "provider"))
        if model.provider in providers():
            return msgspec.structs.replace(model, file=self._model_files.get(document.resource, ""))
        return model

    def _agent_prompt(self, agent: checked.CheckedAgent) -> None:
        prompt, document = agent.body.prompt, agent.document
        agent.system = prompt.system
        if prompt.system_ref is None:
            return
        place = document.place("spec", "prompt", "systemRef")
        if prompt.system is not None:
            message = "both system and systemRef are given"
            self._report.error("E_CONFIG_INVALID_VALUE", message, place, "Give one of the two.")
            return
        if not prompt.system_ref:
            return
        text = document.text("spec", "prompt", "systemRef")
        found = self._files.find(prompt.system_ref)
        try:
            if found.fault is not None:
                raise lookup.Unreadable(found.fault)
            agent.system = self._files.read_text(found.path)
        except lookup.Unreadable as error:
            self._report.error("E_CONFIG_INVALID_VALUE", f"the prompt {text} cannot be used: {error}", place)
            return
        self._pointed_at.append(found.path)

    def _agent_tools(self, agent: checked.CheckedAgent, tools: Mapping[str, checked.CheckedTool]) -> None:
        document = agent.document
        for index, item in enumerate(agent.body.tools):
            at: Path = ("spec", "tools", index)
            ref = references.read_use(item, "Tool")
            registered = self._registered(agent, ref)
            name = registered or self._refer(document, ref, at)
            if name is None:
                continue
            if name in agent.tools or name in agent.dynamic:
                message = "the tool stands twice in this agent"
                self._report.error("E_CONFIG_DUPLICATE", message, document.place(*at), "Remove one of the two.")
                continue
            if registered is not None:
                agent.dynamic.append(name)
                continue
            agent.tools.append(name)
            agent.uses[name] = index

    def _registered(self, agent: checked.CheckedAgent, ref: references.Ref | references.BadRef) -> str | None:
        """The name under which models see a tool that one of the agent's extensions registers. None: it cannot be such
        a tool.

        The tools of an extension are known only when it runs. Names of Tools contain neither a dot nor __.
        """
        if isinstance(ref, references.BadRef) or ref.package is not None or not agent.body.extensions:
            return None
        shown_name = shown_tool_name(ref.name)
        halves = parse_tool_name(shown_name)
        if halves is None or ("Tool", halves.resource_name) in self._found or halves.resource_name in self._base:
            return None
        return shown_name if halves.export_name and is_shown_name(shown_name) else None

    def _agent_extensions(
        self, agent: checked.CheckedAgent, extensions: Mapping[str, checked.CheckedExtension]
    ) -> None:
        document, seen = agent.document, set[str]()
        for index, item in enumerate(agent.body.extensions):
            at: Path = ("spec", "extensions", index)
            name = self._refer(document, references.read_use(item, "Extension"), at)
            extension = (extensions.get(name) or self._base_extensions.find(name)) if name is not None else None
            if extension is None:
                continue
            if extension.name in seen:
                message = "the extension stands twice in this agent"
                self._report.error("E_CONFIG_DUPLICATE", message, document.place(*at), "Remove one of the two.")
                continue
            seen.add(extension.name)
            if extension.missing is not None:
                message = f"{document.resource} uses {extension.document.resource}: {extension.missing}"
                self._report.error("E_CONFIG_UNSUPPORTED", message, document.place(*at), _NOT_YET)
            elif extension.entry:
                own = None if isinstance(item, str) else item.config
                extension_rules.check_used(extension, own, document, at, self._report)
                named = own is not None and variables.names_any(document.node, "spec", "extensions")
                spec = extension_rules.extension_spec(extension, own, named=named)
                folders = folder_rules_of(extension.entry, extension.bundled)
                if folders is not None:
                    found = folders.resolve(spec, self._files)
                    spec, agent.named_folders = found.spec, [*agent.named_folders, *found.granted]
                    if own is not None:
                        folders.check(own, document, (*at, "config"), self._report)
                    if found.warning is not None:
                        code, message, hint = found.warning
                        self._report.warn(code, message, document.place(*at), hint)
                agent.extensions.append(spec)
                if server_rules_of(extension.entry, extension.bundled) is not None:
                    given = own if own is not None else extension.resource.spec.config or {}
                    whose = (document, (*at, "config")) if own is not None else (extension.document, ("spec", "config"))
                    if extension_rules.fits(extension, given):
                        agent.servers.append(checked.ServerUse(extension.name, given, *whose))
                self._bring(agent, extension, at)
        self._misplaced(agent, extensions)

    def _bring(self, agent: checked.CheckedAgent, extension: checked.CheckedExtension, at: Path) -> None:
        """Give the agent the bundled Tools that an extension brings."""
        for tool in extension.tools:
            if ("Tool", tool.name) in self._found or tool.name in self._packaged:
                place = agent.document.place(*at)
                message = (
                    f"{extension.document.resource} brings a Tool {tool.name!r}, and there is another of that name"
                )
                self._report.error("E_CONFIG_DUPLICATE", message, place, "Give the other one another name.")
            elif tool.name not in agent.brought:
                self._brought[tool.name] = tool
                agent.brought.append(tool.name)
            if tool.takes_folder:
                read = join_paths([*tool.sandbox.filesystem.read, *agent.named_folders])
                tool.sandbox = msgspec.structs.replace(tool.sandbox, filesystem=launch.Filesystem(read=read))

    def _misplaced(self, agent: checked.CheckedAgent, extensions: Mapping[str, checked.CheckedExtension]) -> None:
        loaded = [extension.name for extension in agent.extensions]
        dependencies = {name: extension.depends_on for name, extension in extensions.items()}
        for name, wanted, there in extension_rules.misplaced(loaded, dependencies):
            where = "is loaded after it" if there else "is not in the agent's list"
            message = f"Extension/{name} depends on Extension/{wanted}, which {where}"
            self._report.warn("W_CONFIG_DEPENDENCY", message, agent.document.place("spec", "extensions"))

    def _swarm(self, agents: Mapping[str, checked.CheckedAgent]) -> tuple[str, SwarmPolicy, set[str]]:
        """The entry agent ('' if there are no agents), the policy, and the agents that belong to the swarm."""
        swarms = self._of("Swarm")
        if not swarms:
            return self._without_swarm(agents)
        for document, _, _ in swarms[1:]:
            message = "a kernel runs one Swarm, and the bundle has several"
            self._report.error("E_CONFIG_UNSUPPORTED", message, document.place("kind"), "Put the others elsewhere.")
        document, _, built = swarms[0]
        body: resources.SwarmBody = built.spec
        entry = self._refer(document, references.read_entry_agent(body.entry_agent), ("spec",))
        members: set[str] = set()
        for index, item in enumerate(body.agents):
            at: Path = ("spec", "agents", index)
            name = self._refer(document, references.read_use(item, "Agent"), at)
            if name is not None and name in members:
                message = "the agent stands twice in the swarm"
                self._report.error("E_CONFIG_DUPLICATE", message, document.place(*at), "Remove one of the two.")
            if name is not None:
                members.add(name)
        if not body.agents:
            members = set(agents)
        elif entry is not None and entry not in members:
            text = document.text("spec", "entryAgent")
            message = f"the entry agent {text} is not in spec.agents"
            place = document.place("spec", "entryAgent")
            self._report.error("E_CONFIG_MISSING_REF", message, place, "Add it to spec.agents.")
        for name, agent in agents.items():
            if name not in members:
                message = f"{agent.document.resource} is not in the Swarm and will not run"
                self._report.warn("W_CONFIG_UNUSED", message, agent.document.place("metadata", "name"))
        return entry or "", body.policy, members

    def _without_swarm(self, agents: Mapping[str, checked.CheckedAgent]) -> tuple[str, SwarmPolicy, set[str]]:
        if len(agents) == 1:
            return next(iter(agents)), SwarmPolicy(), set(agents)
        certain = self._uncertain is not None and not self._uncertain
        if len(agents) > 1 and certain:
            first = next(iter(agents.values())).document
            message = f"the bundle has {len(agents)} agents and no Swarm that names its entry agent"
            hint = "Add a Swarm document with spec.entryAgent."
            self._report.error("E_CONFIG_MISSING_REF", message, first.place("kind"), hint)
        elif not agents and self._documents and certain:
            message = "the bundle has no Agent"
            self._report.warn("W_CONFIG_NO_AGENT", message, self._documents[0].place())
        return "", SwarmPolicy(), set(agents)


#: The most names in a suggestion.
_LISTED: Final = 8
_NOT_YET: Final = "Write the extension in Python, or leave it out of the agent for now."
_PACKAGE_HINT: Final = "Put the package into $GOONDAN_STATE_ROOT/packages, or correct the name."
_NAME_HINT: Final = (
    "Use 1 to 64 lowercase letters, digits, - and _, without __, starting with a letter or digit, not ending with _."
)


def _kind_of(document: Document) -> str:
    return document.resource.partition("/")[0]


def _name_text(node: MappingNode) -> str:
    """The literal metadata.name of the file. '' when it is no text."""
    metadata = node.get("metadata")
    name = metadata.get("name") if isinstance(metadata, MappingNode) else None
    return (
        name.text
        if isinstance(name, positions.Scalar) and isinstance(name.value, str) and len(name.text) <= 128
        else ""
    )
