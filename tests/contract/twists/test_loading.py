"""Twists of how extensions are declared, loaded and cleaned up: 004 §2, §3, §10, and docs/extensions.md.

Each test takes an example of the specification and bends it; its docstring says which, and what the documents promise.
Numbers are those of the specifications' sections, as the sources in tests/requirements.yaml have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.rules.problems import BundleError, Problem
from tests.contract.twists.stage import NOTES, Stage, calls, new, old
from tests.unit.agentproc.turns import failed


def problems(stage: Stage, *extensions: Any, **bundle: Any) -> tuple[list[Problem], list[Problem]]:
    """The errors and the warnings of a bundle."""
    path = stage.write(extensions, **bundle)
    found = inspect_bundle(str(path), state_dir=str(stage.state), handlers=False)
    return found.errors, found.warnings


@pytest.mark.requirement("EXT-07")
async def test_what_register_returns_is_ignored(stage: Stage) -> None:
    """3.1 with a register that returns rubbish, sync and async."""
    actor = await stage.agent(
        new("a", "def register(api): return {'status': 'error'}"),
        new("b", "async def register(api): return 'no'"),
    )
    assert (await actor.turn()).status == "completed"


@pytest.mark.parametrize(
    ("signature", "given"),
    [("api, config", True), ("api, config=None", True), ("api, settings", True), ("api, *, config=None", False)],
)
async def test_config_by_signature(stage: Stage, signature: str, given: bool) -> None:
    """`(api)` or `(api, config)`: the second is the config, whatever its name is. None that is given by its name."""
    name = signature.split(",")[-1].strip().partition("=")[0]
    actor = await stage.agent(new("a", f"def register({signature}): note({name})", config={"deny": ["rm"]}))
    assert (await actor.turn()).status == "completed"
    assert [{"deny": ["rm"]} if given else None] == NOTES


async def test_no_config_is_an_empty_one_for_the_second_argument(stage: Stage) -> None:
    """`(api, config)` where the document has no config: an object without keys."""
    await stage.agent(new("a", "def register(api, config): note(config)"))
    assert NOTES == [{}]


async def test_config_is_the_extensions_own_copy(stage: Stage) -> None:
    """2.3: an extension that changes its config does not change what its document says, nor another's config."""
    source = (
        "def register(api, config):\n    config['list'].append(api.extension.metadata.name)\n    note(config['list'])"
    )
    shared: dict[str, Any] = {"list": []}
    await stage.agent(new("a", source, config=shared), new("b", source, config=shared))
    assert NOTES == [["a"], ["b"]]


async def test_the_references_config_takes_the_place_of_the_documents(stage: Stage) -> None:
    """2.3 with a config in the reference: it replaces, it is not merged."""
    source = "def register(api, config): note(config, api.extension.spec.config)"
    one = new("a", source, config={"level": "info", "file": "x"})
    await stage.agent(one, refs=[{"ref": "Extension/a", "config": {"level": "debug"}}])
    assert NOTES == [({"level": "debug"}, {"level": "debug"})]


@pytest.mark.parametrize("config", [["a"], "text", 5, True])
async def test_a_config_that_is_no_object_is_refused_by_the_bundle(stage: Stage, config: Any) -> None:
    """EXT-03 with something else: one clear error that names the field, before anything runs."""
    errors, _ = problems(stage, new("a", "def register(api): pass", config=config))
    assert any("config" in error.path + error.message for error in errors), errors


async def test_a_declared_config_fills_in_and_refuses(stage: Stage) -> None:
    """`configSchema`: defaults are filled in, and what does not fit is named."""
    schema = {"type": "object", "properties": {"limit": {"type": "integer", "default": 5}, "name": {"type": "string"}}}
    one = new("a", "def register(api, config): note(config)", config={"name": "x"}, spec={"configSchema": schema})
    await stage.agent(one)
    assert NOTES == [{"limit": 5, "name": "x"}]
    bad = new("a", "def register(api): pass", config={"limit": "five"}, spec={"configSchema": schema})
    errors, _ = problems(stage, bad)
    assert any("limit" in str(error) for error in errors), errors


async def test_variables_of_a_config(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """`${NAME}` is filled in from the environment, also deep inside; a variable that is not set is an error."""
    monkeypatch.setenv("TWIST_HOST", "example.org")
    monkeypatch.delenv("TWIST_UNSET", raising=False)
    await stage.agent(
        new("a", "def register(api, config): note(config)", config={"a": [{"b": "http://${TWIST_HOST}/"}]})
    )
    assert NOTES == [{"a": [{"b": "http://example.org/"}]}]
    errors, _ = problems(stage, new("a", "def register(api): pass", config={"a": "${TWIST_UNSET}"}))
    assert any("TWIST_UNSET" in error.message for error in errors), errors


async def test_runtime_belongs_to_the_older_documents(stage: Stage) -> None:
    """2.1: `runtime: node` is ignored with one warning in v0.9, with anything in it or nothing, and refused today."""
    errors, warnings = problems(stage, old("a", "def register(api): pass"))
    assert errors == []
    assert sum("runtime" in str(warning) for warning in warnings) == 1
    errors, _ = problems(stage, new("a", "def register(api): pass", spec={"runtime": "node"}))
    assert any("runtime" in str(error) for error in errors)


async def test_one_extension_twice_in_the_list(stage: Stage) -> None:
    """10.1 with a name twice: it has one identity (10.3), so the bundle says that it is there twice."""
    errors, warnings = problems(stage, new("a", "def register(api): pass"), refs=["Extension/a", "Extension/a"])
    assert any("Extension/a" in str(problem) or "twice" in str(problem) for problem in errors + warnings), (
        errors,
        warnings,
    )


async def test_three_spellings_of_a_reference_in_one_list(stage: Stage) -> None:
    """10.1 with all spellings mixed: the list's order counts, not that of the documents."""
    source = "def register(api): note(api.extension.metadata.name)"
    refs = [{"kind": "Extension", "name": "c"}, "Extension/a", {"ref": "Extension/b"}]
    await stage.agent(new("a", source), new("b", source), new("c", source), refs=refs)
    assert NOTES == ["c", "a", "b"]


@pytest.mark.requirement("LOAD-02", "LOAD-03")
async def test_each_register_is_awaited_before_the_next(stage: Stage) -> None:
    """10.2 with a slow first: what it does at the end of its register is there for the second."""
    slow = """
        import asyncio

        async def register(api):
            await asyncio.sleep(0.02)
            api.instance.shared["slow:data"] = {"initialized": True}
    """
    await stage.agent(new("slow", slow), new("next", "def register(api): note(api.instance.shared.get('slow:data'))"))
    assert NOTES == [{"initialized": True}]


async def test_an_exception_in_register_fails_each_message_and_loads_no_later_one(stage: Stage) -> None:
    """10.2: an initialisation that fails. Each message gets the same error, which names the extension."""
    actor = await stage.agent(
        new("first", "def register(api): note('first')"),
        new("broken", "def register(api): raise KeyError('token')"),
        new("later", "def register(api): note('later')"),
    )
    for said in ("one", "two"):
        failed(await actor.turn(said), "E_EXTENSION_FAILED", "broken", "token")
    assert "later" not in NOTES
    assert actor.asked == []


@pytest.mark.parametrize(
    "source",
    [
        "def register(): pass",
        "def register(api, config, more): pass",
        "import nothing_of_this_name_at_all\ndef register(api): pass",
        "def register(api):\n    raise SystemExit(0)",
        "def register(api):\n    raise KeyboardInterrupt",
        "raise SystemExit(3)\ndef register(api): pass",
        "def register(api):\n    api.nothing_of_this_name()",
        "async def register(api):\n    import asyncio\n    raise asyncio.CancelledError",
        "class Odd(BaseException): pass\ndef register(api):\n    raise Odd('x')",
        "def register(api):\n    def deep(n): return deep(n + 1)\n    deep(0)",
    ],
)
async def test_modules_that_cannot_be_loaded(stage: Stage, source: str) -> None:
    """3.1 with what is no register, and everything that a module can raise: one error, and the process serves on."""
    actor = await stage.agent(new("odd", source))
    for said in ("one", "two"):
        failed(await actor.turn(said), "E_EXTENSION_FAILED", "odd")


@pytest.mark.parametrize("source", ["value = 1", "def register(api)\n    pass", "raise SystemExit(3)"])
async def test_modules_that_the_bundle_refuses(stage: Stage, source: str) -> None:
    """3.1 without a register: the bundle says so before anything runs, and names the file."""
    errors, _ = problems(stage, new("odd", source))
    assert any("ext/odd.py" in error.message for error in errors), errors


async def test_two_extensions_with_a_module_of_one_name_beside_each(stage: Stage) -> None:
    """3.2 in two folders that both have a `helper.py`: each imports its own."""
    for name in ("a", "b"):
        (stage.home / name).mkdir()
        (stage.home / name / "helper.py").write_text(f"NAME = '{name}'\n")
    source = "import helper\ndef register(api): note(api.extension.metadata.name, helper.NAME)"
    await stage.agent(new("a", source, entry="a/main.py"), new("b", source, entry="b/main.py"))
    assert NOTES == [("a", "a"), ("b", "b")]


async def test_an_extension_in_the_root_and_one_in_a_folder_of_it(stage: Stage) -> None:
    """3.2 with one folder in the other: each imports what lies beside it, whoever was loaded first."""
    (stage.home / "inner").mkdir()
    for folder, name in (("", "outer"), ("inner", "inner")):
        (stage.home / folder / "nested_helper.py").write_text(f"NAME = '{name}'\n")
    source = "import nested_helper\ndef register(api): note(api.extension.metadata.name, nested_helper.NAME)"
    await stage.agent(new("outer", source, entry="outer.py"), new("inner", source, entry="inner/main.py"))
    assert NOTES == [("outer", "outer"), ("inner", "inner")]


async def test_one_module_as_two_extensions(stage: Stage) -> None:
    """One entry, two documents: two identities, each with its own config, state and name."""
    source = """
        def register(api, config):
            api.ext_state()["who"] = config["who"]
            name = api.extension.metadata.name
            api.pipelines.mutate("step.post", lambda ctx: note(name, api.ext_state()["who"]) or ctx)
    """
    one = new("one", source, config={"who": 1}, entry="ext/both.py")
    two = new("two", source, config={"who": 2}, entry="ext/both.py")
    actor = await stage.agent(one, two)
    await actor.turn()
    assert NOTES == [("one", 1), ("two", 2)]


async def test_an_event_in_register_reaches_who_came_before_only(stage: Stage) -> None:
    """3.2, its last step: `extension.initialized` is heard by extensions that were loaded earlier."""
    hears = """
        def register(api):
            api.events.on("extension.initialized", lambda p: note(api.extension.metadata.name, p["name"]))
    """
    tells = "def register(api): api.events.emit('extension.initialized', {'name': 'middle'})"
    actor = await stage.agent(new("before", hears), new("middle", tells), new("after", hears))
    await actor.turn()
    assert NOTES == [("before", "middle")]


async def test_a_circle_of_dependencies_is_a_warning_and_the_list_counts(stage: Stage) -> None:
    """10.2 SHOULD: circular dependencies are warned about; extensions load all the same, in the list's order."""
    source = "def register(api): note(api.extension.metadata.name)"
    one = new("a", source, spec={"dependsOn": ["Extension/b"]})
    two = new("b", source, spec={"dependsOn": ["Extension/a"]})
    errors, warnings = problems(stage, one, two)
    assert errors == []
    assert any("circle" in warning.message or "each other" in warning.message for warning in warnings), warnings
    await stage.agent(one, two)
    assert NOTES == ["a", "b"]


async def test_a_dependency_that_is_not_loaded_before_is_a_warning(stage: Stage) -> None:
    """`dependsOn` with the list in the wrong order, and with an extension that nobody has."""
    source = "def register(api): pass"
    errors, warnings = problems(stage, new("a", source, spec={"dependsOn": ["Extension/b"]}), new("b", source))
    assert errors == []
    assert any("Extension/b" in warning.message for warning in warnings), warnings


async def test_a_member_of_api_that_does_not_exist_is_a_warning_with_its_line(stage: Stage) -> None:
    """3.2 with a typing error in the name of a member."""
    _, warnings = problems(stage, new("a", "def register(api):\n    api.pipelins.mutate('turn.pre', lambda ctx: ctx)"))
    assert any("pipelins" in warning.message and "line 3" in warning.message for warning in warnings), warnings


async def test_once_and_patterns_hear_cleanup_too(stage: Stage) -> None:
    """10.4 by `once` and by a pattern: they are subscriptions like any other."""
    source = """
        def register(api):
            api.events.once("extension.cleanup", lambda p: note("once"))
            api.events.on("extension.*", lambda p: note("pattern", p["name"]))
    """
    actor = await stage.agent(new("a", source))
    await actor.close()
    assert NOTES == ["once", ("pattern", "a")]


async def test_an_extension_leaves_for_one_step_and_comes_back_afresh(stage: Stage) -> None:
    """10.3: out of the list it is gone, with its points; in it again it is registered anew, with an empty state."""
    takes = """
        def register(api):
            def config(ctx):
                if ctx.step.index != 1:
                    return ctx
                kept = [one for one in ctx.effective_config["extensions"] if "goes" not in str(one)]
                return ctx.replace(effective_config={**ctx.effective_config, "extensions": kept})

            api.pipelines.mutate("step.config", config)
    """
    goes = """
        def register(api):
            note("register", dict(api.ext_state()))
            api.ext_state()["seen"] = True
            api.pipelines.mutate("step.blocks", lambda ctx: note("blocks", ctx.step.index) or ctx)
            api.tools.register({"name": "goes__ping", "description": "d", "handler": lambda ctx, input: "pong"})
    """
    read = ("files__read", {"path": "a"})
    actor = await stage.agent(new("takes", takes), new("goes", goes))
    answer = await actor.turn("x", calls(("a", *read)), calls(("b", *read)), "done")
    assert answer.error is None
    assert NOTES == [("register", {}), ("blocks", 0), ("register", {}), ("blocks", 2)]
    assert ["goes__ping" in actor.shown(n) for n in range(3)] == [True, False, True]


async def test_the_sample_documents_of_the_specification(stage: Stage) -> None:
    """2.3 with an entry that is missing, one that leads out of the bundle, and one that is a folder."""
    for entry in ("ext/missing.py", "../outside.py", "ext"):
        one = old("compaction", "def register(api): pass", config={"maxTokens": 8000})
        path = stage.write([one])
        Path(path).write_text(Path(path).read_text().replace("ext/compaction.py", entry))
        found = inspect_bundle(str(path), state_dir=str(stage.state), handlers=False)
        assert any("compaction" in str(error) or "entry" in str(error) for error in found.errors), (entry, found.errors)


async def test_a_bundle_with_an_unknown_extension_names_it(stage: Stage) -> None:
    """10.1 with a reference to nothing: an error before anything runs."""
    path = stage.write([new("a", "def register(api): pass")], refs=["Extension/a", "Extension/aa"])
    from goondan.kernel.bundle.loader import open_bundle

    with pytest.raises(BundleError) as raised:
        open_bundle(str(path), state_dir=str(stage.state), handlers=False)
    assert "aa" in str(raised.value.problems if hasattr(raised.value, "problems") else raised.value)
